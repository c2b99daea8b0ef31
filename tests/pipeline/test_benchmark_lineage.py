"""Evaluation can only score models whose training data was compared with the very benchmarks that it scores them on."""

from pathlib import Path

import pytest

from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.load import load_profile
from klear_core.pipeline.graph import fingerprints_of, stages_of

CONFIGS = Path(__file__).parents[2] / "configs"


def ancestors(stages, name):
    by_name = {stage.name: stage for stage in stages}
    found, open_ = set(), [name]
    while open_:
        stage = by_name[open_.pop()]
        new = set(stage.inputs.values()) - found
        found |= new
        open_ += new
    return [by_name[other] for other in found]


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_every_curation_behind_a_scored_model_has_the_benchmarks_that_score_it(profile):
    stages = stages_of(load_profile(CONFIGS / profile))
    scoring = [stage for stage in stages if stage.job.scores_model]
    assert scoring
    for stage in scoring:
        behind = ancestors(stages, stage.inputs["model"])
        reading = [other for other in behind if other.sources() and other.name != "benchmarks"]
        assert all(other.inputs["benchmarks"] == stage.inputs["benchmarks"] for other in reading), stage.name


def test_another_benchmark_makes_problems_and_trained_models_again_but_not_the_base_model():
    config = load_profile(CONFIGS / "smoke")
    added = BenchmarkConfig(name="added", source=ProceduralSource(split="heldout", num_problems=8, name="added"))
    more = config.model_copy(update={"benchmarks": (*config.benchmarks, added)})
    before, after = (fingerprints_of(stages_of(c), c.workspace) for c in (config, more))
    same = {name for name in before if before[name] == after[name]}
    assert same == {"base"}
