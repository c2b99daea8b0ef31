"""Run distillation: request teacher replies for every problem, judge them, and select the traces to train on.

Wrong traces are kept with their verdict by default (no accuracy filter, Klear-Reasoner section 3.1). Replies of a
teacher over HTTP are written as they arrive; a shard of problems becomes final when all its samples are judged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from klear_core.artifacts.manifest import LedgerStep, StageSummary
from klear_core.artifacts.records import plan_shards, read_shards, work_shards
from klear_core.config.distill import (
    DistillConfig,
    HttpTeacherConfig,
    LocalTeacherConfig,
    ProceduralTeacherConfig,
    PuzzleTeacherConfig,
)
from klear_core.config.verify import VerifyConfig
from klear_core.distill.collection import Collection
from klear_core.distill.shards import JOURNAL_FOLDER, FinishedShard, reopen_poor_shards
from klear_core.distill.teachers.fleet import NO_KEYS, BlockKeys
from klear_core.distill.teachers.teacher import Teacher
from klear_core.errors import DataError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.metrics import Telemetry
from klear_core.seeding import seed_for
from klear_core.types import Judge, Problem
from klear_core.waits import progress_watched

log = logging.getLogger(__name__)

_HERE = EnginesAndJudges(section="distill.teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAccess:
    """API keys of a teacher over HTTP, or the model of a local one."""

    keys: BlockKeys = field(default_factory=dict)
    model: Path | None = None
    """Artifact of the local teacher's model."""
    model_name: str = ""
    """Name of that model in the traces."""
    compute: EnginesAndJudges = _HERE
    """Starts its engines and the judges."""


_NO_ACCESS = TeacherAccess()


def distill(
    cfg: DistillConfig,
    verify: VerifyConfig,
    *,
    problems: Path,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
    access: TeacherAccess = _NO_ACCESS,
) -> StageSummary:
    """Write `workdir/traces` and `workdir/dropped` for the problems in a curation artifact folder.

    For a teacher that is a model, also write `unused` (replies that are no traces) and `usage` (tokens, cost by shard).
    Raise TeacherError or JudgeError if more than `cfg.max_failure_rate` of the samples fail, DataError if there is no
    problem, or too few answers are complete or selected. A rerun reuses finished shards, except those below the floors.
    """
    offered = list(read_shards(problems / "problems", Problem))
    if not offered:
        raise DataError(f"{problems}: there is no problem to distill; the ledger of `curate` says why")
    tagged = [problem for problem in offered if not cfg.difficulties or problem.difficulty in cfg.difficulties]
    if not tagged:
        tags = ", ".join(cfg.difficulties)
        raise DataError(
            f"{problems}: none of its {len(offered)} problems is tagged {tags}, as distill.difficulties asks"
        )
    chosen = choose_problems(tagged, max_problems=cfg.max_problems, seed=seed)

    async def run(judge: Judge) -> StageSummary:
        async with open_teacher(cfg, access, seed=seed, workdir=workdir) as teacher:
            return await collect_traces(cfg, teacher, judge, chosen, seed=seed, workdir=workdir, telemetry=telemetry)

    with access.compute.build_judges(verify) as judges:
        # Before the teacher is asked: a missing sandbox must not be found after the replies are paid for.
        notes = judges.prepare(chosen)
        summary = asyncio.run(run(judges.judge_async))
    summary = summary.model_copy(update={"notes": (*summary.notes, *notes)})
    if len(chosen) == len(offered):
        return summary
    counted = {"other_difficulty": len(offered) - len(tagged), "over_max_problems": len(tagged) - len(chosen)}
    left_out = {reason: count for reason, count in counted.items() if count}
    limit = LedgerStep.of("limit", "problem", num_in=len(offered), dropped=left_out)
    return summary.model_copy(update={"ledger": (limit, *summary.ledger)})


def choose_problems(problems: Sequence[Problem], *, max_problems: int | None, seed: int) -> list[Problem]:
    """Return all problems, or `max_problems` of them drawn by seed, in their original order."""
    if max_problems is None or len(problems) <= max_problems:
        return list(problems)
    # By a hash of each id: a larger `max_problems` keeps every problem that a smaller one draws.
    drawn = sorted(problems, key=lambda p: seed_for(seed, "distill/problems", p.problem_id))[:max_problems]
    ids = {p.problem_id for p in drawn}
    return [p for p in problems if p.problem_id in ids]


