"""Run the stages of a config inside the current Prefect flow run: reuse, run, track, and resume after Retry."""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, cast

from prefect import settings
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.launch import show_core_logs
from flows.local_runs import record_run
from flows.outages import CancelWatch, is_cancelling, server_awaited
from flows.own_server import is_own
from flows.result import PipelineResult
from flows.settings import resolve
from flows.sweep_rules import MAX_ATTEMPTS
from klear_core.artifacts.manifest import ArtifactId, ArtifactRef
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.errors import ArtifactError, KlearError
from klear_core.pipeline.graph import (
    Stage,
    fingerprints_of,
    open_store,
    select_stages,
    stages_again,
    stages_of,
    with_inputs,
    workspace_root,
)
from klear_core.pipeline.preflight import require_ready
from tasks import tracking
from tasks.all import TASKS
from tasks.interrupts import is_interrupt
from tasks.progress import console
from tasks.report import failed_report, report_failure
from tasks.report_inputs import REPORT_FILE
from tasks.run_info import RunInfo
from tasks.task import in_workspace

log = logging.getLogger(__name__)

# At exit the interpreter garbage-collects all objects of torch, Ray and Prefect. That delays a cancelled run by over a
# second of CPU, and by many seconds on a busy machine. Frozen objects are skipped.
atexit.register(gc.freeze)


def run_stages(
    config: PipelineConfig,
    *,
    only: str | None = None,
    from_: str | None = None,
    until: str | None = None,
    rerun_from: str | None = None,
) -> PipelineResult:
    """Run the chosen stages in order, each as a Prefect task, and reuse artifacts that exist and are intact.

    ConfigError before the first stage starts if a requirement is known to be missing or contradictory.
    A stage that is not chosen is needed only as the input of a chosen one: ArtifactError if such an input is missing.
    `rerun_from` makes a stage and all stages that depend on it again, once per flow run even if that is retried.
    A stage that fails ends the run with its error; a report of what exists is then in the workspace's `failed` folder.
    """
    show_core_logs()
    choice = {"only": only, "from_": from_, "until": until, "rerun_from": rerun_from}
    if _has_server():
        return _on_a_server(config, **choice)
    if is_own(settings.PREFECT_API_URL.value() or ""):
        record_run(_this_flow_run().id)
    return _run_chosen(config, **choice)


def _on_a_server(config: PipelineConfig, **choice: str | None) -> PipelineResult:
    """Run the chosen stages so that the run survives outages of its server and can still be cancelled after one."""
    run = _this_flow_run()
    watch = CancelWatch(lambda: is_cancelling(run.id))
    try:
        with watch.running() if run.deployment_id else nullcontext(), server_awaited():
            return _run_chosen(config, **choice)
    except TerminationSignal:
        if not watch.has_fired:
            raise
        # Prefect makes a state that a flow returns the final state of the run.
        return cast("PipelineResult", Cancelled(message="cancelled; the run ended itself"))


def _run_chosen(
    config: PipelineConfig, *, only: str | None, from_: str | None, until: str | None, rerun_from: str | None
) -> PipelineResult:
    stages = stages_of(config)
    chosen = select_stages(stages, only=only, from_=from_, until=until)
    again = stages_again(stages, rerun_from, chosen)
    require_ready(config, chosen, again=again)
    ids = fingerprints_of(with_inputs(stages, {*chosen, *again}), config.workspace)
    info = _run_info(config, _this_flow_run())
    if again:
        _forget_once(config.workspace, [ids[name] for name in again], run_id=info.run_id)
    refs: dict[str, ArtifactRef] = {}
    with _tracked(info), failure_reported(info, config, chosen, refs):
        for stage in stages:
            if stage.name in chosen:
                # Inputs from stages that are not chosen must exist already.
                missing = {name for name in stage.inputs.values() if name not in refs}
                refs |= {
                    name: _existing(config.workspace, ids[name], name, needed_by=stage.name) for name in sorted(missing)
                }
                refs[stage.name] = _run_one(stage, refs, info.model_copy(update={"stage": stage.name}))
    report = refs["report"].path / REPORT_FILE if "report" in chosen else None
    return PipelineResult(
        refs={name: refs[name] for name in chosen},
        mlflow_run_id=tracking.parent_run_id(info),
        report=report,
        flow_run_id=info.run_id,
    )


def run_label() -> str:
    """Return a name that tells runs apart, such as `laptop-seed0-gppo`; a stage's flow puts the stage in front."""
    return label_of(given_config, flow=str(flow_run.flow_name))


def given_config() -> PipelineConfig:
    """Resolve the config from the current flow run's parameters."""
    given: dict[str, Any] = flow_run.parameters
    return resolve(given.get("profile"), given.get("overrides") or [], given.get("settings"))


