"""Sample the student's answers, once; a shard of answers is the unit of resume."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, StageSummary
from klear_core.artifacts.records import Shard, plan_shards, read_shards, work_shards, write_shard
from klear_core.config.opd import OpdRolloutsConfig
from klear_core.errors import DataError, ResourceError
from klear_core.generate.engine import InferenceEngine, one_sample
from klear_core.generate.factory import EngineSpec, LongestFirst, Sampler, StartSampler, running, start_here
from klear_core.generate.pool import expect
from klear_core.hf_config import FolderTokenizer
from klear_core.metrics import SILENT, Telemetry
from klear_core.prompts import load_tokenizer, render_prompt
from klear_core.seeding import seed_for
from klear_core.train.base_model import engine_window, model_folder
from klear_core.types import Completion, Domain, Problem, TrainSample

ROLLOUTS = "rollouts"
"""Folder of the sampled answers in the artifact, and of their shards in the working folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """One answer to sample."""

    problem_id: str
    prompt_ids: tuple[int, ...]
    sample_idx: int


def sample_rollouts(
    cfg: OpdRolloutsConfig,
    *,
    model: Path,
    problems: Path,
    workdir: Path,
    seed: int = 0,
    telemetry: Telemetry = SILENT,
    start_sampler: StartSampler = start_here,
) -> StageSummary:
    """Sample answers of a model artifact to the problems of an artifact; write `workdir/rollouts`.

    Nobody judges them: right and wrong answers have something to learn from a teacher. Raise DataError if no prompt is
    short enough.
    """
    folder = model_folder(model)
    window = engine_window(model, cfg.engine)
    render = partial(render_prompt, load_tokenizer(folder))
    chosen = choose_prompts(cfg, problems, render, seed=seed, window=window)
    answers: list[PlannedAnswer] = []
    for problem_id, prompt_ids in chosen.prompts:
        for i in range(cfg.samples_per_prompt):
            answers.append(PlannedAnswer(problem_id=problem_id, prompt_ids=prompt_ids, sample_idx=i))
    shards = plan_shards(workdir / ROLLOUTS, answers, items_per_shard=cfg.runtime.answers_per_shard)
    spec = EngineSpec.of_model(
        cfg.engine,
        model,
        num_threads=cfg.runtime.num_threads,
        seed=seed_for(seed, "opd/engine"),
        workdir=workdir,
        answer_tokens=cfg.sampling.max_new_tokens,
    )

    async def run() -> None:
        async with running(start_sampler, spec) as sampler:
            await _sample_all(cfg, shards, sampler, seed=seed, telemetry=telemetry)

    if not all(shard.is_done for shard in shards):
        asyncio.run(run())
    num_tokens = num_cut = 0
    stop_ids = FolderTokenizer(folder).stop_ids
    for sample in read_shards(workdir / ROLLOUTS, TrainSample):
        num_tokens += sample.num_loss_tokens
        num_cut += sample.token_ids[-1] not in stop_ids  # at the limit, or at the end of the window
    counts = {"prompts": len(chosen.prompts), "answers": len(answers), "sampled_tokens": num_tokens, "cut": num_cut}
    return StageSummary(counts=counts, ledger=(chosen.ledger,), seeds={"opd_rollouts": seed})


