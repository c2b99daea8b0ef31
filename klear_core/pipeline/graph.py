"""Define the pipeline as data: the stages that a config asks for, their inputs, and the names of their artifacts.

    benchmarks ─┬─► curate ─┬─► distill ─► sft ─► rl ─► rl_code        (with `opd`: sft ─► opd ─► rl)
    base ───────│───────────│──────────────┘      │
                │           └─────────────────────┘ (problems)
                └─► evaluate_base, evaluate_sft, evaluate_rl, … ─► promote ─► report

With `curate_rl` set, RL has its own problems, curated separately. With `tag` set, its stage follows `curate` and hands
on the problems with new difficulty tags; `tag_rl` does so with the problems of RL. A stage's fingerprint includes those
of its inputs, so all fingerprints follow from the config and the content of local files. Only `promote`, which there is
if it is set, also depends on the present champion.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from klear_core.artifacts.files import content_digest
from klear_core.artifacts.manifest import ArtifactId, InputRecord, fingerprint, read_manifest
from klear_core.artifacts.model_files import folder_of
from klear_core.artifacts.store import CheckedBy, LocalStore
from klear_core.config.curate import TagConfig
from klear_core.config.data_jobs import (
    BenchmarksJob,
    CurateJob,
    GivenModelJob,
    GivenProblemsJob,
    GivenRowsJob,
    GivenTracesJob,
    Rows,
    ServedModelJob,
)
from klear_core.config.distill import LocalTeacherConfig
from klear_core.config.evaluate import ServedModelConfig
from klear_core.config.opd import GivenTeacher, OpdTeacherConfig, TrainedTeacher
from klear_core.config.opd_jobs import OpdJob, OpdRolloutsJob, OpdScoresJob
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.settings import expanded, result_settings
from klear_core.config.stage import (
    BaseJob,
    DistillJob,
    EvaluateJob,
    Job,
    PromoteJob,
    ReportJob,
    RlJob,
    SftJob,
    Stage,
    TagJob,
)
from klear_core.config.train import (
    GgufModelConfig,
    GivenFolder,
    GivenGguf,
    GivenRepo,
    HubModelConfig,
    PublishedModel,
    TinyModelConfig,
)
from klear_core.errors import ArtifactError, ConfigError, meant
from klear_core.train.base_model import pointed_folder
from klear_core.types import Domain

log = logging.getLogger(__name__)


def stages_of(config: PipelineConfig) -> tuple[Stage, ...]:
    """Return every stage of a pipeline, each after the stages it depends on.

    With a given result, only the stages that lead from it to the last model are left.
    """
    stages = _with_given(config, _makers(config))
    if config.opd and not config.opd.then_rl:
        stages = list(with_inputs(stages, {"opd"}))
    models = _scored_models(config, stages)
    for model in models:
        inputs = {"model": model, "benchmarks": "benchmarks"}
        stages.append(_stage(f"evaluate_{model}", EvaluateJob.of(config), inputs, section="evaluate"))
    if config.promote:
        stages.append(_stage("promote", PromoteJob.of(config), _promote_inputs(models)))
    # The report takes every stage as an input, so that its fingerprint changes with any of them.
    everything = {stage.name: stage.name for stage in stages}
    return (*stages, _stage("report", ReportJob.of(config), everything))


def _promote_inputs(models: Sequence[str]) -> dict[str, str]:
    """Return the inputs of `promote`: the last model, its scores, and those of the first model if there are several."""
    inputs = {"model": models[-1], "evaluation": f"evaluate_{models[-1]}", "benchmarks": "benchmarks"}
    return inputs if len(models) == 1 else {**inputs, "first": f"evaluate_{models[0]}"}


def _with_given(config: PipelineConfig, stages: list[Stage]) -> list[Stage]:
    """Replace stages by given results, and leave out those that nothing else needs."""
    served = _served_model(config)
    if served:
        return [served, *(stage for stage in stages if isinstance(stage.job, BenchmarksJob))]
    models = config.given.models()
    given = {name: _given_model(name, model) for name, model in models.items()}
    rows = {name: _given_rows(config, name, sources) for name, sources in config.given.rows().items()}
    if not given and not rows:
        return stages
    # `benchmarks` is the first stage, and all that given rows need.
    benchmarks, *others = [stage for stage in stages if stage.name not in given and stage.name not in rows]
    needed = {"benchmarks", *given, *_last_model(config)}
    # What is given comes first, so that it is downloaded before anything is spent.
    return list(with_inputs([*given.values(), benchmarks, *rows.values(), *others], needed))


def _served_model(config: PipelineConfig) -> Stage | None:
    """Return the stage of a model that is served elsewhere, the only one of such a run."""
    engine = config.evaluate.engine
    if not isinstance(engine, ServedModelConfig):
        return None
    return _stage("model", ServedModelJob.of(engine), {}, section="evaluate.engine", label="Model, served")


def _given_model(name: str, given: GivenFolder | GivenRepo | GivenGguf) -> Stage:
    labels = {"sft": "SFT", "rl": "RL", "rl_code": "RL (code)", "model": "Model"}
    section = "given.evaluate" if name == "model" else f"given.{name}"
    return _stage(name, GivenModelJob.of(given), {}, section=section, label=f"{labels[name]}, given")


def _given_rows(config: PipelineConfig, name: str, sources: Rows) -> Stage:
    """Return the stage that takes traces or problems, compared with the benchmarks."""
    job: Job
    if name == "distill":
        job = GivenTracesJob.of(config, sources)
    else:
        own = config.curate_rl if name == "curate_rl" else None
        job = GivenProblemsJob.of(config, own or config.curate, sources)
    return _stage(name, job, {"benchmarks": "benchmarks"}, section=f"given.{name}")


def _last_model(config: PipelineConfig) -> tuple[str, ...]:
    """Return the name of the last model that training leads to; nothing if nothing is to be trained."""
    if config.given.evaluate:
        return ()
    if config.opd and not config.opd.then_rl:
        return ("opd",)
    return ("rl_code",) if config.rl_code or config.given.rl_code else ("rl",)


def _scored_models(config: PipelineConfig, stages: Sequence[Stage]) -> list[str]:
    """Return the names of given models and of those that the last model is trained from, in order.

    A base model that only tags problems is not scored.
    """
    served = _served_model(config)
    if served:
        return [served.name]
    by_name = {stage.name: stage for stage in stages}
    scored = set(config.given.models())
    ahead = list(_last_model(config))
    while ahead:
        stage = by_name[ahead.pop()]
        scored.add(stage.name)
        if "model" in stage.inputs:
            ahead.append(stage.inputs["model"])
    return [stage.name for stage in stages if stage.name in scored]


def _makers(config: PipelineConfig) -> list[Stage]:
    """Return the stages that make problems, traces and models, as if nothing were given. A new stage is added here."""
    problems = "tag" if config.tag else "curate"
    # Given problems of RL alone also need this stage here: `_with_given` then puts them in its place.
    own_problems = config.curate_rl or (config.curate if config.given.curate_rl else None)
    problems_of_rl = "curate_rl" if own_problems else problems
    base = _stage("base", BaseJob.of(config), {}, label="Base")
    # What has to be downloaded comes first, before anything is spent.
    downloaded = [base] if isinstance(config.model, HubModelConfig) else []
    stages = [
        _stage("benchmarks", BenchmarksJob.of(config), {}),
        *downloaded,
        *_given_samplers(config),
        _stage("curate", CurateJob.of(config, config.curate), {"benchmarks": "benchmarks"}),
    ]
    if own_problems:
        stages.append(_stage("curate_rl", CurateJob.of(config, own_problems), {"benchmarks": "benchmarks"}))
    if base not in downloaded:
        stages.append(base)
    if config.tag:
        stages.append(_stage("tag", TagJob.of(config, "tag"), _tag_inputs(config.tag, "curate", "tagger")))
    if config.tag_rl:
        inputs = _tag_inputs(config.tag_rl, problems_of_rl, "tagger_rl")
        stages.append(_stage("tag_rl", TagJob.of(config, "tag_rl"), inputs))
        problems_of_rl = "tag_rl"
    stages += [
        _stage("distill", DistillJob.of(config), _distill_inputs(config, problems)),
        _stage("sft", SftJob.of(config), {"model": "base", "traces": "distill"}, label="SFT"),
        *_opd_stages(config, problems_of_rl),
    ]
    start = "opd" if config.opd else "sft"
    if config.rl_teacher:
        stages += _teacher_stages(config, config.rl_teacher, "rl_teacher", section="rl_teacher")
    stages.append(_rl_stage(config, "rl", model=start, problems=problems_of_rl, label="RL"))
    if config.rl_code:
        stages.append(_rl_stage(config, "rl_code", model="rl", problems=problems_of_rl, label="RL (code)"))
    return stages


def _rl_stage(
    config: PipelineConfig, name: Literal["rl", "rl_code"], *, model: str, problems: str, label: str
) -> Stage:
    job = RlJob.of(config, name)
    teacher = {"teacher": "rl_teacher"} if job.teacher else {}
    return _stage(name, job, {"model": model, "problems": problems, **teacher}, label=label)


def _opd_stages(config: PipelineConfig, problems: str) -> Iterator[Stage]:
    """Yield the stages of on-policy distillation, and those that make its teacher."""
    if config.opd is None:
        return
    code_teacher = config.opd.code_teacher
    yield from _teacher_stages(config, config.opd.teacher, "opd_teacher", section="opd.teacher")
    if code_teacher:
        yield from _teacher_stages(config, code_teacher, "opd_code_teacher", section="opd.code_teacher")
    rollouts = {"model": "sft", "problems": problems}
    yield _stage("opd_rollouts", OpdRolloutsJob.of(config), rollouts, section="opd")
    scores = {"rollouts": "opd_rollouts", "student": "sft", "teacher": "opd_teacher"}
    scores |= {"problems": problems} if code_teacher else {}
    yield _stage("opd_scores", OpdScoresJob.of(config, Domain.MATH if code_teacher else None), scores, section="opd")
    scored = {"scores": "opd_scores"} | ({"code_scores": "opd_code_scores"} if code_teacher else {})
    if code_teacher:
        of_code = scores | {"teacher": "opd_code_teacher"}
        yield _stage("opd_code_scores", OpdScoresJob.of(config, Domain.CODE), of_code, section="opd")
    yield _stage("opd", OpdJob.of(config), {"model": "sft", **scored}, label="OPD")


def _teacher_stages(config: PipelineConfig, teacher: OpdTeacherConfig, name: str, *, section: str) -> Iterator[Stage]:
    """Yield the stages that train the teacher `name`; none if it is given."""
    source = teacher.source
    if isinstance(source, TrainedTeacher):
        base = BaseJob(seed=config.seed, model=source.model)
        yield _stage(f"{name}_base", base, {}, section=f"{section}.source.model", label="Teacher's base")
        job, inputs = SftJob(seed=config.seed, sft=source.sft), {"model": f"{name}_base", "traces": "distill"}
        yield _stage(name, job, inputs, section=f"{section}.source.sft", label="Teacher")


def _stage(name: str, job: Job, inputs: Mapping[str, str], *, section: str = "", label: str = "") -> Stage:
    """Return a stage whose section and label are its name, unless given."""
    return Stage(name=name, section=section or name, label=label or name, job=job, inputs=inputs)


def _given_samplers(config: PipelineConfig) -> Iterator[Stage]:
    """Yield the stages that take the taggers and the teacher which the settings name, early: they are downloaded
    first."""
    for name, section, tag in (("tagger", "tag", config.tag), ("tagger_rl", "tag_rl", config.tag_rl)):
        if tag and tag.model:
            yield _stage(name, GivenModelJob.of(tag.model), {}, section=f"{section}.model", label="Tagger, given")
    teacher = config.distill.teacher
    if isinstance(teacher, LocalTeacherConfig) and teacher.model:
        job = GivenModelJob.of(teacher.model)
        yield _stage("teacher", job, {}, section="distill.teacher.model", label="Teacher, given")
    scoring = (
        ("opd_teacher", "opd.teacher", config.opd and config.opd.teacher),
        ("opd_code_teacher", "opd.code_teacher", config.opd and config.opd.code_teacher),
        ("rl_teacher", "rl_teacher", config.rl_teacher),
    )
    for name, section, scorer in scoring:
        if scorer and isinstance(scorer.source, GivenTeacher):
            job = GivenModelJob.of(scorer.source.model)
            yield _stage(name, job, {}, section=f"{section}.source.model", label="Teacher, given")


def _distill_inputs(config: PipelineConfig, problems: str) -> dict[str, str]:
    """Return the inputs of `distill`: a local teacher is the base model, unless the settings name another."""
    teacher = config.distill.teacher
    if not isinstance(teacher, LocalTeacherConfig):
        return {"problems": problems}
    return {"problems": problems, "teacher": "teacher" if teacher.model else "base"}


def _tag_inputs(tag: TagConfig, problems: str, tagger: str) -> dict[str, str]:
    """Return the inputs of a tag stage: the tagger is the base model, unless the settings name another."""
    return {"problems": problems, "model": tagger if tag.model else "base"}


def evaluation_of(stages: Sequence[Stage], model: str) -> Stage:
    """Return the stage that scores the model made by the stage `model`."""
    return next(stage for stage in stages if stage.scored_model_stage == model)


def select_stages(
    stages: Sequence[Stage], *, only: str | None, from_: str | None, until: str | None, needed_by: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names of the stages to run. A kind selects all its stages (`evaluate`).

    With `needed_by` only these stages and what they depend on are left. ConfigError lists the names if one is unknown.
    """
    if only and (from_ or until):
        raise ConfigError("only runs a single stage, and cannot be combined with from or until")
    names = [s.name for s in stages]
    chosen = _indices(stages, only) if only else list(range(len(names)))
    # A kind stands for several stages: from the first of them, and until the last.
    first = min(_indices(stages, from_)) if from_ else 0
    last = max(_indices(stages, until)) if until else len(names) - 1
    if first > last:
        raise ConfigError(f"from {from_!r} comes after until {until!r}; the order is {', '.join(names)}")
    starts = {names[i] for i in chosen if first <= i <= last}
    if only or from_:
        starts |= _given_to(stages, starts)
    needed = set(names)
    if needed_by:
        goals = [names[i] for which in needed_by for i in _indices(stages, which)]
        needed = {stage.name for stage in with_inputs(stages, goals)}
    return tuple(name for name in names if name in starts and name in needed)


