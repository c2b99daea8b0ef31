"""The compiled decode step against the same step in torch operations."""

import math
from pathlib import Path

import pytest
import torch
from decoder_folder import VOCAB_SIZE, build_model, write_folder
from torch import Tensor

from klear_core.generate.decoder.batch import Batch, BatchRow, EndedRow
from klear_core.generate.decoder.decode import Decoding, NativeStep, RowState, draw, penalise
from klear_core.generate.decoder.decoder import Decoder
from klear_core.generate.decoder.shape import read_shape
from klear_core.generate.engine import SamplingParams
from klear_core.products import instructions

PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 2, 17, 60))]
STOP_ID = 70


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> Decoder:
    write_folder(folder, build_model(**changes))  # type: ignore[arg-type]
    model = Decoder(read_shape(folder), dtype=dtype, device=torch.device("cpu"))
    model.load(folder)
    return model


def native_of(model: Decoder) -> NativeStep:
    native = NativeStep.of(model)
    if native is None:
        pytest.skip("no C compiler on this machine")
    return native


def sample(model: Decoder, native: NativeStep | None, **changes: float) -> list[EndedRow[int]]:
    """Answers of all prompts, in the order of the rows; 40 tokens at the most, so that rows end one by one and others take their place."""
    decoding = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0} | changes
    params = SamplingParams(num_samples=1, max_new_tokens=40, seed=0, **decoding)  # type: ignore[arg-type]
    batch: Batch[int] = Batch(model, native, stop_ids=[STOP_ID], max_rows=64, version=0)
    rows = [(i, prompt) for i, prompt in enumerate(PROMPTS * 6)]
    with torch.inference_mode():
        batch.add(
            [BatchRow(owner=i, prompt_ids=p, key=i * 7919, params=params, end=len(p) + 40 - i % 3) for i, p in rows],
        )
        ended: list[EndedRow[int]] = []
        while batch.num_running:
            ended += batch.step()
    return sorted(ended, key=lambda e: e.row.owner)


