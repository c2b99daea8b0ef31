"""Math answers judged as they should be, by class: our judge, and math-verify alone (`parse` and `verify`).

The probes are those of tests/verify/math_probes.py, and other forms of published references where those are beside the
checkout. `python tests/bench/verify/bench_judge_accuracy.py` prints the table of docs/data/verdicts.md.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from pathlib import Path

from klear_core.config.verify import VerifyConfig
from klear_core.types import Difficulty, Domain, MathReference, Problem
from klear_core.verify import JudgePool

sys.path.insert(0, str(Path(__file__).parents[2] / "verify"))

from math_probes import Probe, boxed_probe, probes
from metamorphic import SHARED, published_references, rewritten

SEED, NUM_REFERENCES = 20, 120
Counts = dict[str, list[int]]
"""By class: right answers, those that ours and math-verify accept, wrong answers, those that ours and it accept."""


def measure() -> list[dict[str, object]]:
    """Shares of right answers accepted and numbers of wrong answers accepted, of all classes together."""
    counts = count()
    right, ours, bare, wrong, ours_false, bare_false = (sum(column) for column in zip(*counts.values(), strict=True))
    errors, bare_errors = right - ours + ours_false, right - bare + bare_false
    versions = {"math-verify": importlib.metadata.version("math-verify"), "python": sys.version.split()[0]}
    entries = [
        ("judge_accuracy/right_accepted/ours", ours / right, f"of {right}", ">= 0.97", ours >= 0.97 * right),
        ("judge_accuracy/right_accepted/math_verify", bare / right, f"of {right}", "-", True),
        ("judge_accuracy/wrong_accepted/ours", ours_false, f"of {wrong}", "<= 5", ours_false <= 5),
        ("judge_accuracy/wrong_accepted/math_verify", bare_false, f"of {wrong}", "-", True),
        ("judge_accuracy/errors/ratio", errors / bare_errors, "times", "<= 0.5", errors * 2 <= bare_errors),
    ]
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def count() -> Counts:
    """Judge all probes on both sides."""
    asked = probes()
    if SHARED.is_dir():
        for form, gold, answer, is_right in rewritten(published_references(), SEED, NUM_REFERENCES):
            kind = "published references, " + ("typeset" if form.startswith("typeset") else "rewritten")
            asked.append(boxed_probe(kind, gold, answer, is_right=is_right))
    counts: Counts = {}
    for probe, is_ours, is_bare in zip(asked, _ours(asked), _bare(asked), strict=True):
        row = counts.setdefault(probe.kind, [0] * 6)
        first = 0 if probe.is_right else 3
        row[first] += 1
        row[first + 1] += is_ours
        row[first + 2] += is_bare
    return counts


def _ours(asked: list[Probe]) -> list[bool]:
    with JudgePool(VerifyConfig()) as pool:
        futures = [pool.submit(_problem(probe.gold), "</think>" + probe.response) for probe in asked]
        return [future.result().score == 1.0 for future in futures]


def _problem(gold: str) -> Problem:
    return Problem(
        problem_id="probe",
        source="bench",
        domain=Domain.MATH,
        question="",
        reference=MathReference(answers=(gold,)),
        difficulty=Difficulty.EASY,
    )


def _bare(asked: list[Probe]) -> list[bool]:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return [bool(verify(parse(rf"\boxed{{{probe.gold}}}"), parse(probe.response))) for probe in asked]


def _print_table(counts: Counts) -> None:
    print("| class | right accepted: ours | math-verify | wrong accepted: ours | math-verify |\n|---|---|---|---|---|")
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    for kind, (right, ours, bare, wrong, ours_false, bare_false) in [*counts.items(), ("**all**", total)]:
        accepted = f"{ours} of {right} | {bare}" if right else "- | -"
        falsely = f"{ours_false} of {wrong} | {bare_false}" if wrong else "- | -"
        print(f"| {kind} | {accepted} | {falsely} |")


if __name__ == "__main__":
    _print_table(count())
