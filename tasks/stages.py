"""The stages as Prefect tasks: each passes its settings and the folders of its inputs to a function of the core."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.blocks.system import Secret
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from klear_core.artifacts.manifest import MANIFEST, ArtifactRef, StageSummary, read_manifest
from klear_core.artifacts.model_files import is_same_model
from klear_core.artifacts.remote_paths import remote_paths_of
from klear_core.config import data_jobs as data
from klear_core.config.distill import HttpTeacherConfig, LocalTeacherConfig
from klear_core.config.pipeline import PipelineConfig
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
from klear_core.errors import ConfigError, ResourceError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.metrics import Telemetry
from klear_core.pipeline.graph import artifact_id, fingerprints_of, open_store, stages_of, with_inputs, workspace_root
from klear_core.pipeline.preflight.exposure import given_contamination
from tasks import resources
from tasks.model_registry import Promotion, Registry, Version, artifact_name, folder_of, open_registry
from tasks.resources import open_engines_and_judges
from tasks.stage import Inputs, StageTask, run_stage, stage, stage_task
from tasks.tracking import RunInfo, report_inputs

if TYPE_CHECKING:
    from klear_core.evaluate.compare.promotion import Rival

log = logging.getLogger(__name__)

# ---- problems ----


@stage
def benchmarks(job: data.BenchmarksJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make one folder of problems per benchmark; they are never trained on. Takes no inputs."""
    from klear_core.data.benchmarks import prepare_benchmarks

    chosen = job.benchmarks()
    return prepare_benchmarks(chosen, seed=job.seed, runtime=job.runtime, workdir=workdir, telemetry=telemetry)


