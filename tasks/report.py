"""The story of a run as one HTML file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts import ArtifactRef, read_manifest
from klear_core.config.jobs import ReportJob
from klear_core.ledger import StageSummary
from klear_core.metrics import Telemetry
from tasks.provenance import code_commit
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task

if TYPE_CHECKING:
    from klear_core.report.inputs import PairedDifference, ReportInputs

EVALUATION = "evaluate_"


@stage_task
def report(info: RunInfo, job: ReportJob, inputs: Inputs) -> ArtifactRef:
    """From every stage of the pipeline, by name; makes `report.html`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.report.build import build_report

        return build_report(report_inputs(info, job, inputs), workdir / "report.html")

    return run_stage(info, job, inputs, body)


def report_inputs(info: RunInfo, job: ReportJob, inputs: Inputs) -> ReportInputs:
    """The run as the report takes it."""
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
    stages = tuple(
        of.StageFolder(
            name=name,
            folder=ref.path,
            was_reused=manifests[name].created_at < info.started_at,
            scores_model=name.removeprefix(EVALUATION) if name.startswith(EVALUATION) else "",
        )
        for name, ref in inputs.items()
    )
    return of.ReportInputs(run=run, config=job.pipeline_config(), stages=stages, differences=tuple(_differences(inputs)))


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
