"""The pipeline as data: which stages a config asks for, what each is made from, and which of them exist already.

    benchmarks ─┬─► curate ─┬─► distill ─► sft ─► rl ─► rl_code
    base ───────│───────────│──────────────┘      │
                │           └─────────────────────┘ (problems)
                └─► evaluate_base, evaluate_sft, evaluate_rl, … ─► report

With `curate_rl` set, RL has problems of its own, curated beside the others.
Fingerprints are chained from recipe to recipe, so the whole plan follows from the config and the content of local files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from klear_core.artifacts import ArtifactId, InputRecord, Manifest, file_ref, fingerprint, read_manifest
from klear_core.config.base import result_settings
from klear_core.config.jobs import BaseJob, BenchmarksJob, CurateJob, DistillJob, EvaluateJob, Job, ReportJob, RlJob, SftJob
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.store import CheckedBy, LocalStore

CODE_VERSIONS = {"benchmarks": 1, "curate": 2, "base": 1, "distill": 2, "sft": 3, "rl": 6, "evaluate": 4, "report": 1}
"""By kind. Raise a number when a change of code changes that stage's result: then it runs again, and what follows from it."""

_ABSENT = "(not set)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One node of the graph."""

    name: str
    """Unique in the pipeline: `evaluate_rl`."""
    job: Job
    inputs: Mapping[str, str]
    """The stage that plays each role: `{"model": "sft"}`."""

    @property
    def kind(self) -> str:
        """What it makes: `evaluate`."""
        return self.job.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What a run would do about one stage."""

    stage: str
    kind: str
    fingerprint: str
    action: Literal["run", "reuse", "damaged"]
    """A damaged artifact is set aside by a run, and made again."""
    why: str
    """For `run`: how it differs from the nearest artifact of its kind. For `damaged`: what is wrong with it."""


def stages_of(config: PipelineConfig) -> tuple[Stage, ...]:
    """Every stage of a pipeline, each after those it depends on."""
    rl_code, curate_rl = config.rl_code, config.curate_rl
    prompts = "curate_rl" if curate_rl else "curate"
    models = ["base", "sft", "rl", *(["rl_code"] if rl_code else [])]
    training: list[tuple[str, Job, dict[str, str]]] = [
        ("benchmarks", BenchmarksJob.of(config), {}),
        ("curate", CurateJob.of(config, config.curate), {"benchmarks": "benchmarks"}),
        *([("curate_rl", CurateJob.of(config, curate_rl), {"benchmarks": "benchmarks"})] if curate_rl else []),
        ("base", BaseJob.of(config), {}),
        ("distill", DistillJob.of(config), {"problems": "curate"}),
        ("sft", SftJob.of(config), {"model": "base", "traces": "distill"}),
        ("rl", RlJob.of(config, config.rl), {"model": "sft", "problems": prompts}),
    ]
    stages = [Stage(name=name, job=job, inputs=inputs) for name, job, inputs in training]
    if rl_code:
        stages.append(Stage(name="rl_code", job=RlJob.of(config, rl_code), inputs={"model": "rl", "problems": prompts}))
    for model in models:
        roles = {"model": model, "benchmarks": "benchmarks"}
        stages.append(Stage(name=f"evaluate_{model}", job=EvaluateJob.of(config), inputs=roles))
    everything = {s.name: s.name for s in stages}
    return (*stages, Stage(name="report", job=ReportJob.of(config), inputs=everything))


def select_stages(stages: Sequence[Stage], *, only: str | None, from_: str | None, until: str | None) -> tuple[str, ...]:
    """Names of the stages to run. A kind stands for all its stages (`evaluate`). ConfigError lists the names if one is unknown."""
    if only and (from_ or until):
        raise ConfigError("only is for one stage; it does not go with from or until")
    names = [s.name for s in stages]
    chosen = _indices(stages, only) if only else list(range(len(names)))
    first = min(_indices(stages, from_)) if from_ else 0
    last = max(_indices(stages, until)) if until else len(names) - 1
    if first > last:
        raise ConfigError(f"from {from_!r} comes after until {until!r}; the order is {', '.join(names)}")
    return tuple(names[i] for i in chosen if first <= i <= last)


def with_inputs(stages: Sequence[Stage], names: Collection[str]) -> tuple[Stage, ...]:
    """The stages of these names and all that they are made from, in order."""
    needed = set(names)
    for stage in reversed(stages):
        if stage.name in needed:
            needed |= set(stage.inputs.values())
    return tuple(s for s in stages if s.name in needed)


def downstream_of(stages: Sequence[Stage], which: str) -> tuple[str, ...]:
    """A stage (or all of a kind) and everything made from it, in order."""
    found = {stages[i].name for i in _indices(stages, which)}
    for stage in stages:
        if found & set(stage.inputs.values()):
            found.add(stage.name)
    return tuple(s.name for s in stages if s.name in found)


def stages_again(stages: Sequence[Stage], rerun_from: str | None, chosen: Collection[str]) -> tuple[str, ...]:
    """Return the stages to make again although they are there: `rerun_from` and all that follows from it; None names none.

    ConfigError if `rerun_from` is not among the stages to run, for then it would be taken away and not be made.
    """
    if rerun_from is None:
        return ()
    again = downstream_of(stages, rerun_from)
    if not set(again[:1]) <= set(chosen):
        raise ConfigError(f"rerun from {rerun_from!r}: it is not among the stages to run, which are {', '.join(chosen)}")
    return again


def fingerprints_of(stages: Sequence[Stage], workspace: WorkspaceConfig) -> dict[str, ArtifactId]:
    """What each stage's artifact is called, by stage name, before anything has run."""
    ids: dict[str, ArtifactId] = {}
    for stage in stages:
        made_from = {role: ids[name] for role, name in stage.inputs.items()}
        ids[stage.name] = artifact_id(stage.job, made_from, workspace)
    return ids


