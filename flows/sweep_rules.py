"""Rules of `klear sweep`: which runs are dead, and what becomes of them. Plain Python; the server is in `flows.sweep`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never
from uuid import UUID

SILENT_S = 90.0
"""A run is dead after this long without a heartbeat: three times the interval that prefect.yaml sets."""
START_S = 600.0
"""A run must send its first heartbeat this long after its process was asked for; importing everything takes a minute at worst."""
SETTLE_S = 15.0
"""A crashed run's process may still be ending; it is retried after this long."""
RECENT_S = 24 * 3600.0
"""Older crashes are history: a sweeper that is started on an old server retries none of them."""
MAX_ATTEMPTS = 10
"""Executions of one flow run, whatever ended them."""
MAX_CRASHES = 3
"""Crashes in a row after which a run is Failed. An attempt that ran for longer than LONG_S made progress, and begins a new row."""
LONG_S = 3600.0
_MAX_STEP_S = 15.0
"""Time between two sweeps that counts as silence; a sweeper that was stopped itself has not listened."""

StateType: TypeAlias = Literal["PENDING", "RUNNING", "CANCELLING", "CRASHED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry in a run's history of states."""

    state: str
    """Prefect's state type, such as RUNNING."""
    at_s: float
    """Seconds on the server's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """An unfinished or crashed flow run as the server shows it."""

    run_id: UUID
    name: str
    state: StateType
    state_id: UUID
    state_age_s: float
    heartbeat: UUID | None
    """The last heartbeat's id; None if there was none."""
    history: tuple[Change, ...] = ()
    """Oldest first; read for crashed runs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state that a run should get, and why."""

    state: Literal["CRASHED", "CANCELLED", "RETRY", "FAILED"]
    why: str


class Watch:
    """Measures how long each run has shown no change, counting only time in which the server answered."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._heard_s = 0.0
        self._unchanged: dict[UUID, tuple[tuple[UUID, UUID | None], float]] = {}

    def look(self, runs: Iterable[SeenRun], *, now_s: float) -> dict[UUID, float]:
        """Return, for each run, the seconds since its state or heartbeat last changed."""
        if self._last_s is not None:
            self._heard_s += min(now_s - self._last_s, _MAX_STEP_S)
        self._last_s = now_s
        before, self._unchanged = self._unchanged, {}
        for run in runs:
            mark = (run.state_id, run.heartbeat)
            old_mark, since_s = before.get(run.run_id, (mark, self._heard_s))
            self._unchanged[run.run_id] = (mark, since_s if old_mark == mark else self._heard_s)
        return {run_id: self._heard_s - since_s for run_id, (_, since_s) in self._unchanged.items()}

    def forget(self) -> None:
        """Start all measurements again, because the server did not answer and heartbeats may have been lost."""
        self._last_s = None
        self._unchanged.clear()


def verdict_on(run: SeenRun, *, quiet_s: float) -> Verdict | None:
    """Return what must become of a run that has shown no change for `quiet_s`; None to leave it alone."""
    patience_s = START_S if run.heartbeat is None else SILENT_S
    match run.state:
        case "PENDING":
            return Verdict(state="CRASHED", why=f"not started within {START_S:.0f} s") if quiet_s > START_S else None
        case "RUNNING":
            return Verdict(state="CRASHED", why=f"no heartbeat for {patience_s:.0f} s") if quiet_s > patience_s else None
        case "CANCELLING":
            return Verdict(state="CANCELLED", why=f"no heartbeat for {SILENT_S:.0f} s") if quiet_s > SILENT_S else None
        case "CRASHED":
            is_due = quiet_s >= SETTLE_S and run.state_age_s < RECENT_S
            return _after_crash(run.history) if is_due else None
        case _:
            assert_never(run.state)


def _after_crash(history: Sequence[Change]) -> Verdict:
    attempts = _attempts(history)
    if attempts and any(change.state == "CANCELLING" for change in attempts[-1]):
        return Verdict(state="CANCELLED", why="crashed while it was being cancelled")
    num_crashes = _crashes_in_a_row(attempts)
    if num_crashes >= MAX_CRASHES:
        return Verdict(state="FAILED", why=f"crashed {num_crashes} times in a row; its log, or the worker's, says why")
    if len(attempts) >= MAX_ATTEMPTS:
        return Verdict(state="FAILED", why=f"crashed in attempt {len(attempts)}, and {MAX_ATTEMPTS} are allowed; its log says why")
    return Verdict(state="RETRY", why=f"retried after a crash, attempt {len(attempts) + 1}")


def _attempts(history: Sequence[Change]) -> list[list[Change]]:
    """Split a history at its PENDING states: each begins an attempt, also one whose process never got as far as RUNNING."""
    attempts: list[list[Change]] = []
    was_pending = False
    for change in history:
        is_pending = change.state == "PENDING"  # one attempt passes through several of them: Pending, InfrastructurePending
        if is_pending and not was_pending:
            attempts.append([])
        if attempts:
            attempts[-1].append(change)
        was_pending = is_pending
    return attempts


def _crashes_in_a_row(attempts: Sequence[Sequence[Change]]) -> int:
    """Count the last attempts that crashed before they had run for long. A crash reported twice is one."""
    num = 0
    for attempt in reversed(attempts):
        ended_s = next((c.at_s for c in attempt if c.state == "CRASHED"), None)
        started_s = next((c.at_s for c in attempt if c.state == "RUNNING"), ended_s)
        if ended_s is None or started_s is None or ended_s - started_s > LONG_S:
            break
        num += 1
    return num
