"""The `klear` and `klear-retrain` flows; a run is checked, tracked, reported if it fails, and survives outages."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from prefect import flow, settings
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed
from pydantic import TypeAdapter

from flows.environment import PipelineResult, StageSelection, export_spans, page_of, resolve, show_core_logs
from flows.outages import CancelWatch, is_cancelling, record_run, server_awaited
from flows.process import lost_interrupts_sent_again, make_terminations_interrupts
from flows.retraining import gated, previous_run, summary, turn
from flows.servers import check_store, is_temporary_server
from flows.sweep import MAX_ATTEMPTS
from klear_core.artifacts.files import DiskErrors
from klear_core.artifacts.manifest import ArtifactId, ArtifactRef
from klear_core.artifacts.run_history import RunHistory, RunState
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.stage import Stage
from klear_core.errors import ArtifactError, ConfigError, KlearError, is_interrupt, reporting
from klear_core.pipeline.graph import (
    fingerprints_of,
    open_store,
    set_moved_aside,
    stages_of,
    with_inputs,
    workspace_root,
)
from klear_core.pipeline.preflight.checks import require_ready, warnings_with
from klear_core.seeding import seed_for
from klear_core.stopping import LimitReached, at_once, requeued_by_signal
from tasks import tracking
from tasks.notify import News, Notifier, RunWatch, end_news, open_notifier
from tasks.progress import console, show_summary
from tasks.resources import no_orphans, read_keys
from tasks.run_record import RunRecorder, new_record
from tasks.stage import StageTask, in_workspace
from tasks.stages import TASKS, failed_report, report_failure
from tasks.tracking import RunInfo

log = logging.getLogger(__name__)

# At exit the interpreter garbage-collects all objects of torch, Ray and Prefect. That delays the end of a cancelled run
# by over a second of CPU, and by many seconds on a busy machine. Frozen objects are skipped.
atexit.register(gc.freeze)
export_spans()  # on import, because Prefect begins a run's span before it calls the flow


@dataclass(slots=True, kw_only=True)
class PipelineRun:
    """A run that has begun: its stages, and the artifacts that it has so far."""

    config: PipelineConfig
    info: RunInfo
    stages: tuple[Stage, ...]
    """All stages of the pipeline, in order."""
    chosen: tuple[str, ...]
    """Names of the stages to run or reuse."""
    artifacts: dict[str, ArtifactRef] = field(default_factory=dict)
    """Artifacts by stage name, in the order in which they were made or found."""
    summary: str = ""
    """Result of the run, for its record; only retraining has one."""

    def inputs_of(self, stage: Stage) -> dict[str, ArtifactRef]:
        """Return a stage's inputs by role. Raise ArtifactError if one is neither made by this run nor in the store."""
        # Sorted, so that of several missing inputs the error always names the same one.
        for name in sorted({*stage.inputs.values()} - self.artifacts.keys()):
            self.artifacts[name] = self._existing(name, needed_by=stage.name)
        return {role: self.artifacts[name] for role, name in stage.inputs.items()}

    def call(self, task: StageTask, stage: Stage, inputs: Mapping[str, ArtifactRef]) -> ArtifactRef:
        """Call a stage's task and return its artifact.

        Prefect caches only the reference, so a cached artifact is verified; if it is missing or damaged, the task
        reruns.
        """
        info = self.info.model_copy(update={"stage": stage.name, "position": self.stages.index(stage)})
        configured = in_workspace(task, info.workspace)
        # Only the state says whether the reference came from Prefect's cache.
        state = configured(info, stage.job, inputs, return_state=True)
        ref = state.result()
        if state.name != "Cached":
            return ref
        try:
            open_store(info.workspace).verify(ref)
        except ArtifactError as e:
            # One that is gone was set aside to be made again (--rerun-from), or deleted: nothing to warn of.
            level = logging.WARNING if ref.path.is_dir() else logging.INFO
            log.log(level, "%s: the cached artifact cannot be used, so the stage runs again: %s", stage.name, e)
            return configured.with_options(refresh_cache=True)(info, stage.job, inputs)
        console().stage_done(stage.name, ref, was_reused=True, wall_s=0.0)
        return ref

    def result(self) -> PipelineResult:
        """Return the artifacts of the chosen stages."""
        refs = {name: self.artifacts[name] for name in self.chosen}
        return PipelineResult(
            refs=refs,
            mlflow_run_id=tracking.parent_run_id(self.info),
            report=page_of(self.stages, refs),
            flow_run_id=self.info.run_id,
        )

    def _existing(self, name: str, *, needed_by: str) -> ArtifactRef:
        # Fingerprints of other stages may be unknown, because files that they read are missing.
        own = fingerprints_of(with_inputs(self.stages, [name]), self.config.workspace)[name]
        store = open_store(self.config.workspace)
        ref = store.find(own.kind, own.fingerprint)
        if ref is None:
            raise ArtifactError(
                f"stage {needed_by!r} needs {name!r} ({own.kind}/{own.fingerprint}), which does not exist for these "
                f"settings: run up to it first, with --until {name}"
            )
        store.verify(ref)
        return ref


