"""CPU-seconds that driver and learner ranks spend on the tokens of an RL step, measured with our own functions on rows of real length."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from klear_core.cluster.engine_actors import Reply
from klear_core.config.rl import RlConfig
from klear_core.rl.groups import to_samples
from klear_core.rl.objective import Denominators, make_loss_inputs
from klear_core.rl.sample_arrays import tokens_of, with_tokens, without_tokens
from klear_core.train.packing import pack
from klear_core.types import (
    Completion,
    Difficulty,
    Domain,
    MathReference,
    Outcome,
    Problem,
    Rollout,
    RolloutGroup,
    TrainSample,
    Verdict,
)

NUM_GROUPS, GROUP, LENGTH, PROMPT = 8, 8, 10_000, 300
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """CPU-seconds, by where they are spent."""

    receive: float
    """A million tokens of answers, unpickled in the driver while it samples."""
    select: float
    """A million tokens, made into rows by the driver while the learner waits."""
    send: float
    """A million tokens, made into arrays and copied into Ray's store by the driver while the learner waits."""
    prepare: float
    """A million tokens of its own rows, packed and given their losses' inputs by a rank."""
    row: float
    """A row of any rank, counted by the driver and read by every rank."""


def measured() -> HostCosts:
    """Measure all costs in this process; a faster machine has less of each."""
    groups = [_group(i) for i in range(NUM_GROUPS)]
    mtok = NUM_GROUPS * GROUP * LENGTH / 1e6
    replies = [Reply(request_id=0, completions=(r.completion,)) for group in groups for r in group.rollouts]
    sent = pickle.dumps(replies, protocol=5)
    cfg = RlConfig().model_copy(update={"old_logps": "sampler"})
    samples = to_samples(groups, cfg, oldest_allowed=0).samples
    everything = range(len(samples))
    rows = with_tokens(without_tokens(samples), tokens_of(samples, everything))

    def send() -> None:
        tokens = tokens_of(samples, everything)
        bytes(memoryview(tokens.ids)), bytes(memoryview(tokens.logps))  # the copy into the store

    def prepare() -> None:
        packed = pack(rows, tokens_per_microbatch=36_864)
        denominators = Denominators.of(rows)
        for micro in packed.micro_batches:
            make_loss_inputs(micro, rows, None, None, denominators, cfg)

    many = [_short(i) for i in range(2_000)]
    return HostCosts(
        receive=_seconds(lambda: pickle.loads(sent)) / mtok,
        select=_seconds(lambda: to_samples(groups, cfg, oldest_allowed=0)) / mtok,
        send=(_seconds(send) + _seconds(lambda: without_tokens(samples))) / mtok,
        prepare=_seconds(prepare) / mtok,
        row=_seconds(lambda: pickle.loads(pickle.dumps(without_tokens(many), protocol=5))) / len(many),
    )


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def _group(number: int) -> RolloutGroup:
    rng = np.random.default_rng(number)
    problem = Problem(
        problem_id=str(number),
        source="simulated",
        domain=Domain.MATH,
        question=str(number),
        reference=MathReference(answers=("1",)),
        difficulty=Difficulty.UNKNOWN,
    )
    rollouts = []
    for i in range(GROUP):
        completion = Completion(
            text="",
            token_ids=tuple(rng.integers(0, 150_000, LENGTH).tolist()),
            logps=tuple((-rng.random(LENGTH, dtype=np.float32)).tolist()),
            finish_reason="stop",
            policy_versions=(1,) * LENGTH,
        )
        rollouts.append(
            Rollout(
                prompt_ids=tuple(rng.integers(0, 150_000, PROMPT).tolist()),
                completion=completion,
                verdict=Verdict(outcome=Outcome.SCORED, score=float(i % 2)),
                reward=float(i % 2),
                is_positive=bool(i % 2),
                custom_rewards={},
            )
        )
    return RolloutGroup(problem=problem, rollouts=tuple(rollouts))


def _short(number: int) -> TrainSample:
    return TrainSample(
        problem_id=str(number // GROUP),
        token_ids=(random.Random(number).randrange(1000), 2, 3),
        loss_mask=(False, True, True),
        sampler_logps=(0.0, -0.5, -0.5),
        advantage=1.0,
        is_positive=True,
        oldest_version=0,
    )


if __name__ == "__main__":
    print(measured())
