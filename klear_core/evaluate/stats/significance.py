"""Test whether two models differ on the same problems: the exact sign-flip test, and Holm's correction of several.

If the models are alike, either could have given either result of a problem, so the signs of the differences are coin
flips. The p-value is the share of all sign choices whose sum is at least as far from zero as the one seen. It assumes
nothing about how large the differences are. Problems of one cluster may change together: their signs flip together. Few
changed problems can show nothing, however many samples each has:
below six, p is above 0.05 whatever they are (`min_changed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from klear_core.scores import Range
from klear_core.seeding import seed_for

_MAX_CELLS = 300_000_000
"""Sums times problems that are added up exactly, in about half a second."""
_MAX_ENUMERATED = 20
_MAX_TRANSFORMED = 100_000_000
"""Sums times different sizes that are counted exactly by a Fourier transform, in about two seconds."""
_ROUNDING = 1e-10
"""Smallest p-value that a Fourier transform can tell from zero."""
_NUM_DRAWS = 99_999
_DRAWS_AT_ONCE = 1_000
_MAX_SIGNS_DRAWN = 300
"""Problems whose signs are drawn as numbers; of more they are drawn as bits, a hundred times as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlip:
    """Result of the sign-flip test."""

    p: float
    """Two-sided p-value."""
    num_changed: int
    """Problems, or clusters of problems, whose score differs between the models; the others say nothing."""
    is_exact: bool
    """Whether all sign choices were counted, up to rounding; else 99,999 random ones with a fixed seed were."""


def sign_flip_test(differences: Sequence[Fraction], clusters: Sequence[int] | None = None) -> SignFlip:
    """Return the two-sided sign-flip test of the differences, one per problem.

    `clusters` has the number of each problem's cluster; the test is then of their sums over clusters.
    """
    if clusters is not None:
        sums: dict[int, Fraction] = {}
        for cluster, difference in zip(clusters, differences, strict=True):
            sums[cluster] = sums.get(cluster, Fraction(0)) + difference
        differences = list(sums.values())
    changed = [d for d in differences if d]
    if not changed:
        return SignFlip(p=1.0, num_changed=0, is_exact=True)
    whole = _as_integers(changed)
    total = sum(map(abs, whole))
    if total * len(whole) <= _MAX_CELLS:
        return SignFlip(p=_by_convolution(whole), num_changed=len(whole), is_exact=True)
    sizes = np.array([float(abs(d)) for d in changed])
    seen = abs(float(sum(changed, Fraction(0))))
    if len(changed) <= _MAX_ENUMERATED:
        return SignFlip(p=_by_enumeration(sizes, seen), num_changed=len(changed), is_exact=True)
    if total * len(set(map(abs, whole))) <= _MAX_TRANSFORMED:
        return SignFlip(p=_by_transform(whole), num_changed=len(changed), is_exact=True)
    return SignFlip(p=_by_drawing(sizes, seen), num_changed=len(changed), is_exact=False)


def min_changed(confidence: float) -> int:
    """Return the fewest changed problems with which p can be below 1 minus the confidence: 2 / 2^6 = 0.031 for 95 %."""
    num = 1
    while 2.0 ** (1 - num) + confidence >= 1:
        num += 1
    return num


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return p-values corrected for their number, in the given order (Holm 1979).

    If those below alpha are called differences, the chance that any of them is wrong is below alpha.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        # a later one is never smaller than an earlier one
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        corrected[i] = largest
    return tuple(corrected)


def fisher_exact_p(events: tuple[int, int], runs: tuple[int, int]) -> float:
    """Return the two-sided p-value of Fisher's exact test that an event is equally likely on both sides.

    `events` of `runs` on each side: 5 of 5 against 0 of 5 is 2 / 252. With as many events in all, it is the chance of
    the tables that are no more likely than this one.
    """
    total = sum(events)
    ways = [math.comb(runs[0], k) * math.comb(runs[1], total - k) for k in range(total + 1)]
    # Whole numbers, so that equally likely tables count as equal.
    extreme = sum(way for way in ways if way <= ways[events[0]])
    return extreme / math.comb(sum(runs), total)


