"""`klear sweep`: restart the crashed runs of a work pool, until Ctrl-C.

It replaces Prefect's automations. They keep heartbeats in the server's memory, so after a server restart they crash
healthy runs and miss dead ones. This process keeps its own clock, and counts silence only while the server answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never, cast
from uuid import UUID

import httpx
from prefect import states
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.events.filters import EventFilter
from prefect.exceptions import ObjectNotFound, PrefectException

from klear_core.errors import ConfigError
from tasks.progress import fail_fast_client

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)

EVERY_S = 5.0
_TIMEOUT_S = 10.0
_MAX_RUNS = 200  # the server's limit per page
_HEARTBEATS_SINCE = timedelta(days=1)
_ASKS_TO_WAIT = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)

Say = Callable[[str], None]


def sweep_until_interrupted(pool: str, say: Say) -> None:
    """Sweep a pool every 5 s, through outages of the server and faults of our own."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            "PREFECT_API_URL: not set; it names the server to sweep, for example http://127.0.0.1:4200/api"
        )
    sweeper = Sweeper(pool, say, connect=partial(fail_fast_client, timeout_s=_TIMEOUT_S))
    while True:
        sweeper.sweep()
        time.sleep(EVERY_S)


class Sweeper:
    """Sweeps one pool, and reports when sweeps start to fail, fail for another reason, and succeed again."""

    def __init__(
        self, pool: str, say: Say, *, connect: Callable[[], AbstractContextManager[SyncPrefectClient]]
    ) -> None:
        self._pool = pool
        self._say = say
        self._connect = connect
        self._quiet = QuietTimes()
        self._is_greeted = False
        self._trouble = ""

    def sweep(self) -> None:
        """Sweep once. An error ends this sweep only: the next may work, and no other process restarts the runs."""
        try:
            self._try()
        except Exception as e:  # noqa: BLE001  see the docstring; what is no outage is logged with its traceback
            self._quiet.forget()
            self._report(e)
            return
        if self._trouble:
            self._say("sweeping again")
        self._trouble = ""

    def _try(self) -> None:
        with self._connect() as client:
            if not self._is_greeted:
                self._say(_greeting(client, self._pool))
                self._is_greeted = True
            sweep(client, self._pool, self._quiet, self._say)

    def _report(self, error: Exception) -> None:
        """Report an error, unless it continues the trouble of the sweep before."""
        kind = type(error).__name__
        is_away = is_outage(error)
        trouble = "outage" if is_away else f"{kind}: {error}"  # one outage may show as several kinds of error
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if is_away:
            self._say(f"the server does not answer ({kind}); waiting for it, and no silence counts meanwhile")
        else:
            self._say(
                f"a sweep failed ({kind}), and not for an outage of the server; its traceback follows. Trying again"
            )
            log.error("a sweep of %s failed", self._pool, exc_info=error)