@stage
def curate(job: data.CurateJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the training problems, and the dropped ones. Input `benchmarks`: problems that they must not resemble."""
    from klear_core.data.curation.curate import curate as curate_problems

    own = inputs["benchmarks"].path
    return curate_problems(
        job.curate, benchmarks=own, verify=job.runtime.verify, seed=job.seed, workdir=workdir, telemetry=telemetry
    )


@stage
def given_problems(job: data.GivenProblemsJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the training problems from given ones. Input `benchmarks`: problems that they must not resemble."""
    from klear_core.data.curation.curate import curate as curate_problems
    from klear_core.data.sources import describe_rows

    given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
    own = inputs["benchmarks"].path
    verify = job.runtime.verify
    summary = curate_problems(
        job.curation(), benchmarks=own, verify=verify, seed=job.seed, workdir=workdir, telemetry=telemetry
    )
    return summary.model_copy(update={"given": given})


# ---- models ----


@stage
def base(job: BaseJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the base model's folder, or a pointer to one on disk. Takes no inputs."""
    from klear_core.train.base_model import prepare_base

    return prepare_base(job.model, seed=job.seed, workdir=workdir, telemetry=telemetry)


@stage
def given_model(job: data.GivenModelJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make a pointer to a model in a folder or in the Hub's cache, which is downloaded first. Takes no inputs."""
    from klear_core.train.base_model import take_model

    return take_model(job.model(), licence=job.given_facts().licence, workdir=workdir, telemetry=telemetry)


# ---- traces ----


@stage
def distill(job: DistillJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make judged teacher traces for `problems`."""
    from klear_core.distill.collect import TeacherAccess
    from klear_core.distill.collect import distill as collect

    teacher = inputs.get("teacher")
    with _open_compute(job, inputs) as compute:
        access = TeacherAccess(
            keys=read_keys([job]),  # here and not in the job, whose settings are recorded in the manifest
            model=teacher.path if teacher else None,
            model_name=job.runtime.name,
            compute=compute,
        )
        return collect(
            job.distill,
            job.verify,
            problems=inputs["problems"].path,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            access=access,
        )


@contextmanager
def _open_compute(job: DistillJob, inputs: Inputs) -> Iterator[EnginesAndJudges]:
    """Yield where the judges run, and the engines of a local teacher."""
    teacher = job.distill.teacher
    if isinstance(teacher, LocalTeacherConfig):
        model, section = inputs["teacher"].path, "distill.teacher"
        with open_engines_and_judges(teacher.engine, teacher.runtime, model, section=section) as compute:
            yield compute
        return
    with resources.open_judges() as build_judges:
        yield EnginesAndJudges(section="distill", build_judges=build_judges)


def read_keys(jobs: Iterable[Job]) -> dict[str, SecretStr]:
    """Return the keys in the Secret blocks that distillations among these jobs name; blocks that do not exist are left
    out. Raise ConfigError, without the value, if a block holds something else than text.
    """
    found: dict[str, SecretStr] = {}
    for name in sorted(_blocks_of(jobs)):
        try:
            block = Secret.load(name)
        except ValueError as e:
            if isinstance(e.__cause__, ObjectNotFound):
                continue
            # the text and the cause of another error may show what is in the block
            raise ConfigError(f"the Prefect block secret/{name} cannot be read ({type(e).__name__})") from None
        assert isinstance(block, Secret), type(block)
        value = block.value.get_secret_value()
        if not isinstance(value, str):
            raise ConfigError(f"the Prefect block secret/{name} holds {type(value).__name__}, not the text of a key")
        found[name] = SecretStr(value)
    return found


def _blocks_of(jobs: Iterable[Job]) -> set[str]:
    names: set[str] = set()
    for job in jobs:
        if isinstance(job, DistillJob) and isinstance(job.distill.teacher, HttpTeacherConfig):
            names.update(endpoint.api_key_block for endpoint in job.distill.teacher.runtime.endpoints)
    return names - {""}


@stage
def given_traces(job: data.GivenTracesJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make traces to fine-tune on from published ones. Input `benchmarks`: problems that they must not resemble."""
    from klear_core.data.sources import describe_rows
    from klear_core.distill.given_traces import take_traces

    given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
    summary = take_traces(
        job.runtime.sources,
        job.decontaminate,
        keep_truncated=job.keep_truncated,
        floors=(job.runtime.read, job.runtime.complete),
        benchmarks=inputs["benchmarks"].path,
        workdir=workdir,
        telemetry=telemetry,
    )
    return summary.model_copy(update={"given": given})


# ---- training ----


@stage
def tag(job: TagJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Tag `problems` by the pass rate of `model`."""
    from klear_core.evaluate.run import tag_problems

    model = inputs["model"].path
    with open_engines_and_judges(job.tag.engine, job.tag.runtime, model, section="tag") as compute:
        return tag_problems(
            job.tag,
            job.verify,
            model=model,
            problems=inputs["problems"].path,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            compute=compute,
        )


@stage
def sft(job: SftJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Fine-tune `model` on `traces`; several learner ranks, or one on a GPU, are Ray actors."""
    from klear_core.sft.loop import train_sft
    from klear_core.train.distributed import run_here
    from klear_core.train.inline_eval import no_scorer

    model, curve = inputs["model"].path, job.runtime.curve
    with resources.memory_advised(job.sft, model), resources.learner_ranks(job.sft.runtime, model) as run_ranks:
        is_on_ray = run_ranks is not run_here
        open_scorer = partial(resources.scorer_beside, is_on_ray=is_on_ray, seed=job.seed, workdir=workdir)
        return train_sft(
            job.sft,
            model=model,
            traces=inputs["traces"].path,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            run_ranks=run_ranks,
            open_scorer=partial(open_scorer, curve, job.sft.runtime) if curve else no_scorer,
        )


@stage
def rl(job: RlJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Train `model` on `problems` with GPPO; learner and rollout workers are Ray actors."""
    from klear_core.cluster.rl_workers import RayWorkers
    from klear_core.evaluate.inline_eval import open_inline_eval
    from klear_core.rl.interfaces import RlSetup
    from klear_core.rl.loop import train_rl
    from klear_core.rl.state import no_inline_eval

    model, workers, curve = inputs["model"].path, RayWorkers(), job.runtime.curve
    inline_eval = partial(open_inline_eval, curve, workers.judges, seed=job.seed) if curve else no_inline_eval
    with resources.memory_advised(job.rl, model), resources.ray_session(resources.needs_of(job.rl, model)):
        resources.share_model(model)
        return train_rl(
            RlSetup(cfg=job.rl, model=model, seed=job.seed, workdir=workdir, remote=remote_paths_of(workdir)),
            job.verify,
            problems=inputs["problems"].path,
            telemetry=telemetry,
            workers=workers,
            open_inline_eval=inline_eval,
        )


# ---- scores ----


@stage
def evaluate(job: EvaluateJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make judged answers of `model` to `benchmarks`, and scores with confidence intervals."""
    from klear_core.evaluate.run import evaluate_model
    from klear_core.evaluate.sample import read_suite

    model = inputs["model"].path
    with open_engines_and_judges(job.evaluate.engine, job.evaluate.runtime, model, section="evaluate") as compute:
        return evaluate_model(
            job.evaluate,
            job.verify,
            read_suite(inputs["benchmarks"].path, job.benchmarks),
            model=model,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            compute=compute,
        )


@stage_task
def report(info: RunInfo, job: ReportJob, inputs: Inputs) -> ArtifactRef:
    """Make `report.html` from the artifacts of all stages, by stage name."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.report.run.build import build_report

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
    from klear_core.report.run.build import build_report
    from klear_core.report.run.data import StageFolder

    failed, *not_reached = unfinished
    own = fingerprints_of(with_inputs(stages_of(config), [failed.name]), info.workspace)[failed.name]
    workdir = open_store(info.workspace).workdir(own.kind, own.fingerprint)
    missing = [StageFolder(stage=failed, folder=None, trouble=trouble, workdir=workdir)]
    # the report stage itself is left out, because its reader is looking at a report
    missing += [StageFolder(stage=stage, folder=None) for stage in not_reached if not stage.job.page]
    out = failed_report(info)
    build_report(report_inputs(info, ReportJob.of(config), inputs, missing), out)
    return out


# ---- promotion ----


_MAX_DECISIONS = 5
"""Most decisions of one run, if other runs keep changing the champion meanwhile."""


@stage_task
def promote(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef:
    """Compare `evaluation`, of `model`, with the champion's, or with `first`; make `model` champion if it passes."""
    from klear_core.evaluate.compare.promotion import read_decision

    registry = open_registry(info.workspace, job.promote.registered_model)
    for _ in range(_MAX_DECISIONS):
        asked = _with_registry(job, registry, inputs)
        decision = _decide(info, asked, inputs)
        if not read_decision(decision.path).is_passed:
            return decision
        model, evaluation = inputs["model"], inputs["evaluation"]
        promotion = Promotion(
            model=artifact_name(model),
            model_uri=model.uri,
            evaluation=artifact_name(evaluation),
            evaluation_uri=evaluation.uri,
            decision=artifact_name(decision),
            decision_uri=decision.uri,
            run=info.run_id,
            over=asked.champion.version if asked.champion else None,
        )
        if registry.promote(promotion):
            return decision
        log.warning("%s: another model has become champion meanwhile: deciding again", info.stage)
    raise ResourceError(f"the champion changed {_MAX_DECISIONS} times while this run decided; run it again")


def _with_registry(job: PromoteJob, registry: Registry, inputs: Inputs) -> PromoteJob:
    """Return the job with its rival and the rollback of its model from the registry, and how the model was chosen."""
    from klear_core.report.run.warnings import chosen_on

    model = artifact_name(inputs["model"])
    rival = registry.rival_of(model)
    champion = rival.as_champion() if rival else None
    found = {
        "champion": champion,
        "withdrawn": registry.withdrawn(model) or withdrawn_elsewhere(inputs["model"].path, registry.versions()),
        "chosen_on": chosen_on(inputs["model"].path),
    }
    return job.model_copy(update=found)


def withdrawn_elsewhere(model: Path, versions: Sequence[Version]) -> str:
    """Return why the same model was rolled back as another artifact, such as the one of its training; empty if it was
    not."""
    own = read_manifest(model)
    # From the newest version: the latest rollback counts.
    for version in reversed(versions):
        folder = folder_of(version.promotion.model_uri)
        is_here = (folder / MANIFEST).is_file()
        if version.rollback is not None and is_here and is_same_model(own, read_manifest(folder)):
            return version.rollback.sentence
    return ""


def _decide(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef:
    """Return the artifact of the decision: the same job and inputs give the same one."""
    champion = _champion_scores(info, job, inputs)

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.evaluate.compare.promotion import Candidate, Contender, decide

        contender = Contender(
            model=artifact_name(inputs["model"]), evaluation=artifact_name(inputs["evaluation"]), run=info.run_id
        )
        candidate = Candidate(
            contender=contender,
            evaluation=inputs["evaluation"].path,
            contaminated=contaminated(job, inputs["model"]),
            withdrawn=job.withdrawn,
            chosen_on=job.chosen_on,
        )
        return decide(job.promote, candidate, _rival(info, job, inputs, champion), workdir=workdir)

    roles = {**inputs, "champion": champion} if champion else inputs
    return run_stage(info, job, roles, body)


def _champion_scores(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef | None:
    """Return the champion's scores: those that made it champion, or new ones if the rule asks for it; None if gone."""
    from klear_core.evaluate.compare.promotion import are_comparable

    champion = job.champion
    if champion is None:
        return None
    found = _stored(info, champion.evaluation, champion.evaluation_uri)
    if not job.promote.score_champion or (found and are_comparable(inputs["evaluation"].path, found.path)):
        return found
    model = _stored(info, champion.model, champion.model_uri)
    if model is None:
        log.warning("the champion cannot be scored again: its model (%s) is gone", champion.model_uri)
        return found
    # At position 0, so that MLflow's list of runs still shows the score of the run's own last model.
    own = info.model_copy(update={"stage": "evaluate_champion", "position": 0})
    scores = {"model": model, "benchmarks": inputs["benchmarks"]}
    # `fn`: as a part of this task, and not as one more task of the flow run.
    return evaluate.fn(own, EvaluateJob.of(job.runtime.config), scores)


def _stored(info: RunInfo, name: str, uri: str) -> ArtifactRef | None:
    """Return the artifact `kind/fingerprint`, from this workspace or from where it was made; None if it is gone."""
    kind, _, fingerprint = name.partition("/")
    found = open_store(info.workspace).find(kind, fingerprint)
    folder = folder_of(uri)
    if found is not None or not (folder / MANIFEST).is_file():
        return found
    manifest = read_manifest(folder)
    return ArtifactRef(
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        uri=uri,
        created_at=manifest.created_at,
        counts=manifest.counts,
    )


def _rival(info: RunInfo, job: PromoteJob, inputs: Inputs, scores: ArtifactRef | None) -> Rival | None:
    """Return the model to compare with: the champion, or without one the first model of the run if the rule asks."""
    from klear_core.evaluate.compare.promotion import Contender, Rival

    if job.champion is not None:
        champion = job.champion
        contender = Contender(
            model=champion.model,
            evaluation=artifact_name(scores) if scores else champion.evaluation,
            run=champion.run,
            version=champion.version,
        )
        return Rival(contender=contender, is_="champion", evaluation=scores.path if scores else None)
    first = inputs.get("first")
    if first is None or job.promote.first == "any":
        return None
    model = next(i for i in read_manifest(first.path).inputs if i.role == "model")
    contender = Contender(model=f"{model.kind}/{model.fingerprint}", evaluation=artifact_name(first), run=info.run_id)
    return Rival(contender=contender, is_="first model of the run", evaluation=first.path)


def contaminated(job: PromoteJob, model: ArtifactRef) -> dict[str, int | None]:
    """Return the number of each benchmark's problems that overlap with the model's training data; None if unknown."""
    from klear_core.report.run.warnings import num_overlapping

    config = job.runtime.config
    found: dict[str, int | None] = dict(num_overlapping(model.path, [b.name for b in config.benchmarks]))
    own_scores = next(stage.inputs["evaluation"] for stage in stages_of(config) if stage.kind == job.kind)
    for exposure in given_contamination(config):
        # A run may score other given models, too. What is not known of their data says nothing about this model.
        if own_scores in exposure.scored_by:
            found |= dict.fromkeys((*exposure.missed, *exposure.unknown))
    return found


TASKS: Mapping[str, StageTask] = {
    task.name: task
    for task in (
        benchmarks,
        curate,
        given_problems,
        base,
        given_model,
        distill,
        given_traces,
        tag,
        sft,
        rl,
        evaluate,
        promote,
        report,
    )
}
"""The task of each kind of stage; a new stage is listed here."""
