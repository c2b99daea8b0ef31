from __future__ import annotations

from dataclasses import replace

import pytest
from evaluate_fakes import RIGHT, SILENT, UNJUDGED, WRONG, make_problem, make_sample

from klear_core.config.evaluate import EvaluateConfig
from klear_core.errors import DataError
from klear_core.evaluate.compare.paired import paired_difference
from klear_core.evaluate.counts import tally
from klear_core.evaluate.score import (
    fence_note,
    ledger_step,
    make_report,
    metrics_of,
    powers_of_two,
    think_tag_note,
    warning_lines,
)
from klear_core.evaluate.stats.intervals import new_problems_interval, problem_scores, rerun_interval
from klear_core.prompts import NO_CLOSE_TAG
from klear_core.scores import EvalReport
from klear_core.types import Difficulty, EvalSample, Outcome, Problem, Verdict
from klear_core.verify.code.program import NO_PROGRAM

PROBLEMS = [make_problem(0, Difficulty.EASY), make_problem(1), make_problem(2)]


def report_of(samples: list[EvalSample], problems: list[Problem] = PROBLEMS, num_samples: int = 2) -> EvalReport:
    tallies = tally(samples, problems)
    return make_report(tallies, EvaluateConfig(), benchmark="toy", num_samples=num_samples, seed=5)


def samples_of(*verdicts: tuple[Verdict, Verdict]) -> list[EvalSample]:
    return [make_sample(i, j, v) for i, pair in enumerate(verdicts) for j, v in enumerate(pair)]


def test_avg_is_the_mean_over_problems_of_the_share_of_right_samples() -> None:
    report = report_of(samples_of((RIGHT, RIGHT), (RIGHT, WRONG), (WRONG, SILENT)))
    assert report.avg.value == pytest.approx(0.5)
    assert (report.avg.num_problems, report.avg.num_samples) == (3, 6)
    scores = problem_scores([(2, 2), (1, 2), (0, 2)])
    assert report.avg.new_problems == new_problems_interval(scores, confidence=0.95)
    assert report.avg.rerun == rerun_interval(scores, confidence=0.95)
    assert [(p.k, p.score.value) for p in report.pass_at] == [(1, pytest.approx(0.5)), (2, pytest.approx(2 / 3))]


def test_one_sampled_answer_a_problem_has_a_rerun_interval_in_all_reports_and_a_greedy_one_in_none() -> None:
    problems = [make_problem(i) for i in range(100)]
    samples = [make_sample(i, 0, RIGHT if i < 50 else WRONG) for i in range(100)]
    tallies = tally(samples, problems)
    report = report_of(samples, problems, num_samples=1)
    # 100 problems with a variance of 0.5 * 0.5 each: 0.5 -+ 1.96 * sqrt(25 + 1.96^2 / 4) / 100
    assert report.avg.rerun is not None
    assert (report.avg.rerun.low, report.avg.rerun.high) == (
        pytest.approx(0.4001, abs=1e-4),
        pytest.approx(0.5999, abs=1e-4),
    )
    assert tallies["sampled"].summary(confidence=0.95, decoding="sampled").score == report.avg.estimate
    same = paired_difference(tallies["sampled"], tallies["sampled"], confidence=0.95, decoding="sampled")
    assert same is not None
    assert same.rerun is not None
    as_greedy = tallies["sampled"].summary(confidence=0.95, decoding="greedy").score
    assert as_greedy is not None
    assert as_greedy.rerun is None


def test_what_could_not_be_judged_is_in_no_mean_and_is_counted() -> None:
    report = report_of(samples_of((RIGHT, UNJUDGED), (RIGHT, WRONG), (UNJUDGED, UNJUDGED)))
    assert report.avg.value == pytest.approx(0.75)  # 1/1 and 1/2; never 1/2, 1/2 and 0
    assert (report.avg.num_problems, report.avg.num_samples) == (2, 3)
    assert report.unscored == {Outcome.JUDGE_FAILED: 3}
    assert report.unscored_problems == ("p002",)
    assert report.num_problems == 3
    assert warning_lines([report]) == (
        "toy: 1 of 3 problems have no sampled answer that could be judged and are missing from its scores: p002",
    )


def test_most_complete_answers_without_the_end_of_a_thought_are_noted() -> None:
    untagged = replace(SILENT, detail=NO_CLOSE_TAG)

    def note(*ends: str) -> str:
        samples = [
            make_sample(0, i, untagged if end else RIGHT, finish_reason=end or "stop") for i, end in enumerate(ends)
        ]
        return think_tag_note("toy", tally(samples, PROBLEMS))

    assert note("stop", "stop", "") == (
        "toy: 66.7\N{NO-BREAK SPACE}% of the answers are complete and lack </think>, so that they count as no answer; for "
        "a model that writes no think tags set verify.tags=none"
    )
    assert note("stop", "") == note("length", "length", "") == ""  # half of them, and answers that were cut off


