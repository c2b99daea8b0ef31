"""Sample in rounds: all answers of a round are waited for, and later rounds may run while the learner updates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from klear_core.config.rl import RlConfig
from klear_core.rl.groups import CANCELLED, SURPLUS, DropCounts, keep_informative
from klear_core.rl.rollout import PromptStream, Sampler, StepRollouts, StreamItem, now
from klear_core.types import Rollout, RolloutGroup


class Collector:
    """Sample prompts in rounds until a step has enough informative groups or `max_rounds` is reached."""

    def __init__(self, sampler: Sampler, stream: PromptStream, cfg: RlConfig) -> None:
        self._sampler = sampler
        self._stream = stream
        self._cfg = cfg

    async def collect(self) -> StepRollouts:
        """Return the groups of the next step.

        Raise TrainingError if no answer is sampled or judged for `stall_timeout_s`.
        """
        started = now()
        rollout = self._cfg.rollout
        groups: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        drops = DropCounts()
        for _ in range(rollout.max_rounds):
            # Sample complete rounds rather than refilling prompt by prompt, because the prompts must not depend on
            # which answers are finished first.
            prompts = self._stream.take(rollout.prompts_per_round)
            sampled = await self._sample_groups(prompts, drops, num_wanted=rollout.groups_per_step - len(kept))
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
            seconds=now() - started,
        )

    async def _sample_groups(
        self, items: Sequence[StreamItem], drops: DropCounts, *, num_wanted: int
    ) -> list[RolloutGroup]:
        """Return one group for each prompt that is not too long, in the order of `items`.

        With `surplus = "cancel"`, groups still unfinished when `num_wanted` are informative are cancelled and counted.
        """
        round_ = _Round(self._cfg, num_wanted)
        for item in items:
            prompt_ids = self._sampler.prompt(item)
            if prompt_ids is None:
                drops.count_group("prompt_too_long")
                continue
            samples = range(self._cfg.rollout.samples_per_group)
            round_.add(item, [asyncio.create_task(self._rollout(item, prompt_ids, i)) for i in samples])
        await self._wait_for_all(round_.tasks)
        # Errors were raised above, so a group without all of its results was cancelled.
        groups = round_.groups()
        for _ in range(len(round_.items) - len(groups)):
            drops.count_group(CANCELLED)
            drops.count_rollouts(f"group_{CANCELLED}", self._cfg.rollout.samples_per_group)
        return groups

    async def _rollout(self, item: StreamItem, prompt_ids: tuple[int, ...], sample_idx: int) -> Rollout:
        completion = await self._sampler.sample(item, prompt_ids, sample_idx)
        return await self._sampler.judge(item, prompt_ids, completion)

    async def _wait_for_all(self, tasks: Sequence[asyncio.Task[Rollout]]) -> None:
        """Wait for all tasks, and raise the first failure.

        Raise TrainingError after `stall_timeout_s` without progress.
        """
        pending: set[asyncio.Task[Rollout]] = set(tasks)
        watch = self._sampler.watch()
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=watch.check_s, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    if not task.cancelled():  # as surplus, which is no error
                        task.result()  # re-raises the task's error
                if pending:
                    watch.check()
        finally:
            for task in pending:
                task.cancel()
            # Wait for the cancelled tasks and retrieve every error, or asyncio would log it as never retrieved.
            await asyncio.gather(*tasks, return_exceptions=True)


class _Round:
    """The requests of a round of prompts, by prompt."""

    def __init__(self, cfg: RlConfig, num_wanted: int) -> None:
        self.items: list[StreamItem] = []
        self.tasks: list[asyncio.Task[Rollout]] = []
        self._cfg = cfg
        self._num_wanted = num_wanted
        self._by_item: list[list[asyncio.Task[Rollout]]] = []

    def add(self, item: StreamItem, tasks: list[asyncio.Task[Rollout]]) -> None:
        """Add the requests of a prompt."""
        self.items.append(item)
        self.tasks += tasks
        self._by_item.append(tasks)
        if self._cfg.rollout.surplus == "cancel":
            for task in tasks:
                task.add_done_callback(partial(self._cancel_surplus, tasks))

    def groups(self) -> list[RolloutGroup]:
        """Return the complete groups, in the order in which they were added."""
        groups = []
        for item, tasks in zip(self.items, self._by_item, strict=True):
            if all(_has_result(task) for task in tasks):
                groups.append(RolloutGroup(problem=item.problem, rollouts=tuple(task.result() for task in tasks)))
        return groups

    def _cancel_surplus(self, group: Sequence[asyncio.Task[Rollout]], _done: asyncio.Task[Rollout]) -> None:
        """Cancel all unfinished requests of the round once enough of its complete groups are informative."""
        # Only a group that has just become complete changes the number of informative groups.
        if not all(_has_result(task) for task in group):
            return
        # Its drops are not counted here: `collect` filters the groups of the whole round again.
        informative = keep_informative(self.groups(), self._cfg.group_filter, self._cfg.overlong)
        if len(informative.groups) >= self._num_wanted:
            for task in self.tasks:
                task.cancel()  # no effect on one that is done


def _has_result(task: asyncio.Task[Rollout]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class Lookahead:
    """Collect batches one after the other in the background, at most `depth` ahead of the batch in use.

    Each call of `allow_another` permits one more; entering the context permits `depth + 1`.
    """

    def __init__(self, collect: Callable[[], Awaitable[StepRollouts]], *, depth: int, num_batches: int) -> None:
        self._collect = collect
        self._num_left = num_batches
        self._tasks: deque[asyncio.Task[StepRollouts]] = deque()
        self._depth = depth

    async def __aenter__(self) -> Self:
        for _ in range(self._depth + 1):
            self.allow_another()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Wait for the cancelled tasks and retrieve their errors: the loop is already ending for another reason.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def allow_another(self) -> None:
        """Permit one more batch; its collection starts when the batch before it is complete."""
        if self._num_left > 0:
            self._num_left -= 1
            # A batch that was taken is complete, so with an empty queue there is none to wait for.
            previous = self._tasks[-1] if self._tasks else None
            self._tasks.append(asyncio.create_task(self._after(previous)))

    async def next(self) -> StepRollouts:
        """Return the oldest batch not yet taken, waiting until it is complete."""
        return await self._tasks.popleft()

    async def _after(self, previous: asyncio.Task[StepRollouts] | None) -> StepRollouts:
        # One batch at a time: all take their prompts from one stream, whose position a batch records at its end.
        if previous is not None:
            await asyncio.wait([previous])  # does not raise: `next` raises the error of that batch
        return await self._collect()
