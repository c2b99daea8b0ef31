"""The stages as Prefect tasks: each passes its settings and the folders of its inputs to a function of the core."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import ArtifactRef, StageSummary
from klear_core.artifacts.remote_paths import remote_paths_of
from klear_core.config import data_jobs as data
from klear_core.config.distill import LocalTeacherConfig
from klear_core.config.opd_jobs import OpdJob, OpdRolloutsJob, OpdScoresJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import (
    BaseJob,
    DistillJob,
    ReportJob,
    RlJob,
    SftJob,
    Stage,
    TagJob,
)
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.metrics import Telemetry
from klear_core.pipeline.graph import artifact_id, fingerprints_of, open_store, stages_of, with_inputs, workspace_root
from tasks import resources
from tasks.evaluation import evaluate, promote
from tasks.resources import open_engines_and_judges, read_keys
from tasks.stage import Inputs, StageTask, run_stage, stage, stage_task
from tasks.tracking import RunInfo, report_inputs

if TYPE_CHECKING:
    from klear_core.rl.loop import OpenTeacher

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
        job.curate,
        benchmarks=own,
        verify=job.runtime.verify,
        open_judges=resources.open_judges,
        seed=job.seed,
        workdir=workdir,
        telemetry=telemetry,
    )


@stage
def given_problems(job: data.GivenProblemsJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the training problems from given ones. Input `benchmarks`: problems that they must not resemble."""
    from klear_core.data.curation.curate import curate as curate_problems
    from klear_core.data.sources import describe_rows

    given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
    own = inputs["benchmarks"].path
    summary = curate_problems(
        job.curation(),
        benchmarks=own,
        verify=job.runtime.verify,
        open_judges=resources.open_judges,
        seed=job.seed,
        workdir=workdir,
        telemetry=telemetry,
    )
    return summary.model_copy(update={"given": given})


# ---- models ----


