"""RL trains on the problems of its domain that can be judged and that the filter keeps; the others are counted by reason."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from rl_builders import problem, problem_artifact

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.config.curate import TagConfig
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.rl import PromptFilterConfig, RlConfig
from klear_core.errors import ConfigError, DataError
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.rl.groups import choose_problems, drop_reason
from klear_core.scores import RATES_FOLDER
from klear_core.types import (
    AssertTests,
    CodeReference,
    Domain,
    PassRate,
    Problem,
    StdinCase,
    StdinTests,
    UnverifiableReference,
)

MATH = [problem(f"p{i}") for i in range(4)]
EVERYTHING = PromptFilterConfig()


def code(name: str, num_cases: int) -> Problem:
    cases = tuple(StdinCase(input=str(i), output=str(i)) for i in range(num_cases))
    return replace(problem(name, domain=Domain.CODE), reference=CodeReference(tests=StdinTests(cases=cases)))


def with_rates(folder: Path, problems: Sequence[Problem], rates: Sequence[tuple[int, int]]) -> Path:
    """An artifact of a tag stage: right and judged answers of the first problems."""
    measured = [
        PassRate(problem_id=p.problem_id, num_correct=right, num_scored=judged)
        for p, (right, judged) in zip(problems, rates, strict=False)
    ]
    write_shard(folder / RATES_FOLDER / shard_name(0, 1), measured)
    return problem_artifact(folder, problems)


def test_without_a_filter_all_judgeable_problems_of_the_domain_are_trained_on(tmp_path: Path):
    bare = replace(problem("bare"), reference=UnverifiableReference(domain=Domain.MATH, why="asks for a proof"))
    chosen, step = choose_problems(problem_artifact(tmp_path, [*MATH, code("c", 1), bare]), "math", EVERYTHING)
    assert chosen == MATH
    assert (step.num_in, step.num_out, step.dropped) == (6, 4, {"other_domain": 1, "unverifiable": 1})


def test_a_set_without_a_problem_to_train_on_is_refused_with_the_reasons(tmp_path: Path):
    artifact = problem_artifact(tmp_path, [*MATH, code("c", 2)])
    with pytest.raises(
        DataError, match=r"none of its 5 problems \(4 other_domain, 1 few_tests\); it needs code problems"
    ):
        choose_problems(artifact, "code", PromptFilterConfig(min_tests=16))


def test_the_papers_code_prompts_have_sixteen_tests(tmp_path: Path):
    asserts = replace(code("a", 1), reference=CodeReference(tests=AssertTests(programs=("assert f(1)",) * 16)))
    problems = [code("few", 15), code("enough", 16), asserts]
    chosen, _ = choose_problems(problem_artifact(tmp_path, problems), "code", PromptFilterConfig(min_tests=16))
    assert chosen == problems[1:]


def test_pass_rates_are_bounded_on_both_sides_and_bounds_are_included(tmp_path: Path):
    artifact = with_rates(tmp_path, MATH, [(7, 16), (8, 16), (16, 16)])
    bounds = PromptFilterConfig(min_pass_rate=0.5, max_pass_rate=0.9)
    chosen, step = choose_problems(artifact, "math", bounds)
    assert chosen == [MATH[1]]
    assert step.dropped == {"high_pass_rate": 1, "low_pass_rate": 1, "no_pass_rate": 1}


def test_a_filter_by_pass_rates_needs_them(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no pass rates.*--set 'tag_rl=\{\}'"):
        choose_problems(problem_artifact(tmp_path, MATH), "math", PromptFilterConfig(min_pass_rate=0.5))


def test_the_number_of_tests_is_asked_of_code_alone():
    assert drop_reason(MATH[0], "math", PromptFilterConfig(min_tests=16), {}) == ""


def test_bounds_out_of_order_are_refused():
    with pytest.raises(ValidationError, match=r"min_pass_rate = 0.9 is above max_pass_rate = 0.1"):
        PromptFilterConfig(min_pass_rate=0.9, max_pass_rate=0.1)


def test_preflight_says_that_nothing_measures_the_pass_rates(tmp_path: Path):
    filtered = RlConfig(prompts=PromptFilterConfig(min_pass_rate=0.5))
    config = PipelineConfig(rl=filtered, workspace=WorkspaceConfig(root=str(tmp_path)))
    told = "rl.prompts: min_pass_rate and max_pass_rate compare pass rates"
    assert [p for p in problems_with(config) if p.startswith(told)]
    for section in ("tag", "tag_rl"):
        tagged = config.model_copy(update={section: TagConfig()})
        assert not [p for p in problems_with(tagged) if p.startswith(told)]


def test_rl_gets_the_problems_that_were_tagged_for_it():
    def problems_of(config: PipelineConfig) -> tuple[str, str]:
        inputs = {stage.name: stage.inputs for stage in stages_of(config)}
        return inputs["distill"]["problems"], inputs["rl"]["problems"]

    assert problems_of(PipelineConfig(tag=TagConfig())) == ("tag", "tag")
    assert problems_of(PipelineConfig(tag_rl=TagConfig())) == ("curate", "tag_rl")
