"""Rewards as published and DAPO's length penalty."""

from __future__ import annotations

from pathlib import Path

import pytest

from klear_core.config.load import load_profile
from klear_core.config.rewards import CustomReward, OverlongConfig, RewardConfig
from klear_core.config.rl import RlConfig, TeacherTermConfig
from klear_core.errors import ConfigError
from klear_core.rl.rewards import is_positive, overlong_penalty, reward_of
from klear_core.types import Completion, Outcome, Verdict

CONFIGS = Path(__file__).parents[2] / "configs"
SMOKE = CONFIGS / "smoke"
OF_THE_PAPER = {"klear_8b", "klear_8b_64k", "klear_8b_opd", "klear_8b_script", "node_8"}
RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0)
WRONG = Verdict(outcome=Outcome.SCORED, score=0.0)
NOTHING = Verdict(outcome=Outcome.NO_ANSWER, score=0.0)


def answer(text: str) -> Completion:
    return Completion(text=text, token_ids=(1,), logps=(0.0,), finish_reason="stop", policy_versions=(0,))


WHOLE = answer("<think>\n1\n</think>\n\n\\boxed{1}")


@pytest.mark.parametrize("values", [{"correct": -1, "wrong": 1}, {"correct": 1, "wrong": 1}, {"wrong": 2}])
def test_right_answers_must_earn_more_than_wrong_ones(values) -> None:
    with pytest.raises(ValueError, match=r"is not above wrong = |reward.correct = reward.wrong: "):
        RlConfig(reward=RewardConfig(**values))


def test_rewards_of_the_users_own_or_a_teacher_may_be_all_that_counts() -> None:
    RlConfig(reward=RewardConfig(correct=0, wrong=0, custom=(CustomReward(function="m:style"),)))
    RlConfig(reward=RewardConfig(correct=0, wrong=0), distill=TeacherTermConfig())


def test_right_wrong_and_no_answer() -> None:
    assert [reward_of(WHOLE, v, RewardConfig()) for v in (RIGHT, WRONG, NOTHING)] == [1, -1, -1]


def test_missing_tags_are_checked_before_the_verdict_and_the_closing_one_first() -> None:
    published = RewardConfig(missing_close=-0.5)
    assert reward_of(answer("<think> \\boxed{1}"), RIGHT, published) == -0.5
    assert reward_of(answer("1 </think> \\boxed{1}"), RIGHT, published) == -2.0
    assert reward_of(answer("\\boxed{1}"), RIGHT, published) == -0.5


@pytest.mark.parametrize(
    ("cfg", "names"),
    [
        (RewardConfig(), []),
        (RewardConfig(missing_close=None, missing_open=None), []),
        (RewardConfig(missing_close=-0.5), ["missing_close = -0.5"]),
        (RewardConfig(wrong=-3), ["missing_close = -1", "missing_open = -2"]),
        (RewardConfig(wrong=0, missing_close=0, missing_open=0), []),
        (RewardConfig(wrong=0, missing_open=0.1), ["missing_open = 0.1"]),
    ],
)
def test_a_malformed_answer_above_a_wrong_one_is_a_loophole(cfg: RewardConfig, names: list[str]) -> None:
    assert [loophole.split(" is above")[0] for loophole in cfg.loopholes] == [f"reward.{name}" for name in names]


@pytest.mark.parametrize("profile", sorted(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "ablations"))
def test_only_the_profiles_of_the_paper_have_its_loophole(profile: str) -> None:
    config = load_profile(CONFIGS / profile, [])
    stages = [rl for rl in (config.rl, config.rl_code) if rl is not None]
    assert [bool(rl.reward.loopholes) for rl in stages] == [profile in OF_THE_PAPER] * len(stages)


def test_format_terms_can_be_left_out() -> None:
    cfg = RewardConfig(missing_close=None, missing_open=None)
    assert reward_of(answer("\\boxed{1}"), RIGHT, cfg) == 1


def test_a_profile_leaves_format_terms_out_by_the_word_none() -> None:
    cfg = load_profile(SMOKE, ["rl.reward.missing_close=none", 'rl.reward.missing_open="none"']).rl.reward
    assert (cfg.missing_close, cfg.missing_open) == (None, None)
    assert is_positive(answer("\\boxed{1}"), RIGHT, cfg)
    with pytest.raises(ConfigError, match=r"rl\.reward\.missing_close"):
        load_profile(SMOKE, ["rl.reward.missing_close=off"])
    with pytest.raises(ConfigError, match=r"rl\.reward\.missing_open.*100"):
        load_profile(SMOKE, ["rl.reward.missing_open=-101"])


@pytest.mark.parametrize(
    ("text", "verdict", "expected"),
    [
        ("<think>1</think> \\boxed{1}", RIGHT, True),
        ("<think>1</think> \\boxed{2}", WRONG, False),
        ("<think>1</think>", NOTHING, False),
        ("<think>1</think> 15 of 16 tests", Verdict(outcome=Outcome.SCORED, score=15 / 16), False),
        ("2+2 </think> \\boxed{4}", RIGHT, False),  # reward -2
        ("<think> \\boxed{4}", RIGHT, False),  # reward -0.5
    ],
)
def test_positive_is_right_and_well_formed(text: str, verdict: Verdict, *, expected: bool) -> None:
    assert is_positive(answer(text), verdict, RewardConfig()) is expected
    assert (reward_of(answer(text), verdict, RewardConfig()) == 1) is expected


def test_positive_does_not_depend_on_what_a_right_answer_is_worth() -> None:
    assert is_positive(WHOLE, RIGHT, RewardConfig(correct=0.5))
    assert is_positive(answer("1 </think> \\boxed{1}"), RIGHT, RewardConfig(missing_open=None))


@pytest.mark.parametrize(("wrong", "reward"), [(-1.0, -0.5), (0.0, 0.25)])
def test_four_of_sixteen_tests_passed_in_the_code_and_in_the_paper(wrong: float, reward: float) -> None:
    assert reward_of(WHOLE, Verdict(outcome=Outcome.SCORED, score=4 / 16), RewardConfig(wrong=wrong)) == reward


def test_a_score_from_minus_one_to_one_is_refused_as_a_wrong_program_would_get_less_than_none() -> None:
    with pytest.raises(ConfigError, match=r"verify\.code\.score.*'soft' or 'hard'"):
        load_profile(SMOKE, ["verify.code.score=plus_minus"])


def test_hard_rewards_know_only_the_full_score() -> None:
    cfg = RewardConfig(soft=False)
    assert reward_of(WHOLE, Verdict(outcome=Outcome.SCORED, score=15 / 16), cfg) == -1
    assert reward_of(WHOLE, RIGHT, cfg) == 1


def test_length_penalty_grows_in_a_line_over_the_buffer() -> None:
    cfg = OverlongConfig(penalty_tokens=20, penalty=0.5)
    assert [overlong_penalty(n, 100, cfg) for n in (0, 80, 90, 100)] == [0, 0, 0.25, 0.5]


def test_no_buffer_is_no_penalty() -> None:
    assert overlong_penalty(100, 100, OverlongConfig()) == 0
