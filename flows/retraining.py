"""Retrain by the clock: one at a time, through the gate, with one summary of what was new and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import PurePath

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import OUTSIDE_KINDS, ArtifactRef, Manifest, read_manifest
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.run_history import RunHistory, RunRecord
from klear_core.config.pipeline import PipelineConfig, PromoteConfig, WorkspaceConfig
from klear_core.config.stage import PromoteJob
from klear_core.errors import ArtifactError, ConfigError
from klear_core.evaluate.compare.promotion import read_decision
from klear_core.pipeline.graph import open_store, workspace_root
from klear_core.scores import number

log = logging.getLogger(__name__)


def gated(config: PipelineConfig) -> PipelineConfig:
    """Return the config with a rule by which its last model becomes champion: its own, or the default one.

    ConfigError if there is no benchmark to decide on.
    """
    if config.promote is not None:
        return config
    if not config.benchmarks:
        raise ConfigError("benchmarks: retraining goes through the gate, and there is nothing to compare models on")
    return config.model_copy(update={"promote": PromoteConfig()})


@contextmanager
def turn(config: PipelineConfig) -> Iterator[None]:
    """Wait until no other retraining for the same registered model runs in this workspace or its shared store."""
    assert config.promote is not None, "retraining goes through the gate"
    name = f"retraining-{config.promote.registered_model}"
    warn = partial(log.warning, "%s is running already: waiting for %s", name)
    with ExitStack() as held:
        lock = workspace_root(config.workspace) / "artifacts" / ".locks" / name
        held.enter_context(file_lock(lock, on_wait=warn))
        store = open_store(config.workspace)
        if isinstance(store, ObjectStore):
            held.enter_context(store.held(name, on_wait=warn))
        yield


def previous_run(workspace: WorkspaceConfig, profile: str, *, run_id: str) -> RunRecord | None:
    """Return the newest other run of the profile that ended well; None if there is none."""
    history = RunHistory.of(workspace_root(workspace), store=workspace.store)
    found = (r for r in history.records() if r.profile == profile and r.state == "done" and r.run_id != run_id)
    return next(found, None)


def summary(
    artifacts: Mapping[str, ArtifactRef], before: RunRecord | None, workspace: WorkspaceConfig, *, started_at: datetime
) -> str:
    """Return what a retraining found new, which stages it made and which it reused, and the decision, as Markdown."""
    manifests = {name: read_manifest(ref.path) for name, ref in artifacts.items()}
    made = [name for name, manifest in manifests.items() if manifest.created_at >= started_at]
    reused = [name for name in manifests if name not in made]
    lines = list(_new_data(manifests, before, workspace)) or ["no new data since the last run"]
    lines.append(f"made: {', '.join(made) or 'nothing'}; reused: {', '.join(reused) or 'nothing'}")
    for name, ref in artifacts.items():
        if manifests[name].kind == PromoteJob.kind:
            lines.append(read_decision(ref.path).sentence)
    return "\n".join(f"- {line}" for line in lines)


def _new_data(manifests: Mapping[str, Manifest], before: RunRecord | None, workspace: WorkspaceConfig) -> Iterator[str]:
    """Yield a line for each file or repository that is not as in the run before, with the counts that changed."""
    if before is None:
        yield "the first run of this profile here"
        return
    then = {stage.name: stage for stage in before.stages}
    store = open_store(workspace)
    for name, manifest in manifests.items():
        old = then.get(name)
        if old is None or not old.fingerprint or old.fingerprint == manifest.fingerprint:
            continue
        try:
            former = read_manifest(store.folder(old.kind, old.fingerprint))
        except ArtifactError:
            continue  # collected meanwhile
        known = {record.role: record.fingerprint for record in former.inputs}
        for record in manifest.inputs:
            if record.kind in OUTSIDE_KINDS and known.get(record.role) != record.fingerprint:
                what = "has changed" if record.role in known else "is new"
                yield f"{PurePath(record.role).name} {what} ({name}: {_counts(former, manifest)})"


def _counts(before: Manifest, after: Manifest) -> str:
    changed = [
        f"{number(before.counts[name])} -> {number(value)} {name}"
        for name, value in after.counts.items()
        if name in before.counts and before.counts[name] != value
    ]
    return ", ".join(changed) or "no count changed"
