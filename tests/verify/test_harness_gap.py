"""The tables of harnesses follow from the counts of `klear bench harness_gap`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klear_core.evaluate.stats.intervals import ProblemScores, paired_new_problems_interval, problem_scores

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [json.loads(line) for line in (DOCS / "data" / "harness_gap.jsonl").read_text().splitlines()]
COLUMNS = (
    ("published",),
    ("math-verify",),
    ("lm-eval hendrycks_math", "lm-eval gsm8k"),
    ("lighteval",),
    ("lcb_runner",),
)


def scores(row: Mapping[str, Any]) -> tuple[ProblemScores, ProblemScores]:
    """Return our score and the other's."""
    counts = [(ours, theirs, n) for ours, theirs, n, num in row["problems"] for _ in range(num)]
    ours, theirs = (problem_scores([(count[i], count[2]) for count in counts]) for i in (0, 1))
    return ours, theirs


def gap(row: Mapping[str, Any]) -> str:
    """Return our score less the other's, in points, with its interval over other problems (B)."""
    ours, theirs = scores(row)
    found = paired_new_problems_interval(theirs, ours, confidence=0.95).range
    return f"{100 * (ours.mean - theirs.mean):+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def line_of(row: Mapping[str, Any]) -> str:
    ours, theirs = (f"{100 * score.mean:.1f}" for score in scores(row))
    grader = " ".join(filter(None, (row["harness"], row["version"])))
    alone = f"{row['ours_only']}, {row['theirs_only']}"
    return f"| {row['set']} | {row['answers']} | {grader} | {ours} | {theirs} | {gap(row)} | {alone} |"


def short_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each set with the gap to each grader; `same` where no verdict differs."""
    found = {(row["set"], row["harness"]): row for row in rows}
    lines = []
    for name, num in {row["set"]: row["answers"] for row in rows}.items():
        cells = []
        for harnesses in COLUMNS:
            own = [found[name, harness] for harness in harnesses if (name, harness) in found]
            same = all(row["ours_only"] == row["theirs_only"] == 0 for row in own)
            cells.append("-" if not own else "same" if same else gap(own[0]))
        lines.append(f"| {name}, {num} | {' | '.join(cells)} |")
    return lines


def test_the_tables_of_harnesses_are_computed_from_their_counts() -> None:
    assert all(sum(num * n for _, _, n, num in row["problems"]) == row["answers"] for row in ROWS)
    page, data = (file.read_text().splitlines() for file in (DOCS / "benchmarks.md", DOCS / "data" / "harness_gap.md"))
    assert [line for line in short_table(ROWS) if line not in page] == []
    assert [line for line in map(line_of, ROWS) if line not in data] == []
