"""Report progress: numbers by step to a receiver that the caller chooses, and a heartbeat of this process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in the artifact of every stage that has metrics."""


class Telemetry(Protocol):
    """Receives metrics and progress from a running stage. Implementations must be cheap: calls come from hot loops."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record numbers at one step, named `stage/noun/stat` (letters, digits, `_`, `-`, `.`, `/`)."""

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record more numbers of a step that may be over; those that were logged of it and of later steps stay."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units are finished; `note` is a few words for a person."""


class NullTelemetry:
    """Ignores everything; for tests and scripts."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Ignore."""

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Ignore."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Ignore."""


SILENT: Telemetry = NullTelemetry()
"""The default of whoever calls a stage as a library function."""


class MetricsFile:
    """Metrics by step as JSON lines. Rows of a step and all later ones are replaced when that step is repeated."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, step: int) -> None:
        """Delete rows at or after `step`: a stage resumes from a checkpoint older than its last log line."""
        if not self.path.exists():
            return
        # A half-written line, whose step is -1, goes as well.
        kept = [line for line in self.path.read_text().splitlines() if -1 < _step_of(line) < step]
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(self.path)

    def append(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one row, without numbers that are not finite: JSON cannot express them."""
        row = {"step": step} | finite(metrics)
        with self.path.open("a+b") as f:  # reads anywhere, and writes at the end
            if f.seek(0, os.SEEK_END) > 0:
                f.seek(-1, os.SEEK_END)
                # A full disk or a kill may have left a line without its end, which this row must not continue.
                if f.read(1) != b"\n":
                    f.write(b"\n")
            f.write(f"{json.dumps(row, allow_nan=False)}\n".encode())


def skipped_note(num_skipped: int) -> str:
    """Return the warning for the report of a stage that skipped some of its updates."""
    return (
        f"{num_skipped} updates were skipped, for their loss or gradient was not finite; "
        "their rows are in skipped/, and in no statistic"
    )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a metrics file, without a half-written last line left by a kill.

    A step may lack any metric. A value of None means the same: earlier versions wrote null for a number that was not
    finite.
    """
    if not path.exists():
        return []
    return [row for line in path.read_text().splitlines() if (row := parse_row(line))]


def parse_row(line: str | bytes) -> dict[str, float | None]:
    """Return a row of a metrics file; empty for a line that a kill left unfinished."""
    try:
        row: dict[str, float | None] = json.loads(line, parse_constant=lambda _name: None)
        return row if int(row["step"]) >= 0 else {}  # type: ignore[arg-type]
    except (json.JSONDecodeError, KeyError, TypeError):
        return {}


def _step_of(line: str) -> int:
    """Return the row's step; -1 for a line that a kill left unfinished."""
    row = parse_row(line)
    return int(row["step"] or 0) if row else -1


# ---- progress ----
# Count what this process has done, so that a learner's driver can tell a slow rank from one that is stuck.


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Count of what a rank has done since it started. The driver only looks whether it has changed."""

    count: int = 0
    latest: str = "nothing yet"
    """The last thing done, for messages."""


_count = 0
_latest = Heartbeat().latest


def made_progress(what: str) -> None:
    """Count one more thing done: a micro-batch, a weight, a part of a file. Cheap; any thread may call it."""
    global _count, _latest  # noqa: PLW0603  # a process runs one rank
    _count += 1  # two threads at once may count one thing, which the driver sees as a change all the same
    _latest = what


def heartbeat() -> Heartbeat:
    """Return what this process has done so far."""
    return Heartbeat(count=_count, latest=_latest)
