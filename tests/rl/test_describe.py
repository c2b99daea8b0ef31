"""The numbers of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rl_builders import problem

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.rl.loop import speed
from klear_core.rl.rollout import StepRollouts
from klear_core.rl.step_metrics import describe_groups
from klear_core.types import Completion, FinishReason, Outcome, Rollout, RolloutGroup, Verdict


def rollout(
    reward: float, *, score: float, num_tokens: int, outcome: Outcome = Outcome.SCORED, finish: FinishReason = "stop"
) -> Rollout:
    completion = Completion(
        text="",
        token_ids=(5,) * num_tokens,
        logps=(-1.0,) * num_tokens,
        finish_reason=finish,
        policy_versions=(0,) * num_tokens,
    )
    verdict = Verdict(outcome=outcome, score=score)
    return Rollout(prompt_ids=(1,), completion=completion, verdict=verdict, reward=reward, is_positive=False)


FAILED = rollout(-1, score=0, num_tokens=4, outcome=Outcome.JUDGE_FAILED)
GROUPS = (
    RolloutGroup(
        problem=problem("a"),
        rollouts=(rollout(1, score=1, num_tokens=2), rollout(-0.5, score=0, num_tokens=8, finish="length")),
    ),
    RolloutGroup(problem=problem("b"), rollouts=(rollout(-2, score=1, num_tokens=6), FAILED)),
)


def test_means_are_of_judged_answers_and_lengths_of_all() -> None:
    """The third answer is right without its tags: it passes, and its reward is that of its form."""
    reasons = ReasonCounts()
    reasons.count("group", "trained")
    reasons.count("group", "judge_failed")
    reasons.count("rollout", "trained", 2)
    reasons.count("rollout", "judge_failed")
    reasons.count("rollout", "group_judge_failed")
    assert describe_groups(GROUPS, reasons) == pytest.approx(
        {
            "rl/groups/asked": 2,
            "rl/groups/kept": 1,
            "rl/groups/dropped_judge_failed": 1,
            "rl/groups/dropped_zero_advantage": 0,
            "rl/groups/informative": 0,
            "rl/groups/informative_frac": 0,
            "rl/groups/informative_per_mtok": 0,
            "rl/rollouts/trained": 2,
            "rl/rollouts/dropped_judge_failed": 1,
            "rl/rollouts/dropped_group_judge_failed": 1,
            "rl/reward/mean": -1.5 / 3,
            "rl/pass/rate": 2 / 3,
            "rl/judge/failed_frac": 1 / 4,
            "rl/response/mean_tokens": 5,
            "rl/response/max_tokens": 8,
            "rl/response/truncated_frac": 1 / 4,
        }
    )


def test_a_group_is_informative_with_positive_and_other_judged_answers() -> None:
    right, wrong = (rollout(score, score=score, num_tokens=5) for score in (1, 0))
    right = replace(right, is_positive=True)
    reasons = ReasonCounts()
    reasons.count("group", "trained", 4)
    pairs = ((right, wrong), (right, right), (wrong, wrong), (right, FAILED))
    metrics = describe_groups([RolloutGroup(problem=problem("a"), rollouts=pair) for pair in pairs], reasons)
    assert metrics["rl/groups/informative"] == 1
    assert metrics["rl/groups/informative_frac"] == 1 / 4
    assert metrics["rl/groups/informative_per_mtok"] == pytest.approx(1e6 / (7 * 5 + 4))


def test_when_no_answer_could_be_judged_that_is_what_is_said() -> None:
    metrics = describe_groups([RolloutGroup(problem=problem("a"), rollouts=(FAILED, FAILED))], ReasonCounts())
    assert metrics["rl/judge/failed_frac"] == 1
    assert "rl/reward/mean" not in metrics


def test_speed_is_tokens_over_the_seconds_of_their_phase() -> None:
    collected = StepRollouts(groups=GROUPS, kept=(), reasons=ReasonCounts(), position=0, seconds=4.0)
    seconds = {"sample": 0.75, "select": 0.25, "learn": 5.0, "hand over": 0.5}
    assert speed(collected, {"rl/batch/tokens": 30.0}, seconds) == {
        "rl/time/rollout_s": 4,
        "rl/time/wait_s": 1,
        "rl/time/train_s": 5,
        "rl/time/sync_s": 0.5,
        "rl/speed/sampled_tokens_per_s": 20 / 4,
        "rl/speed/trained_tokens_per_s": 30 / 5,
    }
