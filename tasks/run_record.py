"""Keep the record of a run and its log while it runs, from which `klear runs` shows it without a server."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import JsonValue

from klear_core.artifacts.manifest import MANIFEST, ArtifactId, ArtifactRef, read_manifest
from klear_core.artifacts.run_history import LOG, RunHistory, RunRecord, RunScore, RunStage, RunState
from klear_core.config.pipeline import PipelineConfig, PromoteConfig
from klear_core.config.settings import leaves_of
from klear_core.config.stage import ReportJob, Stage
from klear_core.config.submit import IdleKill, SubmitConfig, in_seconds
from klear_core.errors import is_interrupt, reporting
from klear_core.scores import read_reports
from klear_core.stopping import LimitReached
from tasks.mlflow_backend import without_password
from tasks.progress import Attempt, Console, Pace, shown_on
from tasks.resources import gpus_in_reach
from tasks.tracking import RunInfo

log = logging.getLogger(__name__)

_WRITE_EVERY_S = 2.0
"""Seconds between two looks whether the record has changed."""
_BEAT_S = 60.0
"""Seconds after which it is written though nothing has changed, also to the shared store."""
_GPU_EVERY_S = 30.0
_GPU_TIMEOUT_S = 10.0
_MAX_CHARS = 1000
LOGGED = ("klear_core", "tasks", "flows", "prefect.flow_runs", "prefect.task_runs")


class RunRecorder(Console):
    """Writes the record of this process's run as its stages proceed, from a thread of its own."""

    def __init__(
        self,
        record: RunRecord,
        history: RunHistory,
        stages: Sequence[Stage],
        *,
        watch: Callable[[RunRecord], None] = lambda _: None,
        limits: SubmitConfig | None = None,
    ) -> None:
        """`watch` is called with the record about once a minute, from another thread.

        A run that reaches one of its limits, deadline or idle GPUs, is ended.
        """
        self._limit_reached = ""
        self._ends_at = None if limits is None else limits.ends_at
        self._idle = None if limits is None else limits.idle_kill
        self._record, self._history, self._watch = record, history, watch
        self._stages = {stage.name: stage for stage in stages}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._pace: Pace | None = None
        self._failed_s = 0.0  # of the running stage, in its earlier attempts
        self._busy: list[float] = []
        self._is_blind = False
        self._warned = _LastWarning()

    @property
    def record(self) -> RunRecord:
        """The record as it is now."""
        with self._lock:
            return self._record

    @contextmanager
    def recording(self, config: PipelineConfig) -> Iterator[None]:
        """Keep record and log while the block runs. A workspace in which that fails ends no run.

        Raise LimitReached if a limit of the run has ended it.
        """
        held = ExitStack()
        with reporting("klear runs will not show this run"):
            held.enter_context(self._history.begun(self._record, config.model_dump_json()))
            held.enter_context(shown_on(self))
            held.enter_context(self._logged(config))
            thread = threading.Thread(target=self._work, name="run-record", daemon=True)
            thread.start()
            held.callback(thread.join, _GPU_TIMEOUT_S)
            held.callback(self._is_over.set)
        try:
            yield
        except BaseException as e:
            if self._limit_reached and is_interrupt(e):
                raise LimitReached(self._limit_reached) from e
            raise
        finally:
            with reporting("the log of this run may lack its end"):
                held.close()

    def ended(self, state: RunState, *, why: str = "", report: str = "") -> None:
        """Write the final record, here and in the shared store."""
        with reporting("klear runs will show this run as killed"):
            self._change(state=state, why=(self._limit_reached or why)[:_MAX_CHARS], report=report, left_s=None)
            self._history.write(self.record)
            self._history.share(self.record)

    def stage_started(self, stage: str, *, attempt: int) -> None:
        """Note the stage that runs, and that nothing is waited for."""
        now_s, before = time.monotonic(), self._pace
        if before is not None and before.stage == stage:  # the attempt before this one failed
            self._failed_s += now_s - before.started_s
        else:
            self._failed_s = 0.0
        self._pace = Pace(stage=stage, started_s=now_s)
        self._warned.text = ""
        note = f"attempt {attempt}" if attempt > 1 else ""
        self._change(stage=stage, done=0, total=0, note=note, left_s=None, why="")

    def stage_progress(self, stage: str, done: int, total: int, note: str) -> None:
        """Note how far it is, and how long the rest will take at its pace."""
        if self._pace is None:
            return
        self._pace.update(done, total, note, now_s=time.monotonic())
        self._change(stage=stage, done=done, total=total, note=note, left_s=self._pace.left_s)

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        """Note the artifact and, of an evaluation, its scores."""
        self._pace = None
        job = self._stages[stage].job if stage in self._stages else None
        changes: dict[str, object] = {
            "kind": ref.kind,
            "fingerprint": ref.fingerprint,
            "state": "reused",
            "wall_s": 0.0,
            "num_gpus": 0,
        }
        if not was_reused:
            changes |= {"state": "made", **self._spent(stage, wall_s + self._failed_s)}
        self._change_stage(stage, changes)
        self._change(left_s=None)
        if job is not None and job.scores_model:
            self._change(scores=tuple(_scores(self._stages[stage].scored_model_stage or stage, ref.path)))

    def stage_failed(self, stage: str, error: BaseException, attempt: Attempt) -> None:
        """Note why, and when the next attempt begins."""
        again = f"; next attempt in about {attempt.next_in_s:.0f} s" if attempt.next_in_s is not None else ""
        self._change(stage=stage, why=f"{_first_line(error)}{again}"[:_MAX_CHARS], left_s=None)

    def count_running(self) -> None:
        """Count what the running stage has spent so far, which may be most of a run."""
        pace = self._pace
        if pace is not None:
            wall_s = self._failed_s + time.monotonic() - pace.started_s
            self._change_stage(pace.stage, self._spent(pace.stage, wall_s))

    def _spent(self, stage: str, wall_s: float) -> dict[str, object]:
        own = self._stages.get(stage)
        holds_gpus = own is not None and (own.learner() is not None or own.engine() is not None)
        return {"wall_s": round(wall_s, 1), "num_gpus": gpus_in_reach() if holds_gpus else 0}

    def _change_stage(self, stage: str, changes: Mapping[str, object]) -> None:
        with self._lock:
            stages = tuple(s.model_copy(update=changes) if s.name == stage else s for s in self._record.stages)
            self._record = self._record.model_copy(update={"stages": stages})

    def _change(self, **changes: object) -> None:
        with self._lock:
            self._record = self._record.model_copy(update=changes)

    def _work(self) -> None:
        written, last_s, gpu_s, watched_s = self.record, time.monotonic(), 0.0, 0.0
        while not self._is_over.wait(_WRITE_EVERY_S):
            with reporting("the record of this run could not be written", level=logging.DEBUG):
                if self._ends_at is not None and datetime.now(UTC) >= self._ends_at:
                    self._end(f"its deadline was {self._ends_at:%Y-%m-%d %H:%M} UTC; submit it again to go on")
                if time.monotonic() - gpu_s >= _GPU_EVERY_S:
                    self._look_at_gpus()
                    gpu_s = time.monotonic()
                if time.monotonic() - watched_s >= _BEAT_S:
                    self.count_running()
                    self._watch(self.record)
                    watched_s = time.monotonic()
                if self._pace is None and self._warned.text:
                    self._change(why=self._warned.text[:_MAX_CHARS])  # between stages: what the next one waits for
                is_due = time.monotonic() - last_s >= _BEAT_S
                if self.record == written and not is_due:
                    continue
                self._change(updated_at=datetime.now(UTC))
                written = self.record
                self._history.write(written)
                if is_due:
                    self._history.share(written)
                    last_s = time.monotonic()

    def _look_at_gpus(self) -> None:
        share = gpu_share()
        if share is None and self._idle is not None and not self._is_blind:
            self._is_blind = True
            log.warning("idle_kill ends nothing: nvidia-smi does not tell how busy this machine's GPUs are")
        if share is not None:
            self._busy.append(share)
            self._change(gpu_busy=round(sum(self._busy) / len(self._busy), 3))
        if self._idle is not None and is_idle(self._busy, self._idle):
            self._end(f"its GPUs computed less than {self._idle.below:.0%} in {self._idle.window}: idle_kill")

    def _end(self, why: str) -> None:
        """End the run as a cancelled one ends, once."""
        if not self._limit_reached:
            self._limit_reached = why
            log.error("this run ends: %s", why)
            # To the main thread: a signal that another thread receives does not end a call that the main one blocks in.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    @contextmanager
    def _logged(self, config: PipelineConfig) -> Iterator[None]:
        """Write what this process logs to the run's log, and remember the last warning."""
        to_file = logging.FileHandler(self._history.folder(self._record.run_id) / LOG, encoding="utf-8")
        to_file.setLevel(logging.INFO)
        is_json = config.workspace.log_format == "json"
        to_file.setFormatter(JsonLines(self) if is_json else logging.Formatter(_TEXT))
        handlers = (to_file, self._warned)
        for name in LOGGED:
            for handler in handlers:
                logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in LOGGED:
                for handler in handlers:
                    logging.getLogger(name).removeHandler(handler)
            to_file.close()