def tracked_run(
    config: PipelineConfig, run_stages: Callable[[PipelineRun], None], selection: StageSelection
) -> PipelineResult:
    """Begin a run, call `run_stages` with it, and return its result.

    Raise ConfigError before the first stage starts if requirements are not met or contradict each other. A stage that
    fails ends the run with its error; a report of what exists is then in the workspace's `failed` folder.
    """
    show_core_logs()
    make_terminations_interrupts()
    # Compiled graphs are found again by later engines, in a container too, whose home folder ends with it.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(workspace_root(config.workspace) / "cache" / "vllm"))
    # Also outside of stages: Prefect writes results to the workspace.
    with requeued_by_signal(), lost_interrupts_sent_again(), DiskErrors(workspace_root(config.workspace)):
        if _has_server():
            return _run_with_server(config, run_stages, selection)
        if is_temporary_server(settings.PREFECT_API_URL.value() or ""):
            with reporting("this run will not be shown as Crashed if it is killed"):
                record_run(_this_flow_run().id)
        return _run_selected(config, run_stages, selection)


def _run_with_server(
    config: PipelineConfig, run_stages: Callable[[PipelineRun], None], selection: StageSelection
) -> PipelineResult:
    """Carry a run out so that it survives outages of its server and can still be cancelled after one."""
    run = _this_flow_run()
    watch = CancelWatch(lambda: is_cancelling(run.id))
    try:
        with ExitStack() as worker, server_awaited():
            if run.deployment_id:  # a run without one has no worker, which could miss the request
                worker.enter_context(watch.running())
                # A worker sends it to cancel the run, and takes only Prefect's own handler for an answer.
                worker.enter_context(at_once(signal.SIGTERM))
            return _run_selected(config, run_stages, selection)
    except LimitReached as e:
        return cast("PipelineResult", Failed(message=str(e)))  # Crashed, it would be started again
    except TerminationSignal:
        if not watch.has_fired:
            raise  # the process that sent the signal, such as the worker, sets the final state
        # If a flow returns a state, Prefect uses it as the final state of the run.
        return cast("PipelineResult", Cancelled(message="cancelled; the run stopped when it saw the request"))


