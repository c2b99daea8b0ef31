"""The simulated engines of `klear bench rollout_scale` have the published step times, and lose no token.

The benchmark shows each setup when it ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from virtual_clock import run_virtually

from klear_core.generate.engine import SamplingParams
from klear_core.types import Completion

sys.path.append(str(Path(__file__).parents[1] / "bench" / "rl"))
from bench_rollout_scale import Setup, measure_each, setups
from simulated_cluster import BLOCK, SimulatedEngine, SimulatedEngines

PROMPT = b"00001"
DOCS = Path(__file__).parents[2] / "docs"


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        num_samples=1, temperature=1, top_p=1, top_k=0, repetition_penalty=1, max_new_tokens=32768, seed=seed
    )


def engine(num_gpus: int = 1, *, cache_tokens: int = 376_000) -> SimulatedEngine:
    return SimulatedEngine("engine 0", num_gpus=num_gpus, limit=256, full=40, cache_tokens=cache_tokens)


@pytest.mark.parametrize(
    ("batch", "context", "published_ms"),
    [(1, 640, 6.86), (64, 640, 9.49), (128, 640, 12.0), (256, 640, 18.1), (32, 3072, 11.9), (64, 3072, 17.1), (16, 8448, 13.8)],
)  # fmt: skip
def test_a_step_takes_what_was_published(batch: int, context: int, published_ms: float) -> None:
    it = engine()
    it._running = dict.fromkeys(range(batch))  # type: ignore[arg-type]
    it._offsets = -float(batch * context)
    assert 1e3 * it._step_s() == pytest.approx(published_ms, rel=0.045)


@dataclass(frozen=True)
class Sampled:
    answers: list[Completion]
    seconds: float
    engine: SimulatedEngine


def sample(count: int, *, cache_tokens: int = 376_000, load_at_s: float | None = None) -> Sampled:
    async def main() -> Sampled:
        engines = SimulatedEngines([engine(cache_tokens=cache_tokens)], send_s=5)
        await engines.start()
        tasks = [asyncio.create_task(engines.generate(PROMPT, params(seed))) for seed in range(count)]
        if load_at_s is not None:
            await asyncio.sleep(load_at_s)
            await engines.load_weights(Path(), version=1)
        answers = [completions[0] for completions in await asyncio.gather(*tasks)]
        return Sampled(answers, asyncio.get_running_loop().time(), engines.engines[0])

    return run_virtually(main())


def test_all_answers_come_at_the_speed_of_their_batch() -> None:
    found = sample(20)
    longest = BLOCK * max(len(answer.token_ids) for answer in found.answers)
    # Between one answer alone and all of them to the end.
    assert longest * 6.85e-3 < found.seconds < longest * 18e-3
    assert all(len(answer.policy_versions) == len(answer.token_ids) for answer in found.answers)


def test_a_small_cache_makes_answers_wait_and_be_preempted_but_changes_none() -> None:
    roomy = sample(60)
    tight = sample(60, cache_tokens=40_000)
    assert (roomy.engine.num_preempted, tight.engine.num_preempted > 0) == (0, True)
    assert tight.engine._cached() == roomy.engine._cached() == 0  # all that came to the cache has left it
    assert [a.token_ids for a in tight.answers] == [a.token_ids for a in roomy.answers]


def test_tokens_after_new_weights_have_their_version() -> None:
    answers = sample(4, load_at_s=20.0).answers
    assert all(answer.policy_versions == tuple(sorted(answer.policy_versions)) for answer in answers)
    assert {version for answer in answers for version in answer.policy_versions} == {0, 1}


def test_the_benchmark_shows_the_row_of_a_setup_before_it_simulates_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setups = [Setup("synchronous", 8, 4, groups, 1, 0) for groups in (4, 5)]
    shown = []

    def watched() -> Iterator[Setup]:
        for setup in setups:
            yield setup
            shown.append(capsys.readouterr().err)

    measures = measure_each(watched())
    assert len(shown) == 2
    for groups, row in zip((4, 5), shown, strict=True):
        assert row.startswith(f"8_gpus/{groups}_groups/synchronous: steps ")
        name = f"rollout_scale/8_gpus/{groups}_groups/synchronous/slower side"
        (value,) = [m["value"] for m in measures if m["name"] == name]
        assert f"slower side {value:.3g} busy" in row


@pytest.mark.parametrize("setup", [s for s in setups() if s.least or s.has_long_tail], ids=lambda s: s.name)
def test_the_pages_have_what_was_simulated_and_no_target_was_missed(setup: Setup) -> None:
    start = setup.name.removeprefix("rollout_scale/") + "/"
    measured = json.loads((DOCS / "data" / "rollout_scale.json").read_text())["rows"]
    found = {row["name"].removeprefix(start): row for row in measured if row["name"].startswith(start)}
    assert found["slower side"]["target"] == ("-" if setup.least is None else f">= {setup.least}")
    assert all(row["ok"] for row in found.values())
    steps, engines, learner = (found[what]["value"] for what in ("steps", "engines", "learner"))
    staleness = f"{found['staleness/mean']['value']:.1f} ({found['staleness/max']['value']})"
    of_all = f"| {steps:.1f} | {engines:.2f} | {learner:.2f} | {staleness} | {found['host']['value']:.1f} |"
    assert of_all in (DOCS / "data" / "rollout_scale.md").read_text()
    bold = [f"**{share:.2f}**" if share == max(engines, learner) else f"{share:.2f}" for share in (engines, learner)]
    least = "-" if setup.least is None else f"{setup.least:.2f}"
    assert f"| {steps:.1f} | {bold[0]} | {bold[1]} | {least} |" in (DOCS / "scale.md").read_text()