@stage
def base(job: BaseJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the base model's folder, or a pointer to one on disk. Takes no inputs."""
    from klear_core.train.base_model import prepare_base

    return prepare_base(job.model, seed=job.seed, workdir=workdir, telemetry=telemetry)


@stage
def served_model(job: data.ServedModelJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make the record of a model that is served elsewhere. Takes no inputs."""
    from klear_core.distill.served import note_served

    telemetry.progress(1, 1, "served model")
    return note_served(job.model, job.addresses, workdir=workdir)


@stage
def given_model(job: data.GivenModelJob, _: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make a pointer to a model in a folder or in the Hub's cache, which is downloaded first. Takes no inputs."""
    from klear_core.train.base_model import take_model

    licence = job.given_facts().licence
    # the preflight knows whether it is to be trained, and so does who trains it
    return take_model(job.runtime.as_model(), licence=licence, is_trained=False, workdir=workdir, telemetry=telemetry)


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
def opd_rollouts(job: OpdRolloutsJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Sample answers of `model` to `problems`."""
    from klear_core.opd.rollouts import sample_rollouts

    model, cfg = inputs["model"].path, job.rollouts
    with open_engines_and_judges(cfg.engine, cfg.runtime, model, section="opd.rollouts") as compute:
        return sample_rollouts(
            cfg,
            model=model,
            problems=inputs["problems"].path,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            start_sampler=compute.start_sampler,
        )


@stage
def opd_scores(job: OpdScoresJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Add the log-probs of `teacher` to the answers of `rollouts`, which `student` gave to `problems`."""
    from klear_core.opd.rollouts import answers_of
    from klear_core.opd.teacher_logps import write_teacher_logps

    teacher, cfg = inputs["teacher"].path, job.runtime
    answers = answers_of(inputs["rollouts"].path, inputs["problems"].path if job.domain else None, job.domain)
    with open_engines_and_judges(cfg.engine, cfg.runtime, teacher, section=f"opd.{job.teacher}") as compute:
        return write_teacher_logps(
            cfg,
            student=inputs["student"].path,
            teacher=teacher,
            answers=answers,
            temperature=job.sampling.temperature,
            workdir=workdir,
            telemetry=telemetry,
            start_sampler=compute.start_sampler,
        )


@stage
def opd(job: OpdJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Train `model` on the scored answers of `scores` and `code_scores`.

    Several learner ranks, or one on a GPU, are Ray actors.
    """
    from klear_core.rl.offline import train_offline

    model, cfg = inputs["model"].path, job.train.as_rl(job.rollouts)
    with resources.memory_advised(cfg, model), resources.learner_ranks(cfg.runtime, model) as run_ranks:
        return train_offline(
            cfg,
            rows_per_step=job.train.rows_per_step,
            model=model,
            rows=[inputs[name].path for name in ("scores", "code_scores") if name in inputs],
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            run_ranks=run_ranks,
        )


@stage
def rl(job: RlJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Train `model` on `problems` with RL; learner ranks and engines are Ray actors."""
    from klear_core.cluster.rl_workers import RayWorkers
    from klear_core.evaluate.inline_eval import open_inline_eval
    from klear_core.rl.interfaces import RlSetup
    from klear_core.rl.loop import no_teacher, train_rl
    from klear_core.rl.state import no_inline_eval

    model, workers, curve = inputs["model"].path, RayWorkers(), job.runtime.curve
    inline_eval = partial(open_inline_eval, curve, workers.judges, seed=job.seed) if curve else no_inline_eval
    open_teacher = _teacher_of(job, inputs, workdir) if job.teacher else no_teacher
    with resources.memory_advised(job.rl, model), resources.ray_session(resources.needs_of(job.rl, model)):
        resources.share_model(model)
        return train_rl(
            RlSetup(cfg=job.rl, model=model, seed=job.seed, workdir=workdir, remote=remote_paths_of(workdir)),
            job.verify,
            problems=inputs["problems"].path,
            telemetry=telemetry,
            workers=workers,
            open_inline_eval=inline_eval,
            open_teacher=open_teacher,
        )


def _teacher_of(job: RlJob, inputs: Inputs, workdir: Path) -> OpenTeacher:
    """Return what starts the teacher of the stage's answers: an engine in this process, or endpoints."""
    from klear_core.generate.factory import start_with_endpoints
    from klear_core.opd.teacher_logps import live_teacher

    cfg, model = job.teacher, inputs["teacher"].path
    assert cfg is not None
    num_here = 0 if cfg.runtime.num_engines == 0 else 1
    if num_here:
        cfg = cfg.model_copy(update={"engine": resources.on_this_cpu(cfg.engine, model, key="rl_teacher")})
    return partial(
        live_teacher,
        cfg,
        student=inputs["model"].path,
        teacher=model,
        sampling=job.rl.rollout.sampling,
        workdir=workdir,
        start_sampler=partial(start_with_endpoints, runtime=cfg.runtime, key="rl_teacher", num_here=num_here),
    )


# ---- report ----


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
    from klear_core.report.run.facts import StageFolder

    failed, *not_reached = unfinished
    own = fingerprints_of(with_inputs(stages_of(config), [failed.name]), info.workspace)[failed.name]
    workdir = open_store(info.workspace).workdir(own.kind, own.fingerprint)
    missing = [StageFolder(stage=failed, folder=None, trouble=trouble, workdir=workdir)]
    # the report stage itself is left out, because its reader is looking at a report
    missing += [StageFolder(stage=stage, folder=None) for stage in not_reached if not stage.job.page]
    out = failed_report(info)
    build_report(report_inputs(info, ReportJob.of(config), inputs, missing), out)
    return out


TASKS: Mapping[str, StageTask] = {
    task.name: task
    for task in (
        benchmarks,
        curate,
        given_problems,
        base,
        given_model,
        served_model,
        distill,
        given_traces,
        tag,
        sft,
        opd_rollouts,
        opd_scores,
        opd,
        rl,
        evaluate,
        promote,
        report,
    )
}
"""The task of each kind of stage; a new stage is listed here."""
