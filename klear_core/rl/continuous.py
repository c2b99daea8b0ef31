"""Sample without rounds: requests in flight are kept at a set number, and steps train on the groups that are finished.

The invariants of `rollout.py` hold. A prompt is in one place at a time: open (being sampled or judged), finished
(informative, waiting for a step), in one step's `kept`, or counted in one step's `reasons`; the last step counts what
is left. A checkpoint has the positions that are open or finished, and a resumed run asks them again. Which groups a
step gets depends on what is finished first, unlike in rounds.

An answer that is unfinished when new weights arrive continues under them. Two rules keep the staleness bound, so that
no finished answer is ever too old. Let s be the next step to be filled, v the version of the engines' weights, b the
bound and G the number of groups per step. A group that is begun under version v has the deadline v + b: it must be
trained on by that step.
1. A group is begun only if fewer than G * (v + b + 1 - s) groups are begun and in no step yet, which is what the steps
   up to its deadline have room for.
2. A step takes the oldest finished groups, and waits until those left can meet their deadlines: for each step d, at
   most G * (d - s) of them have a deadline of d or earlier.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.config.rl import RlConfig
from klear_core.rl.groups import CANCELLED, SURPLUS, filter_groups
from klear_core.rl.rewards import complete_rewards
from klear_core.rl.rollout import RolloutClient, StallWatch, StepRollouts
from klear_core.rl.stream import POOL_UNIT, PromptStream, StreamItem
from klear_core.types import Rollout, RolloutGroup
from klear_core.waits import now


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenGroup:
    """A group whose answers are being sampled or judged."""

    task: asyncio.Task[None]
    version: int
    """Version of the weights under which it was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinishedGroup:
    """An informative group that waits for a step."""

    sampled: RolloutGroup
    kept: RolloutGroup
    """Without its unusable answers."""
    reasons: ReasonCounts
    version: int


