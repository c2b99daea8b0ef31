"""`klear sweep`: restart the crashed runs of a work pool, until Ctrl-C.

It replaces Prefect's automations. They keep heartbeats in the server's memory, so after a server restart they crash
healthy runs and miss dead ones. This process keeps its own clock, and counts silence only while the server answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import httpx
from prefect import states
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.events.filters import EventFilter
from prefect.exceptions import ObjectNotFound, PrefectException

from flows.sweep_rules import RECENT_S, Change, SeenRun, StateType, Verdict, Watch, verdict_on
from klear_core.errors import ConfigError
from tasks.prefect_client import impatient_client

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

EVERY_S = 5.0
_TIMEOUT_S = 10.0
_MAX_RUNS = 200  # the server's limit per page
_HEARTBEATS_SINCE = timedelta(days=1)

Say = Callable[[str], None]


def sweep_until_interrupted(pool: str, say: Say) -> None:
    """Sweep a pool every 5 s; report an outage of the server once and wait until it is over."""
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            "PREFECT_API_URL: not set; it names the server to sweep, for example http://127.0.0.1:4200/api"
        )
    watch = Watch()
    is_greeted = is_away = False
    while True:
        try:
            with impatient_client(timeout_s=_TIMEOUT_S) as client:
                if not is_greeted:
                    say(_greeting(client, pool))
                    is_greeted = True
                sweep(client, pool, watch, say)
            if is_away:
                say("the server answers again")
            is_away = False
        except Exception as e:  # noqa: BLE001  the next sweep may work, and no other process restarts the runs
            watch.forget()
            if not is_away:
                say(f"the server does not answer ({type(e).__name__}); waiting for it, and no silence counts meanwhile")
            is_away = True
        time.sleep(EVERY_S)


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
        return f"sweeping {pool}; it has no limit, so that runs share one machine: prefect work-pool set-concurrency-limit {pool} 1"
    return f"sweeping {pool}, which runs {limit} at a time"


def _runs_of(client: SyncPrefectClient, pool: str) -> list[SeenRun]:
    recent = {"after_": datetime.now(UTC) - timedelta(seconds=RECENT_S)}
    live = _read(client, pool, {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}})
    crashed = _read(client, pool, {"state": {"type": {"any_": ["CRASHED"]}}, "end_time": recent})
    return [_seen(client, run) for run in (*live, *crashed)]


def _read(client: SyncPrefectClient, pool: str, wanted: dict[str, object]) -> list[FlowRun]:
    own = {"parent_task_run_id": {"is_null_": True}, "deployment_id": {"is_null_": False}}
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(wanted | own),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
        limit=_MAX_RUNS,
    )


def _seen(client: SyncPrefectClient, run: FlowRun) -> SeenRun:
    assert run.state is not None, "the filter asks for states"
    is_crashed = run.state.is_crashed()
    return SeenRun(
        run_id=run.id,
        name=run.name,
        state=cast("StateType", run.state.type.value),
        state_id=run.state.id,
        state_age_s=(datetime.now(UTC) - run.state.timestamp).total_seconds(),
        heartbeat=None if is_crashed else _last_heartbeat(client, run.id),
        history=_history(client, run.id) if is_crashed else (),
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