def _given_to(stages: Sequence[Stage], names: Collection[str]) -> set[str]:
    """Return the given results that stages take, with their inputs: they are no earlier work, and are taken at once."""
    takers = [stage for stage in stages if stage.name in names and not stage.job.page]
    inputs = {name for stage in takers for name in stage.inputs.values()}
    given = [
        s.name for s in stages if s.name in inputs and isinstance(s.job, GivenModelJob | GivenRowsJob | ServedModelJob)
    ]
    return {stage.name for stage in with_inputs(stages, given)}


def with_inputs(stages: Sequence[Stage], names: Collection[str]) -> tuple[Stage, ...]:
    """Return the named stages and all that they depend on, in order."""
    needed = set(names)
    # in reverse, a stage comes before its inputs, so one pass finds all
    for stage in reversed(stages):
        if stage.name in needed:
            needed |= set(stage.inputs.values())
    return tuple(s for s in stages if s.name in needed)


def stage_of_problems(stages: Sequence[Stage], stage: Stage) -> Stage:
    """Return the stage that reads the problems which a stage takes; `stages` has all that it depends on."""
    by_name = {one.name: one for one in stages}
    # Stages that tag read no source: they hand on the problems of the stage before them.
    while "problems" in stage.inputs:
        stage = by_name[stage.inputs["problems"]]
    return stage


