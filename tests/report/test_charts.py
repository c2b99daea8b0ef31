from __future__ import annotations

import pytest

from klear_core.report.charts import (
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    WIDTH,
    Block,
    Series,
    line_chart,
    nice_ticks,
    sparkline,
    timeline,
)
from klear_core.rl.interfaces import STEP
from klear_core.scores import NBSP
from klear_core.waits import Span


def series(*values: float | None) -> Series:
    return Series(name="rl/x/mean", steps=tuple(range(1, len(values) + 1)), values=values)


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 97, [0, 25, 50, 75, 100]),
        (-0.5, 2.1, [-1, 0, 1, 2, 3]),
        (60, 98, [60, 70, 80, 90, 100]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, marks: list[float]) -> None:
    assert nice_ticks(low, high) == marks


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9, 1e12])
def test_a_constant_has_an_axis_too(value: float) -> None:
    chart = line_chart("x", [("", series(value, value, value))])
    assert chart is not None
    assert len({t.label for t in chart.y_ticks}) == len(chart.y_ticks)


def test_the_line_goes_from_edge_to_edge() -> None:
    chart = line_chart("x", [("", series(0.0, 1.0))])
    assert chart is not None
    assert chart.lines[0].raw == f"M{LEFT} {HEIGHT - 24}L{WIDTH - RIGHT} 10"


def test_what_is_no_number_breaks_the_line() -> None:
    chart = line_chart("x", [("", series(1.0, 2.0, None, 3.0, 4.0))])
    assert chart is not None
    assert chart.lines[0].raw.count("M") == 2


def test_a_lonely_point_is_a_dot() -> None:
    chart = line_chart("x", [("", series(1.0, None, 2.0))])
    assert chart is not None
    assert len(chart.lines[0].dots) == 2


def test_a_metric_without_a_number_is_not_drawn() -> None:
    assert line_chart("x", [("", series(None, None))]) is None


def test_shares_are_shown_in_percent() -> None:
    chart = line_chart("x", [("", series(0.25, 0.5))], is_share=True)
    assert chart is not None
    assert (chart.lines[0].first, chart.lines[0].last) == ("25\u00a0%", "50\u00a0%")


def test_many_steps_stay_few_points() -> None:
    chart = line_chart("x", [("", series(*(float(i % 7) for i in range(100_000))))])
    assert chart is not None
    assert chart.lines[0].raw.count("L") < MAX_POINTS


def test_noise_is_smoothed_and_a_smooth_line_is_not() -> None:
    noisy = line_chart("x", [("", series(*(float(i % 2) for i in range(60))))])
    smooth = line_chart("x", [("", series(*(float(i) for i in range(60))))])
    assert noisy is not None
    assert smooth is not None
    assert noisy.lines[0].smooth
    assert not smooth.lines[0].smooth


def test_an_empty_series_has_no_sparkline() -> None:
    assert sparkline(series(None)) == ""


def span(track: str, name: str, start: float, end: float) -> Span:
    return Span(track=track, name=name, start=start, end=end)


def test_a_timeline_shows_who_works_and_for_whom_the_driver_waits() -> None:
    """Two steps of ten seconds: six of sampling, in which the second engine is done after three, and four of learning."""
    spans = [
        span("rollout actor 0", "sample", 80, 90),
        span("wait: the learner", "start", 0, 90),
    ]  # before the first step
    for start in (100, 110):
        spans += [
            span("driver", "sample", start, start + 6),
            span("driver", "learn", start + 6, start + 10),
            span("rollout actor 0", "sample", start, start + 6),
            span("rollout actor 1", "sample", start, start + 3),
            span("learner", STEP, start + 6, start + 10),
            span("wait: the engines", "load the weights of version 1", start + 9, start + 10),
            span("wait: the learner", "do a step", start + 6, start + 6.02),  # 0.04 s in all reads as none
        ]
    shown = timeline(spans)
    assert shown is not None
    assert (shown.num_steps, shown.seconds) == (2, f"20{NBSP}s")
    assert [(track.name, track.busy) for track in shown.tracks] == [
        ("driver", ""),
        ("learner", f"40.0{NBSP}%"),
        ("rollout actor 0", f"60.0{NBSP}%"),
        ("rollout actor 1", f"30.0{NBSP}%"),
    ]
    learner = shown.tracks[1]
    assert learner.blocks == tuple(Block(kind="updates", left=left, width=20) for left in (30, 80))
    assert shown.waits == (("the engines", f"2.0{NBSP}s"),)


def test_a_timeline_has_the_last_steps_alone_and_blocks_without_a_gap_are_one() -> None:
    steps = [span("driver", "sample", 10 * i, 10 * i + 10) for i in range(5)]
    shown = timeline(steps)
    assert shown is not None
    assert (shown.num_steps, shown.seconds) == (3, f"30{NBSP}s")
    assert shown.tracks[0].blocks == (Block(kind="sampling", left=0, width=100),)


def test_a_trace_without_a_step_has_no_timeline() -> None:
    assert timeline([span("learner", "start", 0, 10)]) is None
