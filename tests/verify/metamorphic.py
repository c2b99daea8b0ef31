"""Rewrite real math references into other forms of the same value, and into other values."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import sympy
from latex2sympy2_extended import latex2sympy

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
_WORDY = re.compile(
    r"\\(?:text|mbox|mathrm|operatorname|pm|infty|%|\$|circ|begin|mathbb|overline|dots|ldots|cdots)|[$%_|!;:<>]"
    r"|[A-Z]{2}|(?<![a-z\\])[a-zA-Z]{2,}|^.$"
)
_NO_VALUE = re.compile(
    r"[=,\[\]]|\\(?:le|ge|leq|geq|in|cup|cap|to|approx|int|sum|prod|lim|log|ln|sin|cos|tan|neq|equiv|circ)(?![a-z])"
)


def published_references() -> list[str]:
    """Return the distinct references of the published sets of math problems that are JSON, in order."""
    found: dict[str, None] = {}
    files = {
        "math-deepmath/math_deepmath_deal.jsonl": "ground_truth",
        "bench-math500/test.jsonl": "answer",
        "bench-hmmt25/HMMT-202502.jsonl": "answer",
    }
    for rows, field in files.items():
        for line in (SHARED / rows).read_text(encoding="utf-8").splitlines():
            found[str(json.loads(line)[field]).strip()] = None
    for row in json.loads((SHARED / "math-deepscaler-math/math.json").read_text(encoding="utf-8")):
        found[str(row["answer"]).strip()] = None
    return [text for text in found if text]


def _fullwidth(text: str) -> str:
    return re.sub(r"\d", lambda m: chr(ord(m[0]) + 0xFEE0), text)


def _loose(text: str) -> str:
    return re.sub(r"(?<=[\w)}])([+\-=])(?=[\w(\\])", r" \1 ", text).replace(",", ", ")


TYPESETTING: dict[str, Callable[[str], str]] = {
    "dollars": lambda t: f"${t}$",
    "parentheses of LaTeX": lambda t: rf"\({t}\)",
    "bold": lambda t: rf"\boldsymbol{{{t}}}",
    "colour": lambda t: rf"\color{{red}}{{{t}}}",
    "stars": lambda t: f"**{t}**",
    "box in a box": lambda t: rf"\boxed{{{t}}}",
    "stop": lambda t: f"{t}.",
    "display style": lambda t: rf"\displaystyle {t}",
    "large fractions": lambda t: re.sub(r"\\[dt]?frac(?![a-z])", r"\\dfrac", t),
    "small fractions": lambda t: re.sub(r"\\[dt]?frac(?![a-z])", r"\\tfrac", t),
    "growing brackets": lambda t: t.replace("(", r"\left(").replace(")", r"\right)") if r"\left" not in t else t,
    "zero-width space": lambda t: f"\u200b{t}\u200b",
    "full-width digits": _fullwidth,
    "loose": _loose,
    "minus sign": lambda t: t.replace("-", "\u2212"),
    "thin space": lambda t: rf"\,{t}\;",
}
"""Other spellings of any reference, whatever it says."""


def value_of(reference: str) -> sympy.Expr | None:
    """Return a reference's value if it is one expression in numbers and variables; `i` is the imaginary unit."""
    text = reference.strip("$ .")
    if len(text) > 80 or _WORDY.search(text) or _NO_VALUE.search(text):
        return None
    try:
        value = latex2sympy(text)
    except Exception:  # noqa: BLE001 - the parser has no error class of its own
        return None
    if not isinstance(value, sympy.Expr) or value.has(sympy.Derivative, sympy.Integral, sympy.Function):
        return None
    return value.subs(sympy.Symbol("i"), sympy.I).doit()  # the parser leaves factors of 1


def same_value(value: sympy.Expr) -> Iterator[tuple[str, str]]:
    """Yield other ways to write a value, with their names."""
    forms: dict[str, sympy.Expr | str] = {
        "expanded": sympy.expand(value),
        "factored": sympy.factor(value),
        "common denominator": sympy.together(value),
        "reordered": sympy.latex(value, order="rev-lex"),
        "in-line fractions": re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", sympy.latex(value)),
        "negated twice": rf"-({sympy.latex(-value)})",
    }
    for name, form in forms.items():
        yield name, form if isinstance(form, str) else sympy.latex(form)


def other_values(value: sympy.Expr) -> Iterator[tuple[str, str]]:
    """Yield ways to write other values, with their names."""
    others = {"plus one": value + 1, "negated": -value, "doubled": 2 * value, "conjugate": sympy.conjugate(value)}
    for name, other in others.items():
        if sympy.simplify(other - value) != 0 and not other.has(sympy.conjugate):
            yield name, sympy.latex(other)


def rewritten(references: list[str], seed: int, num: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (class, reference, answer, is right) for `num` references with a value and as many of any kind."""
    rng = random.Random(seed)
    shuffled = rng.sample(references, len(references))
    for text in shuffled[:num]:
        name = rng.choice(sorted(TYPESETTING))
        answer = TYPESETTING[name](text)
        if answer != text:
            yield f"typeset: {name}", text, answer, True
    hard = [text for text in shuffled if re.search(r"\\|[a-z+^]", text)]
    imaginary = [text for text in hard if re.search(r"(?<![a-z\\])i(?![a-z])", text)]
    count = 0
    for text in dict.fromkeys(imaginary + hard):
        value = value_of(text)
        if value is None:
            continue
        for name, answer in rng.sample([*same_value(value)], 2):
            yield f"value: {name}", text, answer, True
        for name, answer in [*other_values(value)][:1]:
            yield f"other: {name}", text, answer, False
        count += 1
        if count == num:
            return