@pytest.mark.parametrize(
    "decoding",
    [{}, {"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.4}],
    ids=str,
)
def test_compiled_steps_sample_what_torch_steps_sample(tmp_path: Path, decoding: dict[str, float]) -> None:
    model = load(tmp_path)
    compiled, plain = sample(model, native_of(model), **decoding), sample(model, None, **decoding)
    assert [e.token_ids for e in compiled] == [
        e.token_ids for e in plain
    ]  # a draw within 1e-6 of a border could differ; none is
    assert [e.finish_reason for e in compiled] == [e.finish_reason for e in plain]
    assert {e.finish_reason for e in compiled} == {"stop", "length"}
    for a, b in zip(compiled, plain, strict=True):
        assert torch.allclose(torch.tensor(a.logps), torch.tensor(b.logps), rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    "changes", [{"head_dim": 32}, {"hidden_size": 48}, {"num_layers": 1, "is_tied": False}], ids=str
)
def test_compiled_steps_fit_other_shapes(tmp_path: Path, changes: dict[str, int]) -> None:
    model = load(tmp_path, **changes)
    compiled, plain = sample(model, native_of(model)), sample(model, None)
    assert [e.token_ids for e in compiled] == [e.token_ids for e in plain]


def test_weights_that_are_not_finite_end_the_sampling_with_an_error(tmp_path: Path) -> None:
    model = load(tmp_path)
    native = native_of(model)
    model.norm[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, native)


def test_without_compiler_or_odd_heads_steps_run_as_torch(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert NativeStep.of(model, compilers=("no-such-compiler",)) is None
    (tmp_path / "odd").mkdir()
    assert NativeStep.of(load(tmp_path / "odd", head_dim=8)) is None


needs_half = pytest.mark.skipif(not instructions(), reason="this processor has neither AVX512_BF16 nor AMX")


@needs_half
def test_compiled_steps_in_bfloat16_stay_near_those_in_float32(tmp_path: Path) -> None:
    """Products of the sizes of this model lose 2^-9 of each input; logits of a few nats then move by hundredths."""
    half, whole = load(tmp_path, torch.bfloat16), load(tmp_path)
    greedy = {"temperature": 0.0}
    compiled, plain = sample(half, native_of(half), **greedy), sample(whole, native_of(whole), **greedy)
    gaps = []
    for a, b in zip(compiled, plain, strict=True):
        same = 0
        while same < min(len(a.token_ids), len(b.token_ids)) and a.token_ids[same] == b.token_ids[same]:
            same += 1
        gaps += [abs(x - y) for x, y in zip(a.logps[:same], b.logps[:same], strict=True)]
    assert len(gaps) > 100
    assert 0 < sum(gaps) / len(gaps) < 0.05


@needs_half
def test_new_weights_reach_the_packed_copies(tmp_path: Path) -> None:
    model = load(tmp_path, torch.bfloat16)
    native = native_of(model)
    before = [e.token_ids for e in sample(model, native)]
    for weight in (*model.gate_up, *model.norm1, model.norm):
        weight.mul_(1.5)
    native.read_weights()
    after = [e.token_ids for e in sample(model, native)]
    assert after != before
    assert after == [e.token_ids for e in sample(model, native_of(model))]


# ---- from logits to a token


@pytest.fixture(scope="module", params=["compiled", "torch"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeStep | None:
    """None is the way without a compiler."""
    return None if request.param == "torch" else native_of(load(tmp_path_factory.mktemp("model")))


def drawn(
    native: NativeStep | None, logits_BV: Tensor, *, temperature: float, seed: int = 0
) -> tuple[list[int], list[float]]:
    """A token of each row, and its log-probability."""
    num_rows = len(logits_BV)
    keys_B, no_stop = torch.arange(num_rows) + seed, torch.tensor([-1])
    if native is None:
        decoding = Decoding(
            keys_B=keys_B,
            temperature_B=torch.full((num_rows,), temperature),
            top_p_B=torch.ones(num_rows),
            top_k_B=torch.zeros(num_rows, dtype=torch.int64),
        )
        tokens_B, logps_B = draw(logits_BV, torch.zeros_like(keys_B), decoding, is_truncated=False)
        return tokens_B.tolist(), logps_B.tolist()
    state = RowState.empty(torch.device("cpu"))
    state.reserve(num_rows, 2)
    state.keys_R[:], state.temperature_R[:], state.end_R[:] = keys_B, temperature, 9
    native.draw(logits_BV.clone(), state, no_stop, num_running=num_rows)
    return state.tokens_RT[:, 1].tolist(), state.logps_RT[:, 1].tolist()


def near_ties(vocab_size: int, *, ulps: int) -> tuple[Tensor, list[int]]:
    """Rows whose largest logit is `ulps` steps of a float32 above all others before and after it, from 1e-30 to 1e30 and of both signs."""
    rows, winners = [], []
    for i, size in enumerate([1e-30, 1e-9, 3e-4, 0.3, 1.0, 12.0, 1e3, 1e6, 1e30]):
        for value in (size, -size):
            row_V = torch.full((vocab_size,), value)
            winner = (1 + 37 * i) % vocab_size
            for _ in range(ulps):
                row_V[winner] = torch.nextafter(row_V[winner], torch.tensor(math.inf))
            rows.append(row_V)
            winners.append(winner)
    return torch.stack(rows), winners


@pytest.mark.parametrize("ulps", [1, 3])
def test_greedy_takes_the_largest_logit_however_near_the_others_are(native: NativeStep | None, ulps: int) -> None:
    logits_BV, winners = near_ties(VOCAB_SIZE, ulps=ulps)
    assert drawn(native, logits_BV, temperature=0.0)[0] == winners == logits_BV.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equal_logits(native: NativeStep | None) -> None:
    logits_BV = torch.zeros(2, VOCAB_SIZE)
    logits_BV[1, [70, 20, 100]] = 5.0
    assert drawn(native, logits_BV, temperature=0.0)[0] == [0, 20]


def test_the_penalty_decides_a_near_tie(native: NativeStep | None) -> None:
    """The larger of two neighbours has been said: over 1.01 it is the smaller."""
    logits_BV = torch.zeros(1, VOCAB_SIZE)
    logits_BV[0, 9], logits_BV[0, 4] = 1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert drawn(native, logits_BV, temperature=0.0)[0] == [4]
    penalised_BV = penalise(logits_BV, torch.tensor([[4]]), torch.tensor([1.01]))
    assert drawn(native, penalised_BV, temperature=0.0)[0] == [9]


@pytest.mark.parametrize("temperature", [1e-12, 1e-38])
def test_a_tiny_temperature_is_greedy_and_sure_of_it(native: NativeStep | None, temperature: float) -> None:
    """One step at 0.3 is a gap of 3e-8, thousands of times the temperature, though the quotients may round to one number or to infinity."""
    logits_BV, winners = near_ties(VOCAB_SIZE, ulps=1)
    is_apart = [bool(row.max() - row.min() > 100 * temperature) for row in logits_BV]
    tokens, logps = drawn(native, logits_BV, temperature=temperature)
    assert sum(is_apart) >= 12
    for token, logp, winner, apart in zip(tokens, logps, winners, is_apart, strict=True):
        assert not apart or (token, logp) == (winner, 0.0)


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 2.0])
def test_a_tokens_log_prob_is_that_of_the_softmax_in_float64(native: NativeStep | None, temperature: float) -> None:
    logits_BV = 5 * torch.randn(200, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    tokens, logps = drawn(native, logits_BV, temperature=temperature)
    wanted_BV = torch.log_softmax(logits_BV.double() / temperature, -1)
    wanted_B = wanted_BV.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logps).double(), wanted_B, atol=1e-5, rtol=1e-6)


def test_a_model_of_tiny_logits_answers_greedily_as_in_torch(tmp_path: Path) -> None:
    """Of logits below 1e-8 the exponential of every one is 1."""
    model = load(tmp_path, is_tied=False)
    model.head *= 1e-9
    compiled, plain = sample(model, native_of(model), temperature=0.0), sample(model, None, temperature=0.0)
    assert [e.token_ids for e in compiled] == [e.token_ids for e in plain]
    assert {t for e in plain for t in e.token_ids} != {0}
