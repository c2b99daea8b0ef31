"""Track runs in MLflow. Training never waits for it, and an outage of MLflow never ends a run.

`metrics.jsonl` is the source of truth, MLflow a view of it: a running stage's file is followed, and a stage that ends
while MLflow does not answer leaves a record on disk, which this or a later stage or run sends.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from klear_core.artifacts.manifest import ArtifactRef, InputRecord, read_manifest
from klear_core.artifacts.run_history import RunHistory
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.settings import Settings, leaves_of, result_settings
from klear_core.config.stage import Job, ReportJob
from klear_core.errors import ConfigError, reporting
from klear_core.metrics import read_metrics
from klear_core.pipeline.graph import stages_of, workspace_root
from klear_core.pipeline.preflight.exposure import given_contamination
from tasks.delivery import Connection, StageRun, Undelivered, now_ms
from tasks.mlflow_backend import EXPERIMENT, TRACKING_VARIABLE, RunStatus, TrackedRun, mlflow_backend, server_name

if TYPE_CHECKING:
    from klear_core.report.run.facts import ComparedModels, ReportInputs, ScoreWarning, StageFolder

__all__ = ["EXPERIMENT", "StageRun", "end_pipeline", "parent_run_id", "stage_run", "status_now", "tracking_uri"]

log = logging.getLogger(__name__)

_PARAM_CHARS = 6000  # MLflow's limit of a param's value
_NAME_CHARS = 200  # of its name MLflow takes 250; the pipeline's run has the stage's name before it
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]|/(?=[/.]|$)")
"""What MLflow refuses in a param's name: these characters, and slashes that a path would not need."""
_UNDELIVERED = Path("mlflow", "undelivered")
"""Folder of a workspace with the records that MLflow has not received."""

_parents: dict[tuple[str, str], str] = {}
"""MLflow ids of the parent runs opened by this process, by tracking URI and pipeline run id."""


def tracking_uri(workspace: WorkspaceConfig) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, else the URI of a SQLite file in the workspace."""
    return os.environ.get(TRACKING_VARIABLE) or f"sqlite:///{workspace_root(workspace)}/mlflow/mlflow.db"


@contextmanager
def stage_run(
    info: RunInfo, job: Job, fingerprint: str, inputs: Sequence[InputRecord], metrics_file: Path
) -> Iterator[StageRun]:
    """Yield the stage's run, new or reopened, and close it with the block's status; its records wait if MLflow is down.

    ConfigError if MLflow refuses the first stage of a pipeline run, so that wrong credentials show before work starts.
    """
    uri = tracking_uri(info.workspace)
    origin = job.origin()
    given = {"given": origin} if origin else {}
    record = _record_of(info).model_copy(
        update={
            "stage": info.stage,
            "kind": job.kind,
            "fingerprint": fingerprint,
            "makes_model": job.makes_model,
            "scores_step": info.position if job.scores_model else None,
            "page": job.page,
            "params": flat_params(result_settings(job)) | given,
            "inputs": tuple(inputs),
            "metrics_file": str(metrics_file),
        }
    )
    run = StageRun(_connection(uri, workspace_root(info.workspace)), record)
    run.start()
    # Once a stage was accepted the credentials are right; a later refusal must not end a run that has cost hours.
    if run.refusal and (uri, info.run_id) not in _parents:
        raise ConfigError(f"MLflow at {server_name(uri)} refuses this run: {run.refusal}")
    try:
        yield run
    finally:
        if run.parent_id:
            _parents[uri, info.run_id] = run.parent_id
        status = status_now()
        with reporting(f"the end of {info.stage} could not be recorded for MLflow"):
            run.end(status)


def status_now() -> RunStatus:
    """Return the status of the block that is ending, for use in `finally`: KILLED for Ctrl-C and cancellation."""
    error = sys.exc_info()[1]
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def parent_run_id(info: RunInfo) -> str | None:
    """Return MLflow's id of the pipeline's run; None if no stage opened it: a run that only reuses is not tracked."""
    return _parents.get((tracking_uri(info.workspace), info.run_id))


def end_pipeline(info: RunInfo, status: RunStatus) -> None:
    """Close the pipeline's run if a stage opened it or left a record, and log what MLflow has not received."""
    with reporting("the end of this run could not be recorded for MLflow"):
        _end_pipeline(info, status)


