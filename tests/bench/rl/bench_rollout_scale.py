"""RL on 8 to 1,024 GPUs, simulated: our loop, groups, engine pool and packer, on fake engines and a virtual clock.

Qwen3-8B: engines of two GPUs, learner ranks that share rows by four. `simulated_cluster.py` has all speeds and assumptions. A number on
the command line of the file is the most GPUs to simulate.
"""
# ruff: noqa: E402  # the files beside it are on no path before

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from host_costs import HostCosts, measured
from simulated_cluster import (
    BLOCK,
    JUDGES_PER_NODE,
    SimulatedDriver,
    SimulatedEngine,
    SimulatedEngines,
    SimulatedJudges,
    SimulatedLearner,
    SimulatedTokenizer,
    send_seconds,
)
from virtual_clock import run_virtually

from klear_core.config.evaluate import HardwareConfig, VllmEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.generate.factory import num_slots
from klear_core.generate.model_size import engine_fit, known_size
from klear_core.metrics import METRICS_FILE, NullTelemetry
from klear_core.rl.loop import StepLog, rollouts_of, run_steps
from klear_core.rl.rollout import RolloutClient
from klear_core.rl.state import CollapseGuard, InlineEvals, RlState
from klear_core.rl.stream import PromptStream
from klear_core.types import Difficulty, Domain, MathReference, Problem

TURNS_S = 30.0
"""Seconds a step in which a shared GPU passes from engine to learner and back. An assumption."""
BYTES_PER_TOKEN = 76
"""Memory of an answer's token in the driver: an integer, a float and three references."""
BOUND = 4
"""Staleness bound of continuous rollouts, in versions."""
LONGEST, LONG_TAIL, LONGER_SIGMA = 32_768, 65_536, 1.5
"""Longest answer; that of the setups with a longer tail, and by how much their lengths' sigma is larger: 1.2 for 0.8."""
SLOWNESS = 3.0
"""How much longer a step of a slow engine takes."""
SLOW_AT_S = 3900.0
"""When an engine becomes slow: in the tenth step."""
SLOTS, SLOTS_OF_LONG = 80, 40
"""Requests kept at an engine, also with the longer tail: more do not fit into its cache at their mean length, and would
be preempted."""


@dataclass(frozen=True)
class Setup:
    """A number of GPUs and how they are used."""

    mode: str
    """`turns`, `synchronous`, `one step off` or `continuous`."""
    num_gpus: int
    num_workers: int
    """Learner ranks; the other GPUs are engines. With `turns` all are both."""
    num_groups: int
    num_steps: int
    first: int
    """Steps before the measurement."""
    num_slow: int = 0
    """Engines that are three times slower than the others."""
    slow_at: float = 0.0
    """Seconds after which they are."""
    has_long_tail: bool = False
    slots: int = SLOTS
    """Requests kept at an engine."""

    @property
    def name(self) -> str:
        """Return the name of its measures."""
        more = "/one slow engine" * (self.num_slow == 1) + f", from {self.slow_at:g} s on" * (self.slow_at > 0)
        more += f"/long tail, {self.slots} requests" * self.has_long_tail
        return f"rollout_scale/{self.num_gpus}_gpus/{self.num_groups}_groups/{self.mode}{more}"

    @property
    def least(self) -> float | None:
        """Return the share of the time in which its busier side must work; None: no target."""
        if self.mode != "continuous" or self.num_groups != max(128, 4 * self.num_gpus):
            return None
        if self.has_long_tail:
            return 0.8 if self.slots == SLOTS_OF_LONG else None
        return {32: 0.9, 256: 0.88, 1024: 0.85}.get(self.num_gpus)


MODES = ("turns", "synchronous", "one step off", "continuous")


def setups() -> Iterator[Setup]:
    """Yield all setups: groups that grow with the GPUs, and 128 throughout."""
    for num_gpus, num_workers, num_groups, steps in (
        (8, 4, 128, ((1, 3), (1, 3), (2, 3), (4, 10))),
        (16, 4, 128, ((1, 3), (1, 3), (2, 3), (6, 12))),
        (32, 8, 128, ((1, 3), (1, 3), (2, 3), (6, 12))),
        (256, 64, 1024, ((0, 1), (0, 1), (2, 2), (4, 4))),
        (1024, 256, 4096, ((0, 1), (0, 1), (1, 1), (2, 2))),
    ):
        for mode, (num_before, num_measured) in zip(MODES, steps, strict=True):
            yield Setup(mode, num_gpus, num_workers, num_groups, num_before + num_measured, num_before)
    for num_gpus, num_workers in ((256, 64), (1024, 256)):
        yield Setup("continuous", num_gpus, num_workers, 128, 20, 8)
    for slow_at in (0.0, SLOW_AT_S):
        yield Setup("continuous", 32, 8, 128, 18, 6, num_slow=1, slow_at=slow_at)
    for slots in (SLOTS, SLOTS_OF_LONG):
        yield Setup("continuous", 32, 8, 128, 18, 6, has_long_tail=True, slots=slots)


