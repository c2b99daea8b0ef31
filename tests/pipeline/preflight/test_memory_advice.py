"""A learner rank that runs out of memory although the plan fits is answered by settings that need less."""

from pathlib import Path

import pytest

from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig, SftRuntime
from klear_core.generate.model_size import known_size
from klear_core.pipeline.costs.memory import learner_load, learner_peak, with_margin_gb
from klear_core.pipeline.preflight.capacity import advice_on_memory

SIZE = known_size("Qwen3-8B")


def needs_gb(training: SftConfig | RlConfig) -> float:
    return with_margin_gb(learner_peak(SIZE, learner_load(training)).num_bytes)


@pytest.mark.parametrize("training", [SftConfig(runtime=SftRuntime(num_workers=8)), RlConfig()])
def test_the_advice_names_settings_that_need_a_fifth_less(training: SftConfig | RlConfig):
    advice = advice_on_memory(training, SIZE)
    named = advice.partition("In the stage's runtime, ")[2].partition(" needs 20% less")[0]
    changes = dict(part.split(" = ") for part in named.split(", "))
    values = {key: value == "true" if value in ("true", "false") else int(value) for key, value in changes.items()}
    changed = training.model_copy(update={"runtime": training.runtime.model_copy(update=values)})
    assert needs_gb(changed) <= 0.8 * needs_gb(training)
    assert f"{needs_gb(training):.1f} GB" in advice


def test_the_stage_adds_the_advice_to_the_error(tmp_path: Path):
    from decoder_folder import build_model, write_folder

    from klear_core.errors import GpuMemoryError
    from tasks.resources import memory_advised

    folder = write_folder(tmp_path, build_model())
    with (
        pytest.raises(GpuMemoryError, match=r"rank 0 ran out; the plan has .*GB for a rank.*klear doctor --gpu"),
        memory_advised(SftConfig(), folder),
    ):
        raise GpuMemoryError("rank 0 ran out")
