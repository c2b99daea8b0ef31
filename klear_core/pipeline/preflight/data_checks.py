"""Check before a run that its sources, traces and benchmarks can be read, and its answers judged.

Each function yields one message for each problem that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.files import matching_files
from klear_core.artifacts.manifest import read_manifest
from klear_core.config.data import DatasetsSource, FileSource, GeneratedSource, Source
from klear_core.config.data_jobs import BenchmarksJob, CurateJob, GivenTracesJob, origin_of
from klear_core.config.load import as_option
from klear_core.config.stage import DistillJob, EvaluateJob, RlJob, SftJob, SourceUse, Stage, TagJob
from klear_core.config.verify import UserFunction
from klear_core.errors import ArtifactError, KlearError
from klear_core.pipeline.graph import stage_of_problems
from klear_core.pipeline.plan import PendingWork
from klear_core.types import Domain

T = TypeVar("T")


def file_problems(work: PendingWork) -> Iterator[str]:
    """Find files of sources that do not exist."""
    # Also those of stages that are reused: a fingerprint depends on the content of the files.
    for use in sources_of(work.needed):
        if isinstance(use.source, FileSource | DatasetsSource) and not is_there(use.source):
            yield f"{use.key}: {use.source.path}: no such file"
        if not isinstance(use.source, GeneratedSource):
            tables = [path for path in use.source.lookup.values() if not is_path_there(path)]
            yield from (f"{use.key}: lookup: {path}: no such file" for path in tables)
    for stage, job in work.needs(CurateJob):
        for source in job.curate.decontaminate.also:
            if not is_there(source):
                yield f"{stage.section}.decontaminate.also: {source.path}: no such file"


def source_problems(work: PendingWork) -> Iterator[str]:
    """Find sources that cannot be read, and settings of curation that contradict them."""
    from klear_core.data.curation.selection import check_selection
    from klear_core.data.sources import check_names, check_questions, check_source

    for use in sources_of(work.stages):
        if is_there(use.source):
            yield from error_messages(use.key, check_source, use.source)
    curations = list(work.pending(CurateJob))
    for stage, job in curations:
        yield from error_messages(f"{stage.section}.sources", check_names, job.curate.sources)
        yield from error_messages(stage.section, check_selection, job.curate)
        for source in filter(is_there, job.curate.decontaminate.also):
            yield from error_messages(f"{stage.section}.decontaminate.also", check_questions, source)
    if not work.config.benchmarks and (work.evaluates or curations):
        yield "benchmarks: none, so there is nothing to evaluate on and nothing to keep out of training"


def given_trace_problems(work: PendingWork) -> Iterator[str]:
    """Find given traces that are not there or not in a known format."""
    from klear_core.data.formats.traces import check_traces
    from klear_core.data.sources import check_names

    for stage, job in work.pending(GivenTracesJob):
        yield from error_messages(stage.section, check_names, job.runtime.sources)
        for source in job.runtime.sources:
            if is_there(source):
                yield from error_messages(stage.section, check_traces, source)
            else:
                yield f"{stage.section}: {origin_of(source)}: no such file"


def unjudged_rl_problems(work: PendingWork) -> Iterator[str]:
    """Find RL that would have no problem to learn from, because no source of its problems has references."""
    from klear_core.data.sources import is_without_references

    for stage, _ in work.pending(RlJob):
        sources = sources_of_problems(work.needed, stage)
        if not sources:
            continue
        try:
            can_judge = not all(map(is_without_references, sources))
        except KlearError:
            continue  # a bad source is reported by `source_problems`
        if not can_judge:
            yield (
                f"{stage.section}: its problems come from sources without answers or tests, so that no answer could be "
                "judged; name others in curate_rl.sources"
            )


def benchmark_problems(work: PendingWork) -> Iterator[str]:
    """Compare row counts of reused benchmarks: the expected count is in no fingerprint, so it may have changed."""
    from klear_core.data.benchmarks import num_rows

    if work.benchmarks is None:
        return
    try:
        found = num_rows(read_manifest(work.benchmarks))
    except ArtifactError:
        return  # damaged: it will be built again, and counted then
    for benchmark in work.config.benchmarks:
        expected = benchmark.expected_rows
        if expected is not None and benchmark.num_problems is None and expected != found[benchmark.name]:
            num_found = found[benchmark.name]
            where = f"{num_found} rows in {work.benchmarks}"
            yield f"benchmark {benchmark.name!r}: expected_rows = {expected}, but it has {where}"


def reference_problems(work: PendingWork) -> Iterator[str]:
    """Check the references of reused benchmarks for a judge that has changed since: it is not in their fingerprint."""
    from klear_core.data.benchmarks import recheck_references

    if work.benchmarks is not None and work.evaluates:
        check = partial(recheck_references, runtime=BenchmarksJob.of(work.config).runtime)
        yield from error_messages("benchmarks", check, work.benchmarks)


def weight_problems(work: PendingWork) -> Iterator[str]:
    """Find weights of sources that the traces do not have."""
    from klear_core.data.sources import source_name

    given = work.config.given.distill or work.config.given.curate
    names = [source_name(source) for source in given or work.config.curate.sources]
    key = "the given sources" if given else "curate.sources"
    for stage, job in work.pending(SftJob):
        for name in job.sft.source_weights:
            if name not in names:
                there = ", ".join(names)
                yield f"{stage.section}.source_weights: {name!r} is none of {key}, which are: {there}"


def prompt_filter_problems(work: PendingWork) -> Iterator[str]:
    """Find filters by pass rates that no stage measures."""
    # Among all that is needed: a tag stage that is reused has measured them as well.
    tagged = {stage.name for stage, _ in work.needs(TagJob)}
    for stage, job in work.pending(RlJob):
        if job.rl.prompts.needs_pass_rates and stage.inputs["problems"] not in tagged:
            yield (
                f"{stage.section}.prompts: min_pass_rate and max_pass_rate compare pass rates, and nothing "
                f"measures those of {stage.inputs['problems']!r}: do so with --set 'tag_rl={{}}', or --set 'tag={{}}' "
                f"where RL has no prompts of its own"
            )


# ---- check judging ----
# Check before a run that answers can be judged: rewards and judges of the user's own, and the sandbox of programs.
#
# Each function yields one message for each problem that it finds.


_JUDGING = (BenchmarksJob, TagJob, DistillJob, RlJob, EvaluateJob)
"""Jobs of stages that always judge answers; benchmarks are judged to check their references."""


def reward_problems(work: PendingWork) -> Iterator[str]:
    """Find rewards of the user's own that cannot be called."""
    for stage, job in work.pending(RlJob):
        for reward in job.rl.reward.custom:
            yield from _function_problems(f"{stage.section}.reward.custom, function = {reward.function!r}", reward)


