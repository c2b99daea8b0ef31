"""GPPO reinforcement learning with verifiable rewards: sample groups, judge, keep what teaches, learn, hand the weights back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from klear_core.artifacts.floors import check_floor
from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shards
from klear_core.config.rl import RlConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError
from klear_core.generate.engine import SleepingEngine, TrainableEngine
from klear_core.metrics import Telemetry
from klear_core.prompts import load_tokenizer
from klear_core.rl.groups import to_samples
from klear_core.rl.metrics import describe_groups, gather_shown, last_shown, show
from klear_core.rl.progress import Progress, all_one
from klear_core.rl.rollout import Collected, Collector, Judge, PromptStream
from klear_core.rl.workers import LearnerHandle, LearnerLost, RlSetup, Workers
from klear_core.train.base import model_folder
from klear_core.types import Problem
from klear_core.verify import build_verifier

log = logging.getLogger(__name__)

_LOOK_FROM = 20  # steps after which a run that teaches nothing is stopped
_NUM_SHOWN = 20  # steps of a run whose first answers are kept for the report


def train_rl(
    cfg: RlConfig, verify: VerifyConfig, *, model: Path, problems: Path, seed: int, workdir: Path, telemetry: Telemetry, workers: Workers
) -> StageSummary:
    """Train `model` on the problems of the configured domain; leaves `workdir/model` and `workdir/sample_rollouts.parquet`.

    Killed and rerun with the same `workdir`, it goes on from the last checkpoint. DataError if there is no problem of that
    domain or next to no group that teaches anything, TrainingError on a stall, too many bad updates or too many lost workers.
    """
    chosen, choice = choose_problems(problems / "problems", cfg)
    setup = RlSetup(cfg=cfg, model=model, seed=seed, workdir=workdir)
    with build_verifier(verify) as judges:
        notes = judges.prepare(chosen)
        progress = asyncio.run(run_rl(setup, chosen, judges.judge_async, telemetry, workers))
    warnings = check_taught(progress, setup)
    gather_shown(workdir / "scratch" / "shown", workdir / "sample_rollouts.parquet")
    summary = progress.summary(cfg, choice, seed=seed)
    return summary.model_copy(update={"notes": (*warnings, *summary.notes, *notes)})


def choose_problems(folder: Path, cfg: RlConfig) -> tuple[list[Problem], LedgerStep]:
    """The problems of the stage's domain, and the count of the others."""
    everything = list(read_shards(folder, Problem))
    chosen = [p for p in everything if p.domain == cfg.domain]
    if not chosen:
        raise DataError(f"{folder}: none of its {len(everything)} problems is of domain {cfg.domain!r}")
    dropped = {"other_domain": len(everything) - len(chosen)}
    return chosen, LedgerStep(step="choose_domain", unit="problem", num_in=len(everything), num_out=len(chosen), dropped=dropped)


async def run_rl(setup: RlSetup, problems: list[Problem], judge: Judge, telemetry: Telemetry, workers: Workers) -> Progress:
    """All steps that are still to be done. A lost learner costs the steps since its last checkpoint, and nothing else."""
    try:
        # Both import for seconds: side by side.
        (learner, policy), tokenizer = await asyncio.gather(
            workers.start(setup), asyncio.to_thread(load_tokenizer, model_folder(setup.model))
        )
        while True:
            try:
                progress = Progress.of(await learner.restore())
                stream = PromptStream(problems, seed=setup.seed, position=progress.position)
                collector = Collector(policy, judge, stream, tokenizer, setup.cfg, seed=setup.seed, who_is_asked=workers.status)
                await run_steps(setup, learner, policy, collector.collect, progress, telemetry)
                if not (setup.workdir / "model").exists():
                    await learner.export(setup.workdir / "model")
            except LearnerLost as lost:
                log.warning("%s; going on from its last checkpoint", lost)
            else:
                return progress
    finally:
        await workers.close()


