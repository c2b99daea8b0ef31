"""Format numbers for people, and spell out hidden characters of model output."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from klear_core.scores import Range, TemplateSpread

NBSP = "\u00a0"
NONE = "\u2013"
"""En dash in place of a missing value."""
MINUS = "\u2212"
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})  # Cf has the bidirectional overrides, which reorder text


def percent(fraction: float, decimals: int = 1) -> str:
    """Format a fraction in percent: 0.671 as `67.1 %`."""
    return f"{_signless_zero(fraction * 100, decimals)}{NBSP}%".replace("-", MINUS)


def points(difference: float) -> str:
    """Format a difference of fractions in percentage points, always signed: 0.307 as `+30.7`."""
    value = _signless_zero(difference * 100, 1)
    return value.replace("-", MINUS) if value.startswith("-") else f"+{value}"


def range_text(ends: Range) -> str:
    """Format an interval of a difference in percentage points: `+27.9 to +33.6`."""
    return f"{points(ends.low)} to {points(ends.high)}"


def spread_text(spread: TemplateSpread) -> str:
    """Format the spread of a score over templates: `61.0 to 64.2, standard deviation 1.6 points`."""
    return f"{100 * spread.least:.1f} to {100 * spread.most:.1f}, standard deviation {100 * spread.std:.1f} points"


def p_value(p: float) -> str:
    """Format a p-value with its relation: `p = 0.031`, `p < 0.0001`."""
    if p < 1e-4:
        return "p < 0.0001"
    if p < 0.01:
        return f"p = {p:.4f}"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def number(value: float) -> str:
    """Format counts in full with separators, other numbers with four significant digits."""
    # 1e15 is the largest power of ten below 2^53, up to which a float is an exact integer.
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace("-", MINUS)
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", MINUS)
    text = f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}".replace("e-0", "e-")
    return text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """Format seconds: `0.4 s`, `48 s`, `2 min 05 s`, `3 h 12 min`."""
    if seconds < 59.5:
        return f"{seconds:.1f}{NBSP}s" if seconds < 9.95 else f"{seconds:.0f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest:02d}{NBSP}s"
    return f"{minutes // 60}{NBSP}h {minutes % 60:02d}{NBSP}min"


def shares(counts: Sequence[int]) -> list[str]:
    """Format counts in percent of their sum, rounded so that they add up to exactly 100 (largest remainder method).

    Uses one to four decimals, as many as needed so that no count above zero is printed as zero.
    """
    total = sum(counts)
    if total == 0:
        return [NONE for _ in counts]
    for decimals in (1, 2, 3, 4):
        parts = _apportioned(counts, total, 100 * 10**decimals)
        if all(part or not count for part, count in zip(parts, counts, strict=True)):
            break
    return [f"{part / 10**decimals:.{decimals}f}{NBSP}%" for part in parts]


def _apportioned(counts: Sequence[int], total: int, units: int) -> list[int]:
    """Distribute `units` in proportion to the counts: integer parts first, then one each to the largest remainders."""
    parts = [count * units // total for count in counts]
    # A tie goes to the earlier count, so that the same counts are always printed alike.
    by_remainder = sorted(range(len(counts)), key=lambda i: (-(counts[i] * units % total), i))
    for i in by_remainder[: units - sum(parts)]:
        parts[i] += 1
    return parts


def visible(text: str) -> str:
    """Spell out control characters in model output (`\\u202e`), so that none can hide or reorder text."""
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN_CATEGORIES or char in "\n\t":
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _signless_zero(value: float, decimals: int) -> str:
    """Format with fixed decimals, and zero without a minus sign."""
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text
