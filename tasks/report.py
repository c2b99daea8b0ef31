"""The story of a run as one HTML file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts import ArtifactRef, read_manifest
from klear_core.config.jobs import ReportJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.ledger import StageSummary
from klear_core.metrics import Telemetry
from klear_core.plan import fingerprints_of, open_store, stages_of, with_inputs, workspace_root
from tasks.provenance import code_commit
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task

if TYPE_CHECKING:
    from klear_core.report.inputs import PairedDifference, ReportInputs, StageFolder

EVALUATION = "evaluate_"
REPORT_FILE = "report.html"


@stage_task
def report(info: RunInfo, job: ReportJob, inputs: Inputs) -> ArtifactRef:
    """From every stage of the pipeline, by name; makes `report.html`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.report.build import build_report

        return build_report(report_inputs(info, job, inputs), workdir / REPORT_FILE)

    return run_stage(info, job, inputs, body)


def failed_report(info: RunInfo) -> Path:
    """Where a run that failed leaves its report: beside the artifacts, for no later run may take it for the report of these settings."""
    return workspace_root(info.workspace) / "failed" / info.run_id / REPORT_FILE


def report_failure(info: RunInfo, config: PipelineConfig, inputs: Inputs, unfinished: Mapping[str, str]) -> Path:
    """Write the report of a run that failed; `unfinished` are its stages without an artifact, with the words of the error or empty."""
    from klear_core.report.build import build_report
    from klear_core.report.inputs import StageFolder

    ids, store = fingerprints_of(with_inputs(stages_of(config), unfinished), info.workspace), open_store(info.workspace)
    missing = [
        StageFolder(
            name=name,
            folder=None,
            trouble=trouble,
            workdir=store.workdir(ids[name].kind, ids[name].fingerprint) if trouble else None,
            scores_model=_scored_model(name),
        )
        for name, trouble in unfinished.items()
    ]
    out = failed_report(info)
    build_report(report_inputs(info, ReportJob.of(config), inputs, missing), out)
    return out


def report_inputs(info: RunInfo, job: ReportJob, inputs: Inputs, missing: Sequence[StageFolder] = ()) -> ReportInputs:
    """The run as the report takes it; `missing` are planned stages without an artifact, which come after the others."""
    from klear_core.report import inputs as of

    commit = code_commit()
    manifests = {name: read_manifest(ref.path) for name, ref in inputs.items()}
    links = {"Prefect flow run": info.run_url or info.run_id}
    links |= {f"MLflow run of {name}": m.mlflow_run_id for name, m in manifests.items() if m.mlflow_run_id}
    run = of.RunInfo(
        name=info.run_name,
        profile=job.config.name,
        started_at=info.started_at.isoformat(timespec="seconds"),
        git_commit=commit.sha if commit else "",
        links=links,
    )
    done = (
        of.StageFolder(
            name=name, folder=ref.path, was_reused=manifests[name].created_at < info.started_at, scores_model=_scored_model(name)
        )
        for name, ref in inputs.items()
    )
    return of.ReportInputs(run=run, config=job.pipeline_config(), stages=(*done, *missing), differences=tuple(_differences(inputs)))


def _scored_model(stage: str) -> str:
    return stage.removeprefix(EVALUATION) if stage.startswith(EVALUATION) else ""


def _differences(inputs: Inputs) -> Iterator[PairedDifference]:
    """Each evaluated model against the one before it, and the last against the first."""
    from klear_core.evaluate.gate import compare
    from klear_core.report.inputs import PairedDifference

    models = {name.removeprefix(EVALUATION): ref for name, ref in inputs.items() if name.startswith(EVALUATION)}
    names = list(models)
    pairs = list(itertools.pairwise(names)) + ([(names[0], names[-1])] if len(names) > 2 else [])
    for before, after in pairs:
        for c in compare(models[before].path, models[after].path):
            yield PairedDifference(
                benchmark=c.benchmark,
                decoding=c.decoding,
                before=before,
                after=after,
                value=c.difference,
                low=c.low,
                high=c.high,
                confidence=c.confidence,
                num_problems=c.num_problems,
                is_same_decoding=c.is_same_decoding,
            )