async def run_steps(
    setup: RlSetup,
    learner: LearnerHandle,
    policy: TrainableEngine,
    collect: Callable[[], Awaitable[Collected]],
    progress: Progress,
    telemetry: Telemetry,
) -> None:
    """The loop. With `max_staleness` above 0, groups for the next steps are sampled while the learner is at this one."""
    cfg = setup.cfg
    sleeper = _sleeper(policy, cfg)
    await hand_over(learner, policy, sleeper, version=progress.step)
    async with Lookahead(collect, depth=cfg.max_staleness, num_batches=cfg.num_steps - progress.step) as ahead:
        for step in range(progress.step, cfg.num_steps):
            start = time.monotonic()
            collected = await ahead.next()
            samples = to_samples(collected.kept, cfg.advantage, cfg.overlong, oldest_allowed=step - cfg.max_staleness)
            sampled = time.monotonic()
            if sleeper is not None:
                await sleeper.sleep()
            update = await learner.step(samples.rows)
            trained = time.monotonic()
            await hand_over(learner, policy, sleeper, version=step + 1)
            synced = time.monotonic()
            ahead.allow_another()

            collected.drops.add(samples.drops)
            update |= describe_groups(collected.groups, collected.drops)
            update |= speed(collected, update, wait_s=sampled - start, train_s=trained - sampled, sync_s=synced - trained)
            sampled_tokens = sum(len(r.completion.token_ids) for g in collected.groups for r in g.rollouts)
            progress.after(update, collected.drops, position=collected.position, sampled_tokens=sampled_tokens)
            if progress.has_all_one() and progress.step == progress.steps_without_update + 1:  # the first step with an update
                log.warning("step %d: %s", progress.step, all_one(cfg))
            telemetry.log(update, step=progress.step)
            telemetry.progress(progress.step, cfg.num_steps, f"pass rate {progress.pass_rate:.2f}")
            if step % max(1, cfg.num_steps // _NUM_SHOWN) == 0 or progress.step == cfg.num_steps:
                show(setup.workdir / "scratch" / "shown", collected.groups, step=progress.step)
            if progress.step % cfg.runtime.checkpoint.every_steps == 0 or progress.step == cfg.num_steps:
                await learner.save(progress.counters())
            if progress.step >= _LOOK_FROM:
                check_taught(progress, setup)


def check_taught(progress: Progress, setup: RlSetup) -> tuple[str, ...]:
    """Return the warning about groups that taught nothing, if they are many; DataError if they are nearly all."""
    share = progress.taught(example=last_shown(setup.workdir / "scratch" / "shown"))
    remedy = "Give it problems of another difficulty, a better model to start from, or more samples_per_group"
    return check_floor(share, setup.cfg.runtime.taught, key="rl.runtime.taught", remedy=remedy)


async def hand_over(learner: LearnerHandle, policy: TrainableEngine, sleeper: SleepingEngine | None, *, version: int) -> None:
    """The learner's weights to the engines; a sleeping one wakes for them, also after a learner that died meanwhile."""
    weights = await learner.weights()
    if sleeper is not None:
        await sleeper.wake()
    await policy.load_weights(weights, version=version)


def _sleeper(policy: TrainableEngine, cfg: RlConfig) -> SleepingEngine | None:
    """The policy, if its engines are to sleep while the learner works."""
    if not cfg.rollout.is_asleep_between:
        return None
    assert isinstance(policy, SleepingEngine), type(policy)
    return policy


def speed(collected: Collected, update: dict[str, float], *, wait_s: float, train_s: float, sync_s: float) -> dict[str, float]:
    """Seconds by phase and tokens per second. `wait_s` is less than `rollout_s` where sampling overlaps with learning."""
    sampled_tokens = sum(len(r.completion.token_ids) for g in collected.groups for r in g.rollouts)
    return {
        "rl/time/rollout_s": collected.seconds,
        "rl/time/wait_s": wait_s,
        "rl/time/train_s": train_s,
        "rl/time/sync_s": sync_s,
        "rl/speed/sampled_tokens_per_s": sampled_tokens / max(collected.seconds, 1e-9),
        "rl/speed/trained_tokens_per_s": update.get("rl/batch/tokens", 0.0) / max(train_s, 1e-9),
    }


class Lookahead:
    """Collects one batch after the other, never more than `depth` ahead of the one that was last allowed."""

    def __init__(self, collect: Callable[[], Awaitable[Collected]], *, depth: int, num_batches: int) -> None:
        self._collect = collect
        self._num_left = num_batches
        self._tasks: deque[asyncio.Task[Collected]] = deque()
        self._depth = depth

    async def __aenter__(self) -> Self:
        for _ in range(self._depth + 1):
            self.allow_another()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def allow_another(self) -> None:
        """Let one more batch be collected, once those before it are."""
        if self._num_left > 0:
            self._num_left -= 1
            self._tasks.append(asyncio.create_task(self._after(self._tasks[-1] if self._tasks else None)))

    async def next(self) -> Collected:
        """The oldest batch that was not taken yet."""
        return await self._tasks.popleft()

    async def _after(self, previous: asyncio.Task[Collected] | None) -> Collected:
        if previous is not None:
            await asyncio.wait([previous])
        return await self._collect()
