"""Rewards of the user's own: in the sum, in the metrics, and whose fault it is where they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_engine import FakeAnswer, FakeEngine
from pydantic import ValidationError
from rl_builders import problem, rl_config, tiny_base

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.config.evaluate import SamplingConfig
from klear_core.config.rewards import CustomReward, RewardConfig
from klear_core.config.rl import RlConfig, RolloutConfig
from klear_core.config.verify import VerifyConfig, VerifyRuntime
from klear_core.errors import RewardError
from klear_core.prompts import load_tokenizer
from klear_core.rl.groups import filter_groups, to_samples
from klear_core.rl.rewards import UserRewards, custom_reward, with_failed_values
from klear_core.rl.rollout import Collector, RolloutClient, StepRollouts
from klear_core.rl.step_metrics import describe_groups
from klear_core.rl.stream import PromptStream
from klear_core.train.base_model import model_folder
from klear_core.types import FAILED_ON_ANSWER, Completion, Outcome, Problem, Rollout, RolloutGroup, Verdict
from klear_core.verify import JudgePool

SOURCE = """
import time

def letters(answer):
    return float(len(answer.text))

def picky(answer):
    if answer.text == "bad": raise ValueError("a bad one")
    if answer.text == "slow": time.sleep(1000)
    return 1.0

def knows(answer):
    return {"another question": 1.0}[answer.question]

def long(answer):
    return 1.0 / max(0, len(answer.text) - 3)
"""
LETTERS = CustomReward(function="mine:letters", weight=0.5)
PICKY = CustomReward(function="mine:picky", weight=-2, name="fussy", timeout_s=1)


def test_the_sum_is_weighted_by_name_and_a_weight_of_zero_only_logs() -> None:
    cfg = RewardConfig(custom=(LETTERS, PICKY, CustomReward(function="mine:seen", weight=0)))
    assert custom_reward({"letters": 3.0, "fussy": 1.0, "seen": 90.0}, cfg) == 0.5 * 3 - 2
    assert custom_reward({}, RewardConfig()) == 0
    assert custom_reward({"letters": 3.0, "fussy": FAILED_ON_ANSWER, "seen": None}, cfg) == 0.5 * 3


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ([{"function": "mine.letters"}], "should match pattern"),
        ([{"function": "mine:a.b"}], "should match pattern"),
        ([{"function": "mine:a"}, {"function": "yours:a"}], "two rewards have the name 'a'"),
        ([{"function": "mine:mean"}], "'mean' is taken by the metric"),
        ([{"function": "mine:a", "name": "a/b"}], "should match pattern"),
        ([{"function": "mine:a", "min_value": 1, "max_value": 0}], "min_value = 1.0 is above max_value = 0.0"),
        ([{"function": "mine:a", "min_value": 0, "failed_value": -1}], "failed_value = -1.0 is not between min_value"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RewardConfig.model_validate({"custom": settings})


def rollout(custom: Mapping[str, float | None], *, reward: float = 1.0) -> Rollout:
    completion = Completion(text="", token_ids=(5,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))
    return Rollout(
        prompt_ids=(1,),
        completion=completion,
        verdict=Verdict(outcome=Outcome.SCORED, score=1.0),
        reward=reward,
        is_positive=True,
        custom_rewards=custom,
    )


def test_each_reward_has_its_mean_and_its_share_of_failures_and_stays_out_of_the_sum_where_it_failed() -> None:
    rollouts = (
        rollout({"a": 1.0, "b": 4.0}, reward=2),
        rollout({"a": 3.0, "b": None}, reward=50),
        rollout({"a": 2.0, "b": 2.0}, reward=3),
    )
    metrics = describe_groups([RolloutGroup(problem=problem("q"), rollouts=rollouts)], ReasonCounts())
    rewards = {name: value for name, value in metrics.items() if name.startswith("rl/reward/")}
    assert rewards == pytest.approx(
        {
            "rl/reward/mean": 2.5,
            "rl/reward/a/mean": 2.0,
            "rl/reward/a/failed_frac": 0.0,
            "rl/reward/b/mean": 3.0,
            "rl/reward/b/failed_frac": 1 / 3,
        }
    )
    assert metrics["rl/pass/rate"] == 1


def test_a_reward_that_failed_on_all_answers_has_no_mean() -> None:
    group = RolloutGroup(problem=problem("q"), rollouts=(rollout({"a": None}),))
    metrics = describe_groups([group], ReasonCounts())
    assert metrics["rl/reward/a/failed_frac"] == 1
    assert not {"rl/reward/a/mean", "rl/reward/mean"} & metrics.keys()


def test_an_answer_without_a_value_leaves_its_group_and_is_counted_by_name() -> None:
    group = RolloutGroup(
        problem=problem("q"),
        rollouts=(rollout({"a": 1.0}, reward=2), rollout({"a": None}, reward=9), rollout({"a": 0.0}, reward=0)),
    )
    kept = filter_groups([group], RlConfig())
    assert [r.reward for r in kept.groups[0].rollouts] == [2, 0]
    assert kept.reasons.of("rollout") == {"reward_a_failed": 1}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)  # judging processes start in the working directory


def cfg_with(*rewards: CustomReward) -> RlConfig:
    rollouts = RolloutConfig(groups_per_step=1, samples_per_group=4, sampling=SamplingConfig(max_new_tokens=8))
    reward = RewardConfig(missing_close=None, missing_open=None, custom=rewards)
    return rl_config(rollout=rollouts, reward=reward)


def collect(folder: Path, cfg: RlConfig, texts: tuple[str, ...], **judging: float) -> StepRollouts:
    """Return one group of these answers, all of them wrong, with values from the real workers."""
    tokenizer = load_tokenizer(model_folder(tiny_base(folder / "base")))
    left = iter(texts)

    async def says_wrong(_problem: Problem, _response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=0.0)

    verify = VerifyConfig.model_validate({"runtime": VerifyRuntime(reward_workers=1)} | judging)
    with JudgePool(verify) as judges:
        sampler = RolloutClient(
            FakeEngine(lambda *_: FakeAnswer(text=next(left))),
            says_wrong,
            tokenizer,
            cfg,
            seed=0,
            engine_status=lambda: "the fake engine",
            custom_rewards=UserRewards(cfg.reward.custom, judges),
        )
        return asyncio.run(Collector(sampler, PromptStream([problem("q")], seed=0), cfg).collect())


@pytest.mark.usefixtures("source")
def test_a_users_reward_decides_what_is_learnt_and_an_answer_that_it_fails_on_has_that_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four wrong answers have no gradient. With two rewards the long ones are above the short one by 3 x 0.5. That on which
    `fussy` raises, and that on which it waits twice until the wall clock ends its worker, have its value of the others."""
    texts = ("a", "bad", "slow", "aaaa")
    with caplog.at_level(logging.WARNING):
        collected = collect(tmp_path, cfg_with(LETTERS, PICKY), texts)
    (group,) = collected.kept
    assert {r.completion.text: r.reward for r in group.rollouts} == {
        "a": -1 + 0.5 - 2,
        "bad": -1 + 1.5 - 2,
        "slow": -1 + 2 - 2,
        "aaaa": -1 + 2 - 2,
    }
    failed = {r.completion.text: r.failed_rewards for r in group.rollouts}
    assert failed == {"a": (), "bad": ("fussy",), "slow": ("fussy",), "aaaa": ()}
    assert collected.reasons.of("rollout") == {}
    rows = to_samples([group], cfg_with(), oldest_allowed=0).samples
    mean, std = 0.5 * 12 / 4, 0.375**0.5  # of 0.5, 1.5, 2 and 2: squares of 1, 0, 0.5 and 0.5 make 1.5 in all
    assert [row.advantage for row in rows] == pytest.approx([(x - mean) / std for x in (0.5, 1.5, 2, 2)], abs=1e-4)
    assert caplog.text.count("the reward 'fussy' failed on an answer") == 1
    assert "the reward 'letters'" not in caplog.text


