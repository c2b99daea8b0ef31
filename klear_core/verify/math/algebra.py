"""Compare answers with references by algebra. No other module calls math-verify.

This runs in the main thread of a worker process, under a limit of CPU time. math-verify turns its own time limits into
a silent "wrong", so they are switched off; what exceeds our limit is reported as such, as a `Fault`.
"""

from __future__ import annotations

import logging
import math
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy.logic.boolalg import BooleanAtom

from klear_core.types import Outcome, Verdict
from klear_core.verify.client import Fault, MathTask
from klear_core.verify.math.variables import with_cases_apart

logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning that its time limits, which ours replace, are off


# Known units were removed before. What math-verify would still drop as a unit is a variable: `n+2m` is not `n+2`.
_WITHOUT_UNITS = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
_BOXED_EXTRACTION = (LatexExtractionConfig(normalization_config=_WITHOUT_UNITS), ExprExtractionConfig())
Parsed = tuple[object, ...]
"""The result of math-verify's parser: sympy's form and the text itself; empty if the text cannot be parsed."""
# CPU seconds beyond its limit after which a comparison is killed, if the alarm could not stop one long C call.
_BACKSTOP_CPU_S = 2
_MAX_DETAIL = 500
_INFINITIES = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
_EVALUATED = (sympy.Pow, sympy.Mul, sympy.Add, sympy.log, sympy.exp)
_INDEXED_I = re.compile(r"(?<![\\a-zA-Z])I\s*_")
_FORMULA = re.compile(r"\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_POWER_T = re.compile(r"\^\s*(?:\{\s*T\s*\}|T)")
_PRIME = re.compile(r"\^\s*(?:\{\s*(?P<several>\\prime(?:\s*\\prime)*)\s*\}|\\prime(?![a-zA-Z]))")
_PRIMES_BEFORE_INDEX = re.compile(r"('+)\s*(_(?:\w|\{\w+\}))")
_PRIMED = re.compile(r"([a-zA-Z])(?:_(\w|\{\w+\}))?\s*('+)")  # without braces an index is one character


class CpuLimitError(BaseException):
    """Raised when the CPU time is used up. It is not an Exception, so `except Exception` in sympy lets it pass."""


def compare(task: MathTask) -> Verdict | Fault:
    """Return the verdict on one answer, or on the references alone (`is_trial`).

    A Fault if the comparison needs more CPU time or memory than the settings allow, or raises.
    """
    try:
        with cpu_limit(task.cfg.cpu_s):
            return _try_references(task) if task.is_trial else _compare(task)
    except CpuLimitError:
        return Fault(kind="out_of_cpu", detail=f"not compared within {task.cfg.cpu_s:g} s of CPU time")
    except MemoryError:
        return Fault(kind="out_of_memory", detail=f"not compared within {task.cfg.memory_mb} MB")
    except (OverflowError, RecursionError) as e:
        detail = f"a number too large to compute: {e}"
    except Exception as e:  # noqa: BLE001  sympy and math-verify raise anything over odd expressions
        detail = f"not compared: {type(e).__name__}: {e}"
    return Fault(kind="broke_off", detail=detail[:_MAX_DETAIL])


def _try_references(task: MathTask) -> Verdict:
    """Make all comparisons of a trial; BAD_REFERENCE if no reference can be read."""
    is_readable = False
    for pairs in _parsed_alternatives(task):
        is_readable |= all(gold for gold, _ in pairs)
        for gold, answer in pairs:
            if gold and answer:
                _are_equal(gold, answer, task.cfg.rounding_digits)
    if is_readable:
        return Verdict(outcome=Outcome.SCORED, score=1.0, detail="the reference can be read as math")
    detail = f"no reference can be read as math: {task.golds[0][:200]!r}"
    return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)