def _run_selected(
    config: PipelineConfig, run_stages: Callable[[PipelineRun], None], selection: StageSelection
) -> PipelineResult:
    stages = stages_of(config)
    chosen, again = selection.of(stages)
    # Everything that can be refused is refused before the first artifact is moved and before anything is tracked.
    notifier = open_notifier(config.workspace.notify)
    with notifier.telling_refusals(lambda: _run_info(config, _this_flow_run())):
        keys = read_keys(stage.job for stage in stages if stage.name in chosen)
        require_ready(config, chosen, again=again, keys=keys)
        for warning in warnings_with(config, chosen, again=again):
            log.warning("%s", warning)
        check_store(config.workspace)
    set_moved_aside(config, chosen)
    run = PipelineRun(config=config, info=_run_info(config, _this_flow_run()), stages=stages, chosen=chosen)
    with recorded(run, selection, notifier):
        if again:
            ids = fingerprints_of(with_inputs(stages, again), config.workspace)
            _set_aside_once(config.workspace, [ids[name] for name in again], run_id=run.info.run_id)
        try:
            with reporting_failures(run):
                run_stages(run)
        finally:
            tracking.end_pipeline(run.info, tracking.status_now())
    return run.result()


_STATES: Mapping[str, RunState] = {"FINISHED": "done", "FAILED": "failed", "KILLED": "cancelled"}


_SELECTION = TypeAdapter(StageSelection)


@contextmanager
def recorded(run: PipelineRun, selection: StageSelection, notifier: Notifier) -> Iterator[None]:
    """Keep the run's record, from before it looks for artifacts, so that none of them is collected, until its end.

    Somebody is told of what happens to it.
    """
    this = _this_flow_run()
    stages = [stage for stage in run.stages if stage.name in run.chosen]
    ids: Mapping[str, ArtifactId] = {}
    with suppress(ConfigError):  # the file of a source is gone: the stage that needs it says so
        ids = fingerprints_of(with_inputs(run.stages, run.chosen), run.config.workspace)
    asked = {name: value for name, value in _SELECTION.dump_python(selection, mode="json").items() if value}
    record = new_record(run.info, run.config, stages, ids, selection=asked, has_worker=this.deployment_id is not None)
    history = RunHistory.of(workspace_root(run.config.workspace), store=run.config.workspace.store)
    watch = RunWatch(notifier, run.config.workspace.notify, workspace_root(run.config.workspace))
    recorder = RunRecorder(record, history, run.stages, watch=watch.look, limits=run.config.workspace.submit)
    with recorder.recording(run.config):
        try:
            yield
        finally:
            error = sys.exc_info()[1]
            report = ""
            with reporting("the record of this run does not name its report"):
                page = page_of(run.stages, run.artifacts) or failed_report(run.info)
                report = str(page) if page.is_file() else ""
            why = run.summary if error is None or is_interrupt(error) else f"{type(error).__name__}: {error}"
            recorder.ended(_STATES[tracking.status_now()], why=why, report=report)
            with reporting("nobody could be told of the end of this run"):
                made = [stage.name for stage in recorder.record.stages if stage.state == "made"]
                for event, line in end_news(
                    run.stages, run.artifacts, run.chosen, run.info.started_at, error, made=made
                ):
                    link = run.info.run_url or report
                    notifier.tell(
                        News(event=event, run_id=run.info.run_id, run_name=run.info.run_name, line=line, link=link)
                    )


def _failing_in_one_line(run: Callable[[], PipelineResult]) -> PipelineResult:
    """Return the run's result; on a server, an error of ours is the flow's state Failed with its message.

    Prefect logs an error that leaves a flow with its whole traceback. The state is logged in one line, which is enough:
    see `_is_news`.
    """
    try:
        return run()
    except KlearError as e:
        if not _has_server():
            raise
        # If a flow returns a state, Prefect uses it as the final state; a caller in this process gets the error itself.
        return cast("PipelineResult", Failed(message=f"{type(e).__name__}: {e}", data=e))


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a traceback of a message that the run's state has: an error of ours, or a wrong parameter."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, KlearError | ParameterTypeError)


for _name in ("prefect.flow_runs", "prefect.engine"):
    logging.getLogger(_name).addFilter(_is_news)


def run_label() -> str:
    """Return a name that tells runs apart, such as `laptop-seed0-gppo`; `rl-laptop-seed0-gppo` for one stage alone."""
    only = flow_run.parameters.get("only")
    return label_of(given_config, prefix=str(only or ""), profile=_profile_name())


