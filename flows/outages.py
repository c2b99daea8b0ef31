"""Survive what ends a run from outside: kills, and outages of the Prefect server."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

from klear_core.artifacts.files import file_lock, is_locked
from klear_core.errors import reporting
from tasks.progress import deliver_summaries, fail_fast_client

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds between two requests to the server."""
CANCEL_GRACE_S = 60.0
"""Longer than Prefect's own cancellation, which takes about 45 s: up to 10 s to notice, then a kill after 30 s."""
PATIENCE_S = 3600.0
"""Most seconds that a run which has ended waits for a server that does not answer."""
_TIMEOUT_S = 5.0


class CancelWatch:
    """Sends SIGTERM to this process if its run stays Cancelling: after an outage Prefect 3.8's worker misses that."""

    def __init__(
        self, is_cancelling: Callable[[], bool], *, grace_s: float = CANCEL_GRACE_S, every_s: float = CHECK_EVERY_S
    ) -> None:
        self.has_fired = False
        self._is_cancelling, self._grace_s, self._every_s = is_cancelling, grace_s, every_s
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch from a separate thread while the block runs."""
        thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()

    def _watch(self) -> None:
        since_s: float | None = None
        while not self._is_over.wait(self._every_s):
            if not self._is_cancelling():
                since_s = None  # also during an outage: the worker gets its full time after it
            elif since_s is None:
                since_s = time.monotonic()
            elif time.monotonic() - since_s >= self._grace_s:
                log.warning(
                    "the run was cancelled %.0f s ago and its worker has not ended it: ending it here", self._grace_s
                )
                self.has_fired = True
                # Prefect's handler raises TerminationSignal in the main thread, as when a worker cancels the run.
                os.kill(os.getpid(), signal.SIGTERM)
                return


def is_cancelling(run_id: UUID) -> bool:
    """Return whether the server says that this flow run is being cancelled; False if it does not answer."""
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            state = client.read_flow_run(run_id).state
    except Exception as e:  # noqa: BLE001  the next request may succeed
        log.debug("the state of this run could not be read: %s: %s", type(e).__name__, e)
        return False
    return state is not None and state.is_cancelling()


@contextmanager
def server_awaited() -> Iterator[None]:
    """Wait for the server when the block returns or raises an Exception, but not after an interrupt or termination."""
    try:
        yield
    except Exception:
        _catch_up()
        raise
    _catch_up()


def _catch_up() -> None:
    with reporting("the Prefect server lacks summaries of this run"):
        await_server(ask_health)
        deliver_summaries()  # those that a stage could not send during the outage


def await_server(
    ask: Callable[[], Exception | None], *, patience_s: float = PATIENCE_S, every_s: float = CHECK_EVERY_S
) -> None:
    """Wait until the server answers, so that it gets the run's final state at once; after `patience_s` warn and return.

    Prefect's client backs off exponentially: after minutes of outage, an ended run would look dead for minutes more.
    """
    error = ask()
    if error is None:
        return
    log.warning(
        "the Prefect server does not answer (%s); waiting for it, to tell it how this run ended", type(error).__name__
    )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(every_s)
        if ask() is None:
            return
    log.warning("the Prefect server has not answered for %.0f s; going on without it", patience_s)


def ask_health() -> Exception | None:
    """Return the error of a health check of Prefect's API, or None if it answers."""
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            return client.api_healthcheck()
    except Exception as e:  # noqa: BLE001  reported by the caller
        return e


# ---- killed runs of a user without a Prefect server ----
# Each run locks a record, which the next one checks.
# A killed run cannot report its end, so Prefect's database in the workspace would show it as Running for ever.


_records: dict[int, tuple[Path, ExitStack]] = {}
"""The record of the run that each thread of this process began last."""


def record_run(run_id: UUID) -> None:
    """Write a record of a run of this process; it is removed unless the process is killed.

    It is locked until the process ends or the thread begins another run, because Prefect gets a run's final state only
    after the run.
    """
    record = _folder() / str(run_id)
    before, held = _records.get(threading.get_ident(), (None, ExitStack()))
    if record == before:
        return
    held.close()
    held.enter_context(
        file_lock(record, on_wait=lambda who: log.info("waiting for %s, which runs the same flow run", who))
    )
    held.callback(record.unlink, missing_ok=True)  # first in, last out: the record goes while it is still locked
    if before is None:
        atexit.register(held.close)
    _records[threading.get_ident()] = record, held


def close_killed_runs() -> None:
    """Set runs to Crashed whose record exists but whose process does not. Needs a server on the same database."""
    killed = killed_runs(_folder())
    if not killed:
        return
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.client.schemas.objects import State, StateType
    from prefect.states import Crashed

    unfinished = {"state": {"type": {"any_": [StateType.RUNNING, StateType.PENDING]}}}
    of_killed = {"id": {"any_": [run_id for run_id, _ in killed]}}
    state: State[None] = Crashed(message="killed; the same command goes on from there")
    with get_client(sync_client=True) as client:
        flow_runs = FlowRunFilter.model_validate(of_killed)
        for task in client.read_task_runs(
            flow_run_filter=flow_runs, task_run_filter=TaskRunFilter.model_validate(unfinished)
        ):
            client.set_task_run_state(task.id, state, force=True)
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(of_killed | unfinished)):
            client.set_flow_run_state(run.id, state, force=True)
            log.info("run %s was killed: Crashed in Prefect's database too", run.name)
    # Last: if this command is killed before, the next one finds the records and does it all again.
    for _, record in killed:
        record.unlink(missing_ok=True)


def killed_runs(folder: Path) -> list[tuple[UUID, Path]]:
    """Return the runs whose process is gone, each with its record."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    # NFS keeps a file that was removed while it was open under another name: .nfs and a number.
    records = [file for file in files if not file.name.startswith(".")]
    return [(UUID(record.name), record) for record in records if not is_locked(record)]


def _folder() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "klear-runs"