def _compare(task: MathTask) -> Verdict:
    digits = task.cfg.rounding_digits
    is_answer_readable = False
    for pairs in _parsed_alternatives(task):
        is_answer_readable |= all(answer for _, answer in pairs)
        if all(gold and answer and _are_equal(gold, answer, digits) for gold, answer in pairs):
            detail = f"answer {task.answer} equals the reference, by algebra"
            return Verdict(outcome=Outcome.SCORED, score=1.0, detail=detail)
    found = "does not equal the reference, by algebra" if is_answer_readable else "cannot be read as math"
    return Verdict(outcome=Outcome.SCORED, score=0.0, detail=f"answer {task.answer} {found}")


def _parsed_alternatives(task: MathTask) -> list[list[tuple[Parsed, Parsed]]]:
    """Return the (gold, answer) pairs of each alternative, all parsed: the answer is right if one is equal in full."""
    if task.comparison is None:
        return [[_parse_unboxed(*with_cases_apart(gold, task.unboxed, is_sentence=True))] for gold in task.golds]
    alternatives: list[list[tuple[Parsed, Parsed]]] = []
    for pairs in task.comparison.alternatives:
        apart = [with_cases_apart(pair.gold, pair.answer) for pair in pairs]
        alternatives.append([(_parse_boxed(gold), _parse_boxed(answer)) for gold, answer in apart])
    return alternatives


def _parse_unboxed(gold: str, sentence: str) -> tuple[Parsed, Parsed]:
    # In formulas alone: the apostrophe of a word is no prime.
    sentence = _FORMULA.sub(lambda m: _with_powers_and_primes(m[0]), sentence)
    return _parse_boxed(gold), tuple(map(_plain_symbols, parse(sentence, parsing_timeout=None)))


# All samples of a problem are compared with the same references.
@lru_cache(maxsize=4096)
def _parse_boxed(text: str) -> Parsed:
    text = _INDEXED_I.sub("ω_", text)  # the parser would read `I_1` as the imaginary unit
    text = _with_powers_and_primes(text)
    return tuple(map(_plain_symbols, parse(rf"\boxed{{{text}}}", _BOXED_EXTRACTION, parsing_timeout=None)))


def _with_powers_and_primes(text: str) -> str:
    """Return the text with other spellings for powers `T` and primes, which the parser would drop."""
    if r"\begin" not in text:  # it transposes matrices
        text = _POWER_T.sub("^{t}", text)
    # Primes make another name: `f'(x)` is not `f(x)`.
    text = _PRIME.sub(lambda m: "'" * (m["several"] or m[0]).count("prime"), text)
    text = _PRIMES_BEFORE_INDEX.sub(r"\2\1", text)
    return _PRIMED.sub(lambda m: f"{m[1]}_{{{(m[2] or '').strip('{}')}{'p' * len(m[3])}}}", text)


def _plain_symbols(value: object) -> object:
    """Return the value with the imaginary unit for `i`, and with real symbols.

    The parser makes `i` a real symbol in `6+3i` and one that is not real in `3(2+i)`, and others likewise.
    """
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
        return value
    evaluated = _with_infinities_evaluated(value)
    real = {
        symbol: sympy.Symbol(symbol.name, real=True)
        for symbol in evaluated.free_symbols
        if isinstance(symbol, sympy.Symbol)
    }
    real |= {symbol: sympy.I for symbol in real if symbol.name == "i"}
    changed = {symbol: new for symbol, new in real.items() if symbol != new}
    plain = evaluated.subs(changed) if changed else evaluated
    # An equation that holds for no real number would be the same as any other such equation.
    return evaluated if isinstance(plain, BooleanAtom) else plain


def _with_infinities_evaluated(value: sympy.Basic) -> sympy.Basic:
    """Return the value with `oo` for `2**oo`: sympy deduces facts of an unevaluated one in random order, also zero.

    Sums, limits and integrals with infinite bounds stay as they are.
    """
    if not value.has(*_INFINITIES):
        return value
    return value.replace(
        lambda e: isinstance(e, _EVALUATED) and any(argument in _INFINITIES for argument in e.args),
        lambda e: e.func(*e.args),
    )


