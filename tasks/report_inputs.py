"""Build the input of the report and of the terminal's result. Imports no Prefect: a run that only reuses needs none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.config.jobs import ReportJob
from tasks.provenance import code_commit
from tasks.run_info import RunInfo

if TYPE_CHECKING:
    from klear_core.report.inputs import PairedDifference, ReportInputs, StageFolder

EVALUATION = "evaluate_"
REPORT_FILE = "report.html"


def report_inputs(
    info: RunInfo, job: ReportJob, inputs: Mapping[str, ArtifactRef], missing: Sequence[StageFolder] = ()
) -> ReportInputs:
    """Return the report's input; `missing` are planned stages without an artifact, listed after the others."""
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
            name=name,
            folder=ref.path,
            was_reused=manifests[name].created_at < info.started_at,
            scores_model=scored_model(name),
        )
        for name, ref in inputs.items()
    )
    return of.ReportInputs(
        run=run, config=job.pipeline_config(), stages=(*done, *missing), differences=tuple(_differences(inputs))
    )


def scored_model(stage: str) -> str:
    """Return the name of the model that an evaluation stage scores; empty for other stages."""
    return stage.removeprefix(EVALUATION) if stage.startswith(EVALUATION) else ""


def _differences(inputs: Mapping[str, ArtifactRef]) -> Iterator[PairedDifference]:
    """Yield the paired differences of each evaluated model to the previous one, and of the last to the first."""
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
