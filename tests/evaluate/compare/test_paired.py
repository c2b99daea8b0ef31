from __future__ import annotations

from pathlib import Path

import pytest
from evaluate_fakes import RIGHT, UNJUDGED, WRONG, make_problem, make_sample

from klear_core.artifacts.records import write_shard
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig, TorchEngineConfig, TorchEngineRuntime
from klear_core.errors import ArtifactError, DataError
from klear_core.evaluate.compare.paired import compare, compare_pairs
from klear_core.evaluate.counts import tally
from klear_core.evaluate.score import make_report
from klear_core.evaluate.stats.intervals import (
    paired_new_problems_interval,
    paired_rerun_interval,
    problem_scores,
)
from klear_core.scores import write_reports
from klear_core.types import EvalSample, Verdict


def write_evaluation(folder: Path, samples: list[EvalSample], cfg: EvaluateConfig | None = None) -> Path:
    cfg = cfg or EvaluateConfig()
    benchmarks = sorted({s.benchmark for s in samples})
    reports = []
    for name in benchmarks:
        own = [s for s in samples if s.benchmark == name]
        problems = [make_problem(int(i[1:])) for i in sorted({s.problem_id for s in own})]
        reports.append(make_report(tally(own, problems), cfg, benchmark=name, num_samples=2, seed=0))
    write_shard(folder / "samples" / "a.parquet", samples)
    write_reports(folder, tuple(reports))
    return folder


def answers(*verdicts: tuple[Verdict, Verdict], **changes: object) -> list[EvalSample]:
    return [make_sample(i, j, v, **changes) for i, pair in enumerate(verdicts) for j, v in enumerate(pair)]


def test_two_evaluations_are_paired_by_problem(tmp_path: Path) -> None:
    before = write_evaluation(tmp_path / "a", answers((WRONG, WRONG), (RIGHT, WRONG), (RIGHT, RIGHT)))
    after = write_evaluation(tmp_path / "b", answers((RIGHT, WRONG), (RIGHT, RIGHT), (RIGHT, RIGHT)))
    (comparison,) = compare(before, after)
    x, y = problem_scores([(0, 2), (1, 2), (2, 2)]), problem_scores([(1, 2), (2, 2), (2, 2)])
    assert comparison.difference == pytest.approx(1 / 3)
    assert comparison.new_problems == paired_new_problems_interval(x, y, confidence=0.95).range
    assert comparison.rerun == paired_rerun_interval(x, y, confidence=0.95)
    assert (comparison.p, comparison.num_changed) == (0.5, 2)  # of four sign choices, both alike
    assert (comparison.before, comparison.after, comparison.num_problems) == (0.5, pytest.approx(5 / 6), 3)
    assert not comparison.is_clear


@pytest.mark.parametrize(
    ("first", "second", "is_better", "is_worse"), [(WRONG, RIGHT, True, False), (RIGHT, WRONG, False, True)]
)
def test_a_clear_difference_is_said_to_be_clear(
    tmp_path: Path, first: Verdict, second: Verdict, is_better: bool, is_worse: bool
) -> None:
    before = write_evaluation(tmp_path / "a", answers(*[(first, first)] * 20))
    after = write_evaluation(tmp_path / "b", answers(*[(second, second)] * 20))
    (comparison,) = compare(before, after)
    assert (comparison.is_better, comparison.is_worse, comparison.is_clear) == (is_better, is_worse, True)


def test_the_same_evaluation_is_no_comparison(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "a", answers((RIGHT, WRONG)))
    assert compare(folder, folder) == ()


def test_a_model_that_answers_alike_is_not_better(tmp_path: Path) -> None:
    folders = [write_evaluation(tmp_path / name, answers(*[(RIGHT, WRONG)] * 200)) for name in "ab"]
    (comparison,) = compare(*folders)
    assert comparison.difference == 0
    assert comparison.new_problems.low < 0 < comparison.new_problems.high
    assert (comparison.p, comparison.num_changed, comparison.floor_binds) == (1, 0, True)


