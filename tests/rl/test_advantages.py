"""A table of small groups, and the estimators by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from statistics import fmean, pstdev

import pytest
from pydantic import ValidationError
from rl_builders import problem

from klear_core.config.evaluate import SamplingConfig
from klear_core.config.rewards import (
    AdvantageConfig,
    BatchAdvantage,
    CustomReward,
    GdpoAdvantage,
    GrpoAdvantage,
    MaxRlAdvantage,
    PassAtKAdvantage,
    RewardConfig,
    RlooAdvantage,
)
from klear_core.config.rl import GroupFilterConfig, RlConfig, RolloutConfig, TeacherTermConfig
from klear_core.rl.groups import filter_groups
from klear_core.rl.rewards import (
    advantages,
    complete_rewards,
    custom_reward,
    group_advantages,
    reward_of,
    terms_of,
)
from klear_core.types import Completion, Outcome, Rollout, RolloutGroup, Verdict

PAPER, CODE, DR = GrpoAdvantage(std="population"), GrpoAdvantage(std="sample"), GrpoAdvantage(std="none")


@pytest.mark.parametrize(
    ("rewards", "code", "paper"),
    [
        ([1, *[-1] * 7], [2.4749, *[-0.3536] * 7], [2.6458, *[-0.3780] * 7]),
        ([1, 1, *[-1] * 6], [1.6202] * 2 + [-0.5401] * 6, [1.7321] * 2 + [-0.5774] * 6),
        ([*[1] * 7, -1], [0.3536] * 7 + [-2.4749], [0.3780] * 7 + [-2.6458]),
        (
            [1, 0.5, 0, -0.5, -1, -1, -0.5, 0],
            [1.6869, 0.9766, 0.2664, -0.4439, -1.1542, -1.1542, -0.4439, 0.2664],
            [1.8034, 1.0441, 0.2847, -0.4746, -1.2339, -1.2339, -0.4746, 0.2847],
        ),
        ([-1, -1, -0.5, *[-1] * 5], [-0.3536, -0.3536, 2.4749, *[-0.3536] * 5], None),
    ],
)
def test_group_advantages_match_the_published_numbers(
    rewards: list[float], code: list[float], paper: list[float] | None
) -> None:
    assert advantages([rewards], CODE)[0] == pytest.approx(code, abs=6e-5)
    if paper is not None:
        assert advantages([rewards], PAPER)[0] == pytest.approx(paper, abs=6e-5)


def test_a_group_of_one_is_its_reward_in_the_papers_code_and_nothing_elsewhere() -> None:
    assert advantages([[0.7]], CODE) == [[0.7]]
    assert advantages([[0.7]], PAPER) == [[0.0]]
    assert advantages([[0.7]], RlooAdvantage()) == [[0.0]]


@pytest.mark.parametrize(
    "cfg",
    [PAPER, CODE, DR, RlooAdvantage(), BatchAdvantage(), MaxRlAdvantage(), PassAtKAdvantage(k=2), GdpoAdvantage()],
)
def test_equal_rewards_give_no_advantage(cfg: AdvantageConfig) -> None:
    assert advantages([[0.1] * 3], cfg)[0] == pytest.approx([0, 0, 0], abs=1e-9)


def test_dr_grpo_only_centres() -> None:
    assert advantages([[1, 0, 0, 0]], DR) == [[0.75, -0.25, -0.25, -0.25]]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert advantages([[3, 1, 2]], RlooAdvantage())[0] == pytest.approx([3 - 1.5, 1 - 2.5, 2 - 2])


def test_batch_normalisation_divides_by_the_spread_of_the_whole_batch() -> None:
    # Centred: [1, -1] and [3, -3]; variance (1 + 1 + 9 + 9) / 4 = 5.
    expected = [[1 / 5**0.5, -1 / 5**0.5], [3 / 5**0.5, -3 / 5**0.5]]
    assert [pytest.approx(e, abs=1e-5) for e in expected] == advantages([[2, 0], [6, 0]], BatchAdvantage())


def test_advantages_do_not_see_an_affine_change_of_rewards() -> None:
    soft = [0.25, 0.5, 0.75, 0, 0.25, 0.5, 0.75, 0.5]
    assert advantages([soft], PAPER)[0] == pytest.approx(advantages([[2 * p - 1 for p in soft]], PAPER)[0], abs=1e-4)


def test_maxrl_divides_by_the_groups_accuracy() -> None:
    assert advantages([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0]], MaxRlAdvantage()) == [
        [3, -1, -1, -1],
        [pytest.approx(1 / 3)] * 3 + [-1],
        [0, 0],
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # One right of four, pairs: half of the pairs have it, so mean and deviation are 1/2. A wrong answer is in a
        # right pair in one case of three: (1/3 - 1/2) / (1/2).
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([2, -2, -2, -2], [1, -1 / 3, -1 / 3, -1 / 3]),
        # Two right: five of six pairs, deviation sqrt(5/36); of a wrong answer's three pairs two.
        ([0, 1, 0, 1], [-1 / 5**0.5, 1 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5]),
        ([1, 1, 1, 0], [0, 0, 0, 0]),  # every pair has a right one
        ([1, 0], [1, -1]),  # of two answers pairs cannot be compared, so each is compared by itself
    ],
)
def test_pass_at_k_rewards_an_answer_for_the_best_of_its_subsets(rewards: list[float], expected: list[float]) -> None:
    assert advantages([rewards], PassAtKAdvantage(k=2))[0] == pytest.approx(expected, abs=1e-5)


def test_pass_at_k_of_soft_rewards_is_the_mean_over_all_subsets_and_pass_at_1_is_grpo() -> None:
    draw = random.Random(0)
    for k in (1, 2, 3, 6):
        rewards = [draw.choice([-2, -1, 0, 0.25, 1]) for _ in range(7)]
        best = {subset: max(rewards[i] for i in subset) for subset in combinations(range(7), k)}
        mean, std = fmean(best.values()), pstdev(best.values())
        with_answer = [fmean(value for subset, value in best.items() if i in subset) for i in range(7)]
        found = advantages([rewards], PassAtKAdvantage(k=k))[0]
        assert found == pytest.approx([(value - mean) / (std + 1e-6) for value in with_answer], abs=1e-9)
        if k == 1:
            assert found == pytest.approx(advantages([rewards], PAPER)[0], abs=1e-9)


def rollout(score: float, value: float, cfg: RewardConfig, *, num_tokens: int = 1) -> Rollout:
    completion = Completion(
        text="<think></think>",
        token_ids=(5,) * num_tokens,
        logps=(-1.0,) * num_tokens,
        finish_reason="stop",
        policy_versions=(0,) * num_tokens,
    )
    verdict, custom = Verdict(outcome=Outcome.SCORED, score=score), {"style": value}
    return Rollout(
        prompt_ids=(1,),
        completion=completion,
        verdict=verdict,
        reward=reward_of(completion, verdict, cfg) + custom_reward(custom if cfg.custom else {}, cfg),
        is_positive=score == 1,
        custom_rewards=custom,
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(problem=problem("q"), rollouts=rollouts)


def test_gdpo_tells_apart_what_the_normalised_sum_does_not() -> None:
    rewards = RewardConfig(custom=(CustomReward(function="m:style", weight=1.0),))
    one = group(rollout(0, 0, rewards), rollout(1, 0, rewards))  # the second is better in one part
    both = group(rollout(0, 0, rewards), rollout(1, 1, rewards))  # in both
    summed = group_advantages([one, both], RlConfig(reward=rewards))
    assert summed[0] == pytest.approx(summed[1], abs=1e-5)
    # Sums of the standardised parts: -1, 1 and -2, 2, whose standard deviation is sqrt(2.5).
    found = group_advantages([one, both], RlConfig(reward=rewards, advantage=GdpoAdvantage()))
    assert found[0] == pytest.approx([-1 / 2.5**0.5, 1 / 2.5**0.5], abs=1e-5)
    assert found[1] == pytest.approx([-2 / 2.5**0.5, 2 / 2.5**0.5], abs=1e-5)


def test_gdpo_weighs_standardised_parts_and_keeps_groups_of_equal_sums() -> None:
    rewards = RewardConfig(custom=(CustomReward(function="m:style", weight=0.5),))
    # Sums 1 + 0 and -1 + 0.5 * 4 are equal; standardised parts are 1 - 0.5 and -1 + 0.5.
    equal = group(rollout(1, 0, rewards), rollout(0, 4, rewards))
    assert not filter_groups([equal], RlConfig(reward=rewards)).groups
    gdpo = RlConfig(reward=rewards, advantage=GdpoAdvantage())
    assert filter_groups([equal], gdpo).groups
    assert group_advantages([equal], gdpo)[0] == pytest.approx([1, -1], abs=1e-5)


def test_groups_without_an_advantage_are_dropped_by_what_the_estimator_compares() -> None:
    rewards = RewardConfig()
    half, most = (group(*(rollout(score, 0, rewards) for score in scores)) for scores in ([1, 1, 0, 0], [1, 1, 1, 0]))
    pairs = RlConfig(advantage=PassAtKAdvantage(k=2))
    assert [len(filter_groups([found], pairs).groups) for found in (half, most)] == [1, 0]
    soft = group(rollout(0.5, 0, rewards), rollout(0, 0, rewards))
    assert [len(filter_groups([soft], cfg).groups) for cfg in (RlConfig(), RlConfig(advantage=MaxRlAdvantage()))] == [
        1,
        0,
    ]


def test_groups_without_an_advantage_are_kept_for_a_teacher() -> None:
    """Where all answers are wrong a teacher has most to say."""
    wrong = group(rollout(0, 0, RewardConfig()), rollout(0, 0, RewardConfig()))
    assert not filter_groups([wrong], RlConfig()).groups
    assert filter_groups([wrong], RlConfig(distill=TeacherTermConfig())).groups
    by_accuracy = RlConfig(distill=TeacherTermConfig(), group_filter=GroupFilterConfig(zero_advantage="accuracy"))
    assert not filter_groups([wrong], by_accuracy).groups


def test_length_costs_as_much_as_the_group_is_right() -> None:
    rewards = RewardConfig(length_coef=0.4)
    cfg = RlConfig(reward=rewards, rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=8)))

    def rewards_of(*scores_and_lengths: tuple[float, int]) -> list[float]:
        rollouts = [
            replace(rollout(score, 0, rewards, num_tokens=length), custom_rewards={})
            for score, length in scores_and_lengths
        ]
        completed = complete_rewards(rollouts, cfg)
        assert [sum(terms_of(r, cfg).values()) for r in completed] == pytest.approx([r.reward for r in completed])
        assert [terms_of(r, cfg)["answer"] for r in completed] == [r.reward for r in rollouts]
        return [r.reward for r in completed]

    assert rewards_of((1, 8), (1, 2)) == pytest.approx([1 - 0.4, 1 - 0.1])
    assert rewards_of((1, 4), (0, 8)) == pytest.approx([1 - 0.5 * 0.2, -1 - 0.5 * 0.4])
    assert rewards_of((0, 4), (0, 8)) == [-1, -1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"advantage": {"kind": "pass_at_k", "k": 8}}, "advantage.k = 8 with rollout.samples_per_group = 8"),
        ({"advantage": {"kind": "maxrl"}, "reward": {"length_coef": 0.1}}, "would ignore reward.length_coef"),
        ({"advantage": {"kind": "maxrl"}, "overlong": {"penalty_tokens": 8}}, "would ignore overlong.penalty_tokens"),
    ],
)
def test_advantages_that_do_not_fit_the_rewards_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RlConfig.model_validate(changes)
