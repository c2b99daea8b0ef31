"""Weights from a learner's memory into engines', over gloo: the same bits, in order, and no engine waits for another that is gone."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qwen3_folder import build_model, write_folder

from klear_core.config.engine import TorchEngineConfig
from klear_core.errors import ConfigError
from klear_core.generate.engine import TensorSpec, WeightOffer, dump_offer, load_offer
from klear_core.generate.torch_engine import TorchEngine
from klear_core.generate.transfer import WeightServer, cut, fetch
from klear_core.generate.weights import tensor_shapes, tensors

WEIGHTS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7),
    "c": torch.randn(2, 2).to(torch.bfloat16),
    "d": torch.tensor([-0.0, torch.nan, torch.inf]),
    "e": torch.tensor(4.0),
}


def specs(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name=k, dtype=str(w.dtype).removeprefix("torch."), shape=tuple(w.shape)) for k, w in weights.items()]


def offer_of(server: WeightServer, weights: dict[str, torch.Tensor], *, num_ranks: int = 1, chunk_bytes: int = 64) -> WeightOffer:
    return server.offer(specs(weights), version=3, backend="gloo", num_ranks=num_ranks, chunk_bytes=chunk_bytes)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    )


def test_messages_hold_neighbours_of_one_dtype_up_to_the_limit() -> None:
    sizes = [("float32", 4), ("float32", 4), ("float32", 1), ("bfloat16", 2), ("bfloat16", 100), ("bfloat16", 1)]
    tensors = [TensorSpec(name=str(i), dtype=dtype, shape=(numel,)) for i, (dtype, numel) in enumerate(sizes)]
    assert [[t.name for t in chunk] for chunk in cut(tensors, 32)] == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert cut([], 32) == []


def test_every_process_of_every_engine_gets_the_same_bits_in_order() -> None:
    server = WeightServer("127.0.0.1", timeout_s=120)

    def fetch_all(offer: WeightOffer, rank: int) -> list[tuple[str, torch.Tensor]]:
        return list(fetch(offer, rank=rank))

    for _ in range(2):  # each hand-over meets anew
        offer = load_offer(dump_offer(offer_of(server, WEIGHTS, num_ranks=2)))
        with ThreadPoolExecutor(4) as pool:
            fetching = [pool.submit(fetch_all, replace(offer, engine=engine), rank) for engine in (0, 1) for rank in (1, 2)]
            assert server.send(offer, WEIGHTS.items(), [0, 1]) == []
            for fetched in fetching:
                assert [name for name, _ in fetched.result()] == list(WEIGHTS)
                assert all(same_bits(tensor, WEIGHTS[name]) for name, tensor in fetched.result())


@pytest.mark.slow
def test_an_engine_that_never_comes_or_leaves_early_costs_the_others_nothing() -> None:
    server = WeightServer("127.0.0.1", timeout_s=60)
    offer = offer_of(server, WEIGHTS, chunk_bytes=4)

    def leave_early() -> None:
        arriving = fetch(replace(offer, engine=1), rank=1)
        next(arriving)
        arriving.close()

    with ThreadPoolExecutor(2) as pool:
        leaving = pool.submit(leave_early)
        staying = pool.submit(lambda: dict(fetch(offer, rank=1)))
        assert server.send(offer, WEIGHTS.items(), [0, 1, 2]) == [1, 2]
        leaving.result()
        assert staying.result().keys() == WEIGHTS.keys()


def test_without_a_learner_to_fetch_from_the_engine_hears_of_it() -> None:
    offer = offer_of(WeightServer("127.0.0.1", timeout_s=1), WEIGHTS)
    with pytest.raises(RuntimeError):
        list(fetch(offer, rank=1))


@pytest.mark.parametrize("others", [WEIGHTS | {"a": torch.zeros(15)}, dict(reversed(WEIGHTS.items()))])
def test_weights_that_are_not_those_of_the_offer_are_our_mistake(others: dict[str, torch.Tensor]) -> None:
    server = WeightServer("127.0.0.1", timeout_s=1)
    with pytest.raises(AssertionError):
        server.send(offer_of(server, WEIGHTS), others.items(), [])


def during(server: WeightServer, offer: WeightOffer, weights: Iterable[tuple[str, torch.Tensor]], call: Callable[[], object]) -> None:
    sending = threading.Thread(target=server.send, args=(offer, weights, [0]))
    sending.start()
    call()
    sending.join()


def test_an_offer_is_a_source_of_weights_whose_shapes_are_known_before_anything_is_fetched(tmp_path: Path) -> None:
    old, new = build_model(seed=0), build_model(seed=1)
    engine = TorchEngine(write_folder(tmp_path, old), TorchEngineConfig(), num_threads=1)
    server = WeightServer("127.0.0.1", timeout_s=120)
    weights = dict(new.named_parameters())
    offer = offer_of(server, weights, chunk_bytes=1 << 14)
    assert tensor_shapes(offer) == {name: tuple(w.shape) for name, w in weights.items()}

    async def update(offered: WeightOffer) -> None:
        await engine.load_weights(offered, version=offered.version)

    during(server, offer, ((name, w.detach()) for name, w in weights.items()), lambda: asyncio.run(update(offer)))
    assert engine.version == 3
    loaded = engine._model
    assert torch.equal(loaded._targets()["model.embed_tokens.weight"], new.get_input_embeddings().weight.detach())
    with pytest.raises(ConfigError, match="missing"):
        asyncio.run(update(replace(offer, tensors=offer.tensors[1:])))
    assert dict(tensors({"w": torch.ones(1)})).keys() == {"w"}
    asyncio.run(engine.close())
