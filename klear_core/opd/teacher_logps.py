"""Ask a teacher for its log-probs of the student's tokens: of stored answers, or of those of each RL step.

Of stored answers a shard is the unit of resume.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, StageSummary
from klear_core.artifacts.records import Shard, plan_shards, read_shards, work_shards, write_shard
from klear_core.config.evaluate import SamplingConfig
from klear_core.config.opd import OpdTeacherConfig
from klear_core.errors import DataError
from klear_core.generate.engine import InferenceEngine, logps_of
from klear_core.generate.factory import EngineSpec, Sampler, StartSampler, running, start_here
from klear_core.generate.pool import expect
from klear_core.hf_config import read_hf_config
from klear_core.metrics import SILENT, Telemetry
from klear_core.prompts import check_same_tokens
from klear_core.train.base_model import model_folder
from klear_core.types import TeacherLogps, TrainSample

SCORED = "scored"
"""Folder of the answers with a teacher's log-probs in the artifact."""
_NEVER = -1e4
"""Log-prob of what has probability 0; finite, so that products with it are."""


def write_teacher_logps(
    cfg: OpdTeacherConfig,
    *,
    student: Path,
    teacher: Path,
    answers: Sequence[TrainSample],
    temperature: float,
    workdir: Path,
    telemetry: Telemetry = SILENT,
    start_sampler: StartSampler = start_here,
) -> StageSummary:
    """Write answers of the student with the teacher's log-probs of their tokens to `workdir/scored`.

    Raise ConfigError if teacher and student have different tokens, DataError if a log-prob is NaN or an answer
    does not fit the teacher's window.
    """
    folder = model_folder(teacher)
    check_same_tokens(student=model_folder(student), teacher=folder)
    vocab_size = read_hf_config(model_folder(student)).vocab_size
    shards = plan_shards(workdir / SCORED, answers, items_per_shard=cfg.runtime.answers_per_shard)
    spec = EngineSpec.of_model(
        cfg.engine,
        teacher,
        num_threads=cfg.runtime.num_threads,
        seed=0,  # nothing is drawn
        workdir=workdir,
        answer_tokens=max(answer.num_loss_tokens for answer in answers),
    )

    async def run() -> None:
        async with running(start_sampler, spec) as sampler:
            await _write_shards(
                cfg, shards, sampler, temperature=temperature, vocab_size=vocab_size, telemetry=telemetry
            )

    if not all(shard.is_done for shard in shards):
        asyncio.run(run())
    return _summary(workdir)


async def _write_shards(
    cfg: OpdTeacherConfig,
    shards: Sequence[Shard[TrainSample]],
    sampler: Sampler,
    *,
    temperature: float,
    vocab_size: int,
    telemetry: Telemetry,
) -> None:
    todo = [shard for shard in shards if not shard.is_done]
    num_all, num_todo = (sum(len(shard.items) for shard in some) for some in (shards, todo))
    num_done = num_all - num_todo
    expect(sampler.engine, num_todo)
    room = asyncio.Semaphore(sampler.limit)

    async def work(_shard: Shard[TrainSample], answer: TrainSample) -> TrainSample:
        nonlocal num_done
        async with room:
            found = await with_teacher_logps(
                sampler.engine, answer, temperature=temperature, num_top=cfg.top_k, vocab_size=vocab_size
            )
        num_done += 1
        telemetry.progress(num_done, num_all, "answers scored by the teacher")
        return found

    limit = cfg.runtime.max_in_flight * sampler.num_engines
    # aclosing: an error in this loop also cancels the requests in flight
    async with aclosing(work_shards(todo, work, limit=limit)) as finished:
        async for shard, samples in finished:
            write_shard(shard.path, samples)


async def with_teacher_logps(
    engine: InferenceEngine,
    answer: TrainSample,
    *,
    temperature: float,
    num_top: int = 0,
    vocab_size: int | None = None,
) -> TrainSample:
    """Return an answer with the teacher's log-probs of its tokens, and of its likeliest tokens in their place.

    `vocab_size` is the student's. A teacher's may be rounded up further (Qwen2.5: 151,936 and 152,064): what lies
    beyond is no token, and gets probability 0.
    """
    num_prompt = answer.num_prompt_tokens
    prompt_ids, answer_ids = answer.token_ids[:num_prompt], answer.token_ids[num_prompt:]
    try:
        found = await logps_of(engine, prompt_ids, answer_ids, temperature=temperature, num_top=num_top)
    except ValueError as e:
        raise DataError(f"problem {answer.problem_id}: the teacher's engine refuses an answer: {e}") from e
    if any(map(math.isnan, found.logps + found.top_logps)):
        raise DataError(f"problem {answer.problem_id}: the teacher's log-probs of an answer are NaN")
    top_ids, top_logps = list(found.top_ids), list(found.top_logps)
    for k, token in enumerate(found.top_ids):
        if vocab_size is not None and token >= vocab_size:
            top_ids[k], top_logps[k] = 0, _NEVER
    return replace(
        answer,
        teacher_logps=(0.0,) * num_prompt + found.logps,
        top_ids=tuple(top_ids),
        top_logps=tuple(top_logps),
    )


@asynccontextmanager
async def live_teacher(
    cfg: OpdTeacherConfig,
    *,
    student: Path,
    teacher: Path,
    sampling: SamplingConfig,
    workdir: Path,
    start_sampler: StartSampler = start_here,
) -> AsyncIterator[TeacherLogps]:
    """Start the teacher for the block; yield a function that adds its log-probs to the answers of an RL step,
    which were sampled with `sampling`.

    Raise ConfigError if teacher and student have different tokens. The function raises as `with_teacher_logps` does.
    """
    folder = model_folder(teacher)
    check_same_tokens(student=model_folder(student), teacher=folder)
    vocab_size = read_hf_config(model_folder(student)).vocab_size
    threads, tokens = cfg.runtime.num_threads, sampling.max_new_tokens
    spec = EngineSpec.of_model(cfg.engine, teacher, num_threads=threads, seed=0, workdir=workdir, answer_tokens=tokens)
    async with running(start_sampler, spec) as sampler:
        room = asyncio.Semaphore(sampler.limit)

        async def one(answer: TrainSample) -> TrainSample:
            async with room:
                return await with_teacher_logps(
                    sampler.engine,
                    answer,
                    temperature=sampling.temperature,
                    num_top=cfg.top_k,
                    vocab_size=vocab_size,
                )

        async def with_logps(answers: Sequence[TrainSample]) -> tuple[TrainSample, ...]:
            expect(sampler.engine, len(answers))
            tasks = [asyncio.create_task(one(answer)) for answer in answers]
            try:
                return tuple(await asyncio.gather(*tasks))
            finally:
                for task in tasks:  # after an error, the other requests
                    task.cancel()

        yield with_logps


def _summary(workdir: Path) -> StageSummary:
    """Return counts, with the distance of both models: the mean of log(student / teacher) over all tokens."""
    num_answers = num_tokens = 0
    gap = 0.0
    for answer in read_shards(workdir / SCORED, TrainSample):
        num_answers += 1
        num_tokens += answer.num_loss_tokens
        gap += sum(answer.sampler_logps) - sum(answer.teacher_logps)  # both are 0 on the prompt
    ledger = LedgerStep.of("score", "answer", num_in=num_answers, dropped={})
    counts = {"answers": num_answers, "tokens": num_tokens, "kl": round(gap / max(1, num_tokens), 4)}
    return StageSummary(counts=counts, ledger=(ledger,))