def label_of(config: Callable[[], PipelineConfig], *, flow: str) -> str:
    """Return the flow's name without `klear-`, followed by profile, seed and loss. Never raises.

    Prefect asks for the name before the run is Running: an error here would crash the process, and the run would be
    restarted. The flow itself resolves the same parameters next, and fails once with the reason.
    """
    prefix = flow.split("-")[1:]
    try:
        resolved = config()
    except Exception:  # noqa: BLE001  the flow raises it again, where the user sees it
        return "-".join([*prefix, "unresolved"])
    return "-".join([*prefix, resolved.name, f"seed{resolved.seed}", resolved.rl.loss.kind])


def _run_one(stage: Stage, refs: Mapping[str, ArtifactRef], info: RunInfo) -> ArtifactRef:
    """Call the stage's task and return its artifact.

    Prefect caches only the reference, so a cached artifact is verified; if it is missing or damaged, the task reruns.
    """
    stage_task = in_workspace(TASKS[stage.kind], info.workspace)
    inputs = {role: refs[name] for role, name in stage.inputs.items()}
    state = stage_task(info, stage.job, inputs, return_state=True)
    ref = state.result()
    if state.name != "Cached":
        return ref
    try:
        open_store(info.workspace).verify(ref)
    except ArtifactError as e:
        log.warning("%s: what Prefect remembers cannot be used: %s", stage.name, e)
        return stage_task.with_options(refresh_cache=True)(info, stage.job, inputs)
    console().stage_done(stage.name, ref, was_reused=True, wall_s=0.0)
    return ref


def _existing(workspace: WorkspaceConfig, own: ArtifactId, name: str, *, needed_by: str) -> ArtifactRef:
    store = open_store(workspace)
    ref = store.find(own.kind, own.fingerprint)
    if ref is None:
        raise ArtifactError(
            f"stage {needed_by!r} needs {name!r} ({own.kind}/{own.fingerprint}), which is not there for these settings: "
            f"run up to it first, with --until {name}"
        )
    store.verify(ref)
    return ref


def _forget_once(workspace: WorkspaceConfig, ids: Sequence[ArtifactId], *, run_id: str) -> None:
    """Move artifacts aside so that they are made again, only once: not when the same flow run is retried."""
    marker = workspace_root(workspace) / "forced" / run_id
    if marker.exists():
        return
    store = open_store(workspace)
    for own in ids:
        kept = store.set_aside(own.kind, own.fingerprint, why="rerun")
        if kept is not None:
            log.info("%s %s will be made again; the old one was moved to %s", own.kind, own.fingerprint, kept)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _this_flow_run() -> FlowRun:
    context = FlowRunContext.get()
    assert context is not None, "stages run inside a flow"
    assert context.flow_run is not None, "a flow that has started has a run"
    if context.flow_run.run_count > MAX_ATTEMPTS:
        raise KlearError(
            f"flow run {context.flow_run.name} was started {context.flow_run.run_count} times, more than {MAX_ATTEMPTS}: look at why"
        )
    return context.flow_run


def _run_info(config: PipelineConfig, run: FlowRun) -> RunInfo:
    from prefect.utilities.urls import url_for

    return RunInfo(
        workspace=config.workspace,
        run_id=str(run.id),
        run_name=run.name,
        stage="",
        started_at=run.start_time or datetime.now(UTC),
        run_url=(url_for(run) or "") if _has_server() else "",
    )


def _has_server() -> bool:
    """Return whether the run is recorded on a server that outlives this process."""
    api_url = settings.PREFECT_API_URL.value()
    return bool(api_url) and not is_own(api_url)


@contextmanager
def failure_reported(
    info: RunInfo, config: PipelineConfig, chosen: Sequence[str], refs: Mapping[str, ArtifactRef]
) -> Iterator[None]:
    """Write a report if the block fails, of the artifacts in `refs` and the chosen stages without one, and re-raise."""
    try:
        yield
    except Exception as e:
        if not is_interrupt(e):
            _report_failure(info, config, chosen, refs, e)
        raise
    failed_report(info).unlink(missing_ok=True)  # an earlier attempt of this flow run may have failed


def _report_failure(
    info: RunInfo, config: PipelineConfig, chosen: Sequence[str], refs: Mapping[str, ArtifactRef], error: Exception
) -> None:
    """Write the report. Stages run in order, so the first one without an artifact is the one that failed."""
    failed, *not_reached = [name for name in chosen if name not in refs]
    unfinished = {failed: f"{type(error).__name__}: {error}"} | {name: "" for name in not_reached if name != "report"}
    done = {stage.name: refs[stage.name] for stage in stages_of(config) if stage.name in refs}
    try:
        log.warning("a report of this failed run: %s", report_failure(info, config, done, unfinished))
    except Exception as e:  # noqa: BLE001  an error of the report must not replace the run's error
        log.warning("there is no report of this failed run: %s: %s", type(e).__name__, e)


@contextmanager
def _tracked(info: RunInfo) -> Iterator[None]:
    try:
        yield
    finally:
        tracking.end_pipeline(info, tracking.status_now())
