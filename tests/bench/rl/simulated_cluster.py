"""Fake engines, judges and learner with the speeds of real ones, for a virtual clock. Our loop, pool and packer run between them.

Engines have the step time of vLLM 0.30 with Qwen3-8B in bfloat16 on one H100-80GB, fitted to the median inter-token latencies of
github.com/tgarg01/silybench-data (derived/csv/perf_points.csv, run 20260924T125045Z_h100-80gbx1_qwen3-8b_bf16, CC BY 4.0):

    seconds a step = 6.85e-3 + 1.01e-5 * answers + 4.86e-8 * tokens in the cache

It is within 4 % of the published 6.86 ms (1 answer of about 640 tokens), 12.0 (128), 18.1 (256); 9.46 (16 of 3,072), 11.9 (32), 17.1
(64); 13.8 (16 of 8,448). Prefill: 8,192 tokens in 0.25 s. Two GPUs halve this and add 0.7 ms for 72 sums over GPUs: an assumption.

Tokens are simulated in blocks of 64. An answer on its way keeps its cache when it waits in the engine, and loses it when preempted.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from host_costs import HostCosts

from klear_core.config.evaluate import HardwareConfig
from klear_core.config.rl import RlConfig
from klear_core.generate.engine import SamplingParams, WeightSource
from klear_core.generate.model_size import ModelSize
from klear_core.generate.pool import EnginePool
from klear_core.pipeline.costs.estimate import learning_speed, training_flops
from klear_core.pipeline.costs.throughput import row_work
from klear_core.rl.groups import cut_minibatches
from klear_core.train.balance import Item, Plan, busy_share, distribute
from klear_core.types import Completion, Outcome, Problem, TrainSample, Verdict

BLOCK = 64
STEP_S, ANSWER_S, CACHED_S = 6.85e-3, 1.01e-5, 4.86e-8
SUMS_S = 7e-4
PREFILL_TOKENS_PER_S = 8192 / 0.25
JOIN_S, CARD_BYTES_PER_S = 2.0, 25e9
"""Seconds in which the process groups of a weight transfer are made, and half of what a card of 400 Gbit/s of each GPU
carries. Assumptions."""
MEDIAN_TOKENS, SIGMA_OF_PROBLEMS, SIGMA_OF_ANSWERS = 9000, 0.5, 0.62
"""Answers are log-normal with a sigma of 0.8 in all, and answers to one problem are alike. Assumptions, as in `klear plan`."""
JUDGE_S, JUDGES_PER_NODE = 1.0, 16
"""Mean seconds of a verdict (code with tests), and judging processes of a node of 8 GPUs. Assumptions."""

CHECKPOINT_BYTES, COPY_BYTES_PER_S = 12, 5e9
"""Bytes of a parameter with its moments, and how fast a rank copies them to host memory. The second is an assumption."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Running:
    num_tokens: int
    context: int
    """Tokens of prompt and answer so far, when it was last admitted."""
    versions: list[tuple[int, int]]
    """Tokens of the answer from which on each version of the weights sampled."""
    answer: asyncio.Future[None]
    done: int = 0
    """Tokens of the answer when it was last admitted."""
    joined: float = 0.0
    """The engine's step count at that time."""


