"""Build the input of the report and of the terminal's result. Imports no Prefect: a run that only reuses needs none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.config.jobs import ReportJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.pipeline.exposure import exposures
from klear_core.pipeline.graph import stages_of
from tasks.provenance import code_commit
from tasks.run_info import RunInfo

if TYPE_CHECKING:
    from klear_core.report.inputs import PairedDifference, ReportInputs, ScoreWarning, StageFolder


_PUBLISHED = Path(__file__).parents[1] / "flows" / "profiles" / "published.toml"
"""Published scores: configs/ of a checkout, or its copy in an installed package."""


def report_inputs(
    info: RunInfo, job: ReportJob, inputs: Mapping[str, ArtifactRef], missing: Sequence[StageFolder] = ()
) -> ReportInputs:
    """Return the report's input; `missing` are planned stages without an artifact, listed after the others."""
    from klear_core.evaluate.published import read_published
    from klear_core.report import inputs as of

    config, commit = job.pipeline_config(), code_commit()
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
    done = [
        of.StageFolder(
            stage=stage,
            folder=inputs[stage.name].path,
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


def _score_warnings(config: PipelineConfig, inputs: Mapping[str, ArtifactRef]) -> Iterator[ScoreWarning]:
    """Yield a warning for each benchmark that training may have seen, if a model here was scored on it."""
    from klear_core.report.inputs import ScoreWarning

    for exposure in exposures(config):
        scored = [name for name in exposure.scored_by if name in inputs]
        if scored:
            benchmarks = (*exposure.missed, *exposure.unknown)
            where = ", ".join(scored)
            yield ScoreWarning(where=where, text=exposure.warning, scored_by=tuple(scored), benchmarks=benchmarks)


def _differences(scores: Mapping[str, ArtifactRef]) -> Iterator[PairedDifference]:
    """Yield the paired differences of each evaluated model to the previous one, and of the last to the first.

    `scores` are the evaluations by the stage that made the model, in pipeline order.
    """
    from klear_core.evaluate.gate import compare_pairs
    from klear_core.report.inputs import PairedDifference

    names = list(scores)
    pairs = list(itertools.pairwise(names))
    if len(names) > 2:
        pairs.append((names[0], names[-1]))
    # in one call, because p-values are corrected for all comparisons of the report
    compared = compare_pairs([(scores[before].path, scores[after].path) for before, after in pairs])
    for (before, after), comparisons in zip(pairs, compared, strict=True):
        for c in comparisons:
            yield PairedDifference(
                benchmark=c.benchmark,
                decoding=c.decoding,
                before=before,
                after=after,
                value=c.difference,
                rerun=c.rerun,
                new_problems=c.new_problems,
                floor_binds=c.floor_binds,
                p_corrected=c.p_corrected,
                num_changed=c.num_changed,
                confidence=c.confidence,
                num_problems=c.num_problems,
                is_same_decoding=c.is_same_decoding,
            )