def test_the_p_values_of_one_call_are_corrected_together(tmp_path: Path) -> None:
    """6 problems that all change: p = 2 / 2^6 = 0.031, which is a difference alone and none among two."""
    wrong = write_evaluation(tmp_path / "a", answers(*[(WRONG, WRONG)] * 6))
    right = write_evaluation(tmp_path / "b", answers(*[(RIGHT, RIGHT)] * 6))
    (alone,) = compare(wrong, right)
    assert (alone.p_corrected, alone.is_better) == (2 / 64, True)
    ((there,), (back,)) = compare_pairs([(wrong, right), (right, wrong)])
    assert (there.p, there.p_corrected, there.is_clear) == (2 / 64, 4 / 64, False)
    assert back.p_corrected == 4 / 64


def test_problems_that_only_one_side_could_score_are_left_out_and_counted(tmp_path: Path) -> None:
    before = write_evaluation(tmp_path / "a", answers((WRONG, WRONG), (UNJUDGED, UNJUDGED), (RIGHT, RIGHT)))
    after = write_evaluation(tmp_path / "b", answers((RIGHT, UNJUDGED), (RIGHT, RIGHT), (RIGHT, RIGHT)))
    (comparison,) = compare(before, after)
    assert (comparison.num_problems, comparison.num_unpaired) == (2, 1)
    assert (comparison.before, comparison.after) == (0.5, 1.0)


def test_greedy_is_compared_beside_the_samples(tmp_path: Path) -> None:
    pairs = [(WRONG, WRONG)] * 3
    greedy = [make_sample(i, 0, RIGHT, decoding="greedy") for i in range(3)]
    folders = [write_evaluation(tmp_path / name, answers(*pairs) + greedy) for name in "ab"]
    sampled, of_greedy = compare(*folders)
    assert (sampled.decoding, sampled.after, of_greedy.decoding, of_greedy.after) == ("sampled", 0.0, "greedy", 1.0)
    assert sampled.rerun is not None
    assert of_greedy.rerun is None


def test_another_decoding_profile_is_flagged_but_another_batch_size_is_not(tmp_path: Path) -> None:
    samples = answers((RIGHT, WRONG), (RIGHT, RIGHT))
    plain = write_evaluation(tmp_path / "a", samples)
    hotter = write_evaluation(tmp_path / "b", samples, EvaluateConfig(sampling=EvaluateSamplingConfig(temperature=1.0)))
    wider = write_evaluation(
        tmp_path / "c", samples, EvaluateConfig(engine=TorchEngineConfig(runtime=TorchEngineRuntime(max_batch_size=7)))
    )
    assert not compare(plain, hotter)[0].is_same_decoding
    assert compare(plain, wider)[0].is_same_decoding


def test_different_benchmarks_cannot_be_compared(tmp_path: Path) -> None:
    toy = write_evaluation(tmp_path / "a", answers((RIGHT, WRONG)))
    other = write_evaluation(tmp_path / "b", answers((RIGHT, WRONG), benchmark="other"))
    with pytest.raises(DataError, match=r"benchmarks \['toy'\], the other \['other'\]"):
        compare(toy, other)


def test_no_problem_in_common_is_an_error(tmp_path: Path) -> None:
    one = write_evaluation(tmp_path / "a", [make_sample(0, i, RIGHT) for i in (0, 1)])
    two = write_evaluation(tmp_path / "b", [make_sample(1, i, RIGHT) for i in (0, 1)])
    with pytest.raises(DataError, match="no scored problem in common"):
        compare(one, two)


def test_an_unfinished_evaluation_is_named(tmp_path: Path) -> None:
    done = write_evaluation(tmp_path / "a", answers((RIGHT, WRONG)))
    with pytest.raises(ArtifactError, match=r"nowhere/report\.json: cannot be read"):
        compare(tmp_path / "nowhere", done)
