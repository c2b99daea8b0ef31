"""The stages as Prefect tasks: each opens its inputs, calls the core, and returns a reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prefect.blocks.system import Secret
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from klear_core.artifacts.manifest import ArtifactRef, StageSummary
from klear_core.artifacts.remote_paths import remote_paths_of
from klear_core.config.data_jobs import BenchmarksJob, CurateJob, GivenModelJob, GivenProblemsJob, GivenTracesJob
from klear_core.config.distill import HttpTeacherConfig, LocalTeacherConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import BaseJob, DistillJob, Job, ReportJob, RlJob, SftJob, Stage, TagJob
from klear_core.errors import ConfigError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.metrics import Telemetry
from klear_core.pipeline.graph import artifact_id, fingerprints_of, open_store, stages_of, with_inputs, workspace_root
from tasks.evaluate import evaluate, promote
from tasks.resources import (
    learner_ranks,
    needs_of,
    open_engines_and_judges,
    open_judges,
    ray_session,
    scorer_beside,
    share_model,
)
from tasks.stage import Inputs, StageTask, run_stage, stage_task
from tasks.tracking import RunInfo, report_inputs

# ---- base ----
# The task that makes the base model.


@stage_task
def base(info: RunInfo, job: BaseJob, inputs: Inputs) -> ArtifactRef:
    """Make the base model's folder, or a pointer to one on disk. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.train.base_model import prepare_base

        return prepare_base(job.model, seed=job.seed, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)


# ---- given problems ----
# The task that takes problems that exist.


@stage_task
def given_problems(info: RunInfo, job: GivenProblemsJob, inputs: Inputs) -> ArtifactRef:
    """Make the training problems from given ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.curation.curate import curate
        from klear_core.data.sources import describe_rows

        given = describe_rows(job.runtime.sources, origin=job.origin(), licence=job.given_facts().licence)
        benchmarks = inputs["benchmarks"].path
        summary = curate(job.curation(), benchmarks=benchmarks, seed=job.seed, workdir=workdir, telemetry=telemetry)
        return summary.model_copy(update={"given": given})

    return run_stage(info, job, inputs, body)


# ---- given traces ----
# The task that takes published traces.


@stage_task
def given_traces(info: RunInfo, job: GivenTracesJob, inputs: Inputs) -> ArtifactRef:
    """Make traces to fine-tune on from published ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
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

    return run_stage(info, job, inputs, body)


# ---- given model ----
# The task that takes a model that exists.


@stage_task
def given_model(info: RunInfo, job: GivenModelJob, inputs: Inputs) -> ArtifactRef:
    """Make a pointer to a model in a folder or in the Hub's cache, which is downloaded first. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.train.base_model import take_model

        licence = job.given_facts().licence
        return take_model(job.model(), licence=licence, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)


# ---- benchmarks ----
# The task that loads the benchmarks.


@stage_task
def benchmarks(info: RunInfo, job: BenchmarksJob, inputs: Inputs) -> ArtifactRef:
    """Make one folder of problems per benchmark; they are never trained on. Takes no inputs."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.benchmarks import prepare_benchmarks

        return prepare_benchmarks(
            job.benchmarks(), seed=job.seed, runtime=job.runtime, workdir=workdir, telemetry=telemetry
        )

    return run_stage(info, job, inputs, body)


# ---- curate ----
# The task that makes training problems from sources.


@stage_task
def curate(info: RunInfo, job: CurateJob, inputs: Inputs) -> ArtifactRef:
    """Make the training problems, and the dropped ones. Input `benchmarks`: problems that they must not resemble."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.data.curation.curate import curate as curate_problems

        benchmarks = inputs["benchmarks"].path
        return curate_problems(job.curate, benchmarks=benchmarks, seed=job.seed, workdir=workdir, telemetry=telemetry)

    return run_stage(info, job, inputs, body)


# ---- distill ----
# The task that collects teacher traces.


@stage_task
def distill(info: RunInfo, job: DistillJob, inputs: Inputs) -> ArtifactRef:
    """Make judged teacher traces for `problems`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
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

    return run_stage(info, job, inputs, body)


@contextmanager
def _open_compute(job: DistillJob, inputs: Inputs) -> Iterator[EnginesAndJudges]:
    """Yield where the judges run, and the engines of a local teacher."""
    teacher = job.distill.teacher
    if isinstance(teacher, LocalTeacherConfig):
        model, section = inputs["teacher"].path, "distill.teacher"
        with open_engines_and_judges(teacher.engine, teacher.runtime, model, section=section) as compute:
            yield compute
        return
    with open_judges() as build_judges:
        yield EnginesAndJudges(section="distill", build_judges=build_judges)


# ---- teacher keys ----
# Read teachers' API keys from Prefect blocks.


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


# ---- tag ----
# The task that tags problems with their difficulty.


@stage_task
def tag(info: RunInfo, job: TagJob, inputs: Inputs) -> ArtifactRef:
    """Tag `problems` by the pass rate of `model`."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
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

    return run_stage(info, job, inputs, body)


# ---- sft ----
# The task that fine-tunes a model on long chains of thought.


@stage_task
def sft(info: RunInfo, job: SftJob, inputs: Inputs) -> ArtifactRef:
    """Fine-tune `model` on `traces`; several learner ranks, or one on a GPU, are Ray actors."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.sft.loop import train_sft
        from klear_core.train.distributed import run_here
        from klear_core.train.inline_eval import no_scorer

        model, traces, curve = inputs["model"].path, inputs["traces"].path, job.runtime.curve
        with learner_ranks(job.sft.runtime, model) as run_ranks:
            open_scorer = partial(scorer_beside, is_on_ray=run_ranks is not run_here, seed=job.seed, workdir=workdir)
            return train_sft(
                job.sft,
                model=model,
                traces=traces,
                seed=job.seed,
                workdir=workdir,
                telemetry=telemetry,
                run_ranks=run_ranks,
                open_scorer=partial(open_scorer, curve, job.sft.runtime) if curve else no_scorer,
            )

    return run_stage(info, job, inputs, body)


# ---- rl ----
# The task that trains a model by reinforcement learning (GPPO) on Ray.


@stage_task
def rl(info: RunInfo, job: RlJob, inputs: Inputs) -> ArtifactRef:
    """Train `model` on `problems`; learner and rollout workers are Ray actors."""

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        from klear_core.cluster.rl_workers import RayWorkers
        from klear_core.evaluate.inline_eval import open_inline_eval
        from klear_core.rl.interfaces import RlSetup
        from klear_core.rl.loop import train_rl
        from klear_core.rl.state import no_inline_eval

        model, problems = inputs["model"].path, inputs["problems"].path
        workers, curve = RayWorkers(), job.runtime.curve
        with ray_session(needs_of(job.rl, model)):
            share_model(model)
            return train_rl(
                RlSetup(cfg=job.rl, model=model, seed=job.seed, workdir=workdir, remote=remote_paths_of(workdir)),
                job.verify,
                problems=problems,
                telemetry=telemetry,
                workers=workers,
                open_inline_eval=no_inline_eval
                if curve is None
                else partial(open_inline_eval, curve, workers.judges, seed=job.seed),
            )

    return run_stage(info, job, inputs, body)


# ---- report ----
# The task that writes a run's report as one HTML file, and the report of a failed run.


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


_ALL = (
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
TASKS: Mapping[str, StageTask] = {task.name: task for task in _ALL}
"""The task of each kind of stage; a new stage is listed here."""
