"""Plan a run: say for each stage whether it would be reused or run, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import JsonValue, ValidationError

from klear_core.artifacts.index import Entry, catalog
from klear_core.artifacts.manifest import ArtifactId, InputRecord, Manifest, read_manifest
from klear_core.artifacts.model_files import download_gb
from klear_core.artifacts.store import CheckedBy, LocalStore
from klear_core.config.data import BenchmarkConfig, GeneratedSource
from klear_core.config.data_jobs import BenchmarksJob, GivenModelJob
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.settings import leaves_of, result_settings
from klear_core.config.stage import EngineUse, Job, LearnerUse, Stage
from klear_core.errors import ArtifactError, ConfigError
from klear_core.evaluate.stats.significance import GATE_GAIN, GateBenchmark, detectable, gate_chances
from klear_core.pipeline.costs.estimate import estimate, gpus_held
from klear_core.pipeline.graph import fingerprints_of, input_records, open_store, stages_of, with_inputs
from klear_core.scores import percent

if TYPE_CHECKING:
    from klear_core.distill.teachers.fleet import BlockKeys

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
    """For `run`: how it differs from the nearest of the newest artifacts of its kind. For `given`: where the result
    comes from. For `damaged`: what is wrong with it."""


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
    newest = sorted(catalog(store).values(), key=lambda entry: entry.created_at, reverse=True)
    return [
        _plan_one(stage, ids, config.workspace, store, newest, asked.get(stage.name, ""))
        for stage in stages
        if stage.name in names
    ]


def _plan_one(
    stage: Stage,
    ids: Mapping[str, ArtifactId],
    workspace: WorkspaceConfig,
    store: LocalStore,
    newest: Sequence[Entry],
    asked: str,
) -> StagePlan:
    """Return the plan of one stage. `asked` is why it runs although its artifact may exist; empty if it need not.

    `newest` are the artifacts here, newest first.
    """
    own, origin = ids[stage.name], stage.job.origin()
    action: Action = "given" if origin else "run"
    if asked:
        why = asked
    elif store.exists(own.kind, own.fingerprint):
        damage = store.damage(own.kind, own.fingerprint)
        action = "damaged" if damage else "reuse"
        already = f"given: {origin}, already taken" if origin else "already made"
        why = f"{damage}; a run sets it aside and makes it again" if damage else already
    elif origin:
        why = given_from(stage.job)
    elif store.workdir(own.kind, own.fingerprint).is_dir():
        why = "goes on from an unfinished attempt"
    else:
        records = input_records(stage.job, {role: ids[name] for role, name in stage.inputs.items()}, workspace)
        # Of this stage, and not of all of its kind: `evaluate_sft` differs from every `evaluate_rl` by its model.
        others = [entry for entry in newest if (entry.kind, entry.stage) == (stage.kind, stage.name)]
        why = _why(stage, records, list(_manifests(store, others[:_MAX_COMPARED])))
    return StagePlan(stage=stage.name, kind=own.kind, fingerprint=own.fingerprint, action=action, why=why)


def given_from(job: Job) -> str:
    """Return where a given result comes from, and what is still to be downloaded."""
    origin = job.origin()
    if not isinstance(job, GivenModelJob):
        return origin
    try:
        gigabytes = download_gb(job.runtime.as_model())
    except ConfigError:
        return origin  # preflight says why it cannot be used
    if gigabytes is None:
        return f"{origin}, to be downloaded"
    return f"{origin}, {gigabytes:.2g} GB to be downloaded" if gigabytes else origin


_MAX_COMPARED = 20
"""Artifacts of a stage, the newest, of which the nearest says why it runs."""


def _manifests(store: LocalStore, entries: Sequence[Entry]) -> Iterator[Manifest]:
    for entry in entries:
        try:
            yield read_manifest(store.folder(entry.kind, entry.fingerprint))
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
    old, new = _settings_by_key(other.result_config), _settings_by_key(result_settings(stage.job))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, _ABSENT) != new.get(key, _ABSENT):
            found.append(f"{key}: {old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}")
    before = {i.role: i.fingerprint for i in other.inputs}
    found += [f"input {i.role} changed" for i in inputs if before.get(i.role) != i.fingerprint]
    roles = {i.role for i in inputs}
    found += [f"input {role} is gone" for role in sorted(before.keys() - roles)]
    return found


def _settings_by_key(config: Mapping[str, JsonValue], *, into_lists: bool = False) -> dict[str, JsonValue]:
    return {".".join(path): value for path, value in leaves_of(config, into_lists=into_lists)}


# ---- upgrades ----
# Find finished stages that run again only because the code is newer than their artifacts, and what that costs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A finished stage that runs again although no setting and no source was changed."""

    stage: str
    why: str
    """Change of the code, and the inputs that are made again for such a reason."""
    earlier: Manifest
    """Manifest of the newest artifact that the earlier code made from the same settings."""
    gpu_hours: float | None
    """None if the stage uses no GPU, or on how many it ran is not known."""
    is_measured: bool
    """Whether time and GPU-hours were measured. A build in several attempts has measured only its last one, so that
    `gpu_hours` is then the upper bound of the estimate."""
    max_tokens: int | None
    """The estimated bound of tokens, where the earlier artifact has not counted them."""


