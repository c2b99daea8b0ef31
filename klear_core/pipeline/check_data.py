"""Check before a run that its sources, traces and benchmarks are there and can be read.

Each function yields one message for each problem that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from klear_core.artifacts.manifest import read_manifest
from klear_core.config.data import FileSource, GeneratedSource
from klear_core.config.data_jobs import BenchmarksJob, CurateJob
from klear_core.config.given_jobs import GivenTracesJob, origin_of
from klear_core.config.jobs import RlJob, SftJob, TagJob
from klear_core.errors import ArtifactError, KlearError
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.complaints import complaints, is_path_there, is_there, sources_of, sources_of_problems


def file_problems(work: PendingWork) -> Iterator[str]:
    """Find files of sources that do not exist."""
    # Also those of stages that are reused: a fingerprint depends on the content of the files.
    for use in sources_of(work.needed):
        if isinstance(use.source, FileSource) and not is_there(use.source):
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
    from klear_core.data.selection import check_selection
    from klear_core.data.sources import check_names, check_questions, check_source

    for use in sources_of(work.stages):
        if is_there(use.source):
            yield from complaints(use.key, check_source, use.source)
    curations = list(work.pending(CurateJob))
    for stage, job in curations:
        yield from complaints(f"{stage.section}.sources", check_names, job.curate.sources)
        yield from complaints(stage.section, check_selection, job.curate)
        for source in filter(is_there, job.curate.decontaminate.also):
            yield from complaints(f"{stage.section}.decontaminate.also", check_questions, source)
    if not work.config.benchmarks and (work.evaluates or curations):
        yield "benchmarks: none, so there is nothing to evaluate on and nothing to keep out of training"


def given_trace_problems(work: PendingWork) -> Iterator[str]:
    """Find given traces that are not there or not in a known format."""
    from klear_core.data.sources import check_names
    from klear_core.data.traces import check_traces

    for stage, job in work.pending(GivenTracesJob):
        yield from complaints(stage.section, check_names, job.runtime.sources)
        for source in job.runtime.sources:
            if is_there(source):
                yield from complaints(stage.section, check_traces, source)
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
        if expected is not None and expected != found[benchmark.name]:
            num_found = found[benchmark.name]
            where = f"{num_found} rows in {work.benchmarks}"
            yield f"benchmark {benchmark.name!r}: expected_rows = {expected}, but it has {where}"


def reference_problems(work: PendingWork) -> Iterator[str]:
    """Check the references of reused benchmarks for a judge that has changed since: it is not in their fingerprint."""
    from klear_core.data.benchmarks import recheck_references

    if work.benchmarks is not None and work.evaluates:
        check = partial(recheck_references, runtime=BenchmarksJob.of(work.config).runtime)
        yield from complaints("benchmarks", check, work.benchmarks)


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