def answers_of(rollouts: Path, problems: Path | None = None, domain: Domain | None = None) -> list[TrainSample]:
    """Return the answers of an artifact: all, or those to the artifact `problems`' problems of a domain.

    Raise DataError if there are none.
    """
    answers = list(read_shards(rollouts / ROLLOUTS, TrainSample))
    if problems is None:
        return answers
    known = read_shards(problems / "problems", Problem)
    wanted = {problem.problem_id for problem in known if problem.domain == domain}
    found = [answer for answer in answers if answer.problem_id in wanted]
    if not found:
        raise DataError(f"none of the {len(answers):,} answers is to a {domain} problem; leave opd.code_teacher out")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts to answer, with the ids of their problems, and a count of those left out."""

    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    ledger: LedgerStep


def choose_prompts(
    cfg: OpdRolloutsConfig,
    problems: Path,
    render: Callable[[str], tuple[int, ...]],
    *,
    seed: int,
    window: int | None = None,
) -> Prompts:
    """Return the prompts to answer, in an order that the seed draws.

    Those that leave no room for an answer in the `window` are left out like longer ones; None: there is no bound.
    """
    # An engine refuses them, which would end the stage, and again each time it resumes.
    most = cfg.max_prompt_tokens if window is None else min(cfg.max_prompt_tokens, window - 1)
    # Sorted first, so that the order does not depend on how the problems were stored.
    ordered = sorted(read_shards(problems / "problems", Problem), key=lambda problem: problem.problem_id)
    random.Random(seed_for(seed, "opd/prompts")).shuffle(ordered)  # noqa: S311
    fitting: list[tuple[str, tuple[int, ...]]] = []
    dropped = {"long_prompt": 0, "not_needed": 0}
    for problem in ordered:
        if cfg.num_prompts is not None and len(fitting) >= cfg.num_prompts:
            dropped["not_needed"] += 1
            continue
        prompt_ids = render(problem.question)
        if len(prompt_ids) > most:
            dropped["long_prompt"] += 1
        else:
            fitting.append((problem.problem_id, prompt_ids))
    if not fitting:
        raise DataError(
            f"{problems}: none of its {len(ordered):,} problems has a prompt of at most "
            f"{most} tokens (opd.rollouts.max_prompt_tokens = {cfg.max_prompt_tokens}, window {window})"
        )
    lost = {reason: count for reason, count in dropped.items() if count}
    ledger = LedgerStep.of("choose_prompts", "problem", num_in=len(ordered), dropped=lost)
    return Prompts(prompts=tuple(fitting), ledger=ledger)


async def _sample_all(
    cfg: OpdRolloutsConfig,
    shards: Sequence[Shard[PlannedAnswer]],
    sampler: Sampler,
    *,
    seed: int,
    telemetry: Telemetry,
) -> None:
    todo = [shard for shard in shards if not shard.is_done]
    num_all, num_todo = (sum(len(shard.items) for shard in some) for some in (shards, todo))
    num_done = num_all - num_todo
    gate = LongestFirst(sampler.limit, num_requests=num_todo)
    expect(sampler.engine, num_todo)

    async def work(_shard: Shard[PlannedAnswer], planned: PlannedAnswer) -> TrainSample:
        nonlocal num_done
        async with gate.slot(planned.problem_id):
            completion = await _answer(cfg, sampler.engine, planned, seed=seed)
        gate.record(planned.problem_id, len(completion.token_ids))
        num_done += 1
        telemetry.progress(num_done, num_all, "answers of the student")
        return to_sample(planned, completion)

    limit = cfg.runtime.max_in_flight * sampler.num_engines
    # aclosing: an error in this loop also cancels the requests in flight
    async with aclosing(work_shards(todo, work, limit=limit)) as finished:
        async for shard, samples in finished:
            write_shard(shard.path, samples)


async def _answer(cfg: OpdRolloutsConfig, engine: InferenceEngine, planned: PlannedAnswer, *, seed: int) -> Completion:
    own_seed = seed_for(seed, "opd/rollout", planned.problem_id, planned.sample_idx)
    (completion,) = await engine.generate(planned.prompt_ids, one_sample(cfg.sampling, seed=own_seed))
    if completion.finish_reason == "abort":
        raise ResourceError(f"problem {planned.problem_id}: the engine aborted the request")
    return completion


def to_sample(planned: PlannedAnswer, completion: Completion) -> TrainSample:
    """Return an answer as a row to train on. No reward belongs to it."""
    num_prompt, num_answer = len(planned.prompt_ids), len(completion.token_ids)
    return TrainSample(
        problem_id=planned.problem_id,
        token_ids=(*planned.prompt_ids, *completion.token_ids),
        loss_mask=(False,) * num_prompt + (True,) * num_answer,
        sampler_logps=(0.0,) * num_prompt + completion.logps,
        advantage=0.0,
        is_positive=False,
        oldest_version=0,
    )
