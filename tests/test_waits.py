"""What a trace keeps; who is named when nothing happens is in tests/cluster/test_stalls.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from klear_core.errors import DataError
from klear_core.waits import TRACE_FILE, Span, Trace, read_trace, span, traced


def test_a_trace_is_read_as_it_was_written_but_for_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    file = tmp_path / TRACE_FILE
    assert read_trace(file) == []
    trace = Trace(file)
    now = time.monotonic()
    trace.add("learner", "start", now, now + 2)
    trace.close()
    with file.open("a") as end:
        end.write('{"name": "sam')
    (span,) = read_trace(file)
    assert (span.track, span.name, round(span.end - span.start, 3), span.waited_for) == ("learner", "start", 2, "")


def test_a_trace_that_was_closed_is_json_also_if_a_kill_had_cut_it_before(tmp_path: Path) -> None:
    file = tmp_path / TRACE_FILE
    for _attempt in range(2):
        trace = Trace(file)
        trace.add("learner", "start", 0, 2)
        trace.add("driver", "collect", 2, 3)
        trace.close()
    assert [event["name"] for event in json.loads(file.read_text())] == ["start", "collect"] * 2
    file.write_text(file.read_text().removesuffix("\n]\n") + ',\n{"name": "sam')
    Trace(file).close()
    assert len(json.loads(file.read_text())) == 4
    file.write_text("")
    Trace(file).close()
    assert json.loads(file.read_text()) == []


def test_a_span_says_whom_the_driver_waited_for() -> None:
    assert Span(track="wait: the engines", name="load", start=0, end=1).waited_for == "the engines"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's file on a disk without room")
def test_a_trace_on_a_full_disk_ends_no_run_and_hides_no_error(tmp_path: Path) -> None:
    file = tmp_path / TRACE_FILE
    file.symlink_to("/dev/full")
    with traced(file):
        span("driver", "collect", 0.0, 1.0)

    def fail() -> None:
        with traced(file):
            span("driver", "collect", 0.0, 1.0)
            raise DataError("row 3")

    with pytest.raises(DataError, match="row 3"):
        fail()
    with traced(file / "no folder"):
        span("driver", "collect", 0.0, 1.0)