class SimulatedEngine:
    """One vLLM engine: all running answers get a token a step; an answer that does not fit into the cache waits."""

    is_queued = False

    def __init__(
        self,
        name: str,
        *,
        num_gpus: int,
        limit: int,
        full: int,
        cache_tokens: int,
        slowness: float = 1.0,
        slow_at: float = 0.0,
        spread: float = 1.0,
    ) -> None:
        """`full` is the number of running answers with which it counts as busy.

        From the second `slow_at` on a step takes `slowness` times as long. `spread` is by how much the sigma of the
        answers' lengths is larger.
        """
        self._slowness, self._spread = 1.0, spread
        self._slow_at, self._slowness_then = slow_at, slowness
        self.name, self.limit = name, limit
        self._full = full
        self.version = 0
        self.busy_s = 0.0
        """Integral over time of running answers over `full`, at most 1."""
        self.num_preempted = 0
        self._share = 1 / num_gpus
        self._sums_s = SUMS_S if num_gpus > 1 else 0.0
        self._cache_tokens = cache_tokens
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        self._waiting: deque[_Running] = deque()
        self._ids = count()
        self._steps = 0.0
        """Decoding steps so far: a request that joins at step s and has n tokens left ends at step s + n."""
        self._offsets = 0.0
        """Sum over running answers of joined - context: the cache holds len(running) * steps - offsets tokens."""
        self._at = self._blocked_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        asyncio.get_running_loop().call_at(self._slow_at, self._become_slow)

    def _become_slow(self) -> None:
        self._advance()
        self._slowness = self._slowness_then
        self._schedule()

    async def close(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        text, num_tokens = _answer(prompt_ids, params, self._spread)
        future = asyncio.get_running_loop().create_future()
        request = _Running(
            num_tokens=num_tokens, context=BLOCK * len(prompt_ids), versions=[(0, self.version)], answer=future
        )
        self._advance()
        self._waiting.append(request)
        self._admit()
        self._schedule()
        try:
            await future
        except asyncio.CancelledError:
            self._forget(request)
            raise
        blocks = -(-num_tokens // BLOCK)
        versions: list[int] = []
        for (_, version), (until, _) in zip(
            request.versions, [*request.versions[1:], (BLOCK * blocks, 0)], strict=True
        ):
            versions += [version] * (math.ceil(until / BLOCK) - len(versions))
        return [
            Completion(
                text=text,
                token_ids=(7,) * blocks,
                logps=(-0.5,) * blocks,
                finish_reason="length" if num_tokens == params.max_new_tokens else "stop",
                policy_versions=tuple(versions),
            )
        ]

    def _forget(self, request: _Running) -> None:
        """Stop an answer that nobody waits for."""
        self._advance()
        if request in self._waiting:
            self._waiting.remove(request)
        for key in [key for key, running in self._running.items() if running is request]:
            self._leave(key)
        self._admit()
        self._schedule()

    def load_weights(self, version: int, seconds: float) -> None:
        """Pause, take the weights in so many seconds, and compute the cache again."""
        self._advance()
        self.version = version
        for request in self._running.values():
            request.versions.append((round(request.done + self._steps - request.joined), version))
        for request in self._waiting:
            request.versions.append((request.done, version))
        self.busy_s -= seconds * self._busy()
        self._block(seconds + self._cached() * self._share / PREFILL_TOKENS_PER_S)
        self._schedule()

    def advance(self) -> None:
        """Bring `busy_s` up to date."""
        self._advance()
        self._schedule()

    def _busy(self) -> float:
        return min(1.0, len(self._running) / self._full)

    def _cached(self) -> float:
        return len(self._running) * self._steps - self._offsets

    def _step_s(self) -> float:
        computing_s = self._share * (STEP_S + ANSWER_S * len(self._running) + CACHED_S * self._cached())
        return self._slowness * (computing_s + self._sums_s)

    def _block(self, seconds: float) -> None:
        self._blocked_until = max(self._at, self._blocked_until) + seconds

    def _advance(self) -> None:
        """Count the steps made since the last call. The cache grows by a token an answer and step."""
        now = asyncio.get_running_loop().time()
        n = len(self._running)
        self.busy_s += (now - self._at) * self._busy()
        seconds = max(0.0, now - max(self._at, self._blocked_until))
        self._at = now
        if n == 0 or seconds == 0.0:
            return
        first, growth = self._step_s(), self._slowness * self._share * CACHED_S * n
        steps = 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))
        self._steps += steps

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._running:
            return
        n = len(self._running)
        steps = max(0.0, min(self._ends[0][0] - self._steps, (self._cache_tokens - self._cached()) / n))
        seconds = self._step_s() * steps + self._slowness * self._share * CACHED_S * n * steps**2 / 2
        when = max(self._at, self._blocked_until) + seconds
        self._timer = asyncio.get_running_loop().call_at(when, self._on_event)

    def _on_event(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, key = heapq.heappop(self._ends)
            if key in self._running:
                request = self._running[key]
                self._leave(key)
                if not request.answer.done():  # it is cancelled at the end of the simulation
                    request.answer.set_result(None)
        if self._cached() >= self._cache_tokens - 1:
            self._preempt()
        self._admit()
        self._schedule()

    def _preempt(self) -> None:
        """Send the last to come back to wait, as vLLM does, until there is some room."""
        while self._cached() > 0.98 * self._cache_tokens and len(self._running) > 1:
            key = next(reversed(self._running))
            request = self._running[key]
            self._leave(key)  # first, because the cache is counted by its context when it was admitted
            sampled = round(self._steps - request.joined)
            request.done += sampled
            request.context += sampled
            self._waiting.appendleft(request)
            self.num_preempted += 1

    def _leave(self, key: int) -> None:
        request = self._running.pop(key)
        self._offsets -= request.joined - request.context

    def _admit(self) -> None:
        """Admit waiting answers while the cache has room, with a reserve for those that run."""
        while self._waiting and self._cached() + self._waiting[0].context <= 0.95 * self._cache_tokens:
            request = self._waiting.popleft()
            key = next(self._ids)
            request.joined = self._steps
            self._running[key] = request
            self._offsets += request.joined - request.context
            heapq.heappush(self._ends, (self._steps + request.num_tokens - request.done, key))
            self._block(request.context * self._share / PREFILL_TOKENS_PER_S)


class SimulatedDriver:
    """The only process that all answers pass through: what it does for one keeps the others waiting."""

    def __init__(self, costs: HostCosts) -> None:
        self.costs = costs
        self.busy_s = 0.0
        self._is_free = asyncio.Lock()

    async def receive(self, num_tokens: int) -> None:
        await self.work(self.costs.receive * num_tokens / 1e6)

    async def work(self, seconds: float) -> None:
        async with self._is_free:
            self.busy_s += seconds
            await asyncio.sleep(seconds)


class SimulatedEngines:
    """All engines behind the pool that RL uses, as one `TrainableEngine`."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        *,
        send_s: float,
        load_s: float = 0.0,
        driver: SimulatedDriver | None = None,
    ) -> None:
        """New weights take `send_s`, and `load_s` are further seconds in which nobody works; `driver` receives answers."""
        self._driver = driver
        self.engines, self.version = engines, 0
        self.num_blocks = self.most_held = 0
        """Blocks of all answers so far, and the most that were in no finished step."""
        self.num_used = 0
        """Blocks of all answers in finished steps."""
        self._pool = EnginePool(engines, lambda _name, error: (_ for _ in ()).throw(error))
        self._send_s, self._load_s = send_s, load_s

    async def start(self) -> None:
        await self._pool.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        completions = await self._pool.generate(prompt_ids, params)
        if self._driver is not None:
            await self._driver.receive(BLOCK * len(completions[0].token_ids))
        self.num_blocks += len(completions[0].token_ids)
        self.most_held = max(self.most_held, self.num_blocks - self.num_used)
        return completions

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        for engine in self.engines:
            engine.load_weights(version, self._send_s)
        self.version = version
        await asyncio.sleep(self._send_s + self._load_s)

    async def close(self) -> None:
        await self._pool.close()


def send_seconds(size: ModelSize, *, num_engines: int, num_workers: int) -> float:
    """Return how long new weights take: every rank gathers them, and sends them to its share of the engines."""
    return JOIN_S + (1 + math.ceil(num_engines / num_workers)) * 2 * _num_params(size) / CARD_BYTES_PER_S


def _num_params(size: ModelSize) -> int:
    return size.num_layers * size.layer_params + 2 * size.vocab_size * size.hidden_size


class SimulatedJudges:
    """Judging processes with a queue."""

    def __init__(self, num_judges: int) -> None:
        self.largest_backlog = 0
        self._room = asyncio.Semaphore(num_judges)
        self._num_waiting = 0
        self._rng = random.Random(0)

    async def judge(self, _problem: Problem, text: str) -> Verdict:
        if self._room.locked():
            self.largest_backlog = max(self.largest_backlog, self._num_waiting + 1)
        self._num_waiting += 1
        async with self._room:
            self._num_waiting -= 1
            await asyncio.sleep(JUDGE_S * self._rng.lognormvariate(-0.5, 1.0))
        return Verdict(outcome=Outcome.SCORED, score=float(text == "right"))


@dataclass
class SimulatedLearner:
    """Learner ranks whose updates last as long as the packer's plans say, at the MFU that `klear plan` assumes."""

    cfg: RlConfig
    size: ModelSize
    busy_s: float = 0.0
    rank_shares: list[float] = field(default_factory=list)
    staleness: list[tuple[float, int]] = field(default_factory=list)
    """Mean and largest of each step."""
    version: int = 0
    driver: SimulatedDriver | None = None
    """With its costs, and those of the ranks; None: host work costs nothing."""
    host_s: float = 0.0
    """Seconds in which the ranks waited for work of CPUs."""
    row_gpu_s: dict[int, float] = field(default_factory=dict)
    """Seconds of one GPU for a row, by its length."""

    async def restore(self) -> None:
        return None

    async def notes(self) -> tuple[str, ...]:
        return ()

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        ages = [self.version - sample.oldest_version for sample in samples]
        self.staleness.append((sum(ages) / max(1, len(ages)), max(ages, default=0)))
        await self._prepare(samples)
        seconds = sum(self._update_s(part) for part in cut_minibatches(samples, self.cfg.minibatches_per_step, seed=0))
        self.version += 1
        self.busy_s += seconds
        await asyncio.sleep(seconds)
        num_tokens = BLOCK * sum(len(sample.token_ids) for sample in samples)
        updates = {"rl/optim/updates": 1.0, "rl/optim/skipped": 0.0, "rl/ratio/min": 0.9, "rl/ratio/max": 1.1}
        return updates | {"rl/batch/tokens": float(num_tokens)}

    async def _prepare(self, samples: Sequence[TrainSample]) -> None:
        """Let the driver make and send the rows, and every rank read all counts, plan as all do, and pack its own."""
        if self.driver is None:
            return
        costs, runtime, started = self.driver.costs, self.cfg.runtime, asyncio.get_running_loop().time()
        mtok = BLOCK * sum(len(sample.token_ids) for sample in samples) / 1e6
        await self.driver.work((costs.select + costs.send) * mtok)
        num_ranks = runtime.num_workers // runtime.context_parallel
        cpu = time.process_time()
        for part in cut_minibatches(samples, self.cfg.minibatches_per_step, seed=0):
            self._plan(part)
        planning_s = time.process_time() - cpu
        # Rank 0 plans for the driver, and then every rank for itself.
        await asyncio.sleep(costs.row * len(samples) + 2 * planning_s + costs.prepare * mtok / num_ranks)
        self.host_s += asyncio.get_running_loop().time() - started

    def _plan(self, samples: Sequence[TrainSample]) -> tuple[Plan, list[Item]]:
        runtime, work_of_row = self.cfg.runtime, row_work(self.size, recomputes=True)
        lengths = [BLOCK * len(sample.token_ids) for sample in samples]
        items = [Item(num_tokens=n, work=work_of_row(n)) for n in lengths]
        num_ranks = runtime.num_workers // runtime.context_parallel
        return distribute(items, capacity=runtime.tokens_per_microbatch, num_ranks=num_ranks), items

    def _update_s(self, samples: Sequence[TrainSample]) -> float:
        plan, items = self._plan(samples)
        share = busy_share(plan, items, self.cfg.runtime.num_workers // self.cfg.runtime.context_parallel)
        self.rank_shares.append(share)
        return sum(self._gpu_s(item.num_tokens) for item in items) / self.cfg.runtime.num_workers / share

    def _gpu_s(self, num_tokens: int) -> float:
        """Return the seconds of update and old log-probs, at the MFU of the plan for a row of this length."""
        if num_tokens not in self.row_gpu_s:
            flops = training_flops(self.cfg, self.size, num_tokens, num_tokens)
            self.row_gpu_s[num_tokens] = flops / learning_speed(HardwareConfig(), self.size, self.cfg, num_tokens)
        return self.row_gpu_s[num_tokens]

    async def weights(self) -> WeightSource:
        return Path()

    async def save(self, counters: object) -> None:
        """Copy weights and moments on every rank; `checkpoint.asynchronous` writes them beside the next steps."""
        if self.driver is not None:
            num_bytes = CHECKPOINT_BYTES * _num_params(self.size)
            await asyncio.sleep(num_bytes / self.cfg.runtime.num_workers / COPY_BYTES_PER_S)

    async def export(self, target: Path) -> None: ...


class SimulatedTokenizer:
    """Five blocks a prompt: the digits of the problem's number."""

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_settings: object) -> str:
        return messages[-1]["content"]

    def encode(self, text: str, **_settings: object) -> list[int]:
        return list(text.encode())


def _answer(prompt_ids: Sequence[int], params: SamplingParams, spread: float) -> tuple[str, int]:
    """Return an answer's text, right at the problem's rate, and its length."""
    problem, rng = random.Random(bytes(prompt_ids)), random.Random(params.seed)
    rate, difficulty = problem.random(), problem.gauss(0, SIGMA_OF_PROBLEMS)
    length = round(MEDIAN_TOKENS * math.exp(spread * (difficulty + rng.gauss(0, SIGMA_OF_ANSWERS))))
    return ("right" if rng.random() < rate else "wrong"), max(BLOCK, min(params.max_new_tokens, length))
