"""The limit against servers that are simulated: no network, no clock."""

from __future__ import annotations

import pytest

from klear_core.generate.http_engine import ConcurrencyLimit


def make_limit(minimum: int = 8, maximum: int = 1024) -> ConcurrencyLimit:
    return ConcurrencyLimit(minimum=minimum, maximum=maximum, window_s=1.0, now=0.0)


def run(
    limit: ConcurrencyLimit, tokens_per_s: dict[int, float] | float, windows: int, *, capacity: int = 10**6
) -> list[int]:
    """Run windows on a server that gives each request 10 tokens/s up to a knee, and refuses requests above `capacity`."""
    limits: list[int] = []
    for window in range(1, windows + 1):
        now = float(window)
        if limit.value > capacity:
            limit.refuse(num_served=capacity, sent_at=now, now=now)
        knee = tokens_per_s
        assert isinstance(knee, float)
        served = min(limit.value, capacity)
        # beyond the knee the server thrashes: every further request costs half of what it would have given
        limit.count_tokens(round(10 * served if served <= knee else 10 * (knee - 0.5 * (served - knee))))
        if limit.is_window_over(now):
            limit.end_window(now, is_full=True, is_settled=True)
        limits.append(limit.value)
    return limits


def test_the_limit_doubles_while_throughput_does() -> None:
    # every limit for two windows: one to settle, one to measure
    assert run(make_limit(), 1e9, windows=13) == [16, 16, 32, 32, 64, 64, 128, 128, 256, 256, 512, 512, 1024]


@pytest.mark.parametrize("knee", [20.0, 100.0, 300.0])
def test_a_server_that_slows_down_is_kept_near_its_best(knee: float) -> None:
    limits = run(make_limit(), knee, windows=400)[200:]
    assert sum(limits) / len(limits) == pytest.approx(knee, rel=0.2)


def test_a_server_that_refuses_is_kept_at_what_it_serves() -> None:
    limits = run(make_limit(), 1e9, windows=200, capacity=100)[20:]
    assert min(limits) >= 95
    assert sum(limit == 100 for limit in limits) > 0.8 * len(limits)


def test_refusals_of_requests_sent_before_the_cut_count_once() -> None:
    limit = make_limit()
    run(limit, 1e9, windows=7)
    assert limit.value == 128
    for _ in range(50):
        limit.refuse(num_served=0, sent_at=7.0, now=8.0)
    assert limit.value == 89  # 0.7 of it, once


def test_the_limit_stays_between_its_bounds() -> None:
    limit = make_limit(minimum=4, maximum=10)
    run(limit, 1e9, windows=10)
    assert limit.value == 10
    for i in range(20):
        limit.refuse(num_served=0, sent_at=100.0 + i, now=100.0 + i)
    assert limit.value == 4


def test_windows_without_demand_or_first_tokens_decide_nothing() -> None:
    limit = make_limit()
    for window in range(1, 9):
        limit.count_tokens(1000)
        limit.end_window(float(window), is_full=window % 2 == 0, is_settled=window % 2 == 1)
    assert limit.value == 8


def test_a_server_that_comes_back_is_tried_from_the_start() -> None:
    limit = make_limit()
    run(limit, 1e9, windows=6)
    limit.restart(7.0)
    assert limit.value == 8
