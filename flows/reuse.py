"""Detect and show a run with nothing left to make, without importing Prefect, MLflow, Ray or torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flows.result import PipelineResult, page_of
from flows.run_console import RunConsole
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ArtifactError
from klear_core.pipeline.fingerprints import fingerprints_of
from klear_core.pipeline.graph import stages_of, with_inputs
from klear_core.pipeline.workspace import open_store


def reuse_all(config: PipelineConfig, chosen: Sequence[str]) -> PipelineResult | None:
    """Print and return the result of a run that has nothing to make; None if it has, see `intact_artifacts`."""
    refs = intact_artifacts(config, chosen)
    if refs is None:
        return None
    console = RunConsole()
    for name in chosen:
        console.stage_done(name, refs[name], was_reused=True, wall_s=0.0)
    console.close()
    result = {name: refs[name] for name in chosen}
    report = page_of(stages_of(config), result)
    return PipelineResult(refs=result, mlflow_run_id=None, report=report, flow_run_id="")


def intact_artifacts(config: PipelineConfig, chosen: Sequence[str]) -> dict[str, ArtifactRef] | None:
    """Return the artifacts of the chosen stages and their inputs if all exist and pass the checks of a run, else None.

    A run on them is no flow run, because it has nothing that Prefect could retry, cancel or show. None also if
    PREFECT_API_URL names a server, which should list every run, or if a chosen stage asks the registry.
    """
    if os.environ.get("PREFECT_API_URL"):
        return None
    stages = stages_of(config)
    if any(stage.job.asks_registry for stage in stages if stage.name in chosen):
        return None
    needed = {*chosen} | {name for stage in stages if stage.name in chosen for name in stage.inputs.values()}
    ids = fingerprints_of(with_inputs(stages, needed), config.workspace)
    store = open_store(config.workspace)
    refs = {}
    try:
        for name in needed:  # find all before verifying any, because verification may read every byte
            ref = store.find(ids[name].kind, ids[name].fingerprint)
            if ref is None:
                return None
            refs[name] = ref
        for ref in refs.values():
            store.verify(ref)
    except ArtifactError:
        return None  # a full run reports the damage, moves the artifact aside and makes it again
    return refs