_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, run, stage and, of an exception, its traceback."""

    def __init__(self, recorder: RunRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        now = self._recorder.record
        line: dict[str, JsonValue] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "run": now.run_id,
            "stage": now.stage,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _LastWarning(logging.Handler):
    """Remembers the last warning: between two stages it says what is waited for."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Remember it."""
        self.text = record.getMessage()


def new_record(
    info: RunInfo,
    config: PipelineConfig,
    stages: Sequence[Stage],
    ids: Mapping[str, ArtifactId],
    *,
    selection: Mapping[str, JsonValue],
    has_worker: bool,
) -> RunRecord:
    """Return the record of a run that begins; `ids` are the artifacts of its stages as far as they are known."""
    planned = []
    for stage in stages:
        own = ids.get(stage.name)
        known = own.fingerprint if own is not None and not stage.job.asks_registry else ""
        planned.append(RunStage(name=stage.name, kind=stage.kind, fingerprint=known))
    return RunRecord(
        run_id=info.run_id,
        name=info.run_name,
        profile=config.name,
        started_at=info.started_at,
        updated_at=datetime.now(UTC),
        host=os.uname().nodename,
        pid=os.getpid(),
        run_url=without_password(info.run_url),
        has_worker=has_worker,
        selection=dict(selection),
        settings=not_defaults(config.model_dump(mode="json")),
        stages=tuple(planned),
        price_per_gpu_hour=config.hardware.price_per_gpu_hour,
    )


