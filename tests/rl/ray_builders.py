"""A real Ray, what the tests run on it, and how they kill its actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import alive, title
from rl_builders import Recorder, low_byte_judge, problem, rl_config

from klear_core.config.rl import RlCheckpointConfig, RlConfig, RlRuntime, RolloutConfig
from klear_core.rl.interfaces import RlSetup, Workers
from klear_core.rl.loop import run_rl
from klear_core.rl.state import RlState
from klear_core.types import Judge, Problem, Verdict

pytest.importorskip("ray")
from klear_core.cluster.rl_workers import RayWorkers

PROBLEMS = [problem(f"q{i}") for i in range(6)]
NUM_STEPS = 5


def config(**runtime: object) -> RlConfig:
    """Two answers of up to 40 tokens at a time, so that a kill finds some half finished and others not begun."""
    settings = {"device": "cpu", "stall_timeout_s": 120, "checkpoint": RlCheckpointConfig(every_steps=2)} | runtime
    engine = {"kind": "torch", "runtime": {"max_batch_size": 2}}
    rollout = RolloutConfig.model_validate(
        {"groups_per_step": 4, "samples_per_group": 8, "sampling": {"max_new_tokens": 40}, "engine": engine}
    )
    return rl_config(num_steps=NUM_STEPS, rollout=rollout, runtime=RlRuntime.model_validate(settings))


def run(
    cfg: RlConfig,
    base: Path,
    workdir: Path,
    judge: Judge = low_byte_judge,
    workers: Workers | None = None,
    telemetry: Recorder | None = None,
) -> RlState:
    job = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir)
    return asyncio.run(run_rl(job, PROBLEMS, judge, telemetry or Recorder(), workers or RayWorkers()))


def actors_of(name: str) -> list[psutil.Process]:
    """Living processes of our own Ray that run an actor of this class."""
    return [p for p in alive(psutil.Process().children(recursive=True)) if title(p).startswith(f"ray::{name}")]


def kill(name: str, count: int) -> None:
    for process in actors_of(name)[:count]:
        process.kill()


class Saboteur:
    """A judge that does something to the actors when it has seen so many answers, and judges on by another."""

    def __init__(self, after: int, do: Callable[[], None], judge: Judge = low_byte_judge) -> None:
        self.num_seen = 0
        self.after = after
        self.do = do
        self.judge = judge

    async def __call__(self, asked: Problem, response: str) -> Verdict:
        self.num_seen += 1
        if self.num_seen == self.after:
            self.do()
        return await self.judge(asked, response)
