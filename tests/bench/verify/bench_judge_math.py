"""Math verdicts per second: our pool, bare math-verify in one process a core, and math-verify once per fresh process.

The same pairs on all sides, none of which the text rules can decide, so that every verdict is algebra.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time

from klear_core.config.verify import VerifyConfig
from klear_core.types import Difficulty, Domain, MathReference, Problem
from klear_core.verify import JudgePool

NUM_PAIRS, NUM_FRESH = 400, 8
_SHAPES = (
    (r"\frac{{{0}}}{{{1}}}", r"\frac{{{2}}}{{{3}}}"),
    (r"{0}\sqrt{{2}}", r"\sqrt{{{4}}}"),
    (r"x^2+{0}x+{1}", r"{1}+{0}x+x^{{2}}"),
    (r"({0},{1})", r"({0},{1}.0)"),
    (r"{0}", r"{0}.0"),
)


def measure() -> list[dict[str, object]]:
    """Verdicts a second of the three, and how many of the pool's verdicts are right (all pairs are equal)."""
    pairs = [_pair(i) for i in range(NUM_PAIRS)]
    fresh_rate = _fresh(pairs[:NUM_FRESH])
    bare_rate = max(_bare() for _ in range(2))
    pool_rate, num_right = max(_pool(pairs) for _ in range(2))
    versions = {
        "math-verify": importlib.metadata.version("math-verify"),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    entries = [
        ("judge_math/verdicts_per_s/pool", pool_rate, "verdicts/s", "-", True),
        ("judge_math/verdicts_per_s/bare", bare_rate, "verdicts/s", "-", True),
        ("judge_math/verdicts_per_s/fresh", fresh_rate, "verdicts/s", "-", True),
        ("judge_math/pool_over_fresh/ratio", pool_rate / fresh_rate, "times", ">= 10", pool_rate >= 10 * fresh_rate),
        ("judge_math/pool_over_bare/ratio", pool_rate / bare_rate, "times", ">= 0.8", pool_rate >= 0.8 * bare_rate),
        ("judge_math/verdicts/right", num_right / NUM_PAIRS, "of all", "= 1", num_right == NUM_PAIRS),
    ]
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _pair(i: int) -> tuple[str, str]:
    gold, answer = _SHAPES[i % len(_SHAPES)]
    a, b = 3 + i, 5 + 2 * i
    numbers = (a, b, 7 * a, 7 * b, 2 * a * a)
    return gold.format(*numbers), answer.format(*numbers)


def _fresh(pairs: list[tuple[str, str]]) -> float:
    started = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    for gold, answer in pairs:
        running.append(subprocess.Popen([sys.executable, __file__, gold, answer]))
        if len(running) == (os.cpu_count() or 1):
            assert running.pop(0).wait() == 0, (gold, answer)
    for process in running:
        assert process.wait() == 0
    return len(pairs) / (time.perf_counter() - started)


def _bare() -> float:
    """One process a core, each timing its share once math-verify is warm."""
    cores = os.cpu_count() or 1
    shares = [
        subprocess.Popen([sys.executable, __file__, "share", str(i), str(cores)], stdout=subprocess.PIPE, text=True)
        for i in range(cores)
    ]
    elapsed = [float(share.communicate()[0]) for share in shares]
    return NUM_PAIRS / max(elapsed)


def _time_share(first: int, step: int) -> float:
    pairs = [_pair(i) for i in range(first, NUM_PAIRS, step)]
    _count_equal(pairs[:8])
    started = time.perf_counter()
    assert _count_equal(pairs) == len(pairs)
    return time.perf_counter() - started


def _count_equal(pairs: list[tuple[str, str]]) -> int:
    from math_verify import parse, verify

    return sum(verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}")) for gold, answer in pairs)


def _pool(pairs: list[tuple[str, str]]) -> tuple[float, int]:
    problems = [
        Problem(
            problem_id=str(i),
            source="bench",
            domain=Domain.MATH,
            question="",
            reference=MathReference(answers=(gold,)),
            difficulty=Difficulty.EASY,
        )
        for i, (gold, _) in enumerate(pairs)
    ]
    responses = [rf"</think>\boxed{{{answer}}}" for _, answer in pairs]
    with JudgePool(VerifyConfig()) as pool:
        for future in [pool.submit(p, r) for p, r in zip(problems[:16], responses[:16], strict=True)]:
            future.result()
        started = time.perf_counter()
        verdicts = [f.result() for f in [pool.submit(p, r) for p, r in zip(problems, responses, strict=True)]]
        elapsed = time.perf_counter() - started
    return len(pairs) / elapsed, sum(v.score == 1.0 for v in verdicts)


if __name__ == "__main__":
    if sys.argv[1] == "share":
        print(_time_share(int(sys.argv[2]), int(sys.argv[3])))
    else:
        assert _count_equal([(sys.argv[1], sys.argv[2])]) == 1
