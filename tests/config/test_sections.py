"""Which sections of the config the stages of a run use."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from klear_core.config.data_jobs import STAGE_SECTIONS, section_of, sections_used
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.pipeline.graph import stages_of

CONFIGS = Path(__file__).parents[2] / "configs"
_OF_THE_RUN = {"name", "seed", "workspace", "hardware", "verify", "judge", "benchmarks", "data_until", "given"}


def used(*overrides: str) -> frozenset[str]:
    stages = stages_of(load_profile(CONFIGS / "smoke", overrides))
    return sections_used((stage.name, stage.kind) for stage in stages) & STAGE_SECTIONS


def test_every_section_belongs_to_stages_or_to_the_run() -> None:
    assert set(PipelineConfig.model_fields) == STAGE_SECTIONS | _OF_THE_RUN
    assert not STAGE_SECTIONS & _OF_THE_RUN


@pytest.mark.parametrize(
    ("key", "section"),
    [("rl.optim.lr", "rl"), ("judge.rl.tags", "rl"), ("seed", ""), ("verify.tags", ""), ("judge", "")],
)
def test_a_key_belongs_to_the_section_of_a_stage_or_to_none(key: str, section: str) -> None:
    assert section_of(key) == section


def test_what_is_given_uses_no_settings_of_its_training() -> None:
    everything = {"curate", "model", "distill", "sft", "rl", "evaluate"}
    assert used() == everything
    assert used("given.sft.path=m") == {"curate", "rl", "evaluate"}
    assert used("given.evaluate.path=m") == {"evaluate"}
    assert used("given.distill.path=t.jsonl") == everything
    assert used("given.sft.path=m", "given.curate_rl.path=p.jsonl") == {"curate", "curate_rl", "rl", "evaluate"}
    assert used("promote.margin=5") == everything | {"promote"}
    assert used("rl.distill={}", "rl_teacher={}") == everything | {"rl_teacher"}
    assert used("rl.distill={}", "rl_teacher.source={kind='given', model={path='m'}}") == everything | {"rl_teacher"}


def test_several_greedy_answers_to_a_problem_are_refused() -> None:
    greedy = {"evaluate": {"sampling": {"temperature": 0}}}
    benchmark = {"known": "aime24", "source": "copy.jsonl"}
    with pytest.raises(ValidationError, match="all answers to a problem of aime24 would be the same one"):
        PipelineConfig.model_validate({"benchmarks": [benchmark], **greedy})
    PipelineConfig.model_validate({"benchmarks": [benchmark | {"num_samples": 1}], **greedy})