def artifact_id(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> ArtifactId:
    """What the artifact of this job on these inputs is called."""
    records = input_records(job, inputs, workspace)
    return ArtifactId(kind=job.kind, fingerprint=fingerprint(job.kind, CODE_VERSIONS[job.kind], job, records))


def input_records(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> tuple[InputRecord, ...]:
    """All inputs by role: the artifacts, by name of role, and then the local files that the job names."""
    cache = workspace_root(workspace) / "file_hashes.json"
    artifacts = [InputRecord(kind=i.kind, fingerprint=i.fingerprint, role=role) for role, i in sorted(inputs.items())]
    files = [InputRecord(role=path, **file_ref(path, cache=cache).model_dump()) for path in job.files()]
    return (*artifacts, *files)


def workspace_root(workspace: WorkspaceConfig) -> Path:
    """The workspace as an absolute path."""
    return Path(workspace.root).expanduser().absolute()


def open_store(workspace: WorkspaceConfig) -> LocalStore:
    """The workspace's artifacts."""
    return LocalStore(workspace_root(workspace) / "artifacts", checked_by=workspace.check_artifacts)


def plan_stages(
    config: PipelineConfig, chosen: Collection[str] | None = None, *, again: Collection[str] = (), checked_by: CheckedBy = "size"
) -> list[StagePlan]:
    """Return which of the chosen stages (None: all) a run would reuse, which it would run, and why. Runs nothing.

    `again` names stages that are asked to be made anew. Artifacts are compared with their manifests by name and size, or byte by byte
    if `checked_by` says so.
    """
    stages = stages_of(config)
    names = {s.name for s in stages} if chosen is None else chosen
    ids = fingerprints_of(with_inputs(stages, names), config.workspace)
    store = LocalStore(open_store(config.workspace).root, checked_by=checked_by)
    asked = dict.fromkeys(again, "asked to be made again")
    return [_plan_one(stage, ids, config.workspace, store, asked.get(stage.name, "")) for stage in stages if stage.name in names]


def _plan_one(stage: Stage, ids: Mapping[str, ArtifactId], workspace: WorkspaceConfig, store: LocalStore, asked: str) -> StagePlan:
    """`asked` is why the stage runs although its artifact may be there; empty if it need not."""
    own = ids[stage.name]
    action: Literal["run", "reuse", "damaged"] = "run"
    if asked:
        why = asked
    elif store.folder(own.kind, own.fingerprint).is_dir():
        damage = store.damage(own.kind, own.fingerprint)
        action = "damaged" if damage else "reuse"
        why = f"{damage}; a run sets it aside and makes it again" if damage else "already made"
    elif store.is_begun(own.kind, own.fingerprint):
        why = "goes on from an unfinished attempt"
    else:
        records = input_records(stage.job, {role: ids[name] for role, name in stage.inputs.items()}, workspace)
        why = _why(stage, records, [m for m in _manifests(store, stage.kind) if m.stage == stage.name])
    return StagePlan(stage=stage.name, kind=own.kind, fingerprint=own.fingerprint, action=action, why=why)


def _manifests(store: LocalStore, kind: str) -> Iterator[Manifest]:
    for folder in store.folders(kind):
        try:
            yield read_manifest(folder)
        except ArtifactError:
            continue  # damaged: `create` sets it aside with a message when its turn comes


def _why(stage: Stage, inputs: Sequence[InputRecord], others: Sequence[Manifest]) -> str:
    """How a stage differs from the nearest artifact of its name, in the words of the config."""
    if not others:
        return "no artifact yet"
    described = [(_differences(stage, inputs, m), m.created_at) for m in others]
    nearest = min(described, key=lambda d: (len(d[0]), -d[1].timestamp()))[0]
    shown = nearest[:3]
    return "; ".join(shown) + (f"; and {len(nearest) - 3} more" if len(nearest) > 3 else "")


def _differences(stage: Stage, inputs: Sequence[InputRecord], other: Manifest) -> list[str]:
    """Every difference, the inputs' last: settings say more."""
    found = []
    if other.code_version != CODE_VERSIONS[stage.kind]:
        found.append(f"code version: {other.code_version} -> {CODE_VERSIONS[stage.kind]}")
    old, new = dict(_leaves(other.result_config)), dict(_leaves(result_settings(stage.job)))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, _ABSENT) != new.get(key, _ABSENT):
            found.append(f"{key}: {old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}")
    before = {i.role: i.fingerprint for i in other.inputs}
    found += [f"input {i.role} changed" for i in inputs if before.get(i.role) != i.fingerprint]
    found += [f"input {role} is gone" for role in before.keys() - {i.role for i in inputs}]
    return found


def _leaves(value: JsonValue, path: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Dotted keys and their values; lists count as values, for their items have no names."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _indices(stages: Sequence[Stage], which: str) -> list[int]:
    named = [i for i, s in enumerate(stages) if s.name == which]
    found = named or [i for i, s in enumerate(stages) if s.kind == which]
    if not found:
        names = dict.fromkeys([*(s.name for s in stages), *(s.kind for s in stages)])
        raise ConfigError(f"no stage {which!r}; there are {', '.join(names)}")
    return found
