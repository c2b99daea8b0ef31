"""Sample groups of answers and judge them. Every answer is a separate request, judged as soon as it arrives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klear_core.config.rl import RlConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.prompts import completed, opening_of, render_prompt
from klear_core.rl.groups import SURPLUS, DropCounts, keep_informative
from klear_core.rl.rewards import custom_reward, is_positive, overlong_penalty, reward_of
from klear_core.seeding import seed_for
from klear_core.types import Completion, Judge, Problem, RewardValues, Rollout, RolloutGroup, Verdict

if TYPE_CHECKING:
    Tokenizer = Any

_CHECKS_PER_TIMEOUT = 8  # how often to check for a stall, per stall timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One problem of the stream; `position` tells apart its occurrences in different epochs."""

    position: int
    problem: Problem


class PromptStream:
    """Endless stream of problems, shuffled anew for every epoch. The position alone is enough to restore it."""

    def __init__(self, problems: Sequence[Problem], *, seed: int, position: int = 0) -> None:
        assert problems, "a stream needs a problem"
        self.position = position
        # Sorted, so that the order does not depend on how the problems were stored.
        self._problems = sorted(problems, key=lambda p: p.problem_id)
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[StreamItem]:
        """Return the next problems; positions count from 0 and never repeat."""
        start, self.position = self.position, self.position + count
        return [StreamItem(position=i, problem=self._at(i)) for i in range(start, self.position)]

    def _at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self._problems))
        # The order follows from seed and epoch alone, so a restored stream needs only its position.
        if self._order[0] != epoch:
            order = list(range(len(self._problems)))
            random.Random(seed_for(self._seed, "rl/stream", epoch)).shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return self._problems[self._order[1][index]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The groups of one RL step."""

    groups: tuple[RolloutGroup, ...]
    """All sampled groups."""
    kept: tuple[RolloutGroup, ...]
    """Groups to train on, at most `groups_per_step`, without their unusable answers."""
    drops: DropCounts
    """Counts of all prompts and answers that are not in `kept`."""
    position: int
    """Position of the prompt stream after this step's prompts."""
    seconds: float
    """Wall time from the first request to the last verdict."""


async def no_rewards(_problem: Problem, _completion: Completion, _verdict: Verdict) -> Mapping[str, float | None]:
    """Return no values, for RL without rewards of the user's own."""
    return {}


class Collector:
    """Sample prompts in rounds until a step has enough informative groups or `max_rounds` is reached."""

    def __init__(
        self,
        engine: InferenceEngine,
        judge: Judge,
        stream: PromptStream,
        tokenizer: Tokenizer,
        cfg: RlConfig,
        *,
        seed: int,
        engine_status: Callable[[], str],
        custom_rewards: RewardValues = no_rewards,
    ) -> None:
        """`engine_status` returns a description of pending engine work, used in the stall error message."""
        self._engine = engine
        self._judge = judge
        self._custom_rewards = custom_rewards
        self._stream = stream
        self._tokenizer = tokenizer
        self._opening = opening_of(tokenizer)
        self._cfg = cfg
        self._seed = seed
        self._engine_status = engine_status
        self._num_sampling = 0
        self._num_judging = 0
        self._num_finished_requests = 0

    async def collect(self) -> StepRollouts:
        """Return the groups of the next step.

        Raise TrainingError if no answer is sampled or judged for `stall_timeout_s`.
        """
        started = time.monotonic()
        rollout = self._cfg.rollout
        groups: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        drops = DropCounts()
        for _ in range(rollout.max_rounds):
            # Sample complete rounds rather than refilling prompt by prompt, because the prompts must not depend on
            # which answers are finished first.
            prompts = self._stream.take(round(rollout.groups_per_step * rollout.oversample))
            sampled = await self._sample_groups(prompts, drops)
            informative = keep_informative(sampled, self._cfg.group_filter, self._cfg.overlong)
            drops.add(informative.drops)
            groups += sampled
            kept += informative.groups
            if len(kept) >= rollout.groups_per_step:
                break
        # Keep the first groups in stream order, because the fastest would be biased towards short answers.
        for surplus in kept[rollout.groups_per_step :]:
            drops.count_group(SURPLUS)
            drops.count_rollouts(f"group_{SURPLUS}", len(surplus.rollouts))
        return StepRollouts(
            groups=tuple(groups),
            kept=tuple(kept[: rollout.groups_per_step]),
            drops=drops,
            position=self._stream.position,
            seconds=time.monotonic() - started,
        )

    async def _sample_groups(self, items: Sequence[StreamItem], drops: DropCounts) -> list[RolloutGroup]:
        """Return one group for each prompt that is not too long, in the order of `items`."""
        tasks: dict[int, list[asyncio.Task[Rollout]]] = {}
        for item in items:
            prompt_ids = render_prompt(self._tokenizer, item.problem.question)
            if len(prompt_ids) > self._cfg.rollout.max_prompt_tokens:
                drops.count_group("prompt_too_long")
                continue
            samples = range(self._cfg.rollout.samples_per_group)
            tasks[item.position] = [asyncio.create_task(self._rollout(item, prompt_ids, i)) for i in samples]
        await self._wait_for_all([t for group in tasks.values() for t in group])
        problems = {item.position: item.problem for item in items}
        groups = []
        for position, group in tasks.items():
            rollouts = tuple(task.result() for task in group)
            groups.append(RolloutGroup(problem=problems[position], rollouts=rollouts))
        return groups

    async def _rollout(self, item: StreamItem, prompt_ids: tuple[int, ...], sample_idx: int) -> Rollout:
        sampling = self._cfg.rollout.sampling
        params = SamplingParams(
            num_samples=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=sampling.max_new_tokens,
            # Derive the seed from position and sample index, so that a rerun draws the same answers in whatever order
            # requests are served.
            seed=seed_for(self._seed, "rl/rollout", item.position, sample_idx),
        )
        self._num_sampling += 1
        (sampled,) = await self._engine.generate(prompt_ids, params)
        completion = completed(sampled, self._opening)
        self._num_sampling -= 1
        self._num_judging += 1
        self._num_finished_requests += 1
        verdict = await self._judge(item.problem, completion.text)
        custom = await self._custom_rewards(item.problem, completion, verdict)
        self._num_judging -= 1
        self._num_finished_requests += 1
        # The penalty changes only the reward: a correct but overlong answer still has `is_positive`.
        reward = reward_of(completion, verdict, self._cfg.reward) + custom_reward(custom, self._cfg.reward)
        reward -= overlong_penalty(len(completion.token_ids), sampling.max_new_tokens, self._cfg.overlong)
        return Rollout(
            prompt_ids=prompt_ids,
            completion=completion,
            verdict=verdict,
            reward=reward,
            is_positive=is_positive(completion, verdict, self._cfg.reward),
            custom_rewards=custom,
        )

    async def _wait_for_all(self, tasks: Sequence[asyncio.Task[Rollout]]) -> None:
        """Wait for all tasks, and raise the first failure.

        Raise TrainingError after `stall_timeout_s` without progress.
        """
        timeout_s = self._cfg.runtime.stall_timeout_s
        pending: set[asyncio.Task[Rollout]] = set(tasks)
        seen, seen_at = self._num_finished_requests, time.monotonic()
        try:
            while pending:
                check_s = timeout_s / _CHECKS_PER_TIMEOUT
                done, pending = await asyncio.wait(pending, timeout=check_s, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()  # re-raises the task's error
                if seen != self._num_finished_requests:
                    seen, seen_at = self._num_finished_requests, time.monotonic()
                elif pending and time.monotonic() - seen_at >= timeout_s:
                    raise TrainingError(
                        f"rollouts stalled: in {timeout_s:g} s no answer was sampled or judged; still pending: "
                        f"{self._num_sampling} answers from {self._engine_status()}, "
                        f"{self._num_judging} verdicts from the judges"
                    )
        finally:
            for task in pending:
                task.cancel()
            # Wait for the cancelled tasks and retrieve every error, or asyncio would log it as never retrieved.
            await asyncio.gather(*tasks, return_exceptions=True)