def _are_equal(gold: Parsed, answer: Parsed, digits: int) -> bool:
    """Compare numbers exactly or by significant digits, sets also as sets, and everything else by math-verify."""
    if _is_decided(gold[0]) or _is_decided(answer[0]):
        return _same_equation(gold[0], answer[0])
    if _is_number(gold[0]) and _is_number(answer[0]):
        is_exact = not _has(sympy.Float, gold[0], answer[0])
        exact_gold, exact_answer = _exactly(gold[0]), _exactly(answer[0])
        if not is_exact:
            return _decimals_agree(exact_gold, exact_answer, digits)
        # An unevaluated expression is a percentage from prose, which math-verify accepts in both readings.
        if exact_gold.is_Rational and exact_answer.is_Rational and not _has(sympy.UnevaluatedExpr, gold[0], answer[0]):
            return bool(exact_gold == exact_answer)
    if _is_complex_number(gold[0]) and _is_complex_number(answer[0]):
        return _close(gold[0], answer[0], digits if _has(sympy.Float, gold[0], answer[0]) else 25)
    if verify(list(gold), list(answer), float_rounding=digits, timeout_seconds=None):
        return True
    return isinstance(gold[0], sympy.Set) and isinstance(answer[0], sympy.Set) and _same_set(gold[0], answer[0])


def _is_decided(value: object) -> bool:
    """Return whether sympy makes a truth value of an equation: `x^2+1=0` and `x^2+2=0` both hold for no real number."""
    if not (isinstance(value, sympy.Eq) and isinstance(value.lhs, sympy.Expr) and isinstance(value.rhs, sympy.Expr)):
        return False  # an equation with a set on one side is compared as math-verify does
    return isinstance(value.func(*value.args), BooleanAtom)


def _same_equation(gold: object, answer: object) -> bool:
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return False
    return bool(sympy.simplify((gold.lhs - gold.rhs) - (answer.lhs - answer.rhs)) == 0)


def _is_number(value: object) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number) and value.is_extended_real is not False


def _is_complex_number(value: object) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number) and value.has(sympy.I)


def _has(kind: type, *values: object) -> bool:
    return any(value.has(kind) for value in values)  # type: ignore[attr-defined]


def _exactly(value: object) -> sympy.Expr:
    """Return the number with each decimal as the fraction that was written; a float keeps 15 digits of a longer one."""
    exact = value.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e)))  # type: ignore[attr-defined]
    return exact.doit()


def _decimals_agree(gold: sympy.Expr, answer: sympy.Expr, digits: int) -> bool:
    if not (gold.is_Integer or answer.is_Integer):
        return _close(gold, answer, digits)
    if gold == answer:
        return True
    # An integer equals only itself. Only against an irrational number is it compared numerically, to 25 digits.
    is_exact = gold.is_Rational and answer.is_Rational
    return not is_exact and _close(gold, answer, 25)


def _close(gold: sympy.Expr, answer: sympy.Expr, digits: int) -> bool:
    gold_value, answer_value = sympy.N(gold, 50), sympy.N(answer, 50)
    if not (gold_value.is_finite and answer_value.is_finite):
        return False
    # The tolerance is relative. The factor above 1 keeps a difference that equals the limit within it.
    tolerance = sympy.Float(10, 50) ** -digits * (1 + sympy.Float("1e-9", 50))
    return bool(abs(gold_value - answer_value) <= tolerance * max(abs(gold_value), abs(answer_value)))


def _same_set(gold: sympy.Set, answer: sympy.Set) -> bool:
    """Return whether two sets of numbers are equal once simplified: the reals without 4 are two intervals."""
    if gold.free_symbols or answer.free_symbols:
        return False
    return bool(sympy.simplify(gold.doit()) == sympy.simplify(answer.doit()))


@contextmanager
def cpu_limit(cpu_s: float) -> Iterator[None]:
    """Raise CpuLimitError in the body after `cpu_s` of this process's CPU time; time without a core does not count.

    Main thread only. If the body stays inside one C call for `_BACKSTOP_CPU_S` more, SIGXCPU kills the process.
    """
    is_armed = True

    def on_alarm(_signum: int, _frame: FrameType | None) -> None:
        if is_armed:
            raise CpuLimitError

    signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.2)  # repeated, because a bare `except` may swallow one
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s) + _BACKSTOP_CPU_S, hard))
    try:
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
