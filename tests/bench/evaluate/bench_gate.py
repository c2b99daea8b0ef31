"""How often the rule of the champion promotes, and what clusters of problems do, by simulation: `klear bench gate`.

A replication draws a suite's problems, changes each of them, samples n answers of both models, and applies the parts
"non-inferior" and "better" of klear_core/evaluate/compare/promotion.py. `rare` is the candidate that the sign-flip test
does not protect from: equal on average, it loses 5 % of all problems entirely and gains a little on each of the others.
All problems are easy for it; for `rare, uneven` all difficulties are equally frequent, and it loses a quarter of the
easiest fifth. `uneven` gains and loses as much, and differently by problem.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from klear_core.evaluate.stats.intervals import (
    ProblemScores,
    new_problems_interval,
    paired_new_problems_interval,
    problem_scores,
)
from klear_core.evaluate.stats.significance import (
    GATE_GAIN,
    GateBenchmark,
    confidence_at,
    gate_confidence,
    gate_outcomes,
    sign_flip_test,
)
from klear_core.seeding import seed_for

Floats = npt.NDArray[np.float64]
Draw = np.random.Generator

CONFIDENCE = 0.95
NUM_RUNS = 6000
NUM_LOOKED, NUM_CLUSTERED = 500, 3000
"""Replications of looks and of clusters, which are slow."""
_AIME = GateBenchmark(num_problems=30, num_samples=64, margin=8)
_LCB_V5 = GateBenchmark(num_problems=279, num_samples=8, margin=4.5)
_LCB_V6 = GateBenchmark(num_problems=131, num_samples=8, margin=4.5)
_MATH = GateBenchmark(num_problems=500, num_samples=4, margin=4.5)
SUITES: Mapping[str, Sequence[GateBenchmark]] = {
    "AIME24": (_AIME,),
    "AIME24+25": (_AIME, _AIME),
    "LCB v6": (_LCB_V6,),
    "paper's five": (_AIME, _AIME, _AIME, _LCB_V5, _LCB_V6),
    "MATH-500 + LCB v5": (_MATH, _LCB_V5),
    "MATH-500": (_MATH,),
}
FRESH_SUITES: Mapping[str, Sequence[GateBenchmark]] = {
    "GPQA-Diamond": (GateBenchmark(num_problems=198, num_samples=8, margin=4.5),),
    "AMC23 + BRUMO25": (
        GateBenchmark(num_problems=40, num_samples=32, margin=8),
        GateBenchmark(num_problems=30, num_samples=32, margin=8),
    ),
    "BeyondAIME + LCB v6": (GateBenchmark(num_problems=100, num_samples=8, margin=6), _LCB_V6),
    "50 problems": (GateBenchmark(num_problems=50, num_samples=64, margin=8),),
}
"""Suites on which nothing was tuned."""
LEAST_POWER = dict.fromkeys((*SUITES, *FRESH_SUITES), 0.8) | {
    "AIME24": 0.0,
    "50 problems": 0.0,
    "AIME24+25": 0.7,
    "LCB v6": 0.75,
}
"""How often a gain of GATE_GAIN logits must be promoted; `klear bench gate_bound` says what is possible."""


def _chances(draw: Draw, kind: str, num: int | tuple[int, int]) -> tuple[Floats, Floats]:
    if kind == "rare":
        before = np.clip(draw.normal(0.9, 0.03, num), 0.02, 0.98)
        is_lost = draw.random(num) < 0.05
        return before, np.clip(np.where(is_lost, 0.0, before + 0.05 / 0.95 * 0.9), 0, 1)
    before = draw.uniform(size=num)
    if kind == "equal":
        return before, before
    gain = {"uneven": 0.0, "rare, uneven": 0.28, "gain": GATE_GAIN}[kind]
    odds = before / (1 - before) * np.exp(draw.normal(gain, 0.5, num))
    after = odds / (1 + odds)
    if kind == "rare, uneven":  # 0.28 logits for the others make the mean change 0
        after[(before > 0.8) & (draw.random(num) < 0.25)] = 0.0
    return before, after


def _sampled(draw: Draw, chances: Floats, n: int, clusters: Sequence[str] | None = None) -> ProblemScores:
    return problem_scores([(int(c), n) for c in draw.binomial(n, chances)], clusters=clusters)


def decided(draw: Draw, kind: str, suite: Sequence[GateBenchmark]) -> tuple[float, float, float]:
    """Return how often a candidate is better by the sign-flip test alone, non-inferior, and promoted."""
    drawn = []
    for benchmark in suite:
        before, after = _chances(draw, kind, (NUM_RUNS, benchmark.num_problems))
        n = benchmark.num_samples
        drawn.append((draw.binomial(n, after) - draw.binomial(n, before)) / n)
    found = gate_outcomes(drawn, [b.margin for b in suite], confidence=CONFIDENCE)
    return float(found.is_shown.mean()), float(found.is_non_inferior.mean()), float(found.is_promoted.mean())


def _p_value(before: ProblemScores, after: ProblemScores) -> float:
    return sign_flip_test([b - a for a, b in zip(before.exact, after.exact, strict=True)]).p


# ---- looks ----


def false_gains(num_problems: int, num_samples: Sequence[int], kind: str = "equal") -> tuple[float, float]:
    """Return how often a gain is shown at any look, with the error spent over the looks and with all of it at each.

    The samples of a look contain those of the looks before it.
    """
    draw = np.random.default_rng(seed_for(0, "bench/looks", num_problems, kind, *num_samples))
    looks = [n / num_samples[-1] for n in num_samples]
    hits = {"spent": 0, "whole": 0}
    for _ in range(NUM_LOOKED):
        pair = _chances(draw, kind, num_problems)
        answers = [draw.random((num_problems, num_samples[-1])) < chances[:, None] for chances in pair]
        seen = set[str]()
        for look, n in enumerate(num_samples, start=1):
            counts = ([(int(row[:n].sum()), n) for row in own] for own in answers)
            before, after = (problem_scores(own) for own in counts)
            p = sign_flip_test([b - a for a, b in zip(before.exact, after.exact, strict=True)]).p
            spent = confidence_at(look, looks, confidence=CONFIDENCE)
            for how, level in (("spent", spent), ("whole", CONFIDENCE)):
                low = paired_new_problems_interval(before, after, confidence=gate_confidence(level, 1)).range.low
                if p < 1 - level and low > 0:
                    seen.add(how)
        for how in seen:
            hits[how] += 1
    return hits["spent"] / (NUM_LOOKED), hits["whole"] / (NUM_LOOKED)


# ---- clusters ----


def clustered(
    num_problems: int, n: int, size: int, *, between: float, within: float, effect: float
) -> Mapping[str, float]:
    """Return how often intervals over new problems hold the truth and the test errs, without and with uneven clusters.

    The intervals are those of a difference (B) and of a score (D).

    Difficulties in logits have a standard deviation of `between` over clusters and `within` in them; the models differ
    by cluster with the standard deviation `effect`, and not on average.
    """
    draw = np.random.default_rng(seed_for(7, "bench/clusters", num_problems, n, size, str(between)))
    many = 1 / (1 + np.exp(-draw.normal(0, np.hypot(between, within), 400_000)))
    hits = dict.fromkeys((f"{what}, {how}" for how in ("alone", "clustered") for what in ("B", "D", "false alarms")), 0)
    for _ in range(NUM_CLUSTERED):
        shares = draw.dirichlet(np.ones(max(2, num_problems // size)))
        _, cluster = np.unique(draw.choice(len(shares), num_problems, p=shares), return_inverse=True)
        logit = (between * draw.standard_normal(num_problems))[cluster] + within * draw.standard_normal(num_problems)
        change = (effect * draw.standard_normal(num_problems))[cluster]
        names = [str(c) for c in cluster]
        before, after, alone = (
            _sampled(draw, 1 / (1 + np.exp(-x)), n, names) for x in (logit - change / 2, logit + change / 2, logit)
        )
        differences = [b - a for a, b in zip(before.exact, after.exact, strict=True)]
        for how in ("alone", "clustered"):
            if how == "alone":
                x, y, z = (replace(each, clusters=None) for each in (before, after, alone))
            else:
                x, y, z = before, after, alone
            b = paired_new_problems_interval(x, y, confidence=CONFIDENCE).range
            d = new_problems_interval(z, confidence=CONFIDENCE)
            hits[f"B, {how}"] += b.low <= 0 <= b.high
            hits[f"D, {how}"] += d.low <= float(np.mean(many)) <= d.high
            numbers = None if x.clusters is None else x.clusters.tolist()
            hits[f"false alarms, {how}"] += sign_flip_test(differences, numbers).p < 1 - CONFIDENCE
    return {name: num / NUM_CLUSTERED for name, num in hits.items()}


def measure() -> list[dict[str, object]]:
    """Return the shares of replications, and for the parts that are promised their target."""
    measures: list[dict[str, object]] = []
    for kind in ("rare", "rare, uneven", "equal", "uneven", "gain"):
        for name, suite in (SUITES | FRESH_SUITES).items():
            draw = np.random.default_rng(seed_for(0, "bench/gate", kind, name))
            shares = decided(draw, kind, suite)
            print(f"{kind}, {name}: {shares}", file=sys.stderr)
            measures += [_measure(f"{kind}, {name}: {what}", s) for what, s in zip(PARTS, shares[:2], strict=False)]
            promoted = f"{kind}, {name}: promoted"
            if kind == "gain":
                measures.append(_measure(promoted, shares[2], least=LEAST_POWER[name]))
            else:
                measures.append(_measure(promoted, shares[2], most=0.035))
    for num, num_samples in LOOKS:
        spent, whole = false_gains(num, num_samples)
        cell = f"equal, {num} problems, looks at {num_samples} samples: gain at any"
        measures.append(_measure(f"{cell}, error spent over looks", spent, most=0.035))
        measures.append(_measure(f"{cell}, whole error at each", whole))
    for num, n, size, between, within, effect in CLUSTERED + FRESH_CLUSTERED:
        found = clustered(num, n, size, between=between, within=within, effect=effect)
        for name, share in found.items():
            cell = f"{num} problems, n {n}, clusters of {size}, sd {between} between and {within} within: {name}"
            is_promised = "clustered" in name
            if "alarms" in name:
                measures.append(_measure(cell, share, most=0.08 if is_promised else 1))
            else:
                measures.append(_measure(cell, share, least=0.92 if is_promised else 0))
    return measures


PARTS = ("better by the test alone", "non-inferior")
LOOKS = ((60, (4, 8, 16)), (131, (2, 4, 8)), (30, (16, 32, 48, 64)))
CLUSTERED = [
    (num, n, size, *spread)
    for num, n in ((30, 64), (100, 4), (100, 64), (500, 4))
    for size, spread in ((5, (0.7, 1.5, 0.4)), (max(3, num // 10), (1.5, 1.0, 0.8)))
]
"""Problems, samples, mean cluster size, and the spreads: moderate (ICC .18) and extreme (ICC .69)."""
FRESH_CLUSTERED = [(num, n, 4, 1.0, 1.2, 0.5) for num, n in ((60, 16), (198, 8))]
"""Cells on which nothing was tuned, between the two."""


def _measure(name: str, value: float, *, least: float = 0.0, most: float = 1.0) -> dict[str, object]:
    target = f">= {least:.3g}" if most == 1.0 else f"<= {most:.3g}"
    is_ok = bool(least <= value <= most)
    return {
        "name": name,
        "value": float(value),
        "unit": "share",
        "target": target,
        "ok": is_ok,
        "versions": {"numpy": np.__version__},
    }