def corrected_by_question(p_values: Sequence[float], questions: Sequence[Hashable]) -> tuple[float, ...]:
    """Return p-values corrected for the number of questions that were asked, in the given order.

    The first p-value of a question answers it, by Holm's correction over the questions. Another one of the same
    question (greedy answers beside sampled ones) is looked at only if the first shows a difference: it is multiplied by
    the number of questions, and is never smaller than the first (serial gatekeeping, Westfall and Krishen 2001).
    """
    first: dict[Hashable, int] = {}
    for i, question in enumerate(questions):
        first.setdefault(question, i)
    answers = dict(zip(first, holm([p_values[i] for i in first.values()]), strict=True))
    corrected = []
    for i, (p, question) in enumerate(zip(p_values, questions, strict=True)):
        answer = answers[question]
        corrected.append(answer if first[question] == i else max(answer, min(1.0, p * len(first))))
    return tuple(corrected)


def _as_integers(fractions: Sequence[Fraction]) -> list[int]:
    """Return the smallest integers in the same proportions."""
    denominator = math.lcm(*(f.denominator for f in fractions))
    whole = [int(f * denominator) for f in fractions]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


def _by_convolution(differences: Sequence[int]) -> float:
    """Return p from the exact distribution of the sum of the positive ones among +-D."""
    total = sum(map(abs, differences))
    seen = abs(sum(differences))
    chance = np.zeros(total + 1)  # by sum of the sizes that got a plus
    chance[0] = 1.0
    reached = 0
    # Smallest first, so that few sums are reached, and little is added, for most of the way.
    for size in sorted(map(abs, differences)):
        chance[size : reached + size + 1] += chance[: reached + 1].copy()
        reached += size
        chance[: reached + 1] *= 0.5
    # with s of the total positive, the sum is 2s - total; its distribution is symmetric
    return float(min(1.0, _tail(chance, total=total, seen=seen)))


def _tail(chance: npt.NDArray[np.float64], *, total: int, seen: int) -> float:
    if seen == 0:
        return 1.0
    lowest = (total + seen) // 2  # total and seen have the same parity
    return 2 * math.fsum(chance[lowest:])


def _by_enumeration(sizes: npt.NDArray[np.float64], seen: float) -> float:
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate((sums + size, sums - size))
    # The tolerance counts sums that equal the one seen but for rounding.
    return float(np.mean(np.abs(sums) >= seen * (1 - 1e-9)))