class _Measured(Exception):  # noqa: N818
    """Ends a simulation after its last step."""


class _Probe(NullTelemetry):
    """Reads the counters at the ends of steps."""

    def __init__(self, setup: Setup, engines: SimulatedEngines, learner: SimulatedLearner, state: RlState) -> None:
        self._setup, self._engines, self._learner, self._state = setup, engines, learner, state
        self.at: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
        self.rows: list[Mapping[str, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for engine in self._engines.engines:
            engine.advance()
        engine_s = statistics.fmean(engine.busy_s for engine in self._engines.engines)
        self.at.append((asyncio.get_running_loop().time(), engine_s, self._learner.busy_s))
        self.rows.append(dict(metrics))
        self._engines.num_used = self._state.sampled_tokens
        if step == self._setup.num_steps:
            raise _Measured


def measure(most_gpus: int = 1024) -> list[dict[str, object]]:
    """Return a line for each setup and quantity."""
    return measure_each(setup for setup in setups() if setup.num_gpus <= most_gpus)


def measure_each(chosen: Iterable[Setup]) -> list[dict[str, object]]:
    """Return a line for each of these setups and quantity; print a setup's figures when it ends, for it takes minutes."""
    measures = []
    for setup in chosen:
        started = time.monotonic()
        entries = simulate(setup)
        _print_row(entries, time.monotonic() - started)
        measures += entries
    return measures


def _print_row(entries: Sequence[Mapping[str, object]], seconds: float) -> None:
    """Print a setup's figures on stderr: stdout is for the table of all."""
    start = str(entries[0]["name"]).removesuffix("steps")
    figures = [f"{str(m['name']).removeprefix(start)} {m['value']:.3g} {m['unit']}" for m in entries]
    setup = start.removeprefix("rollout_scale/").rstrip("/")
    print(f"{setup}: {', '.join(figures)}; simulated in {seconds:.0f} s", file=sys.stderr, flush=True)


def simulate(setup: Setup) -> list[dict[str, object]]:
    """Simulate one setup and return its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        return run_virtually(_simulate(setup, Path(folder), _costs()))


@cache
def _costs() -> HostCosts:
    """Measure once, in CPU-seconds: what this machine does beside counts for little."""
    return measured()


async def _simulate(setup: Setup, folder: Path, costs: HostCosts) -> list[dict[str, object]]:
    size = known_size("Qwen/Qwen3-8B")
    assert size is not None
    takes_turns = setup.mode == "turns"
    num_engines = (setup.num_gpus if takes_turns else setup.num_gpus - setup.num_workers) // 2
    num_workers = setup.num_gpus if takes_turns else setup.num_workers
    bound = {"one step off": 1, "continuous": BOUND}.get(setup.mode, 0)
    longest = LONG_TAIL if setup.has_long_tail else LONGEST
    window = longest + 4096
    cfg = RlConfig.model_validate(
        {
            "num_steps": 10_000,
            "max_staleness": bound,
            "rollout": {
                "groups_per_step": setup.num_groups,
                "oversample": 2.0,
                "sampling": {"max_new_tokens": longest},
                "mode": "continuous" if setup.mode == "continuous" else "rounds",
                "engine": {
                    "kind": "vllm",
                    "max_model_len": window,
                    "runtime": {"tensor_parallel": 2, "max_num_seqs": 96},
                },
            },
            "reward": {"missing_close": None, "missing_open": None},
            "runtime": {
                "num_workers": num_workers,
                "context_parallel": 4,
                "num_rollout_actors": num_engines,
                "requests_per_actor": setup.slots,
                "tokens_per_microbatch": window,
                "activation_checkpointing": True,
                "stall_timeout_s": 1e5,
            },
        }
    )
    assert isinstance(cfg.rollout.engine, VllmEngineConfig)
    fit = engine_fit(size, cfg.rollout.engine, HardwareConfig(gpu_memory_gb=80), longest=window)
    limit = num_slots(cfg.rollout.engine, is_on_gpu=True)
    driver = SimulatedDriver(costs)
    engines = SimulatedEngines(
        [
            SimulatedEngine(
                f"engine {i}",
                num_gpus=2,
                limit=limit,
                full=setup.slots,
                cache_tokens=fit.cache_tokens,
                slow_at=setup.slow_at,
                slowness=SLOWNESS if i < setup.num_slow else 1.0,
                spread=LONGER_SIGMA if setup.has_long_tail else 1.0,
            )
            for i in range(num_engines)
        ],
        send_s=send_seconds(size, num_engines=num_engines, num_workers=num_workers),
        load_s=TURNS_S if takes_turns else 0.0,
        driver=driver,
    )
    judges = SimulatedJudges(JUDGES_PER_NODE * math.ceil(setup.num_gpus / 8))
    learner = SimulatedLearner(cfg, size, driver=driver)
    state = RlState()
    probe = _Probe(setup, engines, learner, state)
    await engines.start()
    sampler = RolloutClient(engines, judges.judge, SimulatedTokenizer(), cfg, seed=0, engine_status=lambda: "engines")
    rollouts = rollouts_of(cfg, sampler, PromptStream(_problems(), seed=0), state)
    step_log = StepLog(cfg, state, CollapseGuard(cfg, probe, folder / METRICS_FILE), shown=folder / "shown")
    with suppress(_Measured):
        await run_steps(cfg, learner, engines, rollouts, step_log, InlineEvals(None, probe, cfg, workdir=folder))
    return _entries(setup, probe, judges, learner, engines, driver)


def _entries(
    setup: Setup,
    probe: _Probe,
    judges: SimulatedJudges,
    learner: SimulatedLearner,
    engines: SimulatedEngines,
    driver: SimulatedDriver,
) -> list[dict[str, object]]:
    first, last = probe.at[setup.first], probe.at[-1]
    seconds, steps = last[0] - first[0], len(probe.at) - 1 - setup.first
    engine_share, learner_share = (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds
    stale = learner.staleness[setup.first :]
    rows = probe.rows[setup.first :]
    asked = sum(row["rl/groups/asked"] for row in rows)
    kept = sum(row["rl/groups/kept"] for row in rows)
    busier, most_stale = max(engine_share, learner_share), max(most for _, most in stale)
    values = [
        ("steps", 3600 * steps / seconds, "an hour", True),
        ("engines", engine_share, "busy", True),
        ("learner", learner_share, "busy", True),
        ("slower side", busier, "busy", setup.least is None or busier >= setup.least),
        ("ranks", statistics.harmonic_mean(learner.rank_shares), "busy in an update", True),
        ("groups", kept / steps, "trained a step", True),
        ("groups", asked / kept, "asked a trained one", True),
        ("staleness/mean", statistics.fmean(mean for mean, _ in stale), "versions", True),
        ("staleness/max", most_stale, "versions", most_stale <= BOUND),
        ("driver", driver.busy_s / probe.at[-1][0], "busy", True),
        ("host", learner.host_s / learner.version, "s a step in which the learner waits for CPUs", True),
        ("judges/backlog", judges.largest_backlog, "answers", True),
        ("queue", BYTES_PER_TOKEN * BLOCK * engines.most_held / 1e9, "GB", True),
        ("preempted", sum(engine.num_preempted for engine in engines.engines), "answers", True),
    ]  # fmt: skip
    target = "-" if setup.least is None else f">= {setup.least}"
    return [
        {
            "name": f"{setup.name}/{what}",
            "value": value,
            "unit": unit,
            "target": target if what == "slower side" else "-",
            "ok": bool(ok),
            "versions": {"steps": steps, "block": BLOCK},
        }
        for what, value, unit, ok in values
    ]


def _problems() -> list[Problem]:
    reference = MathReference(answers=("1",))
    problems = []
    for i in range(60_000):
        problems.append(
            Problem(
                problem_id=str(i),
                source="simulated",
                domain=Domain.MATH,
                question=f"{i:05d}",
                reference=reference,
                difficulty=Difficulty.UNKNOWN,
            )
        )
    return problems


if __name__ == "__main__":
    for entry in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1024):
        print(f"{entry['name']:70} {entry['value']:10.4g} {entry['unit']}")
