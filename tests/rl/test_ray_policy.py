"""How requests reach rollout actors that come, go and change: with fakes, and on a real Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from ray_builders import config

from klear_core.errors import ConfigError
from klear_core.generate.engine import SamplingParams
from klear_core.rl.actors import RayPolicy, Restarts, Seat
from klear_core.rl.shells import Answer, Request, RolloutActor, to_arrays
from klear_core.rl.workers import RlRun
from klear_core.types import Completion

PARAMS = SamplingParams(num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0)
ANSWER = Completion(text="x", token_ids=(1,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))


class Method:
    """Stands for `actor.method` of Ray: keeps the calls of `remote`, and answers them."""

    def __init__(self, name: str, calls: list[str], answer: object = None) -> None:
        self.name, self.calls, self.answer = name, calls, answer

    async def remote(self, *args: object) -> object:
        self.calls.append(self.name)
        return self.answer(*args) if callable(self.answer) else self.answer


class FakeActor:
    """Answers every request at once."""

    def __init__(self, calls: list[str]) -> None:
        self.exchange = Method("exchange", calls, self._answers)

    def _answers(self, requests: list[Request], _unwanted: list[int]) -> list[Answer]:
        return [Answer(request_id=r.request_id, completions=(ANSWER,)) for r in requests]


def policy_over(actor: object, base: Path) -> tuple[RayPolicy, Seat]:
    policy = RayPolicy(RlRun(cfg=config(), model=base, seed=0, workdir=base), Restarts(0), 0, None)  # type: ignore[arg-type]
    seat = Seat(index=0, actor=actor)
    policy._seats = [seat]
    return policy, seat


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_actor_is_asked_nothing_while_it_starts_or_takes_weights(base: Path) -> None:
    """An actor that has not started cannot answer, and one that waits for its weights would answer with others."""
    calls: list[str] = []

    async def drive() -> list[Completion]:
        policy, seat = policy_over(FakeActor(calls), base)
        conversation = asyncio.create_task(policy._converse(seat))
        async with seat.changing:
            asked = asyncio.create_task(policy.generate([1], PARAMS))
            await settle()
            assert calls == []
        answers = await asked
        conversation.cancel()
        return answers

    assert asyncio.run(drive()) == [ANSWER]
    assert set(calls) == {"exchange"}


def test_an_engine_is_at_version_0_until_it_has_the_weights_of_another(base: Path, tmp_path: Path) -> None:
    """Else tokens of the initial model could pass for those of the present one, and the bound on staleness would let them in."""

    async def drive() -> int:
        actor = RolloutActor()
        with pytest.raises(ConfigError):
            await actor.start(RlRun(cfg=config(), model=base, seed=0, workdir=tmp_path), to_arrays({"no such": torch.ones(1)}), 7)
        version = actor._engine.version
        await actor.close()
        return version

    assert asyncio.run(drive()) == 0
