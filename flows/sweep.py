"""`klear sweep`: restart the crashed runs of a work pool, until Ctrl-C.

It replaces Prefect's automations. They keep heartbeats in the server's memory, so after a server restart they crash
healthy runs and miss dead ones. This process keeps its own clock, and counts silence only while the server answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

import httpx
from prefect import states
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.events.filters import EventFilter
from prefect.exceptions import ObjectNotFound, PrefectException

from flows.sweep_rules import RECENT_S, Change, SeenRun, StateType, Verdict, Watch, verdict_on
from klear_core.errors import ConfigError
from tasks.prefect_client import fail_fast_client

if TYPE_CHECKING:
    from uuid import UUID

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
        self._watch = Watch()
        self._is_greeted = False
        self._trouble = ""

    def sweep(self) -> None:
        """Sweep once. An error ends this sweep only: the next may work, and no other process restarts the runs."""
        try:
            self._try()
        except Exception as e:  # noqa: BLE001  see the docstring; what is no outage is logged with its traceback
            self._watch.forget()
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
            sweep(client, self._pool, self._watch, self._say)

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


def sweep(client: SyncPrefectClient, pool: str, watch: Watch, say: Say) -> None:
    """Check every unfinished or crashed run of the pool once, and change the state of those that need it."""
    runs = _runs_of(client, pool)
    quiet_s = watch.look(runs, now_s=time.monotonic())
    for run in runs:
        verdict = verdict_on(run, quiet_s=quiet_s[run.run_id])
        if verdict is not None:
            _carry_out(client, run, verdict, say)


def _carry_out(client: SyncPrefectClient, run: SeenRun, verdict: Verdict, say: Say) -> None:
    action = f"{run.name} {run.run_id}: {run.state} -> {verdict.state}: {verdict.why}"
    try:
        # Without force the server rejects the change if the run has ended meanwhile. A crashed run has ended already.
        result = client.set_flow_run_state(run.run_id, _state_of(verdict), force=run.state == "CRASHED")
    except (httpx.HTTPStatusError, PrefectException) as e:  # concerns this run only; continue with the others
        say(f"{action}; not done: {type(e).__name__}: {e}")
        return
    refused = (
        "" if result.status == "ACCEPT" else f"; not done, it has ended meanwhile (the server says {result.status})"
    )
    say(action + refused)


def _state_of(verdict: Verdict) -> State[None]:
    make = {
        "CRASHED": states.Crashed,
        "CANCELLED": states.Cancelled,
        "RETRY": states.AwaitingRetry,
        "FAILED": states.Failed,
    }
    return make[verdict.state](message=f"{verdict.why} (klear sweep)")


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
    # Each is a request per run and sweep, and only one of the two decides (see `verdict_on`).
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