def _end_pipeline(info: RunInfo, status: RunStatus) -> None:
    record = _record_of(info).model_copy(update={"status": status, "ended_ms": now_ms()})
    root = workspace_root(info.workspace)
    undelivered = Undelivered(root / _UNDELIVERED)
    has_waiting_stage = any(r.run_id == info.run_id for r in undelivered.records(record.server))
    if parent_run_id(info) is None and not has_waiting_stage:
        return
    undelivered.save(record)
    connection = _connection(tracking_uri(info.workspace), root)
    connection.allow_try()  # the last chance of this run, however recent a failure is
    connection.deliver_waiting(current_run=info.run_id, except_stage=None)  # the stages' records, and then the run's
    left = undelivered.records(record.server)
    if left:
        num_rows = sum(len(read_metrics(Path(r.metrics_file))) for r in left if r.metrics_file)
        stages = ", ".join(dict.fromkeys(r.stage for r in left if r.stage)) or "the run's end"
        log.warning(
            "MLflow at %s has not received %d records (%s; %d rows of metrics): they wait in %s, "
            "and the next run that reaches MLflow sends them",
            record.server,
            len(left),
            stages,
            num_rows,
            undelivered.folder,
        )


def flat_params(settings: Mapping[str, JsonValue]) -> dict[str, str]:
    """Return nested settings as dotted names with text values; a list is one value, and an empty table is left out.

    Names of sources are keys, too: what MLflow takes in no name is replaced by `_`.
    """
    flat: dict[str, str] = {}
    for path, value in leaves_of(settings):
        if value != {}:
            text = value if isinstance(value, str) else json.dumps(value)
            name = _NOT_IN_NAMES.sub("_", ".".join(path))[:_NAME_CHARS]
            flat[name] = text[:_PARAM_CHARS]
    return flat


def _record_of(info: RunInfo) -> TrackedRun:
    """Return the record of the pipeline's run."""
    commit = code_commit()
    return TrackedRun(
        server=server_name(tracking_uri(info.workspace)),
        run_id=info.run_id,
        run_name=info.run_name,
        run_url=info.run_url,
        git_commit=commit.sha if commit else "",
    )


@cache
def _connection(uri: str, root: Path) -> Connection:
    """Return the connection that all stages of this process share."""
    return Connection(mlflow_backend(uri, root), Undelivered(root / _UNDELIVERED), server_name(uri))


# ---- the context of a stage ----


class RunInfo(Settings):
    """Context that is passed to every task and is not part of its fingerprint."""

    workspace: WorkspaceConfig
    run_id: str
    """Prefect's flow run id: the same for all stages of a pipeline run and for its retries."""
    run_name: str
    stage: str
    """The stage's name in the pipeline, such as `evaluate_rl`."""
    position: int = 0
    """Number of stages before this one in the pipeline. A later model's scores have a higher one."""
    started_at: datetime
    """Start of the pipeline run, with a time zone."""
    run_url: str = ""
    """The flow run's page in Prefect's UI; empty without a server."""


# ---- commit and versions, for manifests ----