class ContinuousRollouts:
    """Fill one step after the other with informative groups, as `Lookahead` does in rounds."""

    def __init__(
        self, client: RolloutClient, stream: PromptStream, cfg: RlConfig, *, step: int, again: Sequence[int] = ()
    ) -> None:
        """`step` is the next step to fill and the version of the engines; `again` are positions to sample first."""
        self._client = client
        self._stream = stream
        self._cfg = cfg
        # Versions count finished steps, so step s starts with engines of version s.
        self._step = self._version = step
        self._again = list(again)
        self._open: dict[int, _OpenGroup] = {}
        self._finished: dict[int, _FinishedGroup] = {}
        self._num_in_flight = 0
        self._num_decided = 0
        """Prompts since the last filled step that gave no informative group: too long, or their group was dropped."""
        self._reasons = ReasonCounts()
        self._dropped_groups: list[RolloutGroup] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._filled_at = now()
        self._begin_groups()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cancel_open()

    def advance(self) -> None:
        """Count one version: the engines have new weights, so that younger groups may be begun."""
        self._version += 1
        self._begin_groups()

    async def next(self) -> StepRollouts:
        """Return the groups of the next step as soon as there are enough and those left can meet their deadlines.

        Raise TrainingError if no answer is sampled or judged for `stall_timeout_s`, or the error of any answer.
        """
        # A watch of this wait alone: the time in which the learner updated is no stall.
        watch = StallWatch(self._client)
        while self._error is None:
            if self._can_fill():
                return await self._fill()
            # No await since `_can_fill`, so no change is lost between the check and the wait.
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=watch.check_s)
            except TimeoutError:
                watch.check()
        raise self._error

    def _begin_groups(self) -> None:
        """Begin groups until enough requests are in flight, or enough groups for all steps within the bound."""
        runtime, rollout = self._cfg.runtime, self._cfg.rollout
        num_requests = runtime.requests_per_actor * runtime.num_rollout_actors
        while self._may_begin():
            # The first group always begins, because the limit may be smaller than one group.
            if self._open and self._num_in_flight + rollout.samples_per_group > num_requests:
                return
            item = self._stream.at(self._again.pop(0)) if self._again else self._stream.take(1)[0]
            prompt_ids = self._client.prompt(item)
            if item.pool is not None:
                self._reasons.count(POOL_UNIT, item.pool)
            if prompt_ids is None:
                self._reasons.count("group", "prompt_too_long")
                self._stream.reject(item)
                self._num_decided += 1
                self._changed.set()  # the step may be due to be filled with fewer groups
                continue
            self._num_in_flight += rollout.samples_per_group
            # The task starts at the next await, when its entry in `_open`, which it pops, is there.
            task = asyncio.create_task(self._run_group(item, prompt_ids))
            task.add_done_callback(self._on_done)
            self._open[item.position] = _OpenGroup(task=task, version=self._version)

    def _may_begin(self) -> bool:
        if self._num_decided >= self._most_decided():
            return False  # the next step is filled with the groups that there are
        # Steps after the last one need no groups.
        last = min(self._version + self._cfg.max_staleness, self._cfg.num_steps - 1)
        num_steps = last + 1 - self._step
        # Rule 1: room in the steps up to the deadline of a group that is begun now.
        return len(self._open) + len(self._finished) < self._cfg.rollout.groups_per_step * num_steps

    def _most_decided(self) -> int:
        """Return the number of prompts after which a step is filled with fewer groups."""
        return self._cfg.rollout.max_rounds * self._cfg.rollout.prompts_per_round

    async def _run_group(self, item: StreamItem, prompt_ids: tuple[int, ...]) -> None:
        """Sample and judge a group; keep it for a step, or count why it is dropped."""
        samples = range(self._cfg.rollout.samples_per_group)
        tasks = [asyncio.create_task(self._rollout(item, prompt_ids, i)) for i in samples]
        try:
            rollouts = await asyncio.gather(*tasks)
        finally:
            # `gather` leaves the others running if one fails. No effect on those that are done.
            for task in tasks:
                task.cancel()
        sampled = RolloutGroup(problem=item.problem, rollouts=complete_rewards(rollouts, self._cfg))
        kept = filter_groups([sampled], self._cfg)
        # Not the present version: the deadline follows from the one under which the group was begun.
        version = self._open.pop(item.position).version
        if kept.groups:
            (informative,) = kept.groups
            self._finished[item.position] = _FinishedGroup(
                sampled=sampled, kept=informative, reasons=kept.reasons, version=version
            )
        else:
            self._reasons.add(kept.reasons)
            self._dropped_groups.append(sampled)
            self._num_decided += 1
        self._changed.set()
        self._begin_groups()

    async def _rollout(self, item: StreamItem, prompt_ids: tuple[int, ...], sample_idx: int) -> Rollout:
        completion = await self._client.sample(item, prompt_ids, sample_idx)
        # Answers that are being judged do not count as in flight, so that engines continue meanwhile.
        self._num_in_flight -= 1
        self._begin_groups()
        return await self._client.judge(item, prompt_ids, completion)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Keep the error of a group for `next`, because nothing awaits its task."""
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self._changed.set()

    def _chosen(self) -> list[int]:
        """Return the positions of the oldest finished groups, at most a step's number."""
        # The oldest version has the first deadline. Equals go in prompt order, whichever was finished first.
        ordered = sorted(self._finished, key=lambda position: (self._finished[position].version, position))
        return ordered[: self._cfg.rollout.groups_per_step]

    def _can_fill(self) -> bool:
        """Return whether there are enough groups (or no more are to be asked), and rule 2 holds for those left."""
        groups_per_step, bound = self._cfg.rollout.groups_per_step, self._cfg.max_staleness
        num_finished = len(self._finished)
        if num_finished < groups_per_step and self._num_decided + num_finished < self._most_decided():
            return False
        # Rule 2, for the groups that this step would leave.
        chosen = set(self._chosen())
        left = [group.version for group in self._open.values()]
        left += [group.version for position, group in self._finished.items() if position not in chosen]
        num_by_version = Counter(left)
        for deadline in range(self._step, self._step + bound + 1):
            num_due = sum(n for version, n in num_by_version.items() if version + bound <= deadline)
            # Steps that are left for them: without this one, which the chosen groups fill.
            if num_due > groups_per_step * (deadline - self._step):
                return False
        return True

    async def _fill(self) -> StepRollouts:
        """Return the next step's groups, and everything that was dropped since the one before."""
        chosen = [self._finished.pop(position) for position in self._chosen()]
        self._step += 1
        if self._step == self._cfg.num_steps:
            await self._give_up_rest()  # before the counts are read, so that they add up
        reasons, self._reasons = self._reasons, ReasonCounts()
        for group in chosen:
            reasons.add(group.reasons)
        groups = [group.sampled for group in chosen] + self._dropped_groups
        self._dropped_groups, self._num_decided = [], 0
        before, self._filled_at = self._filled_at, now()
        unfinished = sorted([*self._open, *self._finished, *self._again])
        step = StepRollouts(
            groups=tuple(groups),
            kept=tuple(group.kept for group in chosen),
            reasons=reasons,
            position=self._stream.position,
            seconds=self._filled_at - before,
            unfinished=tuple(unfinished),
            curriculum=self._stream.end_step(groups, unfinished=unfinished),
        )
        self._begin_groups()
        return step

    async def _give_up_rest(self) -> None:
        """Count and cancel the groups that no step will train on; there are some if a step was filled with fewer."""
        for group in self._finished.values():
            self._reasons.add(group.reasons)
            self._reasons.count("group", SURPLUS)
            self._reasons.count("rollout", f"group_{SURPLUS}", len(group.kept.rollouts))
            self._dropped_groups.append(group.sampled)
        num_cancelled = len(self._open) + len(self._again)
        self._reasons.count("group", CANCELLED, num_cancelled)
        self._reasons.count("rollout", f"group_{CANCELLED}", num_cancelled * self._cfg.rollout.samples_per_group)
        self._finished, self._again = {}, []
        await self._cancel_open()

    async def _cancel_open(self) -> None:
        tasks = [group.task for group in self._open.values()]
        self._open = {}
        for task in tasks:
            task.cancel()
        # Wait for the cancelled tasks and retrieve their errors: the loop is already ending for another reason.
        await asyncio.gather(*tasks, return_exceptions=True)
