"""The scores in docs/smol.md follow from the answers counted in docs/data/smol_runs.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    new_problems_interval,
    paired_new_problems_interval,
    problem_scores,
)
from klear_core.evaluate.stats.significance import sign_flip_test
from klear_core.scores import Range

DOCS = Path(__file__).parents[3] / "docs"
RUNS = json.loads((DOCS / "data" / "smol_runs.json").read_text())
SCORES = {(row["seed"], row["model"]): row for row in RUNS["scores"] if row["benchmark"] == "heldout"}
FRESH = (33, 34, 35, 36)
"""Seeds on which nothing was chosen."""


def estimates(seed: int, model: str) -> ProblemScores:
    return problem_scores([(int(right), 2) for right in SCORES[seed, model]["sampled"]])


def percent(value: float, interval: Range, sign: str = "") -> str:
    unit = "" if sign else " %"
    low, high = 100 * interval.low, 100 * interval.high
    return f"{100 * value:{sign}.1f}{unit} ({low:.1f} to {high:.1f})"


def test_the_table_of_the_profile_is_computed_from_its_answers() -> None:
    page = (DOCS / "smol.md").read_text()
    for seed in FRESH:
        sft, rl = estimates(seed, "sft"), estimates(seed, "rl")
        scores = [percent(e.mean, new_problems_interval(e, confidence=0.95)) for e in (sft, rl)]
        change = paired_new_problems_interval(sft, rl, confidence=0.95).range
        p = 2 * sign_flip_test([b - a for a, b in zip(sft.exact, rl.exact, strict=True)]).p  # Holm, of two benchmarks
        shown = "< .0001" if p < 0.0001 else f"{p:.4f}".lstrip("0")
        row = [str(seed), *scores, percent(rl.mean - sft.mean, change, "+"), shown]
        assert f"| {' | '.join(row)} |" in page


def test_the_page_counts_the_answers_to_gsm8k() -> None:
    right = {row["model"]: row["greedy"].count("1") for row in RUNS["scores"] if row["benchmark"] == "gsm8k"}
    told = f"base, SFT and GPPO are right on {right['base']}, {right['sft']} and {right['rl']} of 200"
    assert told in " ".join((DOCS / "smol.md").read_text().split())


def test_the_page_compares_with_trl_by_the_answers_to_the_same_problems() -> None:
    page = (DOCS / "smol.md").read_text()
    sft, ours, theirs = (estimates(36, model) for model in ("sft", "rl_16_steps", "trl_16_steps"))
    for model in (ours, theirs):
        gain = paired_new_problems_interval(sft, model, confidence=0.95).range
        assert f"{100 * model.mean:.1f} % ({percent(model.mean - sft.mean, gain, '+').replace(' (', ', ')}" in page
    between = paired_new_problems_interval(theirs, ours, confidence=0.95).range
    assert f"ours less TRL's {percent(ours.mean - theirs.mean, between, '+')}" in page


def test_the_curves_beside_trl_are_computed_from_the_steps() -> None:
    bench = Path(__file__).parents[2] / "bench" / "rl" / "bench_smol_trl.py"
    printed = subprocess.run([sys.executable, bench], capture_output=True, text=True, check=True).stdout
    assert printed in (DOCS / "data" / "smol_settings.md").read_text()
    minutes, rates = zip(*((row.split(" | ")[3], row.split(" | ")[5]) for row in printed.splitlines()[2:]), strict=True)
    told = f"take {minutes[1]} minutes, ours {minutes[0]}: {rates[1]} and {rates[0]} tokens a minute"
    assert told in " ".join((DOCS / "smol.md").read_text().split())


def test_what_was_tried_before_has_the_scores_that_the_page_gives() -> None:
    page = (DOCS / "data" / "smol_settings.md").read_text()
    for seed in (31, 41, 42):
        before, after = (100 * estimates(seed, model).mean for model in ("sft", "rl"))
        (line,) = (line for line in page.splitlines() if f" | {before:.1f} to {after:.1f} %" in line)
        assert line.startswith(f"| {seed} |")
