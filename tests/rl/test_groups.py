"""What leaves a group, which groups are kept, and that the books add up."""

from __future__ import annotations

from collections import Counter

import pytest

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.config.rewards import OverlongConfig
from klear_core.config.rl import GroupFilterConfig, RlConfig
from klear_core.rl.groups import filter_groups, reason_ledger
from klear_core.types import (
    Completion,
    Difficulty,
    Domain,
    FinishReason,
    MathReference,
    Outcome,
    Problem,
    Rollout,
    RolloutGroup,
    Verdict,
)

KEEP, DROP = OverlongConfig(), OverlongConfig(handling="drop")


def problem(name: str) -> Problem:
    reference = MathReference(answers=("1",))
    return Problem(
        problem_id=name, source="s", domain=Domain.MATH, question=name, reference=reference, difficulty=Difficulty.EASY
    )


def rollout(
    reward: float,
    *,
    score: float | None = None,
    outcome: Outcome = Outcome.SCORED,
    finish: FinishReason = "stop",
    has_tags: bool = True,
) -> Rollout:
    """A reward with the score it came from (1 for rewards of 1, else 0)."""
    completion = Completion(text="", token_ids=(5,), logps=(-0.5,), finish_reason=finish, policy_versions=(0,))
    verdict = Verdict(outcome=outcome, score=float(reward == 1) if score is None else score)
    return Rollout(
        prompt_ids=(1, 2),
        completion=completion,
        verdict=verdict,
        reward=reward,
        is_positive=verdict.is_correct and has_tags,
    )


def group(*rewards: float, name: str = "p") -> RolloutGroup:
    return RolloutGroup(problem=problem(name), rollouts=tuple(rollout(r) for r in rewards))


def soft_group(*pass_rates: float) -> RolloutGroup:
    return RolloutGroup(problem=problem("code"), rollouts=tuple(rollout(2 * p - 1, score=p) for p in pass_rates))


def kept_of(
    groups: list[RolloutGroup], cfg: GroupFilterConfig | None = None, overlong: OverlongConfig = KEEP
) -> tuple[int, Counter[str]]:
    kept = filter_groups(groups, RlConfig(group_filter=cfg or GroupFilterConfig(), overlong=overlong))
    return len(kept.groups), kept.reasons.counts


def test_groups_of_equal_rewards_are_dropped_and_counted() -> None:
    num_kept, reasons = kept_of([group(1, 1), group(-1, -1), group(1, -1)])
    assert num_kept == 1
    assert reasons == {"group/zero_advantage": 2, "rollout/group_zero_advantage": 4}


def test_the_filter_can_be_off() -> None:
    assert kept_of([group(1, 1)], GroupFilterConfig(zero_advantage="off"))[0] == 1


def test_accuracy_filter_drops_a_code_group_that_only_soft_rewards_tell_apart() -> None:
    rates = (0.25, 0.5, 0.75, 0.0, 0.25, 0.5, 0.75, 0.5)
    by_accuracy = GroupFilterConfig(zero_advantage="accuracy")
    assert kept_of([soft_group(*rates)], by_accuracy) == (
        0,
        {"group/same_accuracy": 1, "rollout/group_same_accuracy": 8},
    )
    assert kept_of([soft_group(1.0, *rates[1:])], by_accuracy)[0] == 1
    assert kept_of([soft_group(*rates)])[0] == 1


def test_a_right_answer_without_its_tags_is_no_accurate_one() -> None:
    """As published: accuracy is a reward of exactly 1."""
    rollouts = (*group(-1, -1).rollouts, rollout(-2, score=1.0, has_tags=False))
    told_apart_by_rewards_alone = RolloutGroup(problem=problem("p"), rollouts=rollouts)
    assert (
        kept_of([told_apart_by_rewards_alone], GroupFilterConfig(zero_advantage="accuracy"))[1]["group/same_accuracy"]
        == 1
    )
    assert kept_of([told_apart_by_rewards_alone], GroupFilterConfig(min_accuracy=0.1))[1]["group/too_hard"] == 1


@pytest.mark.parametrize(("accuracy", "fate"), [(1, "group/too_hard"), (2, None), (3, "group/too_easy")])
def test_mean_band_keeps_its_edges(accuracy: int, fate: str | None) -> None:
    cfg = GroupFilterConfig(min_accuracy=0.5, max_accuracy=0.5)
    num_kept, reasons = kept_of([group(*[1] * accuracy, *[-1] * (4 - accuracy))], cfg)
    assert (num_kept == 1) == (fate is None)
    assert fate is None or reasons[fate] == 1


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.counts_for_model])
def test_what_is_not_the_models_fault_leaves_the_group(outcome: Outcome) -> None:
    broken = rollout(-1, outcome=outcome)
    judged = group(1, -1).rollouts
    kept = filter_groups([RolloutGroup(problem=problem("p"), rollouts=(*judged, broken))], RlConfig())
    assert kept.groups[0].rollouts == judged
    assert kept.reasons.counts == {f"rollout/{outcome}": 1}


def test_a_group_whose_judges_failed_is_dropped_for_that_reason() -> None:
    broken = tuple(rollout(-1, outcome=Outcome.SANDBOX_FAILED) for _ in range(3))
    num_kept, reasons = kept_of([RolloutGroup(problem=problem("p"), rollouts=(*group(1).rollouts, *broken))])
    assert num_kept == 0
    assert reasons == {"rollout/sandbox_failed": 3, "group/sandbox_failed": 1, "rollout/group_sandbox_failed": 1}


def test_overlong_answers_leave_the_group_only_if_asked() -> None:
    rollouts = (*group(1, -1).rollouts, rollout(-0.5, finish="length"))
    mixed = RolloutGroup(problem=problem("p"), rollouts=rollouts)
    assert len(filter_groups([mixed], RlConfig()).groups[0].rollouts) == 3
    dropped = filter_groups([mixed], RlConfig(overlong=DROP))
    assert len(dropped.groups[0].rollouts) == 2
    assert dropped.reasons.counts == {"rollout/overlong": 1}


def test_aborted_answers_never_count() -> None:
    rollouts = (*group(1, -1).rollouts, rollout(-1, finish="abort"))
    assert kept_of([RolloutGroup(problem=problem("p"), rollouts=rollouts)])[1] == {"rollout/aborted": 1}


def test_no_survivor_is_a_result() -> None:
    assert kept_of([group(1, 1)])[0] == 0
    assert kept_of([])[0] == 0


def test_ledger_adds_up_by_unit() -> None:
    reasons = ReasonCounts()
    reasons.count("group", "trained", 3)
    reasons.count("group", "zero_advantage")
    reasons.count("rollout", "trained", 24)
    reasons.count("rollout", "group_zero_advantage", 7)
    reasons.count("rollout", "judge_failed")
    groups, rollouts = reason_ledger(reasons)
    assert (groups.num_in, groups.num_out, groups.dropped) == (4, 3, {"zero_advantage": 1})
    assert (rollouts.num_in, rollouts.num_out, rollouts.dropped) == (
        32,
        24,
        {"group_zero_advantage": 7, "judge_failed": 1},
    )
