from __future__ import annotations

import pytest

from klear_core.scores import duration, number, percent, points, shares, visible


@pytest.mark.parametrize(
    "counts", [[1, 1, 1], [8141, 7, 3], [16264, 2], [0, 5], [1, 0, 0, 0], [333, 333, 334], [20477, 3], [1, 99999]]
)
def test_printed_shares_add_up_to_a_hundred(counts: list[int]) -> None:
    assert round(sum(float(s.removesuffix("\u00a0%")) for s in shares(counts)), 6) == 100


def test_a_count_above_zero_is_not_printed_as_zero() -> None:
    assert shares([16264, 2]) == ["99.99\u00a0%", "0.01\u00a0%"]


def test_nothing_has_no_shares() -> None:
    assert shares([0, 0]) == ["\u2013", "\u2013"]


def test_zero_has_no_sign() -> None:
    assert percent(-0.0001) == "0.0\u00a0%"
    assert points(-0.0001) == "+0.0"


def test_differences_always_have_a_sign() -> None:
    assert (points(0.307), points(-0.05)) == ("+30.7", "\u22125.0")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (8141, "8,141"),
        (3.0, "3"),
        (0.29391, "0.2939"),
        (1234.5, "1,234"),
        (0.00008, "8.0e\u22125"),
        (-2.5, "\u22122.5"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.42, "0.4 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (11_520, "3 h 12 min")],
)
def test_durations_read_naturally(seconds: float, shown: str) -> None:
    assert duration(seconds).replace("\u00a0", " ") == shown


def test_invisible_characters_become_visible() -> None:
    assert visible("a\u202eb\x00\n\tc\u200d\U000e0001") == "a\\u202eb\\x00\n\tc\\u200d\\U000e0001"


def test_a_lone_surrogate_can_be_written() -> None:
    visible("\ud800").encode()
