"""Say who waits for whom: a wait that lasts is named in the log, with what the other side did last.

A hang is a wait that does not end. Whoever waits for something of another process says so with `waiting`; one thread of
this process looks after all waits, so that a blocked event loop is named, too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from klear_core.errors import reporting

log = logging.getLogger(__name__)

TELL_S = 60.0
"""Seconds after which a wait is named; again after twice that, four times that, and so on. Ours."""
_LOOK_S = 0.25
_LOOP_S = 0.5
"""Seconds between two signs of life of an event loop."""


@dataclass(slots=True, kw_only=True)
class _Wait:
    whom: str
    what: str
    last: Callable[[], str]
    since: float
    tell_at: float


_ids = itertools.count()
_open: dict[int, _Wait] = {}
_lock = threading.Lock()
_watcher: threading.Thread | None = None
_tell_s = TELL_S
_trace: Trace | None = None


def tell_after(seconds: float) -> float:
    """Name waits after so many seconds from now on; return what it was before."""
    global _tell_s  # one watcher a process
    before, _tell_s = _tell_s, seconds
    return before


def now() -> float:
    """Return the time of the event loop. In simulations it runs faster than the clock."""
    return asyncio.get_running_loop().time()


@contextmanager
def waiting(whom: str, what: str, last: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Wait in the block for `whom` to do `what`. `last` says what it did last; it is called only for a log line."""
    began = time.monotonic()
    wait = _Wait(whom=whom, what=what, last=last, since=began, tell_at=began + _tell_s)
    key = next(_ids)
    with _lock:
        _open[key] = wait
    _start_watcher()
    try:
        yield
    finally:
        with _lock:
            _open.pop(key, None)
        ended = time.monotonic()
        if _trace is not None and ended - wait.since >= _SHORTEST_S:
            _trace.add(_WAIT + whom, what, wait.since, ended)


class Silence:
    """Names a wait in which nothing happens, for callers who see progress: after TELL_S, then seldom."""

    def __init__(self) -> None:
        self._tell_at = _tell_s

    @property
    def check_s(self) -> float:
        """Return the longest pause between two checks."""
        return max(_LOOK_S, _tell_s / 4)

    def check(self, silent_s: float, line: Callable[[], str]) -> None:
        """Log the line if nothing has happened for long enough."""
        if silent_s < _tell_s:
            self._tell_at = _tell_s
        elif silent_s >= self._tell_at:
            self._tell_at = 2 * silent_s
            log.warning("nothing has happened for %.0f s: waiting for %s", silent_s, line())


@contextmanager
def loop_watched(what: str) -> Iterator[None]:
    """Name the code that keeps this thread's event loop from running, while the block runs in that loop."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    ended, silence, last_beat = threading.Event(), Silence(), time.monotonic()
    handle: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal last_beat, handle
        last_beat = time.monotonic()
        handle = loop.call_later(_LOOP_S, beat)

    def look() -> None:
        while not ended.wait(_LOOK_S):
            silence.check(
                time.monotonic() - last_beat,
                lambda: f"the driver, whose event loop is busy in {_place_of(thread)}; {what}",
            )

    beat()
    threading.Thread(target=look, name="klear-loop-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if handle is not None:
            handle.cancel()


def _place_of(thread: int) -> str:
    """Return the innermost frames of a thread, those of Klear first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "no code: its thread has ended"
    stack = traceback.extract_stack(frame)
    ours = [f for f in stack if "klear_core" in f.filename] or stack
    return " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(ours[-3:]))


def _start_watcher() -> None:
    global _watcher  # noqa: PLW0603  # one watcher a process
    if _watcher is None or not _watcher.is_alive():  # a forked process has none
        _watcher = threading.Thread(target=_watch, name="klear-waits", daemon=True)
        _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(_LOOK_S)
        looked_at = time.monotonic()
        with _lock:
            due = [wait for wait in _open.values() if looked_at >= wait.tell_at]
        for wait in due:
            waited_s = looked_at - wait.since
            wait.tell_at = wait.since + 2 * max(waited_s, _tell_s)
            log.warning("waiting for %s to %s, for %.0f s%s", wait.whom, wait.what, waited_s, _last_of(wait))


