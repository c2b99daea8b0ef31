"""The compiled decode step against the same step in torch operations."""

from pathlib import Path

import pytest
import torch
from qwen3_folder import build_model, write_folder

from klear_core.generate.engine import SamplingParams
from klear_core.generate.qwen3_shape import read_shape
from klear_core.generate.torch_batch import Batch, EndedRow, Row
from klear_core.generate.torch_native import NativeStep
from klear_core.generate.torch_qwen3 import Qwen3

PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 2, 17, 60))]
STOP_ID = 70


def load(folder: Path, **changes: int) -> Qwen3:
    write_folder(folder, build_model(**changes))  # type: ignore[arg-type]
    model = Qwen3(read_shape(folder), dtype=torch.float32, device=torch.device("cpu"))
    model.load(folder)
    return model


def native_of(model: Qwen3) -> NativeStep:
    native = NativeStep.of(model)
    if native is None:
        pytest.skip("no C compiler on this machine")
    return native


def sample(model: Qwen3, native: NativeStep | None, **changes: float) -> list[EndedRow[int]]:
    """Answers of all prompts, in the order of the rows; 40 tokens at the most, so that rows end one by one and others take their place."""
    decoding = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0} | changes
    params = SamplingParams(num_samples=1, max_new_tokens=40, seed=0, **decoding)  # type: ignore[arg-type]
    batch: Batch[int] = Batch(model, native, stop_ids=[STOP_ID], max_rows=64, version=0)
    rows = [(i, prompt) for i, prompt in enumerate(PROMPTS * 6)]
    with torch.inference_mode():
        batch.add(
            [Row(owner=i, prompt_ids=p, key=i * 7919, params=params, end=len(p) + 40 - i % 3) for i, p in rows],
        )
        ended: list[EndedRow[int]] = []
        while batch.num_running:
            ended += batch.step()
    return sorted(ended, key=lambda e: e.row.owner)


@pytest.mark.parametrize(
    "decoding", [{}, {"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.4}], ids=str
)
def test_compiled_steps_sample_what_torch_steps_sample(tmp_path: Path, decoding: dict[str, float]) -> None:
    model = load(tmp_path)
    compiled, plain = sample(model, native_of(model), **decoding), sample(model, None, **decoding)
    assert [e.token_ids for e in compiled] == [e.token_ids for e in plain]  # a draw within 1e-6 of a border could differ; none is
    assert [e.finish_reason for e in compiled] == [e.finish_reason for e in plain]
    assert {e.finish_reason for e in compiled} == {"stop", "length"}
    for a, b in zip(compiled, plain, strict=True):
        assert torch.allclose(torch.tensor(a.logps), torch.tensor(b.logps), rtol=0, atol=3e-5)


@pytest.mark.parametrize("changes", [{"head_dim": 32}, {"hidden_size": 48}, {"num_layers": 1, "is_tied": False}], ids=str)
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


def test_without_compiler_half_precision_or_odd_heads_steps_run_as_torch(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert NativeStep.of(model, compilers=("no-such-compiler",)) is None
    assert NativeStep.of(Qwen3(model.shape, dtype=torch.bfloat16, device=torch.device("cpu"))) is None
    (tmp_path / "odd").mkdir()
    assert NativeStep.of(load(tmp_path / "odd", head_dim=8)) is None
