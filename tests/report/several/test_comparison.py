"""The comparison of runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stored_evaluations import (
    RIGHT,
    SILENT,
    WRONG,
    evaluation,
    given_model,
    made_model,
    published_report,
    said,
    sample,
)

from klear_core.config.settings import different_settings
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ArtifactError, DataError
from klear_core.metrics import NullTelemetry
from klear_core.report.several.compared_runs import read_run
from klear_core.report.several.comparison import COMPARISON_PAGE, compare_runs
from klear_core.scores import Range, Score, TemplateScore
from klear_core.train.base_model import prepare_base


def run(root: Path, marks: str, *, seed: int = 0, first: int = 1, **config: object) -> Path:
    """A run whose RL model answers problem after problem as `marks` say, and the folder of its report."""
    verdicts = {"R": RIGHT, "W": WRONG, "N": SILENT}
    samples = [sample(first + i, 0, said(i), verdicts[mark]) for i, mark in enumerate(marks)]
    ref = evaluation(root, samples, seed=seed)
    return published_report(root, {"evaluate_rl": ref}, {"name": "toy", "seed": seed, **config})


def _tiny(folder: Path) -> Path:
    cfg = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
    folder.mkdir()
    prepare_base(cfg, seed=0, workdir=folder, telemetry=NullTelemetry())
    return folder


def test_differences_are_paired_and_flips_counted_against_the_first_run(tmp_path: Path) -> None:
    reports = [run(tmp_path / "a", "RRWWNR" * 5, lr=1), run(tmp_path / "b", "RWWRNR" * 5, seed=1, lr=2)]
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    (row,) = comparison.rows
    assert [cell and cell.value for cell in row.cells] == ["50.0\u00a0%", "50.0\u00a0%"]
    assert [cell and cell.no_answer for cell in row.cells] == ["16.7\u00a0%", "16.7\u00a0%"]
    (difference,) = row.differences
    assert (difference.num_fixed, difference.num_broken, difference.num_problems) == (5, 5, 30)
    assert (difference.value, difference.standing) == ("+0.0", "not_shown")
    assert [(s.key, s.values) for s in comparison.settings] == [("seed", ("0", "1")), ("lr", ("1", "2"))]
    page = (tmp_path / "out" / COMPARISON_PAGE).read_text()
    links = re.findall(r'href="(answers\.html#benchmark=[^"]*show=fixed)"', page)
    assert links == ["answers.html#benchmark=toy&amp;decoding=s&amp;a=0&amp;b=1&amp;show=fixed"]
    assert (tmp_path / "out" / "answers.html").is_file()


def test_a_gain_on_most_problems_is_shown_as_better(tmp_path: Path) -> None:
    reports = [run(tmp_path / "a", "W" * 40), run(tmp_path / "b", "R" * 36 + "W" * 4, seed=1)]
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    assert comparison.rows[0].differences[0].standing == "better"
    assert comparison.rows[0].differences[0].notes == ()
    assert comparison.rows[0].range == "0.0 to 90.0"


def test_too_few_changed_problems_for_a_test_and_an_interval_at_its_floor_are_said(tmp_path: Path) -> None:
    reports = [run(tmp_path / "a", "R" * 40), run(tmp_path / "b", "R" * 40, seed=1)]
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    notes = comparison.rows[0].differences[0].notes
    assert notes == (
        "only 0 of 40 problems changed, too few for a test",
        "with 40 problems a change in up to 2 of 40 could go unseen; the interval over other problems is not narrower "
        "than that",
    )
    page = (tmp_path / "out" / COMPARISON_PAGE).read_text()
    assert all(note in page for note in notes)


def test_runs_on_other_problems_stand_side_by_side_without_a_difference(tmp_path: Path) -> None:
    reports = [run(tmp_path / "a", "RRW"), run(tmp_path / "b", "RWW", seed=1, first=100)]
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    (difference,) = comparison.rows[0].differences
    assert (difference.is_paired, difference.standing) == (False, "no problem in common")


def test_scores_in_other_templates_stand_beside_the_plain_one_with_their_spread(tmp_path: Path) -> None:
    samples = [sample(i, j, said(i), RIGHT if i < 3 else WRONG) for i in range(1, 5) for j in range(2)]
    one = Score(
        value=0.9, new_problems=Range(low=0, high=1), rerun=Range(low=0.8, high=1), num_problems=4, num_samples=8
    )
    boxed = TemplateScore(name="boxed", text="{question}!", avg=one, truncated_frac=0, no_answer_frac=0, unscored={})
    ref = evaluation(tmp_path / "a", samples, templates=[boxed])
    reports = [published_report(tmp_path / "a", {"evaluate_rl": ref}, {"name": "toy", "seed": 0})]
    reports.append(run(tmp_path / "b", "RRWW", seed=1))
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    first, second = comparison.rows[0].cells
    assert first is not None
    assert second is not None
    # the standard deviation of 50 and 90 is 40 / sqrt(2)
    assert first.templates.replace("\u00a0", " ") == (
        "plain 50.0 %, boxed 90.0 %; 50.0 to 90.0, standard deviation 28.3 points"
    )
    assert second.templates == ""
    page = (tmp_path / "out" / COMPARISON_PAGE).read_text()
    assert page.count("templates: plain") == 1


def test_two_runs_of_one_name_have_labels_that_differ(tmp_path: Path) -> None:
    reports = [run(tmp_path / "a", "RW"), run(tmp_path / "b", "RW")]
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    assert [r.label for r in comparison.runs] == ["1: toy, seed 0", "2: toy, seed 0"]


def test_settings_in_lists_are_compared_one_by_one_and_workspaces_not_at_all() -> None:
    configs = [
        {"workspace": {"root": "a"}, "benchmarks": [{"name": "x", "n": 1}], "steps": [1, 2]},
        {"workspace": {"root": "b"}, "benchmarks": [{"name": "x", "n": 2}, {"name": "y"}], "steps": [1, 3]},
    ]
    found = different_settings(configs, absent="-")  # type: ignore[arg-type]
    assert [(s.key, s.values) for s in found] == [
        ("benchmarks.0.n", ("1", "2")),
        ("steps", ("[1, 2]", "[1, 3]")),
        ("benchmarks.1.name", ("-", '"y"')),
    ]


def test_only_settings_of_stages_that_all_runs_have_are_listed_and_other_stages_are_named(tmp_path: Path) -> None:
    """An evaluation alone has the defaults of all training settings, which it never used."""
    trained = {"rl": {"lr": 1}, "model": {"layers": 2}, "judge": {"rl": {"tags": "any"}}, "evaluate": {"n": 1}}
    alone = {"rl": {"lr": 2}, "model": {"layers": 3}, "judge": {"rl": {"tags": None}}, "evaluate": {"n": 2}}
    made = evaluation(tmp_path / "a", [sample(1, 0, said(1), RIGHT)])
    given = given_model(tmp_path / "b", _tiny(tmp_path / "tiny") / "model", work=tmp_path / "pointer")
    scored = evaluation(tmp_path / "b", [sample(1, 0, said(1), RIGHT)], stage="evaluate_model", made=given)
    runs = [
        published_report(tmp_path / "a", {"evaluate_rl": made}, {"name": "whole", "seed": 0, **trained}),
        published_report(tmp_path / "b", {"evaluate_model": scored}, {"name": "alone", "seed": 0, **alone}),
    ]
    comparison = compare_runs([read_run(report) for report in runs], tmp_path / "out")
    assert [s.key for s in comparison.settings] == ["name", "evaluate.n"]
    assert comparison.stages_of_some == "rl (whole, seed 0); model (alone, seed 0)"
    assert comparison.stages_of_some in (tmp_path / "out" / COMPARISON_PAGE).read_text()
    same = compare_runs([read_run(runs[0])] * 2, tmp_path / "same")
    assert same.stages_of_some == ""


def test_a_table_that_one_run_lacks_is_not_also_listed_as_null() -> None:
    configs = [{"given": {"sft": None}}, {"given": {"sft": {"path": "m"}}}]
    found = different_settings(configs, absent="-")  # type: ignore[arg-type]
    assert [(s.key, s.values) for s in found] == [("given.sft.path", ("-", '"m"'))]


def test_one_run_and_other_artifacts_are_refused(tmp_path: Path) -> None:
    report = run(tmp_path, "RW")
    with pytest.raises(DataError, match="at least two runs"):
        compare_runs([read_run(report)], tmp_path / "out")
    with pytest.raises(ArtifactError, match="not the report of a run"):
        read_run(next((tmp_path / "artifacts" / "evaluate").iterdir()))


@pytest.mark.parametrize("is_trained_first", [True, False])
def test_a_model_that_is_evaluated_alone_stands_beside_the_stage_of_the_run_that_made_it(
    tmp_path: Path, is_trained_first: bool
) -> None:
    """Both have the same files; the evaluation alone calls them `model`, and the run has another one."""
    answers = [sample(i, 0, said(i), RIGHT) for i in range(1, 9)]
    trained = made_model(tmp_path / "a", files=_tiny(tmp_path / "tiny"))
    made = evaluation(tmp_path / "a", answers, made=trained)
    before = evaluation(tmp_path / "a", answers, stage="evaluate_sft", model="sft")
    given = given_model(tmp_path / "b", trained.path / "model", work=tmp_path / "pointer")
    alone = evaluation(tmp_path / "b", answers[:4], stage="evaluate_model", made=given)
    reports = [
        published_report(tmp_path / "a", {"evaluate_sft": before, "evaluate_rl": made}, {"name": "whole", "seed": 0}),
        published_report(tmp_path / "b", {"evaluate_model": alone}, {"name": "alone", "seed": 0}),
    ]
    ordered = reports if is_trained_first else reports[::-1]
    comparison = compare_runs([read_run(report) for report in ordered], tmp_path / "out")
    shared = [row for row in comparison.rows if row.differences]
    assert [row.maker for row in shared] == ["rl" if is_trained_first else "model"]
    assert shared[0].differences[0].num_problems == 4
    assert comparison.last == shared[0].maker
