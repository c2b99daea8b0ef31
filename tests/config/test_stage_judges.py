from __future__ import annotations

from pathlib import Path

import pytest

from klear_core.config.load import load_profile
from klear_core.config.settings import config_digest
from klear_core.config.stage import EvaluateJob, RlJob, Stage
from klear_core.config.verify import StageJudges, VerifyConfig, sections_of_evaluation
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import stages_of

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"


def stages(*overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages_of(load_profile(SMOKE, overrides))}


def changed(*overrides: str) -> set[str]:
    """Return the stages whose own settings the overrides change."""
    before, after = stages(), stages(*overrides)
    return {name for name in before if config_digest(before[name].job) != config_digest(after[name].job)}


def test_another_judge_of_evaluation_trains_nothing_again() -> None:
    found = changed("judge.evaluate.code.max_tests=4", "judge.evaluate.window=whole")
    assert found == {"evaluate_base", "evaluate_sft", "evaluate_rl", "report"}


def test_a_box_can_be_required_for_rl_alone() -> None:
    assert changed("judge.rl.math.box=required") == {"rl", "report"}
    found = stages("judge.rl.math.box=required")
    rl, evaluation = found["rl"].job, found["evaluate_rl"].job
    assert isinstance(rl, RlJob)
    assert isinstance(evaluation, EvaluateJob)
    assert (rl.verify.math.box, evaluation.verify.math.box) == ("required", "optional")


def test_common_settings_reach_every_stage_that_judges() -> None:
    assert changed("verify.math.rounding_digits=5") >= {"distill", "rl", "evaluate_rl"}


def test_evaluation_judges_programs_as_livecodebench_does_unless_told_otherwise() -> None:
    config = load_profile(SMOKE, ["verify.code.max_tests=3", "verify.code.compare=exact"])
    code = config.judge_of("evaluate").code
    assert (code.max_tests, code.compare, code.cpu_s, code.recursion_limit) == (0, "decimal", 6.0, 50_000)
    assert (config.judge_of("rl").code.max_tests, config.judge_of("rl").code.compare) == (3, "exact")
    own = load_profile(SMOKE, ["judge.evaluate.code.max_tests=9"]).judge_of("evaluate").code
    assert (own.max_tests, own.compare) == (9, "decimal")


@pytest.mark.parametrize("overrides", [[], ["verify.tags=none", "judge.evaluate.code.max_tests=9"]])
def test_a_stored_judge_is_the_settings_that_made_it_without_the_defaults(overrides: list[str]) -> None:
    """Two runs by the same settings are then shown as such, whether they took them from an evaluation or not."""
    config = load_profile(SMOKE, overrides)
    sections = sections_of_evaluation(config.judge_of("evaluate"))
    again = config.model_copy(
        update={
            "verify": VerifyConfig.model_validate(sections["verify"]),
            "judge": StageJudges.model_validate(sections["judge"]),
        }
    )
    assert again == config
    assert again.judge_of("evaluate") == config.judge_of("evaluate")


def test_a_stage_without_settings_of_its_own_has_the_common_ones() -> None:
    config = load_profile(SMOKE, ["verify.tags=none"])
    for stage in ("distill", "tag", "tag_rl", "rl", "rl_code"):
        assert config.judge_of(stage) == config.verify


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("judge.evaluate.code.max_testz=4", "judge.evaluate.code.max_testz: unknown key; did you mean max_tests"),
        ("judge.rl.code.cpu_s=-1", "judge.rl.code.cpu_s = -1: input should be greater than 0"),
        ("judge.rl.sandbox=auto", "judge.rl.sandbox: unknown key"),
        ("judge.sft.tags=none", "judge.sft: unknown key"),
    ],
)
def test_wrong_settings_are_refused_by_name(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_profile(SMOKE, [override])
