"""How the core speaks of its progress: numbers by step, and how far it is. Who listens is the caller's business."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

METRICS_FILE = "metrics.jsonl"
"""In the artifact of every stage that has metrics."""


class Telemetry(Protocol):
    """Receives what a running stage has to say. Implementations must be cheap: calls come from hot loops."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Numbers at one step, named `stage/noun/stat` (letters, digits, `_`, `-`, `.`, `/`)."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units are finished; `note` is a few words for a person."""


class NullTelemetry:
    """Listens to nothing; for tests and scripts."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Ignore."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Ignore."""


class MetricsFile:
    """Metrics by step as JSON lines; what was written for a step and later ones is replaced when that step comes again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, step: int) -> None:
        """Forget rows at or after `step`: a stage resumes from a checkpoint older than its last log line."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if -1 < _step_of(line) < step]
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        beside.replace(self.path)

    def append(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Add one row, without the numbers that are not finite: JSON has no name for them."""
        row = {"step": step} | finite(metrics)
        with self.path.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")


def skipped_note(num_skipped: int) -> str:
    """The warning for the report of a stage whose updates were not all applied."""
    return f"{num_skipped} updates were skipped, for their loss or gradient was not finite; their rows are in skipped/, and in no statistic"


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics file; a half-written last line, left by a kill, is skipped.

    A step may lack any metric. None is such a lack too: earlier versions wrote null where a number was not finite.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=lambda _name: None) for line in lines if _step_of(line) >= 0]


def _step_of(line: str) -> int:
    """The row's step; -1 for a line that a kill left unfinished."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return -1