@asynccontextmanager
async def open_teacher(
    cfg: DistillConfig, access: TeacherAccess, *, seed: int, workdir: Path
) -> AsyncIterator[Teacher]:
    """Yield the teacher that the settings name; raise ConfigError if its API key is missing."""
    match cfg.teacher:
        case LocalTeacherConfig() as local:
            from klear_core.distill.teachers.teacher import open_local_teacher

            assert access.model is not None, "a local teacher needs its model"
            name, compute = access.model_name, access.compute
            async with open_local_teacher(
                local, access.model, name=name, seed=seed, workdir=workdir, compute=compute
            ) as teacher:
                yield teacher
        case ProceduralTeacherConfig() | PuzzleTeacherConfig() | HttpTeacherConfig() as other:
            opened = build_teacher(other, access.keys)
            try:
                yield opened
            finally:
                await opened.close()
        case _:
            assert_never(cfg.teacher)


def build_teacher(
    cfg: ProceduralTeacherConfig | PuzzleTeacherConfig | HttpTeacherConfig, keys: BlockKeys = NO_KEYS
) -> Teacher:
    """Build a teacher that needs no model here; raise ConfigError if its API key is missing."""
    match cfg:
        case ProceduralTeacherConfig():
            from klear_core.distill.teachers.procedural import ProceduralTeacher

            return ProceduralTeacher(cfg)
        case PuzzleTeacherConfig():
            from klear_core.distill.teachers.procedural import PuzzleTeacher

            return PuzzleTeacher(cfg)
        case HttpTeacherConfig():
            from klear_core.distill.teachers.http_teacher import HttpTeacher

            return HttpTeacher(cfg, keys)
        case _:
            assert_never(cfg)


async def collect_traces(
    cfg: DistillConfig,
    teacher: Teacher,
    judge: Judge,
    problems: Sequence[Problem],
    *,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> StageSummary:
    """Collect traces for the unfinished shards; requests and judging overlap.

    Raise BudgetError if the budget is spent before enough samples were requested.
    """
    # A problem's samples share a shard, so one problem may hold more traces than `traces_per_shard`.
    problems_per_shard = max(1, cfg.runtime.traces_per_shard // cfg.samples_per_problem)
    shards = plan_shards(
        workdir / "traces", problems, items_per_shard=problems_per_shard, begun=workdir / JOURNAL_FOLDER
    )
    run = Collection(cfg, teacher, judge, seed=seed, telemetry=telemetry, num_problems=len(problems))
    finished_before = {shard.path: FinishedShard.of(shard) for shard in shards if shard.is_done}
    # Before the count: a shard that is reopened is work to do, and not work done.
    reopen_poor_shards(shards, finished_before, cfg)
    run.count_earlier(shards, finished_before)
    todo = [shard for shard in shards if not shard.is_done]
    if len(todo) < len(shards):
        log.info("distill: %d of %d shards are there already", len(shards) - len(todo), len(shards))
    # Replies that a journal holds are included: `Collection` subtracts each one that it takes from there.
    teacher.expect(cfg.samples_per_problem * sum(len(shard.items) for shard in todo))
    try:
        # aclosing: if `finish` raises, the generator's cleanup cancels the requests that are still running.
        async with (
            progress_watched(lambda: (run.usage, run.progress.num_done), run.awaited),
            aclosing(work_shards(run.affordable(todo), run.work, limit=cfg.runtime.max_in_flight)) as finished,
        ):
            async for shard, results in finished:
                run.finish(shard, results)
        if run.is_over_budget:
            run.finish_over_budget([shard for shard in todo if not shard.is_done])
    finally:
        run.close()
    # Empty by now: each shard that is written deletes its journal. The folder is no part of the artifact.
    if (workdir / JOURNAL_FOLDER).is_dir():
        (workdir / JOURNAL_FOLDER).rmdir()
    return run.summary()