def _by_transform(differences: Sequence[int]) -> float:
    """Return p as `_by_convolution` does, but from the characteristic function, one factor for each size.

    That of a size d with a random sign that counts if it is plus is exp(i t d/2) cos(t d/2).
    """
    from scipy.fft import irfft, next_fast_len

    total = sum(map(abs, differences))
    length = next_fast_len(total + 1, real=True)
    k = np.arange(length // 2 + 1)  # t = 2 pi k / length

    def half_angle(size: int) -> npt.NDArray[np.float64]:
        reduced = k * size % (2 * length)  # as integers: large angles lose digits
        return np.asarray(np.pi / length * reduced)

    product = np.ones(len(k))
    for size, num in Counter(map(abs, differences)).items():
        product *= np.cos(half_angle(size)) ** num
    chance = irfft(product * np.exp(-1j * half_angle(total)), length)
    p = _tail(chance[: total + 1], total=total, seen=abs(sum(differences)))
    return float(min(1.0, max(p, _ROUNDING)))


def _by_drawing(sizes: npt.NDArray[np.float64], seen: float) -> float:
    """Return p from random sign choices, the seen one among them, so that it is never zero (Phipson and Smyth 2010)."""
    draw = np.random.default_rng(seed_for(0, "evaluate/sign_flip"))
    hits, left = 0, _NUM_DRAWS
    while left:
        num = min(left, _DRAWS_AT_ONCE)
        sums = _random_sums(draw, sizes, num)
        hits += int(np.sum(np.abs(sums) >= seen * (1 - 1e-9)))
        left -= num
    return (1 + hits) / (1 + _NUM_DRAWS)


def _random_sums(draw: np.random.Generator, sizes: npt.NDArray[np.float64], num: int) -> npt.NDArray[np.float64]:
    """Return the sums of the sizes with random signs, `num` times."""
    if len(sizes) <= _MAX_SIGNS_DRAWN:
        signs = draw.integers(0, 2, size=(num, len(sizes))) * 2 - 1
        return np.asarray(signs @ sizes)
    # a random byte is the signs of eight problems: look its sum up in a table of all 256
    padded = np.pad(sizes, (0, -len(sizes) % 8)).reshape(-1, 8)
    signs_of_byte = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * 2.0 - 1
    tables = padded @ signs_of_byte.T
    sums = np.zeros(num)
    for table in tables:
        sums += table[np.frombuffer(draw.bytes(num), dtype=np.uint8)]
    return sums


# ---- power ----
# Compute the smallest gain that a benchmark can show, from its numbers of problems and of samples, before any run.


# What a suite can show is computed for problems whose difficulties are all equally frequent and whose gains differ.


POWER = 0.8
"""Share of runs in which a gain of the printed size is shown, by convention (Cohen 1988)."""
_SPREAD = 0.5
"""Standard deviation of the gain over problems, in logits: training does not help all problems equally."""
_NUM_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectable:
    """Differences of avg@n that an evaluation can tell from chance."""

    gain: float | None
    """Smallest gain over another model that the sign-flip test shows in 4 of 5 runs; None if no gain can be."""
    rerun: float
    """Largest difference of two runs of one model, in 95 of 100 cases."""


def detectable(num_problems: int, num_samples: int, *, confidence: float) -> Detectable:
    """Return the smallest differences that an evaluation shows if all difficulties are equally frequent.

    With paired problems only the noise of sampling and the spread of the gain over problems remain. The power is that
    of Student's t test, which the exact sign-flip test has, too (docs/statistics.md), with a correction for few
    answers.
    """
    from scipy.special import ndtri, stdtrit

    difficulty = (np.arange(_NUM_POINTS) + 0.5) / _NUM_POINTS
    noise = float(np.mean(difficulty * (1 - difficulty))) / num_samples
    rerun = min(1.0, float(ndtri(0.5 + confidence / 2)) * math.sqrt(2 * noise / num_problems))
    if num_problems < min_changed(confidence):
        return Detectable(gain=None, rerun=rerun)
    quantiles = float(stdtrit(num_problems - 1, 0.5 + confidence / 2)) + float(ndtri(POWER))
    logits = np.log(difficulty / (1 - difficulty))[:, None]
    spread = _SPREAD * ndtri((np.arange(_NUM_POINTS) + 0.5) / _NUM_POINTS)[None, :]
    # Sums of differences are 2 / n apart, and the exact p-value counts all choices of signs at the sum that is seen.
    continuity = 1 / (num_samples * num_problems)
    low, high = 0.0, 12.0  # mean gain in logits
    for _ in range(40):
        middle = (low + high) / 2
        after = 1 / (1 + np.exp(-(logits + middle + spread)))
        change = after - difficulty[:, None]
        # Over drawn problems the difference varies by the spread of the gain and by the sampling noise of both models.
        variance = float(np.var(change)) + noise + float(np.mean(after * (1 - after))) / num_samples
        needed = quantiles * math.sqrt(variance / num_problems) + continuity
        is_seen = float(np.mean(change)) >= needed
        low, high = (low, middle) if is_seen else (middle, high)
    gain = float(np.mean(1 / (1 + np.exp(-(logits + high + spread))) - difficulty[:, None]))
    # at the largest gain that there is, nothing was seen
    return Detectable(gain=gain if high < 12.0 else None, rerun=rerun)


def detectable_by(interval: Range, num_problems: int, *, confidence: float) -> float | None:
    """Return the change that the test would show in 4 of 5 runs, given the interval of a difference over problems.

    The interval is t standard errors wide on each side, and such a change is t plus the power's quantile of them. None
    if the problems are too few for the test.
    """
    from scipy.special import ndtri, stdtrit

    if num_problems < min_changed(confidence):
        return None
    quantile = float(stdtrit(num_problems - 1, 0.5 + confidence / 2))
    return (interval.high - interval.low) / 2 * (1 + float(ndtri(POWER)) / quantile)


_LEAST_ERROR = 1e-12
"""Error that a look may spend at least: small enough to matter nowhere, and large enough for quantiles to be exact."""


def confidence_at(look: int, looks: Sequence[float], *, confidence: float) -> float:
    """Return the level for one of several looks at growing data, so that all together have the error of one.

    `looks` has the share of the planned samples at each, the last 1. Errors are spent as O'Brien and Fleming's bounds
    do (Lan and DeMets 1983), nearly all at the end; each look has what is newly spent, which is cautious (Bonferroni).
    """
    from scipy.special import ndtr, ndtri

    quantile = float(ndtri(0.5 + confidence / 2))
    spent = [0.0, *(2 - 2 * float(ndtr(quantile / math.sqrt(share))) for share in looks)]
    # an error too small for the digits of a float would make the level 1, at which no interval exists
    return 1 - max(spent[look] - spent[look - 1], _LEAST_ERROR)


# ---- chances of the champion's rule ----


def gate_confidence(confidence: float, num_tests: int) -> float:
    """Return the level of the interval over other problems that must exclude 0 for a gain in one of several tests.

    Bonferroni's correction, and a fifth of the error less: so, with `unseen_loss`, a candidate of equal mean that loses
    5 % of the problems entirely is promoted in about 3 of 100 cases at most (`klear bench gate`).
    """
    return 1 - 0.8 * (1 - confidence) / num_tests


_RARE = 0.05
"""Share of all problems that a rare loss loses."""
_RARE_ERROR = 0.03
"""Chance with which a model of rare losses may be taken for a better one."""


def unseen_loss(differences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how large a gain must be (0 to 1) to exclude a rare loss that was not drawn, for each row of differences.

    A model of equal mean that loses 5 % of all problems entirely gains up to 5/95 on the others, and of P problems none
    is lost in .95^P of draws. Such a gain must be exceeded at the level .03 / .95^P, so that it is taken for a better
    model in 3 of 100 cases. From 69 problems on there is no limit (0).
    """
    from scipy.special import stdtrit

    num = differences.shape[-1]
    if num == 1:
        return np.ones(differences.shape[:-1])
    level = _RARE_ERROR / (1 - _RARE) ** num
    if level >= 1:
        return np.zeros(differences.shape[:-1])
    error = differences.std(axis=-1, ddof=1) / math.sqrt(num)
    return np.asarray(_RARE / (1 - _RARE) + float(stdtrit(num - 1, 1 - level)) * error)


GATE_GAIN = 0.35
"""Mean gain, in logits, of the better model whose chance `gate_chances` returns: 5 to 6 points where problems of all
difficulties are equally frequent."""
_NUM_REPLICATIONS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class GateBenchmark:
    """A benchmark of a suite, as the rule of the champion sees it."""

    num_problems: int
    num_samples: int
    margin: float
    """Points that may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChances:
    """Chances that a model passes the rule of the champion on a suite, with a standard error of at most .025."""

    equal_passes: float
    """Chance that a model that is as good on every problem is found non-inferior on all benchmarks."""
    better_is_promoted: float
    """Chance that a model with a mean gain of GATE_GAIN everywhere is also found better on one."""


def gate_chances(suite: Sequence[GateBenchmark], *, confidence: float) -> GateChances:
    """Return the chances by simulation with a fixed seed."""
    passed = {}
    for gain in (0.0, GATE_GAIN):
        drawn = []
        for i, benchmark in enumerate(suite):
            draw = np.random.default_rng(seed_for(0, "evaluate/gate_chances", i, str(gain)))
            drawn.append(_drawn_differences(draw, benchmark, gain))
        passed[gain] = gate_outcomes(drawn, [b.margin for b in suite], confidence=confidence)
    equal, better = passed[0.0], passed[GATE_GAIN]
    return GateChances(
        equal_passes=float(np.mean(equal.is_non_inferior)), better_is_promoted=float(np.mean(better.is_promoted))
    )


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcomes:
    """Findings of the champion's rule in replications, one value each."""

    is_non_inferior: Flags
    is_shown: Flags
    """Whether the sign-flip test alone shows a gain on a benchmark."""
    is_better: Flags

    @property
    def is_promoted(self) -> Flags:
        """Whether the model is promoted."""
        return self.is_non_inferior & self.is_better


def gate_outcomes(
    drawn: Sequence[npt.NDArray[np.float64]], margins: Sequence[float], *, confidence: float
) -> GateOutcomes:
    """Apply the rule to differences of two models: for each benchmark an array with one row a replication.

    It is that of `promotion.py`, but the sign-flip test is taken as Student's t test.
    """
    lows = [_lower_ends(difference, confidence=confidence) for difference in drawn]
    raw_p = np.array([_student_p(difference) for difference in drawn])
    holm_p = np.array([holm(p_values) for p_values in raw_p.T.tolist()]).T
    is_clear = (holm_p + confidence < 1) & np.array([d.mean(axis=1) > 0 for d in drawn])
    tests = [(p, difference, 2 * len(drawn)) for p, difference in zip(holm_p, drawn, strict=True)]
    if len(drawn) == 1:
        tests = [(holm_p[0], drawn[0], 1)]
    else:
        together = np.concatenate(drawn, axis=1)
        tests.append((2 * _student_p(together), together, 2))
    is_better = np.zeros(len(drawn[0]), dtype=bool)
    for p, difference, num_tests in tests:
        low = _lower_ends(difference, confidence=gate_confidence(confidence, num_tests))
        exceeds = difference.mean(axis=1) > unseen_loss(difference)
        is_better |= (p + confidence < 1) & (low > 0) & exceeds
    are_non_inferior = np.array([100 * low > -margin for low, margin in zip(lows, margins, strict=True)])
    is_non_inferior = np.asarray(are_non_inferior.all(axis=0))
    return GateOutcomes(is_non_inferior=is_non_inferior, is_shown=np.asarray(is_clear.any(axis=0)), is_better=is_better)


def _drawn_differences(draw: np.random.Generator, benchmark: GateBenchmark, gain: float) -> npt.NDArray[np.float64]:
    """Return the differences of two models on drawn problems, one row a replication."""
    before = draw.uniform(size=(_NUM_REPLICATIONS, benchmark.num_problems))
    after = before
    if gain:
        odds = before / (1 - before) * np.exp(draw.normal(gain, _SPREAD, before.shape))
        after = odds / (1 + odds)
    n = benchmark.num_samples
    return np.asarray((draw.binomial(n, after) - draw.binomial(n, before)) / n)


def _student_p(difference: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    from scipy.special import stdtr

    num = difference.shape[1]
    error = np.maximum(difference.std(axis=1, ddof=1), 1e-12) / math.sqrt(num)
    return np.asarray(2 * stdtr(num - 1, -np.abs(difference.mean(axis=1)) / error))


def _lower_ends(difference: npt.NDArray[np.float64], *, confidence: float) -> npt.NDArray[np.float64]:
    """Return each row's lower end over new problems (B); see `intervals.paired_new_problems_interval`."""
    from scipy.special import ndtri, stdtrit

    num = difference.shape[1]
    t = float(stdtrit(num - 1, 0.5 + confidence / 2))
    mean = difference.mean(axis=1)
    centred = difference - mean[:, None]
    squares = np.maximum((centred**2).sum(axis=1), 1e-12)
    shift = (centred**3).sum(axis=1) / squares * (1 + 2 * t * t) / (6 * num)
    floor = 2 / num * float(ndtri(0.5 + confidence / 2)) / float(ndtri(0.975))
    half = np.maximum(t * np.sqrt(squares / (num - 1) / num), floor)
    return np.asarray(mean + np.minimum(shift, 0) - half)
