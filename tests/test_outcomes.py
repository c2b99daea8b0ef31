"""RL, evaluation, scores during training, tags, distillation and rejudging take the same answers for judged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from distill_fakes import make_trace
from evaluate_fakes import RIGHT, WRONG, FakeEngine, FakeJudge, make_problem, make_sample, render
from toy_inline_evals import toy_inline_eval

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import TagConfig
from klear_core.config.distill import SelectConfig
from klear_core.config.rewards import OverlongConfig
from klear_core.distill.select import drop_reason
from klear_core.evaluate.answers.rejudge import mark_of
from klear_core.evaluate.counts import tally
from klear_core.evaluate.inline_eval import CheckpointInlineEval
from klear_core.evaluate.run import write_tags
from klear_core.rl.groups import split_usable
from klear_core.scores import RATES_FOLDER
from klear_core.types import Completion, Difficulty, Outcome, PassRate, Rollout, RolloutGroup, Verdict

IS_JUDGED = {
    Outcome.SCORED: True,
    Outcome.NO_ANSWER: True,
    Outcome.BAD_REFERENCE: False,
    Outcome.UNVERIFIABLE: False,
    Outcome.JUDGE_FAILED: False,
    Outcome.SANDBOX_FAILED: False,
    Outcome.TIMED_OUT: False,
}


def in_rl(verdicts: list[Verdict]) -> int:
    completion = Completion(text="", token_ids=(5,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))
    rollouts = [
        Rollout(prompt_ids=(1,), completion=completion, verdict=verdict, reward=0.0, is_positive=verdict.is_correct)
        for verdict in verdicts
    ]
    usable, _ = split_usable(RolloutGroup(problem=make_problem(0), rollouts=tuple(rollouts)), OverlongConfig())
    return len(usable)


def in_evaluation(verdicts: list[Verdict]) -> int:
    counts = tally([make_sample(0, i, verdict) for i, verdict in enumerate(verdicts)], [make_problem(0)])["sampled"]
    assert counts.num_answers - counts.unscored.total() == counts.scored["p000"][1]
    return counts.num_answers - counts.unscored.total()


def in_tags(verdicts: list[Verdict], workdir: Path) -> int:
    answers = [make_sample(0, i, verdict) for i, verdict in enumerate(verdicts)]
    write_tags(TagConfig(), [make_problem(0)], iter(answers), workdir=workdir)
    (rate,) = read_shards(workdir / RATES_FOLDER, PassRate)
    return rate.num_scored


def in_scores_during_training(verdicts: list[Verdict], folder: Path) -> float:
    problems = [make_problem(i) for i in range(len(verdicts))]
    by_problem = dict(zip([problem.problem_id for problem in problems], verdicts, strict=True))
    inline_eval = CheckpointInlineEval(
        job=toy_inline_eval(folder),
        problems=problems,
        render=render,
        judge=FakeJudge(lambda problem, response: by_problem[problem.problem_id]).judge_async,
        opening="",
        seed=0,
    )
    return len(verdicts) * (1 - asyncio.run(inline_eval(FakeEngine()))["unscored_frac"])


def in_distillation(verdicts: list[Verdict]) -> int:
    """Return how many traces are taken for right or wrong where right ones alone are kept."""
    strict = SelectConfig(easy="correct_only", medium="correct_only", hard="correct_only")
    drops = [drop_reason(make_trace(verdict, Difficulty.HARD), strict) for verdict in verdicts]
    return sum(drop is None or drop.reason == "wrong_hard" for drop in drops)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_stage_takes_the_same_answers_for_judged(tmp_path: Path, outcome: Outcome) -> None:
    verdicts = [RIGHT, WRONG, Verdict(outcome=outcome, score=0.0)]
    num_judged = 2 + IS_JUDGED[outcome]
    assert in_rl(verdicts) == num_judged
    assert in_evaluation(verdicts) == num_judged
    assert in_tags(verdicts, tmp_path) == num_judged
    assert in_scores_during_training(verdicts, tmp_path) == pytest.approx(num_judged)
    assert in_distillation(verdicts) == num_judged
    assert (mark_of(verdicts[-1]) == "not judged") is not IS_JUDGED[outcome]