def reruns_of_upgrade(config: PipelineConfig, chosen: Collection[str] | None = None) -> list[Rerun]:
    """Return the chosen stages (None: all) that run again only because of newer code, in order."""
    stages = stages_of(config)
    names = [stage.name for stage in stages if chosen is None or stage.name in chosen]
    needed = with_inputs(stages, names)
    ids = fingerprints_of(needed, config.workspace)
    store = open_store(config.workspace, checked_by="size")
    newest = sorted(catalog(store).values(), key=lambda entry: entry.created_at, reverse=True)
    earlier: dict[str, list[Manifest]] = {}
    reruns = []
    for stage in needed:
        own = ids[stage.name]
        if stage.job.origin() or stage.job.asks_registry or store.exists(own.kind, own.fingerprint):
            continue
        records = input_records(stage.job, {role: ids[name] for role, name in stage.inputs.items()}, config.workspace)
        accepted = [{record.fingerprint} for record in records]
        for record, fingerprints in zip(records, accepted, strict=True):
            before = earlier.get(stage.inputs.get(record.role, ""), [])
            fingerprints.update(manifest.fingerprint for manifest in before)
        made_from_these = [
            entry
            for entry in newest
            if (entry.kind, entry.stage) == (stage.kind, stage.name)
            and len(entry.inputs) == len(accepted)
            and all(i.rpartition("/")[2] in those for i, those in zip(entry.inputs, accepted, strict=True))
        ]
        compared = _manifests(store, made_from_these[:_MAX_COMPARED])
        found = [manifest for manifest in compared if _added_settings(stage.job, manifest) is not None]
        if found:
            earlier[stage.name] = found
            if stage.name in names:
                reruns.append(_rerun(config, stage, max(found, key=lambda m: m.created_at), remade=earlier.keys()))
    return reruns


def _added_settings(job: Job, earlier: Manifest) -> dict[str, JsonValue] | None:
    """Return the settings that an earlier artifact did not know and that have their defaults now; None if any other
    setting differs."""
    old = _settings_by_key(earlier.result_config, into_lists=True)
    new = _settings_by_key(result_settings(job), into_lists=True)
    set_by_user = _settings_by_key(job.model_dump(mode="json", exclude_defaults=True), into_lists=True)
    added = {key: value for key, value in new.items() if key not in old}
    is_same = all(new.get(key, _ABSENT) == value for key, value in old.items())
    return added if is_same and not added.keys() & set_by_user.keys() else None


