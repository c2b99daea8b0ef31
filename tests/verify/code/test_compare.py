# ruff: noqa: E501, RUF001
"""Comparators of outputs and of call results, by hand."""

import pytest

from klear_core.config.verify import CodeConfig
from klear_core.verify.code.program import same_output, same_value
from klear_core.verify.sandbox.jail import WireError, plain_value

TOKENS, WHITESPACE, EXACT, DECIMAL = (CodeConfig(compare=c) for c in ("tokens", "whitespace", "exact", "decimal"))


@pytest.mark.parametrize(
    ("expected", "output", "tokens", "whitespace", "exact", "decimal"),
    [
        ("1 2\n", "1 2", True, True, True, True),
        ("1 2", "1 2\n\n", True, True, True, True),
        ("1\n2", "1 \n2", True, True, False, True),
        ("1 2", "1  2", True, True, False, True),
        ("1\n2", "1\n\n2", True, True, False, False),
        ("1 2", "1\n2", False, False, False, False),
        ("1\n2", "2\n1", False, False, False, False),
        ("1", "1.0", True, False, False, True),
        ("0.5", "0.50", True, False, False, True),
        ("0.333333333", "0.3333333334", True, False, False, False),
        ("0.3333", "0.3334", False, False, False, False),
        ("1e-12", "2e-12", True, False, False, False),
        ("123456789012", "123456789013", False, False, False, False),
        ("1000000", "1000000.5", False, False, False, False),
        ("YES", "NO", False, False, False, False),
        ("YES", "yes", False, False, False, False),
        ("abc def", "xyz uvw", False, False, False, False),
        ("4", "garbage", False, False, False, False),
        ("5", "5 5 5", False, False, False, False),
        ("", "", True, True, True, True),
        ("3", "", False, False, False, False),
        ("3", "0_3", False, False, False, True),
        ("3", "３", False, False, False, True),
        ("nan", "nan", True, True, True, True),
        ("1.0", "nan", False, False, False, False),
        ("1.0", "inf", False, False, False, False),
        ("1.5", "1e999", False, False, False, False),
        ("-0.0", "0.0", True, False, False, True),
        ("007", "7", False, False, False, True),
    ],
)
def test_outputs(expected: str, output: str, tokens: bool, whitespace: bool, exact: bool, decimal: bool) -> None:
    assert [same_output(expected, output, cfg) for cfg in (TOKENS, WHITESPACE, EXACT, DECIMAL)] == [
        tokens,
        whitespace,
        exact,
        decimal,
    ]


PI = "3.1415926535897932384626433832795028841971693993751058209749445923078164062862089986280348253421170679"


@pytest.mark.parametrize(
    ("expected", "output", "is_same"),
    [
        (PI, PI, True),
        (PI, PI[:-1] + "8", True),  # one unit in the last place
        (PI, PI[:-1] + "5", False),
        (PI, PI[:17] + "0" * 85, False),
        (PI, "3.141592653589793", False),
        (PI, PI[:60], False),
        (PI, PI + "8", True),
        ("-" + PI, "-" + PI, True),
        ("-" + PI, PI, False),
        (f"{PI}e10", f"{PI}E+10", True),
        (f"{PI}e10", "3.14159265358979e10", False),
        ("24.63441361516795872523", "24.634413615168", True),  # a long double's digits, of AtCoder
        ("0.666666666666666666666666666667", "0.6666666666666666", True),
        ("24.63441361516795872523", "24.6345", False),
        (f"{0.1:.50f}", "0.1", True),  # a double's digits in full
        (f"{0.1:.50f}", "0.10001", False),
        ("0." + "1" * 60, "1e999", False),
    ],
)
def test_digits_beyond_a_float_are_compared_as_digits(expected: str, output: str, is_same: bool) -> None:
    assert same_output(expected, output, TOKENS) is is_same


def test_the_order_of_lines_counts_unless_the_problem_says_otherwise() -> None:
    assert not same_output("1\n2", "2\n1", TOKENS)
    assert same_output("1\n2", "2\n1", TOKENS, is_order_free=True)
    assert not same_output("1\n2", "2\n2", TOKENS, is_order_free=True)


@pytest.mark.parametrize(
    ("expected", "value", "is_same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (3, "3", False),
        (True, True, True),
        (True, 1, True),
        (0.1, 0.1 + 1e-12, True),
        (1.0, 1, True),
        (3, 3.0000001, False),
        (10**20, 10**20 + 1, False),
        (1.5, 10**400, False),
        ([1, [2, 3]], [1, [2, 3]], True),
        ([1, 2], [2, 1], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, None, True),
        (None, 0, False),
        ("a", "a ", False),
        ([], None, False),
    ],
)
def test_values(expected: object, value: object, is_same: bool) -> None:
    assert same_value(expected, value, TOKENS) is is_same


def test_order_free_values_are_compared_as_bags() -> None:
    assert same_value([[1, 2], [3]], [[3], [1, 2]], TOKENS, is_order_free=True)
    assert not same_value([1, 1, 2], [1, 2, 2], TOKENS, is_order_free=True)


@pytest.mark.parametrize(
    ("frame", "value"),
    [
        (b'{"value": 3}', 3),
        (b'{"value": ["t", [1, ["l", [2]]]]}', [1, [2]]),
        (b'{"value": ["d", [[1, "a"], ["b", null]]]}', {"1": "a", "b": None}),
        (b'{"value": ["n", "ListNode", [1, ["n", "ListNode", [2, null]]]]}', [1, 2]),
    ],
)
def test_results_arrive_as_plain_json(frame: bytes, value: object) -> None:
    assert plain_value(frame) == value


@pytest.mark.parametrize(
    ("frame", "value"),
    [
        (b'{"value": ["t", [1, ["l", [2]]]]}', [1, [2]]),
        (b'{"value": ["l", [["t", [1]]]]}', None),
        (b'{"value": ["i", [1]]}', None),
        (b'{"value": ["d", [["a", 1]]]}', {"a": 1}),
        (b'{"value": ["d", [[1, "a"]]]}', None),
    ],
)
def test_by_livecodebenchs_rule_only_the_whole_result_may_be_a_tuple(frame: bytes, value: object) -> None:
    if value is not None:
        assert plain_value(frame, is_exact=True) == value
    else:
        with pytest.raises(WireError, match="the result has a"):
            plain_value(frame, is_exact=True)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xff\xff", b"[]", b'{"value": ["s", [1]]}', b'{"value": ["h", 0]}', b'{"value": {"a": 1}}', b'{"error": "E", "text": "t"}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_result_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        plain_value(frame)
