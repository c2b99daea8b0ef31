"""The pictures of the pages are of real runs, and so are the warnings that docs/when_a_run_goes_wrong.md quotes.

To draw the pictures anew: KLEAR_DRAW=1 pytest tests/report/test_pictures.py
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from klear_core.config.rl import RlConfig
from klear_core.errors import CollapseError
from klear_core.metrics import SILENT
from klear_core.report import charts
from klear_core.report.charts import Series, line_chart
from klear_core.report.run.build import page_template
from klear_core.rl.state import CollapseGuard

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "when_a_run_goes_wrong.md").read_text()
SHARES = {
    "tags_missing": {"answers/malformed_frac": "without tags", "pass/rate": "right"},
    "hot": {"answers/repeated_frac": "looping", "response/truncated_frac": "cut off", "pass/rate": "right"},
    "tags_twice": {"answers/extra_tags_frac": "tags twice", "response/truncated_frac": "cut off", "pass/rate": "right"},
    "one_answer": {"answers/same_frac": "the most common", "pass/rate": "right"},
    "drift": {"answers/other_script_frac": "other letters", "pass/rate": "right"},
    "hole": {"pass/rate": "right, by RL's judge", "eval/avg": "by the benchmark's"},
    "endless": {"response/truncated_frac": "cut off", "pass/rate": "right"},
    "stale": {"pass/rate": "right", "response/truncated_frac": "cut off"},
}
"""Runs that are shown by shares of answers: the metrics and their names in the legend."""
NUMBERS = {
    "short": {"response/mean_tokens": "tokens"},
    "long": {"response/mean_tokens": "tokens"},
    "entropy": {"entropy/mean": "entropy, nats"},
    "equal": {"groups/kept": "groups trained on"},
}
COLOURS = ("#2b6cb8", "#c2540a", "#17845a", "#8a4fa8")


def runs() -> dict[str, dict[int, dict[str, float]]]:
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for line in (DOCS / "pictures" / "bad_runs.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row.pop("run")][row.pop("step")] = row
    return found


RUNS = runs()


def lines_of(name: str) -> list[tuple[str, Series]]:
    legend = SHARES.get(name) or NUMBERS[name]
    lines = []
    for metric, label in legend.items():
        points = {step: row[metric] for step, row in RUNS[name].items() if metric in row}
        lines.append((label, Series(name=f"rl/{metric}", steps=tuple(points), values=tuple(points.values()))))
    return lines


def drawn(name: str, lines: list[tuple[str, Series]], *, is_share: bool) -> str:
    """The chart of the report as a file of its own, with its legend in it."""
    chart = line_chart(name, lines, is_share=is_share)
    assert chart is not None
    html = str(page_template("macros.html.j2").module.line_chart(chart, charts))  # type: ignore[attr-defined]
    (drawing,) = re.findall(r"<svg[^>]*>(.*)</svg>", html, re.DOTALL)
    style = "".join(f".tone{i}{{--c:{colour};fill:{colour}}}" for i, colour in enumerate(COLOURS))
    style += "text{font:10px sans-serif;fill:#777}text.y{text-anchor:end}text.x{text-anchor:middle}.grid{stroke:#ccc}"
    style += "path{fill:none;stroke:var(--c);stroke-width:1.8}.under{opacity:.3}.smooth{stroke-width:2.2}"
    at = charts.LEFT
    words = []
    for i, line in enumerate(chart.lines):
        words.append(f'<tspan x="{at}" style="fill:{COLOURS[i]}">{line.label}</tspan>')
        at += 12 + round(5.4 * len(line.label))
    size = f'viewBox="0 -18 {charts.WIDTH} {charts.HEIGHT + 18}" width="{charts.WIDTH}"'
    body = re.sub(r"\n\s*", "\n", drawing).strip()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n'
        f'<text y="-6">{"".join(words)}</text>\n{body}\n</svg>\n'
    )


def require_drawn(name: str, lines: list[tuple[str, Series]], *, is_share: bool) -> None:
    file = DOCS / "pictures" / f"{name}.svg"
    if os.environ.get("KLEAR_DRAW"):
        file.write_text(drawn(name, lines, is_share=is_share))
    assert file.read_text() == drawn(name, lines, is_share=is_share)


@pytest.mark.parametrize("name", [*SHARES, *NUMBERS])
def test_a_picture_shows_the_run_in_the_data(name: str) -> None:
    require_drawn(name, lines_of(name), is_share=name in SHARES)
    assert f"](pictures/{name}.svg)" in PAGE


def test_the_picture_of_smol_shows_its_runs() -> None:
    rows = json.loads((DOCS / "data" / "smol_runs.json").read_text())["rl"]
    runs = {(row["seed"], row["max_staleness"]): tuple(row["pass_rate"]) for row in rows}
    legend = {(33, 0): "seed 33", (34, 0): "seed 34", (35, 0): "seed 35", (32, 1): "32, one step apart"}
    steps = tuple(range(1, 29))
    lines = [(label, Series(name="rl/pass/rate", steps=steps, values=runs[run])) for run, label in legend.items()]
    require_drawn("smol", lines, is_share=True)
    for page in (DOCS / "smol.md", DOCS.parent / "README.md"):
        assert "pictures/smol.svg)" in page.read_text()


@pytest.mark.parametrize("name", [*SHARES, *NUMBERS])
def test_the_page_quotes_what_the_run_said(name: str, tmp_path: Path) -> None:
    """The metrics of the run, told again to a guard with the default limits, give the quoted stop or warning."""
    guard = CollapseGuard(RlConfig(), SILENT, tmp_path / "none")
    said: set[str] = set()
    for step, row in RUNS[name].items():
        guard.log({f"rl/{metric}": value for metric, value in row.items()}, step=step)
        said |= {f"step {step}: {note}" for note in guard.notes()}
        try:
            guard.check(step)
        except CollapseError as stop:
            said.add(str(stop))
            break
    (section,) = (part for part in PAGE.split("\n## ") if f"](pictures/{name}.svg)" in part)
    quoted = re.findall(r"^> (.*)$", section, re.MULTILINE)
    assert quoted
    assert [line for line in quoted if not any(line in text for text in said)] == [], said
