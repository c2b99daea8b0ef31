"""Mark killed runs as Crashed where the user has no Prefect server: each run locks a record, which the next one checks.

A killed run cannot report its end, so Prefect's database in the workspace would show it as Running for ever.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

from klear_core.artifacts.files import file_lock

log = logging.getLogger(__name__)

_records: dict[Path, ExitStack] = {}


def record_run(run_id: UUID) -> None:
    """Write a record of a run of this process; it is locked until the process ends, and removed unless it is killed."""
    record = _folder() / str(run_id)
    if record in _records:
        return
    held = _records[record] = ExitStack()
    held.enter_context(
        file_lock(record, on_wait=lambda who: log.info("waiting for %s, which runs the same flow run", who))
    )
    held.callback(record.unlink, missing_ok=True)  # first in, last out: the record goes while it is still locked
    atexit.register(held.close)  # at exit, because Prefect gets the run's final state only after the run


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
    return [(UUID(record.name), record) for record in records if not _is_held(record)]


def _is_held(record: Path) -> bool:
    try:
        fd = os.open(record, os.O_RDWR)
    except FileNotFoundError:
        return True  # the process has just ended normally and removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_size == 0  # an empty file is about to be locked: `file_lock` creates, locks, then writes
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _folder() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "klear-runs"