def _profile_name() -> str:
    return Path(str(flow_run.parameters.get("profile") or "")).name


def given_config() -> PipelineConfig:
    """Resolve the config from the current flow run's parameters."""
    given: dict[str, Any] = flow_run.parameters
    return resolve(given.get("profile"), given.get("overrides") or [], given.get("settings"))


def label_of(config: Callable[[], PipelineConfig], *, prefix: str, profile: str = "") -> str:
    """Join prefix (if any), profile, seed and last method with `-`; `profile` is its name if the settings are wrong.

    Never raises.

    Prefect asks for the name before the run is Running: an error here would crash the process, and the run would be
    restarted. The flow itself resolves the same parameters next, and fails once with the reason.
    """
    words = [prefix] if prefix else []
    try:
        resolved = config()
        ends_with_opd = resolved.opd is not None and not resolved.opd.then_rl
        method = "opd" if ends_with_opd else resolved.rl.loss.kind
        words += [resolved.name, f"seed{resolved.seed}", method]
    except Exception:  # noqa: BLE001  the flow raises it again, where the user sees it
        words += [profile, "unresolved"] if profile else ["unresolved"]
    return "-".join(words)


def _set_aside_once(workspace: WorkspaceConfig, ids: Sequence[ArtifactId], *, run_id: str) -> None:
    """Set artifacts aside so that they are rebuilt; do so once per flow run, not again when it is retried."""
    marker = workspace_root(workspace) / "forced" / run_id
    if marker.exists():
        return
    store = open_store(workspace)
    for own in ids:
        kept = store.set_aside(own.kind, own.fingerprint, why="rerun")
        if kept is not None:
            log.info("%s %s will be made again; the old one was moved to %s", own.kind, own.fingerprint, kept)
    # Last: a run that is killed before moves the rest when it is retried, and has made nothing yet that could be moved.
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _this_flow_run() -> FlowRun:
    context = FlowRunContext.get()
    assert context is not None, "stages run inside a flow"
    assert context.flow_run is not None, "a flow that has started has a run"
    if context.flow_run.run_count > MAX_ATTEMPTS:
        count = context.flow_run.run_count
        raise KlearError(
            f"flow run {context.flow_run.name} was started {count} times; the limit is {MAX_ATTEMPTS}: "
            "read the logs of its attempts"
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
    return bool(api_url) and not is_temporary_server(api_url)


@contextmanager
def reporting_failures(run: PipelineRun) -> Iterator[None]:
    """If the block raises, write a report on the run's artifacts and unfinished stages, and raise the error again."""
    try:
        yield
    except Exception as e:
        if not is_interrupt(e):
            _write_failure_report(run, e)
        raise
    with reporting("the report on an earlier attempt, which failed, could not be deleted"):
        failed_report(run.info).unlink(missing_ok=True)


def _write_failure_report(run: PipelineRun, error: Exception) -> None:
    """Write the report. Stages run in order, so the first one without an artifact is the one that failed."""
    unfinished = [stage for stage in run.stages if stage.name in run.chosen and stage.name not in run.artifacts]
    error_text = f"{type(error).__name__}: {error}"
    with reporting("could not write a report on this failed run"):
        file = report_failure(run.info, run.config, run.artifacts, unfinished, error_text)
        log.warning("a report on this failed run: %s", file)


# ---- the klear flow ----


@flow(name="klear", flow_run_name=run_label, persist_result=False)
def pipeline(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    only: str | None = None,
    from_: str | None = None,
    until: str | None = None,
    rerun_from: str | None = None,
    needed_by: list[str] | None = None,
) -> PipelineResult:
    """Make a reasoning model out of a base model, and reuse artifacts that exist.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's; those that are not given keep the profile's values.
        overrides: Single settings that replace both, such as rl.loss.eps_high=0.28.
        only: Run this stage alone, on the artifacts that exist.
        from_: Start at this stage; the artifacts of earlier stages must exist.
        until: Stop after this stage.
        rerun_from: Make this stage and all that depend on it again, even if nothing has changed.
        needed_by: Run only these stages and what they depend on.
    """
    needed = tuple(needed_by or ())
    selection = StageSelection(only=only, from_=from_, until=until, rerun_from=rerun_from, needed_by=needed)
    return _failing_in_one_line(lambda: tracked_run(resolve(profile, overrides, settings), run_stages, selection))


def run_stages(run: PipelineRun) -> None:
    """Make the chosen stages, or reuse their artifacts."""
    # stages_of(config): benchmarks, curate, base, distill, sft, rl, an evaluation of each model, report;
    # and as configured curate_rl, tag, tag_rl, rl_code
    for stage in run.stages:
        if stage.name in run.chosen:
            inputs = run.inputs_of(stage)
            run.artifacts[stage.name] = run.call(TASKS[stage.kind], stage, inputs)


def run_pipeline(config: PipelineConfig, selection: StageSelection) -> PipelineResult:
    """Run the pipeline in this process and raise the error of a stage that fails."""
    with no_orphans():
        return pipeline(
            profile=None,  # its default is a profile, over which the settings would be merged
            settings=config,
            only=selection.only,
            from_=selection.from_,
            until=selection.until,
            rerun_from=selection.rerun_from,
            needed_by=list(selection.needed_by) or None,
        )


# ---- the klear-retrain flow, which runs on a schedule ----


Seed = Literal["fixed", "fresh"]


def retrain_label() -> str:
    """Return the run's name; see `label_of`. Its seed is the one that the run will use."""

    def config() -> PipelineConfig:
        return with_seed(given_config(), flow_run.parameters.get("seed", "fixed"), run_id=str(flow_run.id))

    return label_of(config, prefix="retrain", profile=_profile_name())


@flow(name="klear-retrain", flow_run_name=retrain_label, persist_result=False)
def retrain(
    profile: str | None = "laptop",
    settings: PipelineConfig | None = None,
    overrides: list[str] = [],  # noqa: B006  Prefect shows the default in its form
    seed: Seed = "fixed",
) -> PipelineResult:
    """Run the pipeline again and let its last model become champion if it passes the rule; `promote` has the rule.

    With a fixed seed only stages with changed data or settings run, with a fresh seed all. One retraining of a
    registered model runs at a time; another one waits.

    Args:
        profile: A folder under configs/, or a path to one.
        settings: Settings that replace the profile's; those that are not given keep the profile's values.
        overrides: Single settings that replace both, such as rl.num_steps=200.
        seed: `fixed` keeps the config's; `fresh` derives a new one for each flow run, the same if the run is retried.
    """

    def run() -> PipelineResult:
        config = gated(with_seed(resolve(profile, overrides, settings), seed, run_id=str(flow_run.id)))
        return tracked_run(config, run_stages_in_turn, StageSelection())

    return _failing_in_one_line(run)


def run_stages_in_turn(run: PipelineRun) -> None:
    """Make or reuse the stages once no other retraining runs, and sum up what was new and what came of it."""
    with turn(run.config):
        before = previous_run(run.config.workspace, run.config.name, run_id=run.info.run_id)
        run_stages(run)
        with reporting("the summary of this retraining could not be written"):
            run.summary = summary(run.artifacts, before, run.config.workspace, started_at=run.info.started_at)
            log.info("retraining %s:\n%s", run.info.run_name, run.summary)
            show_summary(run.info, run.summary)


def with_seed(config: PipelineConfig, seed: Seed, *, run_id: str) -> PipelineConfig:
    """Return the config unchanged, or with a fresh seed derived from its seed and the flow run's id."""
    if seed == "fixed":
        return config
    return config.model_copy(update={"seed": seed_for(config.seed, "retrain", run_id) % 2**31})
