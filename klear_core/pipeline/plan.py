"""Plan a run: say for each stage whether it would be reused or run, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from klear_core.artifacts.manifest import ArtifactId, InputRecord, Manifest, read_manifest
from klear_core.artifacts.model_files import download_gb
from klear_core.artifacts.store import CheckedBy, LocalStore
from klear_core.config.given_jobs import GivenModelJob
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import Stage
from klear_core.errors import ArtifactError, ConfigError
from klear_core.pipeline.fingerprints import fingerprints_of, input_records
from klear_core.pipeline.graph import stages_of, with_inputs
from klear_core.pipeline.workspace import open_store

_ABSENT = "(not set)"

Action = Literal["run", "reuse", "given", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The planned action for one stage."""

    stage: str
    kind: str
    fingerprint: str
    action: Action
    """`given`: a run takes a result that exists. A run sets a damaged artifact aside, and builds it again."""
    why: str
    """For `run`: how it differs from the nearest artifact of its kind. For `given`: where the result comes from. For
    `damaged`: what is wrong with it."""


def plan_stages(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    checked_by: CheckedBy = "size",
) -> list[StagePlan]:
    """Return which of the chosen stages (None: all) a run would reuse, which it would run, and why. Runs nothing.

    `again` names stages that the user asked to build again. Artifacts are compared with their manifests by name and
    size, so that a plan takes seconds, or byte by byte if `checked_by` says so; a run does as
    `workspace.check_artifacts` says.
    """
    stages = stages_of(config)
    names = [stage.name for stage in stages if chosen is None or stage.name in chosen]
    ids = fingerprints_of(with_inputs(stages, names), config.workspace)
    store = open_store(config.workspace, checked_by=checked_by)
    asked = {stage.name: "asks each time which model is champion" for stage in stages if stage.job.asks_registry}
    asked |= dict.fromkeys(again, "asked to be made again")
    return [
        _plan_one(stage, ids, config.workspace, store, asked.get(stage.name, ""))
        for stage in stages
        if stage.name in names
    ]


def _plan_one(
    stage: Stage, ids: Mapping[str, ArtifactId], workspace: WorkspaceConfig, store: LocalStore, asked: str
) -> StagePlan:
    """Return the plan of one stage. `asked` is why it runs although its artifact may exist; empty if it need not."""
    own = ids[stage.name]
    action: Action = "given" if stage.origin else "run"
    if asked:
        why = asked
    elif store.exists(own.kind, own.fingerprint):
        damage = store.damage(own.kind, own.fingerprint)
        action = "damaged" if damage else "reuse"
        already = f"given: {stage.origin}, already taken" if stage.origin else "already made"
        why = f"{damage}; a run sets it aside and makes it again" if damage else already
    elif stage.origin:
        why = given_from(stage)
    elif store.is_begun(own.kind, own.fingerprint):
        why = "goes on from an unfinished attempt"
    else:
        records = input_records(stage.job, {role: ids[name] for role, name in stage.inputs.items()}, workspace)
        # Of this stage, and not of all of its kind: `evaluate_sft` differs from every `evaluate_rl` by its model.
        why = _why(stage, records, [m for m in _manifests(store, stage.kind) if m.stage == stage.name])
    return StagePlan(stage=stage.name, kind=own.kind, fingerprint=own.fingerprint, action=action, why=why)


def given_from(stage: Stage) -> str:
    """Return where a given result comes from, and what is still to be downloaded."""
    if not isinstance(stage.job, GivenModelJob):
        return stage.origin
    try:
        gigabytes = download_gb(stage.job.model())
    except ConfigError:
        return stage.origin  # preflight says why it cannot be used
    if gigabytes is None:
        return f"{stage.origin}, to be downloaded"
    return f"{stage.origin}, {gigabytes:.2g} GB to be downloaded" if gigabytes else stage.origin


def _manifests(store: LocalStore, kind: str) -> Iterator[Manifest]:
    for folder in store.folders(kind):
        try:
            yield read_manifest(folder)
        except ArtifactError:
            continue  # damaged: a run sets it aside, with a message


def _why(stage: Stage, inputs: Sequence[InputRecord], others: Sequence[Manifest]) -> str:
    """Return how a stage differs from the nearest artifact of its name, in terms of the config."""
    if not others:
        return "no artifact yet"
    described = [(_differences(stage, inputs, m), m.created_at) for m in others]
    # the fewest differences, the newest of equals
    nearest = min(described, key=lambda d: (len(d[0]), -d[1].timestamp()))[0]
    shown = nearest[:3]
    if len(nearest) > len(shown):
        shown.append(f"and {len(nearest) - len(shown)} more")
    return "; ".join(shown)


def _differences(stage: Stage, inputs: Sequence[InputRecord], other: Manifest) -> list[str]:
    """Return every difference; those of the inputs come last, because settings say more."""
    found = []
    if other.code_version != stage.job.code_version:
        found.append(f"code version: {other.code_version} -> {stage.job.code_version}")
    old, new = dict(_leaves(other.result_config)), dict(_leaves(result_settings(stage.job)))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, _ABSENT) != new.get(key, _ABSENT):
            found.append(f"{key}: {old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}")
    before = {i.role: i.fingerprint for i in other.inputs}
    found += [f"input {i.role} changed" for i in inputs if before.get(i.role) != i.fingerprint]
    roles = {i.role for i in inputs}
    found += [f"input {role} is gone" for role in sorted(before.keys() - roles)]
    return found


def _leaves(value: JsonValue, path: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield dotted keys and their values; a list counts as one value, because its items have no names."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value