def is_outage(error: Exception) -> bool:
    """Return whether the network or the server failed, as opposed to a request of ours or to our own code."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= httpx.codes.INTERNAL_SERVER_ERROR or status in _ASKS_TO_WAIT
    return isinstance(error, httpx.RequestError)


def sweep(client: SyncPrefectClient, pool: str, quiet: QuietTimes, say: Say) -> None:
    """Check every unfinished or crashed run of the pool once, and change the state of those that need it."""
    runs = _runs_of(client, pool)
    quiet_s = quiet.look(runs, now_s=time.monotonic())
    for run in runs:
        new_state = new_state_of(run, quiet_s=quiet_s[run.run_id])
        if new_state is not None:
            _carry_out(client, run, new_state, say)


def _carry_out(client: SyncPrefectClient, run: SeenRun, new_state: NewState, say: Say) -> None:
    action = f"{run.name} {run.run_id}: {run.state} -> {new_state.state}: {new_state.why}"
    try:
        # Without force the server rejects the change if the run has ended meanwhile. A crashed run has ended already.
        result = client.set_flow_run_state(run.run_id, _state_of(new_state), force=run.state == "CRASHED")
    except (httpx.HTTPStatusError, PrefectException) as e:  # concerns this run only; continue with the others
        say(f"{action}; not done: {type(e).__name__}: {e}")
        return
    refused = (
        "" if result.status == "ACCEPT" else f"; not done, it has ended meanwhile (the server says {result.status})"
    )
    say(action + refused)


def _state_of(new_state: NewState) -> State[None]:
    make = {
        "CRASHED": states.Crashed,
        "CANCELLED": states.Cancelled,
        "RETRY": states.AwaitingRetry,
        "FAILED": states.Failed,
    }
    return make[new_state.state](message=f"{new_state.why} (klear sweep)")


def _greeting(client: SyncPrefectClient, pool: str) -> str:
    try:
        limit = client.read_work_pool(pool).concurrency_limit
    except ObjectNotFound:
        return f"sweeping; there is no work pool {pool!r} yet: prefect work-pool create {pool} --type process"
    if limit is None:
        remedy = f"prefect work-pool set-concurrency-limit {pool} 1"
        return f"sweeping {pool}; it has no limit, so that runs share one machine: {remedy}"
    return f"sweeping {pool}, which runs {limit} at a time"


def _runs_of(client: SyncPrefectClient, pool: str) -> list[SeenRun]:
    recent = {"after_": datetime.now(UTC) - timedelta(seconds=RECENT_S)}
    live = _read(client, pool, {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}})
    crashed = _read(client, pool, {"state": {"type": {"any_": ["CRASHED"]}}, "end_time": recent})
    return [_seen(client, run) for run in (*live, *crashed)]


def _read(client: SyncPrefectClient, pool: str, wanted: dict[str, object]) -> list[FlowRun]:
    # A flow inside another flow is run again by that one, and no worker can restart a run without a deployment.
    own = {"parent_task_run_id": {"is_null_": True}, "deployment_id": {"is_null_": False}}
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(wanted | own),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
        limit=_MAX_RUNS,
    )


def _seen(client: SyncPrefectClient, run: FlowRun) -> SeenRun:
    assert run.state is not None, "the filter asks for states"
    heartbeat: UUID | None = None
    history: tuple[Change, ...] = ()
    # Each is a request per run and sweep, and only one of the two decides (see `new_state_of`).
    if run.state.is_crashed():
        history = _history(client, run.id)
    else:
        heartbeat = _last_heartbeat(client, run.id)
    return SeenRun(
        run_id=run.id,
        name=run.name,
        state=cast("StateType", run.state.type.value),
        state_id=run.state.id,
        state_age_s=(datetime.now(UTC) - run.state.timestamp).total_seconds(),
        heartbeat=heartbeat,
        history=history,
    )


def _history(client: SyncPrefectClient, run_id: UUID) -> tuple[Change, ...]:
    changes = sorted(client.read_flow_run_states(run_id), key=lambda state: state.timestamp)
    return tuple(Change(state=state.type.value, at_s=state.timestamp.timestamp()) for state in changes)


def _last_heartbeat(client: SyncPrefectClient, run_id: UUID) -> UUID | None:
    wanted = {
        "order": "DESC",
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "any_resource": {"id": [f"prefect.flow-run.{run_id}"]},
        "occurred": {"since": datetime.now(UTC) - _HEARTBEATS_SINCE},
    }
    found = client.read_events(EventFilter.model_validate(wanted), limit=1).events
    return found[0].id if found else None


# ---- which runs are dead ----
# Plain Python, without the server.


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
class NewState:
    """The state that a run must get, and the reason."""

    state: Literal["CRASHED", "CANCELLED", "RETRY", "FAILED"]
    why: str


class QuietTimes:
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


def new_state_of(run: SeenRun, *, quiet_s: float) -> NewState | None:
    """Return the state that a run without a change for `quiet_s` must get; None to leave it as it is."""
    patience_s = START_S if run.heartbeat is None else SILENT_S
    match run.state:
        case "PENDING":
            return NewState(state="CRASHED", why=f"not started within {START_S:.0f} s") if quiet_s > START_S else None
        case "RUNNING":
            why = f"no heartbeat for {patience_s:.0f} s"
            return NewState(state="CRASHED", why=why) if quiet_s > patience_s else None
        case "CANCELLING":  # SILENT_S even before the first heartbeat: cancelling needs no imports
            return NewState(state="CANCELLED", why=f"no heartbeat for {SILENT_S:.0f} s") if quiet_s > SILENT_S else None
        case "CRASHED":
            is_due = quiet_s >= SETTLE_S and run.state_age_s < RECENT_S
            return _after_crash(run.history) if is_due else None
        case _:
            assert_never(run.state)


def _after_crash(history: Sequence[Change]) -> NewState:
    attempts = _attempts(history)
    if attempts and any(change.state == "CANCELLING" for change in attempts[-1]):
        return NewState(state="CANCELLED", why="crashed while it was being cancelled")
    num_crashes = _crashes_in_a_row(attempts)
    if num_crashes >= MAX_CRASHES:
        return NewState(state="FAILED", why=f"crashed {num_crashes} times in a row; its log, or the worker's, says why")
    if len(attempts) >= MAX_ATTEMPTS:
        return NewState(
            state="FAILED", why=f"crashed in attempt {len(attempts)}, and {MAX_ATTEMPTS} are allowed; its log says why"
        )
    return NewState(state="RETRY", why=f"retried after a crash, attempt {len(attempts) + 1}")


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
