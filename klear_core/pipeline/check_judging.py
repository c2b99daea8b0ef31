"""Check before a run that answers can be judged: rewards and judges of the user's own, and the sandbox of programs.

Each function yields one message for each problem that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from klear_core.config.data import Source
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.jobs import DistillJob, EvaluateJob, RlJob, SftJob, TagJob
from klear_core.config.toml import as_option
from klear_core.config.user_code import UserFunction
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.complaints import complaints, is_there, or_nothing, sources_of, sources_of_problems
from klear_core.types import Domain

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
    judges = work.config.verify.judges
    for judge in judges:
        yield from _function_problems(judge.key, judge)
    names = [judge.name for judge in judges]
    for use in sources_of(work.needed):
        unknown = or_nothing(judges_of, use.source).difference(names) if is_there(use.source) else ()
        for name in sorted(unknown):
            example = [{"name": name, "function": "my_judges:my_function"}]
            yield (
                f"{use.key}: its references name the judge {name!r}, and verify.judges has "
                f"{', '.join(names) or 'none'}; bind it in a profile ([[verify.judges]]), or with "
                f"{as_option('verify.judges', example)}"
            )


def sandbox_problems(work: PendingWork) -> Iterator[str]:
    """Find out whether programs can be run safely, if a stage judges any."""
    stages = list(dict.fromkeys(_sections_that_judge_code(work)))
    if not stages:
        return
    from klear_core.verify.sandbox.selftest import checked_backend

    yield from complaints(
        f"verify.sandbox, for the code problems of {', '.join(stages)}", checked_backend, work.config.verify
    )


def _function_problems(key: str, cfg: UserFunction) -> Iterator[str]:
    """Import a user's function in a child process, so that side effects of the import do not reach this process."""
    from klear_core.verify.user_code import check

    missing = [path for path in cfg.files if not Path(path).exists()]
    yield from (f"{key}: files: {path}: no such file" for path in missing)
    yield from complaints(key, check, cfg)


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
