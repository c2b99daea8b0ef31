"""A model is refused for the data behind it, and not for the data behind others that its run scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_evaluations import made_model

from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, PromoteConfig
from klear_core.config.stage import PromoteJob
from klear_core.config.train import GivenConfig, GivenFolder
from tasks.evaluation import contaminated

BENCH = BenchmarkConfig(name="b", source=ProceduralSource(split="heldout"))
UNKNOWN = GivenFolder(path="unknown")
COMPARED = GivenFolder(path="compared", decontaminated_against=("b",))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (GivenConfig(sft=UNKNOWN), {"b": None}),  # RL goes on from it
        (GivenConfig(sft=COMPARED), {"b": 0}),
        (GivenConfig(evaluate=UNKNOWN), {"b": None}),
        (GivenConfig(sft=UNKNOWN, evaluate=COMPARED), {"b": 0}),
        (GivenConfig(sft=COMPARED, evaluate=UNKNOWN), {"b": None}),
        (GivenConfig(sft=UNKNOWN, rl=COMPARED), {"b": 0}),
    ],
)
def test_the_data_behind_a_model_is_that_of_the_given_model_it_comes_from(
    tmp_path: Path, given: GivenConfig, found: dict[str, int | None]
) -> None:
    (tmp_path / "files").mkdir()
    model = made_model(tmp_path, seed=0, files=tmp_path / "files")
    job = PromoteJob.of(PipelineConfig(benchmarks=(BENCH,), promote=PromoteConfig(), given=given))
    assert contaminated(job, model) == found