def _rerun(config: PipelineConfig, stage: Stage, earlier: Manifest, *, remade: Collection[str]) -> Rerun:
    job, reasons = stage.job, []
    if earlier.code_version != job.code_version:
        known = [why for version, why in job.code_changes.items() if version > earlier.code_version]
        change = f"code version {earlier.code_version} -> {job.code_version}"
        reasons.append(": ".join([change, *(["; ".join(known)] if known else [])]))
    added = _added_settings(job, earlier) or {}
    reasons += [f"new setting {key} = {value}" for key, value in added.items()]
    inputs = [name for name in dict.fromkeys(stage.inputs.values()) if name in remade]
    if inputs:
        reasons.append(f"follows from {', '.join(inputs)}")
    rows = estimate(config, {stage.name})
    max_tokens = rows[0].max_tokens if rows else None
    estimated = [row.gpu_hours for row in rows if row.gpu_hours is not None]
    is_measured, num_gpus = earlier.attempts == 1, gpus_held(_as_it_ran(stage, earlier))
    measured = earlier.wall_s / 3600 * num_gpus if estimated and num_gpus is not None else None
    expected = sum(estimated) if estimated else None
    return Rerun(
        stage=stage.name,
        why="; ".join(reasons),
        earlier=earlier,
        gpu_hours=measured if is_measured else expected,
        is_measured=is_measured,
        max_tokens=max_tokens,
    )


def _as_it_ran(stage: Stage, earlier: Manifest) -> Stage:
    """Return the stage with the workers and engines that made the earlier artifact, if its settings can be read."""
    try:
        return replace(stage, job=type(stage.job).model_validate(earlier.config))
    except ValidationError:  # a setting of its `runtime` has another name since
        return stage


# ---- pending work ----
# Find the work that a run still has to do: stages to build, and the sources, engines and trainings that they use.


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """The stages that would run, and what they would use."""

    config: PipelineConfig
    stages: tuple[Stage, ...]
    """Stages that would run, in order."""
    needed: tuple[Stage, ...]
    """Stages whose input files must exist, in order: those chosen, and all that they depend on. Also those to build
    again and not chosen, because their artifacts are set aside by fingerprint, which depends on their files."""
    benchmarks: Path | None = None
    """The folder of the benchmarks artifact that would be reused."""
    begun_gb: float = 0.0
    """Gigabytes that earlier attempts at these stages have left in their working folders."""
    unmade_inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Chosen stages, each with the inputs (in pipeline order) that neither exist nor are chosen."""
    keys: BlockKeys | None = None
    """Teachers' API keys by Prefect block; None before Prefect runs, when they cannot be read."""

    @classmethod
    def of(cls, config: PipelineConfig, chosen: Collection[str] | None, again: Collection[str]) -> PendingWork:
        """Return the work for the chosen stages (None: all), without those that exist, unless they are to be built
        `again`."""
        stages = stages_of(config)
        wanted = tuple(s for s in stages if chosen is None or s.name in chosen)
        names = {s.name for s in wanted}
        needed = with_inputs(stages, names.union(again))
        try:
            ids = fingerprints_of(needed, config.workspace)
        except (ConfigError, OSError):  # a missing file or unusable workspace; preflight reports it with its key
            return cls(config=config, stages=wanted, needed=needed)
        # By size: this check takes seconds. The run itself compares as `workspace.check_artifacts` says.
        store = open_store(config.workspace, checked_by="size")
        made = _made(store, ids, again)
        pending = tuple(s for s in wanted if s.name not in made)
        begun = [store.workdir(ids[s.name].kind, ids[s.name].fingerprint) for s in pending]
        loading = [s.name for s in needed if isinstance(s.job, BenchmarksJob)]
        benchmarks = _folder_of(store, ids[loading[0]]) if loading and loading[0] in made else None
        return cls(
            config=config,
            stages=pending,
            needed=needed,
            benchmarks=benchmarks,
            begun_gb=sum(_gb_in(folder) for folder in begun),
            unmade_inputs=tuple(_unmade_inputs(wanted, needed, made)),
        )

    @property
    def evaluates(self) -> bool:
        """Whether any model would be evaluated."""
        return any(stage.job.scores_model for stage in self.stages)

    def pending(self, job: type[J]) -> Iterator[tuple[Stage, J]]:
        """Yield the stages that would run and have a job of this class, each with its job."""
        return _with_job(self.stages, job)

    def needs(self, job: type[J]) -> Iterator[tuple[Stage, J]]:
        """Yield the `needed` stages that have a job of this class, each with its job."""
        return _with_job(self.needed, job)

    def engines(self) -> list[EngineUse]:
        """Return the engines that would sample, each once: all models are evaluated by one."""
        # By key, because the stages that evaluate share one section of settings, also with the curve of SFT.
        by_key: dict[str, EngineUse] = {}
        for stage in self.stages:
            engines = [use for use in (stage.job.scorer(), stage.engine()) if use is not None]
            by_key |= {use.key: use for use in engines}
        return list(by_key.values())

    def trainings(self) -> Iterator[tuple[Stage, LearnerUse]]:
        """Yield the stages that would train, each with its learner."""
        for stage in self.stages:
            learner = stage.learner()
            if learner is not None:
                yield stage, learner