def downstream_of(stages: Sequence[Stage], which: str) -> tuple[str, ...]:
    """Return the names of a stage (or all of a kind) and of everything made from it, in order."""
    found = {stages[i].name for i in _indices(stages, which)}
    # Stages come after their inputs, so one pass finds what is made from what was found.
    for stage in stages:
        if found & set(stage.inputs.values()):
            found.add(stage.name)
    return tuple(s.name for s in stages if s.name in found)


def stages_again(stages: Sequence[Stage], rerun_from: str | None, chosen: Collection[str]) -> tuple[str, ...]:
    """Return the stages to build again: `rerun_from` and all that depend on it; None names none.

    ConfigError if `rerun_from` is not among the stages to run: its artifact would be set aside and not be built.
    """
    if rerun_from is None:
        return ()
    again = downstream_of(stages, rerun_from)
    if not set(again[:1]) <= set(chosen):
        raise ConfigError(
            f"rerun from {rerun_from!r}: it is not among the stages to run, which are {', '.join(chosen)}"
        )
    return again


def _indices(stages: Sequence[Stage], which: str) -> list[int]:
    """Return the places of the stage of this name, or of all stages of this kind. ConfigError if there is neither."""
    names = [stage.name for stage in stages]
    kinds = [stage.kind for stage in stages]
    # A name has priority over a kind: `rl` means math RL, although `rl_code` is of the kind `rl`, too.
    if which in names:
        return [names.index(which)]
    if which not in kinds:
        raise ConfigError(f"no stage {which!r}; {meant(which, [*dict.fromkeys([*names, *kinds])], 'there are')}")
    return [i for i, kind in enumerate(kinds) if kind == which]