@pytest.mark.usefixtures("source")
def test_a_reward_that_fails_too_often_stops_the_stage_by_name(tmp_path: Path) -> None:
    knows = CustomReward(function="mine:knows")
    with pytest.raises(RewardError, match=r"\d of \d values of the reward 'knows' failed.*KeyError.*mine.py, line 13"):
        collect(tmp_path, cfg_with(knows), ("a", "b", "c", "d"), min_failed_count=2)


@pytest.mark.usefixtures("source")
def test_answers_that_a_reward_fails_on_do_not_stop_the_stage(tmp_path: Path) -> None:
    """1 / 0 for texts of up to three characters; the group's lowest value is that of five, 1 / 2."""
    collected = collect(
        tmp_path, cfg_with(CustomReward(function="mine:long")), ("a", "b", "4444", "55555"), min_failed_count=1
    )
    (group,) = collected.kept
    assert {r.completion.text: r.custom_rewards["long"] for r in group.rollouts} == {
        "a": 0.5,
        "b": 0.5,
        "4444": 1.0,
        "55555": 0.5,
    }
    metrics = describe_groups(collected.groups, ReasonCounts())
    assert metrics["rl/reward/long/failed_frac"] == 0.5
    assert metrics["rl/reward/long/mean"] == 0.75
    assert metrics["rl/reward/mean"] == -1 + (0.5 + 0.5 + 1 + 0.5) / 4


@pytest.mark.parametrize(
    ("weight", "failed_value", "value"),
    [(2.0, None, 1.0), (-2.0, None, 3.0), (2.0, -5.0, -5.0), (-2.0, 90.0, 90.0), (0.0, None, 1.0)],
)
def test_an_answer_that_a_reward_fails_on_gains_no_more_by_it_than_any_other(
    weight: float, failed_value: float | None, value: float
) -> None:
    cfg = RewardConfig(custom=(CustomReward(function="m:a", weight=weight, failed_value=failed_value),))
    group = [rollout({"a": 1.0}), rollout({"a": FAILED_ON_ANSWER}, reward=0.25), rollout({"a": 3.0}), rollout({})]
    filled = with_failed_values(group, cfg)
    assert filled[1].custom_rewards == {"a": value}
    assert filled[1].reward == 0.25 + weight * value
    assert [filled[i] for i in (0, 2, 3)] == [group[i] for i in (0, 2, 3)]


def test_a_reward_that_fails_on_every_answer_of_a_group_leaves_nothing_to_compare() -> None:
    cfg = RewardConfig(custom=(CustomReward(function="m:a"),))
    filled = with_failed_values([rollout({"a": FAILED_ON_ANSWER}), rollout({"a": None})], cfg)
    kept = filter_groups([RolloutGroup(problem=problem("q"), rollouts=filled)], RlConfig(reward=cfg))
    assert kept.reasons.of("rollout") == {"reward_a_failed": 2}


@pytest.mark.usefixtures("source")
def test_answers_without_a_verdict_ask_no_reward() -> None:
    completion = Completion(text="a", token_ids=(5,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))
    with JudgePool(VerifyConfig()) as judges:
        rewards = UserRewards((LETTERS,), judges)
        for outcome in (Outcome.JUDGE_FAILED, Outcome.UNVERIFIABLE):
            verdict = Verdict(outcome=outcome, score=0.0)
            assert asyncio.run(rewards(problem("q"), completion, verdict)) == {}
