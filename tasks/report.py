"""The task that writes a run's report as one HTML file, and the report of a failed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klear_core.artifacts.ledger import StageSummary
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.jobs import ReportJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.metrics import Telemetry
from klear_core.pipeline.fingerprints import artifact_id, fingerprints_of
from klear_core.pipeline.graph import stages_of, with_inputs
from klear_core.pipeline.workspace import open_store, workspace_root
from tasks.report_inputs import report_inputs
from tasks.run_info import RunInfo
from tasks.stage import run_stage
from tasks.task import Inputs, stage_task


@stage_task
def report(info: RunInfo, job: ReportJob, inputs: Inputs) -> ArtifactRef:
    """Make `report.html` from the artifacts of all stages, by stage name."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.report.build import build_report

        # The report is written in the working folder; its links must hold where the artifact will be.
        own = artifact_id(job, inputs, info.workspace)
        home = open_store(info.workspace).folder(own.kind, own.fingerprint)
        return build_report(report_inputs(info, job, inputs), workdir / job.page, home=home)

    return run_stage(info, job, inputs, body)


def failed_report(info: RunInfo) -> Path:
    """Return the path of a failed run's report. It is not an artifact, so no later run can reuse it."""
    return workspace_root(info.workspace) / "failed" / info.run_id / ReportJob.page


def report_failure(
    info: RunInfo, config: PipelineConfig, inputs: Inputs, unfinished: Sequence[Stage], trouble: str
) -> Path:
    """Write the report of a failed run. The first of the `unfinished` stages failed with `trouble`; none followed
    it."""
    from klear_core.report.build import build_report
    from klear_core.report.inputs import StageFolder

    failed, *not_reached = unfinished
    own = fingerprints_of(with_inputs(stages_of(config), [failed.name]), info.workspace)[failed.name]
    workdir = open_store(info.workspace).workdir(own.kind, own.fingerprint)
    missing = [StageFolder(stage=failed, folder=None, trouble=trouble, workdir=workdir)]
    # the report stage itself is left out, because its reader is looking at a report
    missing += [StageFolder(stage=stage, folder=None) for stage in not_reached if not stage.job.page]
    out = failed_report(info)
    build_report(report_inputs(info, ReportJob.of(config), inputs, missing), out)
    return out
