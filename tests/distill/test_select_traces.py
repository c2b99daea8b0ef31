from __future__ import annotations

import pytest
from distill_fakes import RIGHT, UNJUDGED, WRONG, make_reply, make_trace

from klear_core.config.distill import SelectConfig
from klear_core.distill.select import drop_reason, failures_of, why_incomplete
from klear_core.types import Difficulty, Outcome, Verdict


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"finish_reason": "length"}, "truncated"),
        ({"reasoning": ""}, "no_reasoning"),
        ({"answer": ""}, "no_answer"),
        ({"finish_reason": "tool_calls"}, "tool_calls"),
        ({"finish_reason": "other"}, "other_shape"),
    ],
)
def test_a_whole_reply_ended_by_itself_and_has_both_parts(changes: dict[str, object], reason: str) -> None:
    assert why_incomplete(make_reply(**changes), SelectConfig()) == reason


def test_truncated_replies_stay_if_asked_for() -> None:
    reply = make_reply(answer="", finish_reason="length")
    assert why_incomplete(reply, SelectConfig(keep_truncated=True)) == ""


def test_wrong_traces_stay_by_default_at_every_difficulty() -> None:
    assert all(drop_reason(make_trace(WRONG, d), SelectConfig()) is None for d in Difficulty)


def test_correct_only_drops_the_wrong_ones_of_that_difficulty_alone() -> None:
    cfg = SelectConfig(easy="correct_only")
    drop = drop_reason(make_trace(WRONG, Difficulty.EASY, sample_idx=3), cfg)
    assert drop is not None
    assert (drop.step, drop.reason, drop.detail) == ("select", "wrong_easy", "sample 3: different text")
    assert drop_reason(make_trace(RIGHT, Difficulty.EASY), cfg) is None
    assert drop_reason(make_trace(WRONG, Difficulty.HARD), cfg) is None


def test_a_program_that_passes_some_tests_is_wrong() -> None:
    half = Verdict(outcome=Outcome.SCORED, score=0.5)
    drop = drop_reason(make_trace(half), SelectConfig(hard="correct_only"))
    assert drop is not None
    assert drop.reason == "wrong_hard"


def test_no_answer_is_the_teachers_doing_and_counts_as_wrong() -> None:
    silent = make_trace(Verdict(outcome=Outcome.NO_ANSWER, score=0.0))
    assert drop_reason(silent, SelectConfig()) is None
    drop = drop_reason(silent, SelectConfig(hard="correct_only"))
    assert drop is not None
    assert drop.reason == "wrong_hard"


def test_what_could_not_be_judged_is_dropped_as_that_and_never_as_wrong() -> None:
    drop = drop_reason(make_trace(UNJUDGED), SelectConfig())
    assert drop is not None
    assert (drop.step, drop.reason) == ("judge", "judge_failed")
    assert drop_reason(make_trace(UNJUDGED), SelectConfig(keep_unjudged=True)) is None
    drop = drop_reason(make_trace(UNJUDGED), SelectConfig(keep_unjudged=True, hard="correct_only"))
    assert drop is not None
    assert (drop.step, drop.reason) == ("select", "unjudged_hard")


def test_a_trace_of_a_problem_without_reference_is_kept_unless_a_right_answer_is_asked_for() -> None:
    trace = make_trace(Verdict(outcome=Outcome.UNVERIFIABLE, score=0.0))
    assert drop_reason(trace, SelectConfig()) is None
    assert failures_of([trace]) == []
    drop = drop_reason(trace, SelectConfig(hard="correct_only"))
    assert drop is not None
    assert (drop.step, drop.reason) == ("select", "unverifiable_hard")