def judge_problems(work: PendingWork) -> Iterator[str]:
    """Find judges of the user's own that cannot be called, and references whose judge is none of them."""
    from klear_core.data.sources import judges_of

    if not any(isinstance(stage.job, _JUDGING) or stage.job.scorer() for stage in work.stages):
        return
    # The judges by name are the same in all stages: no stage can override them.
    verify = work.config.verify
    for judge in verify.judges:
        yield from _function_problems(judge.key, judge)
    names = [judge.name for judge in verify.all_judges]
    for use in sources_of(work.needed):
        unknown = or_nothing(judges_of, use.source).difference(names) if is_there(use.source) else ()
        for name in sorted(unknown):
            example = [{"name": name, "function": "my_judges:my_function"}]
            yield (
                f"{use.key}: its references name the judge {name!r}, and verify.judges has "
                f"{', '.join(names)}; bind it in a profile ([[verify.judges]]), or with "
                f"{as_option('verify.judges', example)}"
            )


def sandbox_problems(work: PendingWork) -> Iterator[str]:
    """Find out whether programs can be run safely, if a stage judges any."""
    stages = list(dict.fromkeys(_sections_that_judge_code(work)))
    if not stages:
        return
    from klear_core.verify.sandbox.selftest import checked_backend

    yield from error_messages(
        f"verify.sandbox, for the code problems of {', '.join(stages)}", checked_backend, work.config.verify
    )


def _function_problems(key: str, cfg: UserFunction) -> Iterator[str]:
    """Import a user's function in a child process, so that side effects of the import do not reach this process."""
    from klear_core.verify.user_code import check

    missing = [path for path in cfg.files if not Path(path).exists()]
    yield from (f"{key}: files: {path}: no such file" for path in missing)
    yield from error_messages(key, check, cfg)


def _sections_that_judge_code(work: PendingWork) -> Iterator[str]:
    # Once for all evaluations: looking for code reads the first rows of every benchmark.
    has_code_benchmarks = any(_has_code(benchmark.source) for benchmark in work.config.benchmarks)
    for stage in work.stages:
        match stage.job:
            case DistillJob() | TagJob() if any(map(_has_code, sources_of_problems(work.needed, stage))):
                yield stage.section
            case RlJob(rl=rl) if rl.domain == "code":
                yield stage.section
            case SftJob() | RlJob() as job if job.runtime.curve and _has_code(job.runtime.curve.source.source):
                yield stage.section
            case EvaluateJob() if has_code_benchmarks:
                yield stage.section


def _has_code(source: Source) -> bool:
    from klear_core.data.sources import domains_of

    return Domain.CODE in or_nothing(domains_of, source)


# ---- messages ----
# Turn the errors of checks before a run into messages, and find the sources that they read.


def error_messages(where: str, check: Callable[[T], object], subject: T) -> Iterator[str]:
    """Yield the message of the error that a check of the subject raises, if it raises one."""
    try:
        check(subject)
    except KlearError as e:
        yield f"{where}: {e}"


def or_nothing(read: Callable[[Source], frozenset[T]], source: Source) -> frozenset[T]:
    """Return what is read from a source; nothing from a bad one, which `source_problems` reports."""
    try:
        return read(source)
    except KlearError:
        return frozenset()


def sources_of(stages: Sequence[Stage]) -> Iterator[SourceUse]:
    """Yield the sources that stages read."""
    for stage in stages:
        yield from stage.sources()


def sources_of_problems(stages: Sequence[Stage], stage: Stage) -> list[Source]:
    """Return the sources of the problems that a stage takes; `stages` has the stage and all that it depends on."""
    return [use.source for use in stage_of_problems(stages, stage).sources()]


def is_there(source: Source) -> bool:
    """Return whether a source can be read; `file_problems` reports a missing file, so no other check should."""
    if not isinstance(source, FileSource | DatasetsSource) or not source.path:
        return True
    return is_path_there(source.path)


def is_path_there(path: str) -> bool:
    """Return whether a file or folder exists, or a pattern matches a file."""
    return Path(path).exists() or bool(matching_files(path))
