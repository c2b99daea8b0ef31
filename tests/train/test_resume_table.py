"""The table of resumed runs in docs/benchmarks.md follows from the rows of `klear bench resume`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = (("klear", "sft"), ("trl", "sft"), ("klear", "grpo"), ("trl", "grpo"))


def cell(row: Mapping[str, Any] | None) -> str:
    """Say whether the run ended with the weights and moments of the one that nobody cut, and where it went on."""
    if row is None:
        return "-"
    if row["error"]:
        return f"fails: `{row['error'].partition(':')[0]}`"
    went_on = "" if row["first_step"] is None else f" ({row['first_step']})"
    if row["weights_gap"] == row["moments_gap"] == 0:
        return f"same{went_on}"
    return f"differs by {row['weights_gap']:.1g}{went_on}"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = {(row["case"], row["side"], row["training"].partition("_")[0]): row for row in rows}
    cases = dict.fromkeys(row["case"] for row in rows)
    return [f"| {case} | {' | '.join(cell(found.get((case, *column))) for column in COLUMNS)} |" for case in cases]


def test_the_table_of_resumed_runs_is_computed_from_its_rows() -> None:
    rows = [json.loads(line) for line in (DOCS / "data" / "resume.jsonl").read_text().splitlines()]
    page = (DOCS / "benchmarks.md").read_text().splitlines()
    assert [line for line in table(rows) if line not in page] == []
