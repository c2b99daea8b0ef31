"""The tables of docs/data/gate.md follow from the rows of `klear bench gate` and `klear bench gate_bound`."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parents[3] / "docs" / "data"


def values(name: str) -> dict[str, float]:
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return {row["name"]: row["value"] for row in rows}


def short(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def test_the_table_of_errors_is_computed_from_its_rows() -> None:
    found, page = values("gate.jsonl"), (DATA / "gate.md").read_text().splitlines()
    suites = [name.removeprefix("gain, ").removesuffix(": promoted") for name in found if name.startswith("gain, ")]
    suites = [suite for suite in suites if ":" not in suite]
    assert len(suites) == 10
    for suite in suites:
        rates = [found[f"{kind}, {suite}: promoted"] for kind in ("equal", "uneven", "rare", "rare, uneven")]
        test_alone = found[f"rare, {suite}: better by the test alone"]
        gain = found[f"gain, {suite}: promoted"]
        cells = [suite, short(test_alone), *map(short, rates), short(gain, 2)]
        assert f"| {' | '.join(cells)} |" in page


def test_the_bound_is_the_least_power_of_the_oracle() -> None:
    found, page = values("gate_bound.jsonl"), (DATA / "gate.md").read_text()
    for suite in ("AIME24", "AIME24+25", "AMC23 + BRUMO25", "LCB v6"):
        rows = {
            name.removeprefix(f"{suite}: "): value for name, value in found.items() if name.startswith(f"{suite}: ")
        }
        bound = rows.pop("bound")
        assert bound == min(rows.values())
        assert f"| {suite} | {short(bound, 2)} |" in page


def test_the_ranges_of_clusters_are_those_of_their_rows() -> None:
    found, page = values("clusters.jsonl"), (DATA / "intervals.md").read_text()
    for what in (
        "B, alone",
        "D, alone",
        "false alarms, alone",
        "B, clustered",
        "D, clustered",
        "false alarms, clustered",
    ):
        rows = [value for name, value in found.items() if name.endswith(what)]
        assert len(rows) == 6
        assert f"{short(min(rows))} to {short(max(rows))}" in page.replace("\n", " ")