def _with_job(stages: Sequence[Stage], job: type[J]) -> Iterator[tuple[Stage, J]]:
    for stage in stages:
        if isinstance(stage.job, job):
            yield stage, stage.job


def _made(store: LocalStore, ids: Mapping[str, ArtifactId], again: Collection[str]) -> set[str]:
    """Return the names of stages whose artifacts can be reused."""
    return {
        name
        for name, own in ids.items()
        if name not in again and store.exists(own.kind, own.fingerprint) and not store.damage(own.kind, own.fingerprint)
    }


def _folder_of(store: LocalStore, own: ArtifactId) -> Path | None:
    ref = store.find(own.kind, own.fingerprint)
    return ref.path if ref else None


def _unmade_inputs(
    wanted: Sequence[Stage], needed: Sequence[Stage], made: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    there = {stage.name for stage in wanted} | {*made}
    for stage in wanted:
        inputs = set(stage.inputs.values())
        missing = tuple(n.name for n in needed if n.name in inputs and n.name not in there)
        if missing:
            yield stage.name, missing


def _gb_in(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9


# ---- detectable gains ----
# Say before a run which differences its benchmarks can show.


def detectable_lines(config: PipelineConfig) -> Iterator[str]:
    """Yield a sentence for each benchmark whose number of problems the config has."""
    for benchmark in config.benchmarks:
        num = num_problems(benchmark)
        if num is None:
            continue
        n = benchmark.num_samples
        found = detectable(num, n, confidence=config.evaluate.confidence)
        start = f"{benchmark.name}, {num:,} problems, n = {n}: "
        if found.gain is None:
            seen = "too few problems to show any gain"
        else:
            seen = f"a gain of {100 * found.gain:.1f} points is shown 4 times in 5"
        yield f"{start}{seen}; two runs of one model differ by up to {100 * found.rerun:.1f} points"


def gate_lines(config: PipelineConfig) -> Iterator[str]:
    """Yield the chances that models pass the rule of the champion, if all numbers of problems are known."""
    rule = config.promote
    suite = []
    for benchmark in config.benchmarks:
        num = num_problems(benchmark)
        if rule is None or num is None or num < 2:
            return
        margin = rule.margin_of(benchmark.name)
        suite.append(GateBenchmark(num_problems=num, num_samples=benchmark.num_samples, margin=margin))
    if suite:
        found = gate_chances(suite, confidence=config.evaluate.confidence)
        yield (
            f"promote: an equal model is found non-inferior in {percent(found.equal_passes, 0)} of runs, one with a "
            f"gain of {GATE_GAIN} logits everywhere is promoted in {percent(found.better_is_promoted, 0)}"
        )


def num_problems(benchmark: BenchmarkConfig) -> int | None:
    """Return a benchmark's number of problems, as far as the config has it."""
    if benchmark.num_problems is not None:
        return benchmark.num_problems
    if isinstance(benchmark.source, GeneratedSource):
        return benchmark.source.num_problems
    return benchmark.expected_rows
