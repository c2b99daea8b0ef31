"""Normalisation of math answers: facts that hold for every text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klear_core.config.verify import MathConfig
from klear_core.verify.math.answer_text import _SYNONYMS, MathAnswer, normalise
from klear_core.verify.math.numbers import as_text, plain_number
from klear_core.verify.math.rules import decide, usable_references
from klear_core.verify.math.spelling import COMMANDS, Rewrite, plain_characters, rewritten

COMMAND_PIECES = r"""
\frac \dfrac \left \right \text \mathrm \boldsymbol \color \sqrt \circ \le \leqslant \ne \not \in \mathbb \over \{ \} \\ \, \; \quad
{a} {12} ** __ $$ <sup> </sup> <b> ... ~~ => -> <= 1,000 0.1(6) 3\frac12 \textbf{x} \boxed{3} ½ ² ₃ √ π ∞ ≤
"""
PIECES = (*(chr(i) for i in range(32, 127)), *COMMAND_PIECES.split())
MATH_TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize("row", [*COMMANDS, *_SYNONYMS], ids=lambda row: row[1].pattern[:50])
@settings(max_examples=30)  # of each of the rows
@given(data=st.data())
def test_a_row_that_is_skipped_could_not_have_matched(row: Rewrite, data: st.DataObject) -> None:
    needs, pattern, _ = row
    text = data.draw(st.from_regex(pattern))
    found = pattern.search(text)
    assert found is not None
    assert any(need in found[0] for need in needs)


@given(MATH_TEXTS)
def test_rows_are_skipped_without_a_difference(text: str) -> None:
    expected = text
    for _, pattern, replacement in COMMANDS:
        expected = pattern.sub(replacement, expected)
    assert rewritten(text, COMMANDS) == expected


@given(MATH_TEXTS)
def test_what_is_normalised_has_no_spaces_at_its_ends_nor_two_in_a_row(text: str) -> None:
    for found in (normalise(text), normalise(text, commas_separate=True)):
        assert found == found.strip()
        assert "  " not in found


@given(st.text(st.characters(max_codepoint=127, exclude_characters="&"), max_size=30))
def test_no_character_of_ascii_is_another(text: str) -> None:
    assert plain_characters(text) == text.strip("\x00 \t\r\n")


@given(st.integers(-(10**18) + 1, 10**18 - 1), st.integers(0, 10**6))
def test_a_plain_number_is_its_own_spelling_and_thousands_separators_are_none(whole: int, decimals: int) -> None:
    assert normalise(f"{whole}.{decimals}") == f"{whole}.{decimals}"
    assert normalise(f"{whole:,}") == str(whole)
    assert normalise(rf"$\mathbf{{{whole}}}$") == str(whole)


@given(st.integers(0, 9**9), st.integers(1, 99), st.integers(1, 99))
def test_fractions_in_all_commands_are_one(a: int, b: int, c: int) -> None:
    forms = {normalise(rf"{a}+\{command}{{{b}}}{{{c}}}") for command in ("frac", "dfrac", "tfrac", "cfrac")}
    assert len(forms) == 1
    assert all(r"\frac" in form for form in forms)


@given(st.fractions())
def test_a_number_written_as_latex_is_read_back(value: Fraction) -> None:
    number = plain_number(as_text(value))
    assert number is not None
    assert (number.value, number.is_rounded) == (value, False)


@given(
    st.integers(1, 10**6),
    st.sampled_from(
        [("km", "m", 1000), ("m", "cm", 100), ("kg", "g", 1000), ("hours", "minutes", 60), ("cm", "mm", 10)]
    ),
    st.sampled_from(["{} {}", r"{}\text{{ {}}}", r"{}\,\mathrm{{{}}}"]),
)
def test_a_quantity_is_the_same_in_other_units_and_no_other_is(
    num: int, units: tuple[str, str, int], form: str
) -> None:
    large, small, factor = units
    (gold,) = usable_references((form.format(num, large),), MathConfig())

    def verdict(value: int) -> object:
        return decide((gold,), MathAnswer(texts=(form.format(value, small),), is_unboxed=False), MathConfig())

    assert verdict(num * factor) is True
    assert verdict(num * factor + 1) is False
    assert verdict(num) is False