def record_of_report(folder: Path) -> RunRecord:
    """Return the record of a run that kept none (of an earlier version, or on another machine), by its report.

    ArtifactError if the report is damaged.
    """
    manifest = read_manifest(folder)
    config = manifest.config.get("config")
    tree = config if isinstance(config, dict) else {}
    artifacts = folder.parents[1]
    stages, scores = [], []
    for record in manifest.inputs:
        stages.append(RunStage(name=record.role, kind=record.kind, fingerprint=record.fingerprint, state="made"))
        own = artifacts / record.kind / record.fingerprint
        if record.kind == "evaluate" and (own / MANIFEST).is_file():
            scores.append((read_manifest(own).created_at, record.role.partition("_")[2], own))
    last = max(scores, default=None)
    return RunRecord(
        run_id=manifest.fingerprint,
        name=f"{tree.get('name', 'run')}-seed{tree.get('seed', 0)}",
        profile=str(tree.get("name", "run")),
        state="done",
        started_at=manifest.created_at,
        updated_at=manifest.created_at,
        host="",
        pid=0,
        settings=not_defaults(tree),
        stages=(*stages, RunStage(name=manifest.stage, kind=manifest.kind, fingerprint=folder.name, state="made")),
        scores=tuple(_scores(last[1], last[2])) if last else (),
        report=str(folder / ReportJob.page),
    )


def not_defaults(config: Mapping[str, JsonValue]) -> dict[str, str]:
    """Return the settings that are not the defaults, by dotted key, as JSON; those of the workspace are left out."""
    # A section that is off by default, such as promotion, has defaults of its own once it is on.
    usual = dict(leaves_of({"promote": PromoteConfig().model_dump(mode="json")}))
    usual |= leaves_of(PipelineConfig().model_dump(mode="json"))
    return {
        ".".join(path): json.dumps(value, ensure_ascii=False)[:_MAX_CHARS]
        for path, value in leaves_of(config)
        if path[0] != "workspace" and usual.get(path) != value
    }


def _scores(model: str, evaluation: Path) -> Iterator[RunScore]:
    for report in read_reports(evaluation):
        avg = report.avg
        yield RunScore(
            model=model,
            benchmark=report.benchmark,
            num_samples=report.num_samples,
            value=avg.value,
            low=avg.new_problems.low,
            high=avg.new_problems.high,
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_idle(shares: Sequence[float], limit: IdleKill) -> bool:
    """Return whether GPUs computed less than the limit, by their shares of every 30 s so far."""
    num_looks = math.ceil(in_seconds(limit.window) / _GPU_EVERY_S)
    return len(shares) >= num_looks and sum(shares[-num_looks:]) / num_looks < limit.below


def gpu_share() -> float | None:
    """Return the share of time in which this machine's GPUs computed just now, as their driver says; None without."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
        shares = [float(line) for line in listed.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no GPU, or none that tells
    return sum(shares) / len(shares) / 100 if shares else None
