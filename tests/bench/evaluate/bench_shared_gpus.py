"""Two models evaluated on the same GPUs, one after the other and at once, simulated: our engine pool and order of requests on fake engines.

Qwen3-8B, 8 engines of two GPUs, with the speeds, lengths and assumptions of `simulated_cluster.py`.
"""
# ruff: noqa: E402  # the files beside it are on no path before

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "rl"), str(Path(__file__).parents[2])]

from simulated_cluster import SimulatedEngine
from virtual_clock import run_virtually

from klear_core.generate.engine import SamplingParams
from klear_core.generate.factory import LongestFirst, RestartLimit
from klear_core.generate.pool import EnginePool
from klear_core.types import Completion

NUM_ENGINES, NUM_MODELS = 8, 2
SUITES = ((30, 16), (960, 1), (30, 64), (60, 64))
"""Problems, and answers to each."""
LIMIT, FULL, CACHE_TOKENS = 120, 80, 825_000
"""Requests sent to an engine (a batch of 96 and a quarter more), those with which it is full, and its cache."""
LOAD_S = 60.0
"""Seconds in which an engine loads its model. An assumption."""


class QueuedEngine:
    """A simulated engine that waits for GPUs in turn, as actors of Ray do, and frees them when it is closed."""

    def __init__(self, name: str, gpus: asyncio.Semaphore) -> None:
        self.name, self.limit, self.is_queued = name, LIMIT, False
        self._gpus = gpus
        self._engine = SimulatedEngine(name, num_gpus=2, limit=LIMIT, full=FULL, cache_tokens=CACHE_TOKENS)
        self._has_gpus = False

    async def start(self) -> None:
        self.is_queued = True
        try:
            await self._gpus.acquire()
        finally:
            self.is_queued = False
        self._has_gpus = True
        await asyncio.sleep(LOAD_S)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        return await self._engine.generate(prompt_ids, params)

    async def close(self) -> None:
        if self._has_gpus:
            self._has_gpus = False
            self._gpus.release()


def measure() -> list[dict[str, object]]:
    """Return the hours of both ways, and the share of the time that is saved."""
    measures: list[dict[str, object]] = []
    for num_problems, num_samples in SUITES:
        apart = run_virtually(_apart(num_problems, num_samples))
        at_once = run_virtually(_at_once(num_problems, num_samples))
        for what, value, unit, target in (
            ("one after the other", apart, "h", "-"),
            ("at once", at_once, "h", "-"),
            ("saved", 1 - at_once / apart, "of the time", ">= 0"),
        ):
            measures.append(
                {
                    "name": f"shared_gpus/{num_problems}_problems/{num_samples}_answers/{what}",
                    "value": value,
                    "unit": unit,
                    "target": target,
                    "ok": at_once <= apart,
                    "versions": {"engines": NUM_ENGINES, "models": NUM_MODELS},
                }
            )
    return measures


async def _apart(num_problems: int, num_samples: int) -> float:
    gpus = asyncio.Semaphore(NUM_ENGINES)
    for model in range(NUM_MODELS):
        await _evaluate(model, gpus, num_problems, num_samples)
    return asyncio.get_running_loop().time() / 3600


async def _at_once(num_problems: int, num_samples: int) -> float:
    gpus = asyncio.Semaphore(NUM_ENGINES)
    await asyncio.gather(*(_evaluate(model, gpus, num_problems, num_samples) for model in range(NUM_MODELS)))
    return asyncio.get_running_loop().time() / 3600


async def _evaluate(model: int, gpus: asyncio.Semaphore, num_problems: int, num_samples: int) -> None:
    """Start engines for a model, and ask for all answers; the models' answers to a problem are alike in length."""
    engines = [QueuedEngine(f"engine {i}", gpus) for i in range(NUM_ENGINES)]
    pool = EnginePool(engines, RestartLimit(0, window_s=3600, key="none").count)
    await pool.start(num_up=1)
    num_requests = num_problems * num_samples
    gate = LongestFirst(pool.limit, num_requests=num_requests)
    pool.expect(num_requests)

    async def ask(problem: int, seed: int) -> None:
        prompt = f"{problem:05d}".encode()
        params = SamplingParams(
            num_samples=1, temperature=1, top_p=1, top_k=0, repetition_penalty=1, max_new_tokens=32768, seed=seed
        )
        async with gate.slot(problem):
            (completion,) = await pool.generate(prompt, params)
        gate.record(problem, len(completion.token_ids))

    seeds = range(model * num_requests, (model + 1) * num_requests)
    await asyncio.gather(*(ask(i // num_samples, seed) for i, seed in enumerate(seeds)))
    await pool.close()


if __name__ == "__main__":
    for entry in measure():
        print(f"{entry['name']:60} {entry['value']:10.4g} {entry['unit']}")
