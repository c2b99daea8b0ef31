"""Define the actor that runs one learner rank, and what it reports; imports no Ray."""

from __future__ import annotations

import logging
import os
import pickle
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from klear_core.config.train import TrainRuntime
from klear_core.metrics import NullTelemetry
from klear_core.progress import Progress, progress

if TYPE_CHECKING:
    from klear_core.train.ranks import Body

LOGGER = "klear_core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A call of `Telemetry.log`, or of `Telemetry.add`."""

    metrics: dict[str, float]
    step: int
    is_added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A call of `Telemetry.progress`."""

    done: int
    total: int
    note: str


Report = Logged | Progressed | logging.LogRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Everything a rank reports in one answer to the driver."""

    items: list[Report]
    progress: Progress


class Outbox:
    """Telemetry and log queue of a rank, which keeps everything until the driver takes it. Thread-safe."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Keep a log record, which `QueueHandler` has made picklable."""
        self._reports.append(record)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics; see `Telemetry.log`."""
        self._reports.append(Logged(metrics=dict(metrics), step=step))

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep metrics of an earlier step; see `Telemetry.add`."""
        self._reports.append(Logged(metrics=dict(metrics), step=step, is_added=True))

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Keep progress; see `Telemetry.progress`."""
        self._reports.append(Progressed(done=done, total=total, note=note))

    def take(self) -> list[Report]:
        """Return everything kept, and forget it."""
        # As many as there are now: other threads may append meanwhile, and those stay for the next call.
        return [self._reports.popleft() for _ in range(len(self._reports))]


class RankActor:
    """Run one learner rank. `take_reports` runs on a thread of its own, while another call works."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._exit = ExitStack()  # never closed: the process group lasts as long as the actor

    def join(self, runtime: TrainRuntime, rank: int, init_method: str, level: int) -> None:
        """Join the process group of all ranks; keep log records from `level` on, for the driver."""
        from klear_core.train.world import join_world

        logger = logging.getLogger(LOGGER)
        # The other ranks log what rank 0 logs; only their warnings may be about something of their own.
        logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
        logger.addHandler(QueueHandler(self._outbox))  # type: ignore[arg-type]
        self._host = urlsplit(init_method).hostname or ""  # of rank 0
        self._world = self._exit.enter_context(join_world(runtime, rank=rank, init_method=init_method))

    def run(self, body: Body[Any]) -> Any:
        """Run `body` to its end and return its result; None on ranks above 0, whose telemetry is dropped."""
        is_first = self._world.rank == 0
        try:
            value = body(self._world, self._outbox if is_first else NullTelemetry())
        except Exception as error:  # noqa: BLE001  # raised again, in a form that can be sent to the driver
            raise _portable(error, self._world.rank) from None
        return value if is_first else None

    def take_reports(self) -> Reports:
        """Return telemetry and log records since the last call, and how much the rank has done."""
        return Reports(items=self._outbox.take(), progress=progress())

    def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()


def _portable(error: Exception, rank: int) -> Exception:
    """Return the error with its traceback as a note, because a traceback cannot be pickled.

    If the error cannot be pickled either, return a RuntimeError in its place.
    """
    trace = f"On rank {rank}:\n{''.join(traceback.format_exception(error))}"
    error.add_note(trace)
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  # an exception's class can raise anything when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
    return error