def test_programs_that_nobody_asked_to_fence_are_noted() -> None:
    """An answer without `</think>`, an empty program and one that was cut off lost their program for another reason."""
    unfenced = replace(SILENT, detail=NO_PROGRAM)
    others = replace(SILENT, detail=NO_CLOSE_TAG), replace(SILENT, detail="the block of code is empty")
    samples = [
        *samples_of((RIGHT, unfenced), others, (WRONG, WRONG))[:5],
        make_sample(2, 1, unfenced, finish_reason="length"),
    ]
    tallies = tally(samples, PROBLEMS)
    assert fence_note("toy", tallies, "plain") == (
        "toy: 16.7\N{NO-BREAK SPACE}% of the answers are complete and hold no fenced program, and the plain prompt does "
        'not ask for one; prompt = "livecodebench" does'
    )
    assert fence_note("toy", tallies, "livecodebench") == ""
    assert fence_note("toy", tally(samples_of((RIGHT, SILENT), others, (WRONG, WRONG)), PROBLEMS), "plain") == ""


def test_pass_at_k_leaves_out_problems_with_fewer_than_k_scored_samples() -> None:
    at_two = report_of(samples_of((RIGHT, UNJUDGED), (WRONG, WRONG), (WRONG, RIGHT))).pass_at[1]
    assert (at_two.k, at_two.score.value, at_two.score.num_problems) == (2, pytest.approx(0.5), 2)


def test_a_program_that_passes_some_tests_is_not_a_pass() -> None:
    half = Verdict(outcome=Outcome.SCORED, score=0.9)
    assert report_of(samples_of((half, half), (half, RIGHT), (WRONG, WRONG))).avg.value == pytest.approx(1 / 6)


def test_greedy_has_its_own_score_and_never_mixes_with_the_samples() -> None:
    greedy = [make_sample(i, 0, RIGHT, decoding="greedy", finish_reason="length") for i in range(3)]
    report = report_of(samples_of((WRONG, WRONG), (WRONG, WRONG), (WRONG, WRONG)) + greedy)
    assert report.avg.value == 0.0
    assert report.greedy is not None
    assert report.greedy.value == 1.0
    assert report.greedy.rerun is None  # another run would give the same answers
    assert (report.truncated_frac, report.greedy_truncated_frac) == (0.0, 1.0)
    assert report_of(samples_of((WRONG, WRONG), (WRONG, WRONG), (WRONG, WRONG))).greedy is None


def test_truncation_and_length_count_every_sample() -> None:
    samples = samples_of((RIGHT, WRONG), (RIGHT, UNJUDGED), (WRONG, WRONG))
    samples[3] = make_sample(1, 1, UNJUDGED, finish_reason="length", num_tokens=70)
    report = report_of(samples)
    assert report.truncated_frac == pytest.approx(1 / 6)
    assert report.mean_tokens == pytest.approx(20)


def test_difficulties_are_scored_apart_also_when_one_cannot_be() -> None:
    report = report_of(samples_of((UNJUDGED, UNJUDGED), (RIGHT, RIGHT), (WRONG, WRONG)))
    easy, hard = report.by_difficulty
    assert (easy.difficulty, easy.num_problems, easy.avg) == (Difficulty.EASY, 1, None)
    assert hard.avg is not None
    assert (hard.difficulty, hard.num_problems, hard.avg.value) == (Difficulty.HARD, 2, 0.5)


def test_a_benchmark_without_one_scored_sample_has_no_score() -> None:
    with pytest.raises(DataError, match="'toy': none of 6 answers could be judged"):
        report_of(samples_of(*[(UNJUDGED, UNJUDGED)] * 3))


def test_the_ledger_adds_up_over_both_decodings() -> None:
    samples = samples_of((RIGHT, UNJUDGED), (RIGHT, SILENT), (WRONG, WRONG))
    samples.append(make_sample(0, 0, RIGHT, decoding="greedy", finish_reason="length"))
    step = ledger_step("toy", tally(samples, PROBLEMS))
    assert (step.step, step.num_in, step.num_out) == ("judge_toy", 7, 6)
    assert step.dropped == {"judge_failed": 1}
    assert step.noted == {"no_answer": 1, "truncated": 1}


def test_metric_names_have_three_parts_and_no_at_sign() -> None:
    metrics = metrics_of(report_of(samples_of((RIGHT, RIGHT), (RIGHT, WRONG), (WRONG, UNJUDGED))))
    assert metrics["eval/toy/avg_at_2"] == pytest.approx(0.5)
    assert metrics["eval/toy/unscored_frac"] == pytest.approx(1 / 6)
    assert all(name.count("/") == 2 and "@" not in name for name in metrics)


@pytest.mark.parametrize(
    ("limit", "powers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_k_runs_over_powers_of_two_and_n(limit: int, powers: list[int]) -> None:
    assert powers_of_two(limit) == powers