def _last_of(wait: _Wait) -> str:
    try:
        last = wait.last()
    except Exception as error:  # noqa: BLE001  # a line of the log ends no run
        last = f"not known ({type(error).__name__})"
    return f"; last: {last}" if last else ""


@asynccontextmanager
async def progress_watched(count: Callable[[], object], line: Callable[[], str]) -> AsyncIterator[None]:
    """Log `line` while the block runs and `count` returns the same for long."""

    async def look() -> None:
        silence, seen, seen_at = Silence(), count(), time.monotonic()
        while True:
            await asyncio.sleep(silence.check_s)
            if (found := count()) != seen:
                seen, seen_at = found, time.monotonic()
            silence.check(time.monotonic() - seen_at, line)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


# ---- trace ----


TRACE_FILE = "trace.json"
"""Name of the trace in the artifact of an RL stage."""
_SHORTEST_S = 1e-3
"""Shorter waits are left out: no reader sees them, and a long run has very many."""
_WAIT = "wait: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work of one track of a trace, or a wait of the driver, between two times in seconds."""

    track: str
    name: str
    start: float
    end: float

    @property
    def waited_for(self) -> str:
        """Return whom the driver waited for; empty if this is no wait."""
        return self.track.removeprefix(_WAIT) if self.track.startswith(_WAIT) else ""


class Trace:
    """Spans of a run as a Chrome trace (chrome://tracing, Perfetto), one line of JSON each, in a file that grows.

    It only reports: a file that cannot be written ends no run.
    """

    def __init__(self, path: Path) -> None:
        """Continue the file, if it is there, without a line that a kill has cut short: times are of the wall clock."""
        self._lock = threading.Lock()
        self._offset = time.time() - time.monotonic()
        self._file: TextIO | None = None
        with reporting("no trace of this run is kept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            before = [json.dumps(event) for event in _events(path)]
            if path.is_file():
                beside = path.with_suffix(".tmp")
                beside.write_text("[\n" + ",\n".join(before))
                beside.replace(path)
            self._separator = ",\n" if before else ""
            self._file = path.open("a")
            if self._file.tell() == 0:
                self._file.write("[\n")

    def add(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span between two times of the monotonic clock, on a track of its own."""
        us = 1e6
        event = {"name": name, "ph": "X", "pid": track, "tid": track, "ts": round((start + self._offset) * us)}
        line = json.dumps(event | {"dur": round((end - start) * us)})
        with self._lock, reporting("the trace of this run lacks a span", level=logging.DEBUG):
            if self._file is not None:
                self._file.write(self._separator + line)
                self._file.flush()
                self._separator = ",\n"

    def close(self) -> None:
        """Close the list and the file. A killed run leaves the list open, which the format allows."""
        with self._lock, reporting("the trace of this run lacks its end"):
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()


@contextmanager
def traced(path: Path) -> Iterator[Trace]:
    """Keep the spans of the block in a file: waits, and what is added by `span`."""
    global _trace  # a process runs one stage
    before, _trace = _trace, Trace(path)
    try:
        yield _trace
    finally:
        trace, _trace = _trace, before
        trace.close()


def span(track: str, name: str, start: float, end: float) -> None:
    """Add a span of the monotonic clock to the trace, if one is kept."""
    if _trace is not None:
        _trace.add(track, name, start, end)


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a trace, in the order in which they ended; none if there is no file."""
    spans = []
    for event in _events(path):
        start = event["ts"] / 1e6
        spans.append(Span(track=event["tid"], name=event["name"], start=start, end=start + event["dur"] / 1e6))
    return spans


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, without a line that a kill has cut short."""
    for line in path.read_text().splitlines() if path.is_file() else []:
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                yield json.loads(line.rstrip(","))
