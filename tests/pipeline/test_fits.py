"""`klear plan` refuses what does not fit into the GPUs, and names settings that do."""

from pathlib import Path

import pytest

from klear_core.config.load import load_profile
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.fits import memory_problems

KLEAR_8B = Path(__file__).parents[2] / "configs" / "klear_8b"


def _problems(*overrides: str) -> list[str]:
    return list(memory_problems(PendingWork.of(load_profile(KLEAR_8B, overrides), None, ())))


def test_the_8b_profile_fits_into_80_gb() -> None:
    assert _problems("hardware.gpu_memory_gb=80") == []


def test_too_small_gpus_are_refused_with_settings_that_fit() -> None:
    problems = _problems("hardware.gpu_memory_gb=24")
    assert [p.split(":")[0] for p in problems] == ["sft.runtime", "rl.runtime", "rl_code.runtime"]
    assert "set context_parallel = 4, num_workers = 16 in sft.runtime" in problems[0]
    advised = ("sft.runtime.context_parallel=4", "sft.runtime.num_workers=16")
    assert not any(p.startswith("sft.") for p in _problems("hardware.gpu_memory_gb=24", *advised))


def test_without_known_gpus_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert _problems() == []


def test_a_learner_and_an_engine_on_one_gpu_must_leave_room_for_each_other() -> None:
    shared = ["rl.runtime.learner_gpus=0.5", "rl.runtime.rollout_gpus=0.5", "rl.runtime.num_workers=8"]
    problems = _problems("hardware.gpu_memory_gb=80", *shared)
    of_engine = [p for p in problems if p.startswith("rl.rollout.engine.runtime")]
    assert "sleep_mode = false" in of_engine[0]
    # 8 ranks keep 12 * 8.19e9 / 8 = 12.3 GB each, 14.5 with the margin: 80 - 14.5 is 81 % of the GPU, less than 90 %.
    assert "set 0.81 at most" in of_engine[1]
