"""Decide which runs are dead and which state `klear sweep` gives them. Plain Python; `flows.sweep` calls the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never
from uuid import UUID

SILENT_S = 90.0
"""Seconds without a heartbeat after which a run is dead: three times the interval that prefect.yaml sets."""
START_S = 600.0
"""Seconds in Pending, or in Running before the first heartbeat, after which a run is dead; imports take up to 60."""
SETTLE_S = 15.0
"""Seconds between a crash and the retry, because the crashed process may still be exiting."""
RECENT_S = 24 * 3600.0
"""Seconds after which a crash is not retried, so that a sweeper started on an old server leaves old runs alone."""
MAX_ATTEMPTS = 10
"""Executions of one flow run, however they ended."""
MAX_CRASHES = 3
"""Crashes in a row after which a run is Failed. An attempt longer than LONG_S made progress and ends the row."""
LONG_S = 3600.0
_MAX_STEP_S = 15.0
"""Most seconds between two sweeps that count as silence, because a sweeper that was suspended saw no heartbeats."""

StateType: TypeAlias = Literal["PENDING", "RUNNING", "CANCELLING", "CRASHED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One entry in a run's history of states."""

    state: str
    """Prefect's state type, such as RUNNING."""
    at_s: float
    """Unix time in seconds, by the server's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """An unfinished or crashed flow run as the server shows it."""

    run_id: UUID
    name: str
    state: StateType
    state_id: UUID
    state_age_s: float
    heartbeat: UUID | None
    """Id of the last heartbeat event; None if there was none."""
    history: tuple[Change, ...] = ()
    """State changes, oldest first; read for crashed runs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state that a run must get, and the reason."""

    state: Literal["CRASHED", "CANCELLED", "RETRY", "FAILED"]
    why: str


class Watch:
    """Measures how long each run has not changed, counting only time in which the server answered."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._heard_s = 0.0
        self._unchanged: dict[UUID, tuple[tuple[UUID, UUID | None], float]] = {}

    def look(self, runs: Iterable[SeenRun], *, now_s: float) -> dict[UUID, float]:
        """Return, for each run, the seconds since its state or heartbeat last changed."""
        if self._last_s is not None:
            self._heard_s += min(now_s - self._last_s, _MAX_STEP_S)
        self._last_s = now_s
        before, self._unchanged = self._unchanged, {}  # runs that are not seen any more are dropped
        for run in runs:
            mark = (run.state_id, run.heartbeat)
            old_mark, since_s = before.get(run.run_id, (mark, self._heard_s))
            self._unchanged[run.run_id] = (mark, since_s if old_mark == mark else self._heard_s)
        return {run_id: self._heard_s - since_s for run_id, (_, since_s) in self._unchanged.items()}

    def forget(self) -> None:
        """Restart all measurements, because the server did not answer and heartbeats may have been lost."""
        self._last_s = None
        self._unchanged.clear()


def verdict_on(run: SeenRun, *, quiet_s: float) -> Verdict | None:
    """Return the state that a run without a change for `quiet_s` must get; None to leave it as it is."""
    patience_s = START_S if run.heartbeat is None else SILENT_S
    match run.state:
        case "PENDING":
            return Verdict(state="CRASHED", why=f"not started within {START_S:.0f} s") if quiet_s > START_S else None
        case "RUNNING":
            why = f"no heartbeat for {patience_s:.0f} s"
            return Verdict(state="CRASHED", why=why) if quiet_s > patience_s else None
        case "CANCELLING":  # SILENT_S even before the first heartbeat: cancelling needs no imports
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
        return Verdict(
            state="FAILED", why=f"crashed in attempt {len(attempts)}, and {MAX_ATTEMPTS} are allowed; its log says why"
        )
    return Verdict(state="RETRY", why=f"retried after a crash, attempt {len(attempts) + 1}")


def _attempts(history: Sequence[Change]) -> list[list[Change]]:
    """Split a history at its PENDING states: each begins an attempt, even if its process never reached RUNNING."""
    attempts: list[list[Change]] = []
    was_pending = False
    for change in history:
        is_pending = change.state == "PENDING"  # consecutive in one attempt: Pending, then InfrastructurePending
        if is_pending and not was_pending:
            attempts.append([])
        if attempts:
            attempts[-1].append(change)
        was_pending = is_pending
    return attempts


def _crashes_in_a_row(attempts: Sequence[Sequence[Change]]) -> int:
    """Count the last attempts in a row that crashed within LONG_S of running. A crash reported twice counts once."""
    num = 0
    for attempt in reversed(attempts):
        ended_s = next((c.at_s for c in attempt if c.state == "CRASHED"), None)
        # An attempt that never ran lasted 0 s.
        started_s = next((c.at_s for c in attempt if c.state == "RUNNING"), ended_s)
        if ended_s is None or started_s is None or ended_s - started_s > LONG_S:
            break
        num += 1
    return num
