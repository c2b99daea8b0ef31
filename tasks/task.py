"""Turn stages into Prefect tasks that are retried with backoff and cached by fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import exponential_backoff
from pydantic import ValidationError

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import KlearError
from klear_core.pipeline.fingerprints import artifact_id
from klear_core.pipeline.workspace import workspace_root
from tasks.interrupts import is_interrupt
from tasks.run_info import RunInfo

Inputs = Mapping[str, ArtifactRef]
StageTask = Task[[RunInfo, Any, Inputs], ArtifactRef]

_FIRST_DELAY_S = 5.0
"""Seconds before the first retry; each later delay is twice the one before it."""
_OURS_OR_THE_USERS = (ValidationError, TypeError, AttributeError, NameError, AssertionError, ImportError)
"""Errors that a retry would repeat: wrong settings, or bugs."""


def stage_task(function: Callable[[RunInfo, Any, Inputs], ArtifactRef]) -> StageTask:
    """Make a task of `f(info: RunInfo, job: Job, inputs: Inputs) -> ArtifactRef`.

    The cache key is our fingerprint, so Prefect's UI shows Cached exactly where an artifact is reused, both after Retry
    in the same run and in other runs.
    """
    decorate = task(
        task_run_name="{info.stage}",
        retry_jitter_factor=0.5,
        retry_condition_fn=is_worth_a_retry,
        cache_key_fn=cache_key,
        persist_result=True,  # Prefect caches only persisted results
        result_serializer="json",
    )
    return decorate(function)


def in_workspace(stage: StageTask, workspace: WorkspaceConfig) -> StageTask:
    """Return the task with the workspace's retries, timeout and result storage, where other processes find results."""
    return stage.with_options(
        retries=workspace.retries,
        retry_delay_seconds=exponential_backoff(_FIRST_DELAY_S)(workspace.retries),
        timeout_seconds=workspace.timeout_s,
        result_storage=workspace_root(workspace) / "prefect-results",
    )


def is_worth_a_retry(
    task: Task[..., Any],  # noqa: ARG001  Prefect's signature
    task_run: TaskRun,  # noqa: ARG001
    state: State[Any],
) -> bool:
    """Return whether the error may be transient (disk, network, lost worker): not a wrong config, bad data or a bug."""
    return _may_pass(state.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a stage, and the delay of the next if this one fails."""

    number: int
    of: int
    next_in_s: float | None
    """Mean delay in seconds before the next attempt; None if there is none."""


def this_attempt(error: BaseException) -> Attempt:
    """Return the attempt of the current task run that `error` ended; outside a task run there is only one."""
    context = TaskRunContext.get()
    if context is None:
        return Attempt(number=1, of=1, next_in_s=None)
    tries = context.task.retries + 1
    number = (context.task_run.run_count - 1) % tries + 1  # Prefect keeps counting when the flow run is retried
    if number == tries or not _may_pass(error):
        return Attempt(number=number, of=number, next_in_s=None)
    delays = context.task.retry_delay_seconds
    assert isinstance(delays, list), type(delays)
    return Attempt(number=number, of=tries, next_in_s=delays[number - 1])


def _may_pass(error: object) -> bool:
    if isinstance(error, BaseException) and is_interrupt(error):
        return False
    if isinstance(error, KlearError):
        return not error.is_permanent
    return not isinstance(error, _OURS_OR_THE_USERS)


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str | None:  # noqa: ARG001  Prefect's signature
    """Return `kind-fingerprint`, which is also the name of the result file; None for a stage that runs every time."""
    if parameters["job"].asks_registry:
        return None
    own = artifact_id(parameters["job"], parameters["inputs"], parameters["info"].workspace)
    return f"{own.kind}-{own.fingerprint}"
