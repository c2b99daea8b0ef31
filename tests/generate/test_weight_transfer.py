"""Weights from a learner's memory into engines', over gloo: the same bits, in order, and no engine waits for another that is gone."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoder_folder import build_model, write_folder
from torch.distributed import TCPStore

from klear_core.config.evaluate import TorchEngineConfig
from klear_core.errors import ConfigError
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import TensorSpec, TransferBackend, WeightOffer, dump_offer, load_offer
from klear_core.generate.model_weights import tensor_shapes, tensors
from klear_core.generate.weight_transfer import IpcBackend, WeightServer, fetch, nccl_env, split_chunks, wait_for_work

WEIGHTS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7),
    "c": torch.randn(2, 2).to(torch.bfloat16),
    "d": torch.tensor([-0.0, torch.nan, torch.inf]),
    "e": torch.tensor(4.0),
}

ENGINE = """
import sys
from klear_core.generate.engine import load_offer
from klear_core.generate.weight_transfer import fetch
print("ready", flush=True)
arriving = fetch(load_offer(input()), rank=1)
print(next(arriving)[0], flush=True)
input()
"""


def specs(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name=k, dtype=str(w.dtype).removeprefix("torch."), shape=tuple(w.shape)) for k, w in weights.items()
    ]


def offer_of(
    server: WeightServer,
    weights: dict[str, torch.Tensor],
    *,
    num_ranks: int = 1,
    chunk_bytes: int = 64,
    backend: TransferBackend = "gloo",
) -> WeightOffer:
    return server.offer(specs(weights), version=3, backend=backend, num_ranks=num_ranks, chunk_bytes=chunk_bytes)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    )


def test_messages_hold_neighbours_of_one_dtype_up_to_the_limit() -> None:
    sizes = [("float32", 4), ("float32", 4), ("float32", 1), ("bfloat16", 2), ("bfloat16", 100), ("bfloat16", 1)]
    tensors = [TensorSpec(name=str(i), dtype=dtype, shape=(numel,)) for i, (dtype, numel) in enumerate(sizes)]
    assert [[t.name for t in chunk] for chunk in split_chunks(tensors, 32)] == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert split_chunks([], 32) == []


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_every_process_of_every_engine_gets_the_same_bits_in_order(backend: TransferBackend) -> None:
    server = WeightServer("127.0.0.1", timeout_s=120)

    def fetch_all(offer: WeightOffer, rank: int) -> list[tuple[str, torch.Tensor]]:
        return list(fetch(offer, rank=rank))

    for _ in range(2):  # each hand-over meets anew
        offer = load_offer(dump_offer(offer_of(server, WEIGHTS, num_ranks=2, backend=backend)))
        with ThreadPoolExecutor(4) as pool:
            fetching = [
                pool.submit(fetch_all, replace(offer, engine=engine), rank) for engine in (0, 1) for rank in (1, 2)
            ]
            assert server.send(offer, WEIGHTS.items(), [0, 1]) == []
            for fetched in fetching:
                assert [name for name, _ in fetched.result()] == list(WEIGHTS)
                assert all(same_bits(tensor, WEIGHTS[name]) for name, tensor in fetched.result())


@pytest.mark.slow
def test_an_engine_that_never_comes_or_leaves_early_costs_the_others_nothing() -> None:
    server = WeightServer("127.0.0.1", timeout_s=40)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "number", "told"),
    [
        ("gloo", signal.SIGKILL, ""),
        ("gloo", signal.SIGSTOP, "did not complete the operation"),
        ("ipc", signal.SIGKILL, "did not complete the operation"),
    ],
)
def test_an_engine_that_is_killed_or_stuck_meanwhile_is_lost_alone(
    caplog: pytest.LogCaptureFixture, backend: TransferBackend, number: signal.Signals, told: str
) -> None:
    """A real process: a killed one the backend reports, one that only stops answering, as all do over NCCL, it does not."""
    server = WeightServer("127.0.0.1", timeout_s=40)
    offer = offer_of(server, WEIGHTS, chunk_bytes=4, backend=backend)
    lost = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert lost.stdin is not None
    assert lost.stdout is not None
    assert lost.stdout.readline() == "ready\n"
    lost.stdin.write(dump_offer(replace(offer, engine=1)) + "\n")
    lost.stdin.flush()

    def weights() -> Iterable[tuple[str, torch.Tensor]]:
        for name, weight in WEIGHTS.items():
            yield name, weight
            if name == "a":
                assert lost.stdout is not None
                assert lost.stdout.readline() == "a\n"
                os.kill(lost.pid, number)

    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        staying = pool.submit(lambda: dict(fetch(offer, rank=1)))
        assert server.send(offer, weights(), [0, 1]) == [1]
        assert staying.result().keys() == WEIGHTS.keys()
    lost.kill()
    lost.communicate()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("engine 1 was lost while weights were sent to it")
    assert told in message


def test_memory_that_cannot_be_opened_and_a_peer_that_gives_up_are_errors() -> None:
    """CUDA refuses the handle of a GPU that this process does not see."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("1", json.dumps([{"hex": b"/gone".hex()}, {"hex": b"/torch_0".hex()}, 8]))
    work = IpcBackend(store, 1, 1).broadcast(torch.empty(8, dtype=torch.uint8), 0)
    assert work.is_completed()
    with pytest.raises(RuntimeError):
        work.wait()
    IpcBackend(store, 0, 1).abort()
    with pytest.raises(RuntimeError, match="the peer aborted the transfer"):
        work.is_completed()


def test_the_clock_is_ours_for_the_backends_wait_may_never_return() -> None:
    class NeverDone:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> None:
            raise AssertionError("nobody shall wait in here")

    with pytest.raises(RuntimeError, match="did not complete the operation"):
        wait_for_work(NeverDone(), time.monotonic())


def test_nccl_is_told_to_leave_the_process_alive_and_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    before = dict(os.environ)
    with nccl_env():
        assert [os.environ[f"TORCH_NCCL_{name}"] for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT")] == ["0", "0"]
    assert os.environ == before


def test_without_a_learner_to_fetch_from_the_engine_hears_of_it() -> None:
    offer = offer_of(WeightServer("127.0.0.1", timeout_s=1), WEIGHTS)
    with pytest.raises(RuntimeError):
        list(fetch(offer, rank=1))


@pytest.mark.parametrize("others", [WEIGHTS | {"a": torch.zeros(15)}, dict(reversed(WEIGHTS.items()))])
def test_weights_that_are_not_those_of_the_offer_are_our_mistake(others: dict[str, torch.Tensor]) -> None:
    server = WeightServer("127.0.0.1", timeout_s=1)
    with pytest.raises(AssertionError):
        server.send(offer_of(server, WEIGHTS), others.items(), [])


def during(
    server: WeightServer, offer: WeightOffer, weights: Iterable[tuple[str, torch.Tensor]], call: Callable[[], object]
) -> None:
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