# ---- fingerprints ----
# Compute the names of the stages' artifacts, before anything has run.


def fingerprints_of(stages: Sequence[Stage], workspace: WorkspaceConfig) -> dict[str, ArtifactId]:
    """Return the name of each stage's artifact, by stage name, before anything has run.

    `stages` must be in order and complete: each comes after all of its inputs. The artifact of a stage that asks the
    registry is the newest one that was made from these inputs. ConfigError if a local file is missing.
    """
    ids: dict[str, ArtifactId] = {}
    for stage in stages:
        made_from = {role: ids[name] for role, name in stage.inputs.items()}
        own = artifact_id(stage.job, made_from, workspace)
        newest = _newest_made_from(stage.job, made_from, workspace) if stage.job.asks_registry else None
        ids[stage.name] = newest or own
    return ids


def _newest_made_from(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> ArtifactId | None:
    """Return the newest artifact with the job's settings and these inputs, whatever the registry added to them."""
    wanted = {(role, own.kind, own.fingerprint) for role, own in inputs.items()}
    # Settings that are filled in from the registry when the stage runs are empty here, and not compared.
    settings = {key: value for key, value in result_settings(job).items() if value}
    found = []
    for folder in open_store(workspace).folders(job.kind):
        try:
            manifest = read_manifest(folder)
        except ArtifactError:
            continue  # damaged: a run makes it again
        made_from = {(record.role, record.kind, record.fingerprint) for record in manifest.inputs}
        is_same = all(manifest.result_config.get(key) == value for key, value in settings.items())
        # A subset, and not equality: the run may have added the champion's scores to the inputs.
        if is_same and wanted <= made_from and manifest.code_version == job.code_version:
            found.append((manifest.created_at, manifest.fingerprint))
    return ArtifactId(kind=job.kind, fingerprint=max(found)[1]) if found else None


def artifact_id(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> ArtifactId:
    """Return the name of the artifact of this job on these inputs."""
    records = input_records(job, inputs, workspace)
    return ArtifactId(kind=job.kind, fingerprint=fingerprint(job.kind, job.code_version, job, records))


def input_records(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> tuple[InputRecord, ...]:
    """Return all inputs by role: artifacts, sorted by role, then local files and repositories that the job names."""
    cache = workspace_root(workspace) / "file_hashes.json"
    # The order of inputs is part of a fingerprint, and their roles are not: sorted, it follows from the roles alone.
    artifacts = [InputRecord(kind=i.kind, fingerprint=i.fingerprint, role=role) for role, i in sorted(inputs.items())]
    files = [InputRecord(kind="file", fingerprint=content_digest(Path(p), cache=cache), role=p) for p in job.files()]
    repos = [InputRecord(kind="hub", fingerprint=use.revision, role=use.repo) for use in job.repos()]
    return (*artifacts, *files, *repos)


# ---- moved models ----
# Find artifacts that point to a model elsewhere than the config does, so that they are made again.


def set_moved_aside(config: PipelineConfig, chosen: Collection[str] | None = None) -> None:
    """Set aside the artifacts of models that are now given by another folder; a run takes them again.

    What was made from such a model stays valid: a fingerprint depends on the model's content and not on its place. The
    old folder may be gone, or hold another model by now.
    """
    stages = stages_of(config)
    names = [stage.name for stage in stages if chosen is None or stage.name in chosen]
    published = {stage.name: model for stage in with_inputs(stages, names) if (model := _pointed_to(stage)) is not None}
    if not published:
        return
    try:
        ids = fingerprints_of(with_inputs(stages, published), config.workspace)
    except ConfigError:
        return  # preflight says what is missing
    store = open_store(config.workspace)
    for name, model in published.items():
        own, folder = ids[name], folder_of(model).resolve()
        artifact = store.folder(own.kind, own.fingerprint)
        if artifact.is_dir() and pointed_folder(artifact) != folder:
            log.warning("%s: the same model is now taken from %s", name, folder)
            store.set_aside(own.kind, own.fingerprint, why="moved")


def _pointed_to(stage: Stage) -> PublishedModel | None:
    """Return the model that the stage's artifact points to; None if the artifact holds its files, or no model."""
    match stage.job:
        case GivenModelJob() as job:
            model = job.runtime.as_model()
        case BaseJob(model=base) if not isinstance(base, TinyModelConfig):
            model = base
        case _:
            return None
    return None if isinstance(model, GgufModelConfig) else model


# ---- workspace ----
# Open the workspace of a run: its folder, and the store of its artifacts.


def workspace_root(workspace: WorkspaceConfig) -> Path:
    """Return the workspace as an absolute path."""
    return expanded(workspace.root).absolute()


def open_store(workspace: WorkspaceConfig, *, checked_by: CheckedBy | None = None) -> LocalStore:
    """Return the store of the workspace's artifacts, with another check if given. ConfigError if a file is there."""
    root, checked_by = workspace_root(workspace) / "artifacts", checked_by or workspace.check_artifacts
    there = next(path for path in root.parents if path.exists())
    if not there.is_dir():
        raise ConfigError(f"workspace.root = {workspace.root!r}: {there} is not a folder")
    if not workspace.store:
        return LocalStore(root, checked_by=checked_by)
    from klear_core.artifacts.bucket import LeaseTimes
    from klear_core.artifacts.object_store import ObjectStore

    times = LeaseTimes(expiry_s=workspace.lease_s)
    return ObjectStore(
        root,
        workspace.store,
        checked_by=checked_by,
        cache_gb=workspace.cache_gb,
        times=times,
        share_work_s=workspace.share_work_s,
    )