LIBRARIES = (
    "klear",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "ray",
    "vllm",
    "math-verify",
    "pyarrow",
    "prefect",
    "mlflow",
    "pydantic",
)
_CODE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Commit of a git checkout, and whether tracked files differ from it."""

    sha: str
    is_dirty: bool


@cache
def code_commit() -> Commit | None:
    """Return the commit of the checkout that this code runs from; None if it was installed from a package."""
    if not (_CODE / ".git").exists():
        return None
    try:
        sha = _git("rev-parse", "HEAD")
        # Untracked files do not count: runs and notes are among them.
        return Commit(sha=sha.strip(), is_dirty=bool(_git("status", "--porcelain", "--untracked-files=no").strip()))
    except (OSError, subprocess.SubprocessError):
        return None  # no git on this machine, or a checkout without commits


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries, without importing them."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_CODE), *args], capture_output=True, text=True, check=True, timeout=10
    ).stdout


# ---- input of the report and of the terminal's result ----
# Without Prefect, which a run that only reuses does not import.


_PUBLISHED = Path(__file__).parents[1] / "flows" / "profiles" / "published.toml"
"""Published scores: configs/ of a checkout, or its copy in an installed package."""


def report_inputs(
    info: RunInfo, job: ReportJob, inputs: Mapping[str, ArtifactRef], missing: Sequence[StageFolder] = ()
) -> ReportInputs:
    """Return the report's input; `missing` are planned stages without an artifact, listed after the others."""
    from klear_core.evaluate.compare.published import read_published
    from klear_core.report.run import facts as of

    config, commit = job.config.model_copy(update={"workspace": job.runtime.workspace}), code_commit()
    pipeline = stages_of(config)
    stages = [stage for stage in pipeline if stage.name in inputs]
    manifests = {stage.name: read_manifest(inputs[stage.name].path) for stage in stages}
    links = {"Prefect flow run": info.run_url or info.run_id}
    links |= {f"MLflow run of {name}": m.mlflow_run_id for name, m in manifests.items() if m.mlflow_run_id}
    run = of.RunInfo(
        name=info.run_name,
        profile=job.config.name,
        started_at=info.started_at.isoformat(timespec="seconds"),
        git_commit=commit.sha if commit else "",
        links=links,
    )
    gpus = _gpus_held(info)
    done = [
        of.StageFolder(
            stage=stage,
            folder=inputs[stage.name].path,
            num_gpus=gpus.get(stage.name, 0),
            # By time, because a retry of the flow run reuses what the same run has made, which is not older.
            was_reused=manifests[stage.name].created_at < info.started_at,
        )
        for stage in stages
    ]
    scores = {stage.scored_model_stage: inputs[stage.name] for stage in stages if stage.scored_model_stage}
    return of.ReportInputs(
        run=run,
        config=config,
        pipeline=pipeline,
        stages=(*done, *missing),
        differences=tuple(_differences(scores)),
        score_warnings=tuple(_score_warnings(config, inputs)),
        published=read_published(_PUBLISHED),
    )


def _gpus_held(info: RunInfo) -> dict[str, int]:
    """Return the number of GPUs that the run has held for each stage that it made, as its record says."""
    records = RunHistory.of(workspace_root(info.workspace)).records()
    return {stage.name: stage.num_gpus for record in records if record.run_id == info.run_id for stage in record.stages}


def _score_warnings(config: PipelineConfig, inputs: Mapping[str, ArtifactRef]) -> Iterator[ScoreWarning]:
    """Yield a warning for each benchmark that training may have seen, if a model here was scored on it."""
    from klear_core.report.run.facts import ScoreWarning

    for exposure in given_contamination(config):
        scored = [name for name in exposure.scored_by if name in inputs]
        if scored:
            benchmarks = (*exposure.missed, *exposure.unknown)
            where = ", ".join(scored)
            yield ScoreWarning(
                where=where,
                text=exposure.warning,
                scored_by=tuple(scored),
                benchmarks=benchmarks,
                questions_seen=exposure.seen,
            )


def _differences(scores: Mapping[str, ArtifactRef]) -> Iterator[ComparedModels]:
    """Yield the paired differences of each evaluated model to the previous one, and of the last to the first.

    `scores` are the evaluations by the stage that made the model, in pipeline order.
    """
    from klear_core.evaluate.compare.paired import compare_pairs
    from klear_core.report.run.facts import ComparedModels

    names = list(scores)
    pairs = list(itertools.pairwise(names))
    if len(names) > 2:
        pairs.append((names[0], names[-1]))
    # in one call, because p-values are corrected for all comparisons of the report
    compared = compare_pairs([(scores[before].path, scores[after].path) for before, after in pairs])
    for (before, after), comparisons in zip(pairs, compared, strict=True):
        for comparison in comparisons:
            yield ComparedModels(before=before, after=after, scores=comparison)
