"""Rows that share a prompt's keys and values, join while others run and end at different times: compiled steps, and steps in torch."""

from collections.abc import Iterable

import pytest
import torch
from decoder_folder import build_model, write_folder

from klear_core.generate.decoder.batch import Batch, BatchRow, EndedRow
from klear_core.generate.decoder.decode import NativeStep
from klear_core.generate.decoder.decoder import Decoder
from klear_core.generate.decoder.shape import read_shape
from klear_core.generate.engine import SamplingParams

PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 2, 17, 90))]
NEVER = 1000
"""No token of this vocabulary, so that budgets alone end a row."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_folder(tmp_path_factory.mktemp("model"), build_model(seed=1))
    model = Decoder(read_shape(folder), dtype=torch.float32, device=torch.device("cpu"))
    model.load(folder)
    return model


@pytest.fixture(params=["compiled", "torch"])
def native(request: pytest.FixtureRequest, model: Decoder) -> NativeStep | None:
    if request.param == "torch":
        return None
    return NativeStep.of(model) or pytest.skip("no C compiler on this machine")


def row(owner: int, *, temperature: float = 0.8, repetition_penalty: float = 1.0) -> BatchRow[int]:
    """Of the owner's number follow its prompt, its draws and its budget: 1 to 70 tokens."""
    prompt_ids, budget = PROMPTS[owner % len(PROMPTS)], 1 + owner * 29 % 70
    decoding = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "repetition_penalty": repetition_penalty}
    params = SamplingParams(num_samples=1, max_new_tokens=budget, seed=0, **decoding)  # type: ignore[arg-type]
    return BatchRow(owner=owner, prompt_ids=prompt_ids, key=owner * 7919, params=params, end=len(prompt_ids) + budget)


@torch.inference_mode()
def finish(batch: Batch[int], arrivals: Iterable[list[BatchRow[int]]] = ()) -> dict[int, EndedRow[int]]:
    """Every ended row by owner; one lot of arrivals joins after every third step."""
    ended: dict[int, EndedRow[int]] = {}
    waiting = list(arrivals)
    while batch.num_running or waiting:
        if waiting:
            batch.add(waiting.pop(0))
        for _ in range(3):
            ended |= {e.row.owner: e for e in (batch.step() if batch.num_running else [])}
    return ended


def batch_of(model: Decoder, native: NativeStep | None) -> Batch[int]:
    return Batch(model, native, stop_ids=[NEVER], max_rows=64, version=0)


def test_a_row_among_rows_of_its_prompt_is_the_same_as_alone(model: Decoder, native: NativeStep | None) -> None:
    """Compiled steps: to the bit."""
    lots = [[row(owner) for owner in range(start, start + 7)] for start in range(0, 56, 7)]
    crowd = finish(batch_of(model, native), lots)
    assert sorted(crowd) == list(range(56))
    for owner, together in crowd.items():
        alone = finish(batch_of(model, native), [[row(owner)]])[owner]
        assert together.token_ids == alone.token_ids
        assert torch.allclose(
            torch.tensor(together.logps), torch.tensor(alone.logps), rtol=0, atol=0 if native else 3e-5
        )
        assert len(together.token_ids) == 1 + owner * 29 % 70


def test_a_penalised_row_alone_is_what_it_is_among_others(model: Decoder, native: NativeStep | None) -> None:
    """Alone, rows without an owner run beside it. Theirs is token 0, to which this model gives a positive logit."""
    crowd = finish(batch_of(model, native), [[row(owner, repetition_penalty=1.3) for owner in range(8)]])
    for owner in range(8):
        alone = finish(batch_of(model, native), [[row(owner, repetition_penalty=1.3)]])[owner]
        assert alone.token_ids == crowd[owner].token_ids


def test_rows_that_go_on_in_slots_of_their_own_take_the_tokens_they_would_have_taken(
    model: Decoder, native: NativeStep | None
) -> None:
    """`renew` with the weights there were: the prompt and what was sampled so far become a prefix."""
    owners = range(24)
    expected = finish(batch_of(model, native), [[row(owner, temperature=0.0) for owner in owners]])
    batch = batch_of(model, native)
    with torch.inference_mode():
        batch.add([row(owner, temperature=0.0) for owner in owners])
        ended = {e.row.owner: e for _ in range(20) for e in batch.step()}
        batch.recompute_cache(1)
        batch.drop(lambda owner: owner == 7)
        batch.add([row(24, temperature=0.0)])
    ended |= finish(batch)
    assert sorted(ended) == sorted({*owners, 24} - {7})
    for owner in ended.keys() & set(owners):
        assert ended[owner].token_ids == expected[owner].token_ids
        assert torch.allclose(torch.tensor(ended[owner].logps), torch.tensor(expected[owner].logps), rtol=0, atol=3e-5)
    assert {version for e in ended.values() for version in e.versions} == {0, 1}


def test_the_room_for_one_long_prompt_is_freed_once_the_batch_is_empty(
    model: Decoder, native: NativeStep | None
) -> None:
    """Four prompts of up to 90 tokens need rows of 96 positions, and not of the 240 of a prompt before them."""
    rows = [row(owner) for owner in range(4)]
    fresh, batch = batch_of(model, native), batch_of(model, native)
    expected = finish(fresh, [rows])
    long = BatchRow(owner=9, prompt_ids=(65,) * 240, key=1, params=rows[0].params, end=241)
    finish(batch, [[long]])
    assert batch.cached_positions >= 240
    after = finish(batch, [[row(owner) for owner in range(4)]])
    assert {i: ended.logps for i, ended in after.items()} == {i: ended.logps for i, ended in expected.items()}
    assert batch.cached_positions == fresh.cached_positions
