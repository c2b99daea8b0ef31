"""Compared models problem by problem."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from stored_evaluations import RIGHT, UNJUDGED, WRONG, evaluation, published_report, said, sample

from klear_core.evaluate.counts import write_clusters
from klear_core.evaluate.stats.significance import detectable_by
from klear_core.report.charts import Series, line_chart
from klear_core.report.several.compared_runs import cost_rows, read_run
from klear_core.report.several.comparison import COMPARISON_PAGE, RunComparison, compare_runs
from klear_core.report.several.problems import PROBLEMS_TABLE, level_of
from klear_core.scores import Range
from klear_core.types import Difficulty, EvalSample

VERDICTS = {"R": RIGHT, "W": WRONG, "?": UNJUDGED}


def answers(rows: Sequence[str]) -> list[EvalSample]:
    """Answers to one problem a row: a right one has 10 tokens, a wrong one 100; all but the first problem are hard."""
    samples = []
    for number, marks in enumerate(rows, start=1):
        for i, mark in enumerate(marks):
            own = sample(number, i, said(number), VERDICTS[mark])
            level = Difficulty.EASY if number == 1 else Difficulty.HARD
            samples.append(replace(own, num_tokens=10 if mark == "R" else 100, difficulty=level))
    return samples


def run(root: Path, rows: Sequence[str], *, before: Sequence[str] = (), seed: int = 0, **config: object) -> Path:
    """The report of a run whose RL model, and base model if `before` is given, gave these answers."""
    stages = {}
    if before:
        stages["evaluate_base"] = evaluation(root, answers(before), stage="evaluate_base", model="base", seed=seed)
    stages["evaluate_rl"] = evaluation(root, answers(rows), seed=seed)
    return published_report(root, stages, {"name": "toy", "seed": seed, **config})


def compared(tmp_path: Path, *reports: Path) -> RunComparison:
    return compare_runs([read_run(report) for report in reports], tmp_path / "out")


def test_the_matrix_has_a_row_for_each_model_and_the_hardest_problems_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", ["RRRR", "WWWW", "RRWW", "RWWW"])
    second = run(tmp_path / "b", ["RRRR", "WWWW", "RRRR", "RW??"], seed=1)
    (bench,) = compared(tmp_path, first, second).problems
    # Means over both models: problem 2 has 0, 4 has (1/4 + 1/2) / 2, 3 has 3/4, 1 has 1.
    assert [(row.label, row.score.replace("\u00a0", " ")) for row in bench.matrix] == [
        ("toy, seed 0: rl", "43.8 %"),
        ("toy, seed 1: rl", "62.5 %"),
    ]
    assert bench.matrix[0].paths == ((0, "M0 0h1v1h-1z"), (2, "M1 0h1v1h-1z"), (3, "M2 0h1v1h-1z"), (5, "M3 0h1v1h-1z"))
    # Two neighbours of one level are one rectangle.
    assert bench.matrix[1].paths == ((0, "M0 0h1v1h-1z"), (3, "M1 0h1v1h-1z"), (5, "M2 0h2v1h-2z"))
    assert [level_of(share) for share in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)] == [0, 1, 2, 3, 4, 4, 5]


def test_changed_problems_have_their_sizes_and_the_largest_comes_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", ["RRRR", "RRRW", "WWWW", "RRRR"])
    second = run(tmp_path / "b", ["RRRW", "RRRW", "WRRR", "WWRR"], seed=1)
    (bench,) = compared(tmp_path, first, second).problems
    assert [(p.title, p.change) for p in bench.changed] == [
        ("What is 3?", "+75.0"),
        ("What is 4?", "\u221250.0"),
        ("What is 1?", "\u221225.0"),
    ]
    assert bench.changed[0].cells == ((0, "0 of 4"), (4, "3 of 4"))
    # A majority flips on one problem alone; two more lost answers.
    assert bench.moves == (
        "toy, seed 1: 1 gained (1 by half of the answers or more), 2 lost (1 by half of the answers or more), "
        "1 as before",
    )
    page = (tmp_path / "out" / COMPARISON_PAGE).read_text()
    assert 'href="answers.html#problem=toy/0000000000000003&amp;a=0&amp;b=1"' in page


def test_hidden_characters_of_a_question_are_spelled_out_on_the_page(tmp_path: Path) -> None:
    reports = []
    for seed, mark in enumerate("WR"):
        asked = replace(answers([mark])[0], question="What is \u202e1\x00?")
        own = evaluation(tmp_path / mark, [asked], seed=seed)
        reports.append(published_report(tmp_path / mark, {"evaluate_rl": own}, {"name": "toy", "seed": seed}))
    assert compared(tmp_path, *reports).problems[0].changed[0].title == "What is \\u202e1\\x00?"


def test_parts_are_by_difficulty_subject_and_length(tmp_path: Path) -> None:
    first = run(tmp_path / "a", ["RR", "WW", "RW"])
    second = run(tmp_path / "b", ["RR", "RR", "RW"], seed=1)
    subjects = {"toy": {f"{number:016x}": "algebra" for number in (1, 2)}}
    for report in (first, second):
        (evaluated,) = (stage.folder for stage in read_run(report).stages if stage.name == "evaluate_rl")
        write_clusters(evaluated, subjects)
    (bench,) = compared(tmp_path, first, second).problems
    found = [
        (p.split, p.name, p.num_problems, *(cell[0].replace("\u00a0", " ") for cell in p.cells)) for p in bench.parts
    ]
    assert found == [
        ("difficulty", "easy", 1, "100.0 %", "100.0 %"),
        ("difficulty", "hard", 2, "25.0 %", "75.0 %"),
        ("subject", "algebra", 2, "50.0 %", "100.0 %"),
        ("subject", "none stated", 1, "50.0 %", "50.0 %"),
        # Mean lengths are 10, 55 (100 and 10), 55 (55 and 55); equal ones are in the order of their ids.
        ("length of answers", "shortest third", 1, "100.0 %", "100.0 %"),
        ("length of answers", "middle third", 1, "0.0 %", "100.0 %"),
        ("length of answers", "longest third", 1, "50.0 %", "50.0 %"),
    ]


def test_intervals_of_parts_are_as_wide_as_clusters_of_problems_make_them(tmp_path: Path) -> None:
    """Eight templates that are right or wrong as a whole say as much as eight problems, also those of one difficulty."""
    rows = ["RR" if i // 5 % 2 else "WW" for i in range(40)]
    reports = [run(tmp_path / name, rows, seed=seed) for seed, name in enumerate("ab")]
    for report in reports:
        (evaluated,) = (stage.folder for stage in read_run(report).stages if stage.name == "evaluate_rl")
        write_clusters(evaluated, {"toy": {f"{i + 1:016x}": f"template {i // 5}" for i in range(40)}})
    comparison = compared(tmp_path, *reports)
    assert comparison.rows[0].cells[0] is not None
    assert comparison.rows[0].cells[0].interval == "17.9 to 82.1"
    hard = next(part for part in comparison.problems[0].parts if part.name == "hard")  # all but one
    low, high = map(float, hard.cells[0][1].split(" to "))
    assert high - low > 60  # 30.9 if the 39 were independent


def test_lengths_of_right_and_wrong_answers_and_the_table_of_all_problems(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", ["RRW", "WWW"]), run(tmp_path / "b", ["RRR", "R?W"], seed=1)
    (bench,) = compared(tmp_path, first, second).problems
    assert [(row.mean, row.right, row.wrong) for row in bench.lengths] == [
        ("70", "10 (10 to 10)", "100 (100 to 100)"),
        ("28", "10 (10 to 10)", "100 (100 to 100)"),  # (4 * 10 + 100) / 5
    ]
    with (tmp_path / "out" / PROBLEMS_TABLE).open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[-3:] == ["toy, seed 1: rl, right", "toy, seed 1: rl, answers", "toy, seed 1: rl, mean tokens"]
    assert rows == [
        ["toy", "0000000000000001", "What is 1?", "easy", "", "2", "3", "40.0", "3", "3", "10.0"],
        ["toy", "0000000000000002", "What is 2?", "hard", "", "0", "3", "100.0", "1", "2", "55.0"],
    ]


def test_runs_are_named_by_the_few_settings_that_differ(tmp_path: Path) -> None:
    configs: list[dict[str, object]] = [{"optim": {"lr": 1}, "loss": "gppo"}, {"optim": {"lr": 2}, "loss": "clip"}]
    reports = [run(tmp_path / str(i), ["RW"], seed=7, **config) for i, config in enumerate(configs)]
    assert [r.label for r in compared(tmp_path, *reports).runs] == [
        "toy, optim.lr 1, loss gppo",
        "toy, optim.lr 2, loss clip",
    ]


def test_runs_that_differ_in_their_seed_alone_are_pooled(tmp_path: Path) -> None:
    rows = (["RRRR", "WWWW"], ["RRRR", "RWWW"], ["RRRR", "RRWW"])
    reports = [run(tmp_path / str(i), own, seed=i) for i, own in enumerate(rows)]
    reports.append(run(tmp_path / "other", ["RRRR", "RRRR"], seed=0, lr=2))
    (pool,) = compared(tmp_path, *reports).seeds
    assert [one.replace("\u00a0", " ") for one in (*pool.scores, pool.mean)] == ["50.0 %", "62.5 %", "75.0 %", "62.5 %"]
    # Standard deviation 12.5, divided by the root of 3, times t = 4.303 with 2 degrees of freedom: 31.05 on each side.
    assert (pool.label, pool.spread, pool.interval) == ("toy, lr \u2013", "12.5", "31.4 to 93.6")


def test_a_model_that_runs_share_is_not_pooled_over_their_seeds(tmp_path: Path) -> None:
    """Its one score three times would have a spread of zero, as if seeds did not matter."""
    shared = evaluation(tmp_path, answers(["RW", "WW"]), stage="evaluate_sft", model="sft")
    reports = []
    for seed, rows in enumerate((["RR", "WW"], ["RR", "RW"], ["RR", "RR"])):
        own = {"evaluate_sft": shared, "evaluate_rl": evaluation(tmp_path, answers(rows), seed=seed)}
        reports.append(published_report(tmp_path, own, {"name": "toy", "seed": seed}))
    assert [(row.maker, len(row.scores)) for row in compared(tmp_path, *reports).seeds] == [("rl", 3)]


def test_what_a_point_of_gain_took_stands_below_the_times(tmp_path: Path) -> None:
    first = run(tmp_path / "a", ["RRRR", "RRWW"], before=["WWWW", "RRWW"])  # 25 to 75 %
    second = run(tmp_path / "b", ["RRRR", "WWWW"], before=["RRRR", "WWWW"], seed=1)  # no gain
    costs = {row.stage: row.cells for row in compared(tmp_path, first, second).costs}
    assert costs["gain, first to last model"] == ("+50.0", "+0.0")
    assert costs["time per point"] == ("0.1\u00a0s", "\u2013")  # four stages of 1 s
    assert "tokens sampled by RL per point" not in costs


def test_tokens_that_rl_sampled_are_divided_by_the_points_gained(tmp_path: Path) -> None:
    ran = read_run(run(tmp_path / "a", ["RRRR", "RRWW"], before=["WWWW", "RRWW"]))  # +50 points
    stages = tuple(
        replace(stage, manifest=stage.manifest.model_copy(update={"counts": {"sampled_tokens": 92_050}}))
        if stage.name == "rl" else stage
        for stage in ran.stages
    )  # fmt: skip
    costs = {row.stage: row.cells for row in cost_rows([replace(ran, stages=stages)])}
    assert costs["tokens sampled by RL per point"] == ("1,841",)


def test_the_change_that_could_be_shown_is_the_interval_s_half_width_and_the_power_s_quantile_more() -> None:
    # t with 99 degrees of freedom is 1.984, the quantile of 80 % is 0.842: 0.05 * (1 + 0.842 / 1.984)
    found = detectable_by(Range(low=-0.04, high=0.06), 100, confidence=0.95)
    assert found == pytest.approx(0.0712, abs=1e-4)
    assert detectable_by(Range(low=-0.04, high=0.06), 5, confidence=0.95) is None


def test_an_interval_is_an_area_around_its_line() -> None:
    line, low, high = (
        Series(name=name, steps=(0, 10), values=v) for name, v in zip("abc", [(1, 2), (0, 1), (2, 4)], strict=True)
    )
    chart = line_chart("Score", [("run", line)], bands={"run": (low, high)})
    assert chart is not None
    assert chart.y_ticks[-1].label == "4"  # the axis holds the intervals, too
    # Along the lower ends and back along the upper ones; the canvas has its origin at the top.
    assert chart.lines[0].band == "M54 172L330 131.5L330 10L54 91z"
