"""Turn prompts into judged groups of answers. Every answer is a separate request, judged as soon as it arrives.

These invariants hold in both modes, rounds (here) and continuous (`continuous.py`):
- Every prompt reaches the learner exactly once or is counted: the group of each position of the stream is in one step's
  `StepRollouts.kept`, or counted in one step's `reasons`.
- An answer's seed follows from its position and index alone, its problem from the position, with a curriculum also from
  the groups of the steps before; so a resumed run asks the same again.
- No token of an answer that is trained on is more than `max_staleness` versions of the weights old.
- A failure of a judge or a reward function by itself is never a reward: that answer leaves its group and is counted.
  One that an answer causes has the least value in its place (`with_failed_values`).
- If nothing is sampled or judged for `stall_timeout_s`, the run ends with an error that says what is pending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from klear_core.artifacts.manifest import ReasonCounts
from klear_core.config.rl import RlConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import InferenceEngine, one_sample
from klear_core.prompts import completed, opening_of, render_prompt
from klear_core.rl.groups import CANCELLED, SURPLUS, filter_groups
from klear_core.rl.rewards import complete_rewards, custom_reward, is_positive, overlong_penalty, reward_of
from klear_core.rl.stream import POOL_UNIT, CurriculumState, PromptStream, StreamItem
from klear_core.seeding import seed_for
from klear_core.types import Completion, Judge, Problem, RewardFunction, Rollout, RolloutGroup, Verdict
from klear_core.waits import Silence, now

if TYPE_CHECKING:
    Tokenizer = Any

_CHECKS_PER_TIMEOUT = 8  # how often to check for a stall, per stall timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The groups of one RL step."""

    groups: tuple[RolloutGroup, ...]
    """All sampled groups."""
    kept: tuple[RolloutGroup, ...]
    """Groups to train on, at most `groups_per_step`, without their unusable answers."""
    reasons: ReasonCounts
    """Counts of the prompts and answers that are not in `kept`, by reason; with a curriculum also of all drawn prompts,
    by pool. `StepLog.log` adds those of `kept`, trained or not."""
    position: int
    """Position of the prompt stream after this step's prompts."""
    seconds: float
    """Time from the first request to the last verdict; in continuous mode, since the step before."""
    unfinished: tuple[int, ...] = ()
    """Positions before `position` whose groups are in no step yet: a resumed run samples them again."""
    curriculum: CurriculumState = field(default_factory=CurriculumState)
    """State of the curriculum after this step's groups."""

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens in all sampled answers."""
        return sum(len(r.completion.token_ids) for g in self.groups for r in g.rollouts)


async def no_rewards(_problem: Problem, _completion: Completion, _verdict: Verdict) -> Mapping[str, float | None]:
    """Return no values, for RL without rewards of the user's own."""
    return {}


class RolloutClient:
    """Sample and judge single answers, and tell what is finished and what is pending."""

    def __init__(
        self,
        engine: InferenceEngine,
        judge: Judge,
        tokenizer: Tokenizer,
        cfg: RlConfig,
        *,
        seed: int,
        engine_status: Callable[[], str],
        custom_rewards: RewardFunction = no_rewards,
        window: int | None = None,
    ) -> None:
        """`engine_status` returns a description of pending engine work, used in the stall error message; `window` is
        the number of positions of the engines, None without a bound."""
        self._engine = engine
        self._judge = judge
        self._custom_rewards = custom_rewards
        self._tokenizer = tokenizer
        self._opening = opening_of(tokenizer)
        self._cfg = cfg
        most = cfg.rollout.max_prompt_tokens
        # An engine refuses a prompt without room for an answer, which would end the run, and each time it resumes.
        self._max_prompt_tokens = most if window is None else min(most, window - 1)
        self._seed = seed
        self._engine_status = engine_status
        self._num_sampling = 0
        self._num_judging = 0
        self._num_finished_requests = 0
        self._sampled_at: float | None = None
        self._judged_at: float | None = None

    def prompt(self, item: StreamItem) -> tuple[int, ...] | None:
        """Return a problem's prompt; None if it is too long."""
        prompt_ids = render_prompt(self._tokenizer, item.problem.question)
        return prompt_ids if len(prompt_ids) <= self._max_prompt_tokens else None

    async def sample(self, item: StreamItem, prompt_ids: tuple[int, ...], sample_idx: int) -> Completion:
        """Return one answer of the engine."""
        # Derive the seed from position and sample index, so that a rerun draws the same answers in whatever order
        # requests are served.
        seed = seed_for(self._seed, "rl/rollout", item.position, sample_idx)
        params = one_sample(self._cfg.rollout.sampling, seed=seed)
        self._num_sampling += 1
        try:
            (sampled,) = await self._engine.generate(prompt_ids, params)
        finally:  # also when the request is cancelled
            self._num_sampling -= 1
        self._sampled_at = now()
        self._num_finished_requests += 1  # not in `finally`: a request that is cancelled or fails is no progress
        return completed(sampled, self._opening)

    async def judge(self, item: StreamItem, prompt_ids: tuple[int, ...], completion: Completion) -> Rollout:
        """Return an answer with its verdict and its reward."""
        cfg = self._cfg
        self._num_judging += 1
        try:
            verdict = await self._judge(item.problem, completion.text)
            custom = await self._custom_rewards(item.problem, completion, verdict)
        finally:
            self._num_judging -= 1
        self._judged_at = now()
        self._num_finished_requests += 1
        # The penalty changes only the reward: a correct but overlong answer still has `is_positive`.
        reward = reward_of(completion, verdict, cfg.reward) + custom_reward(custom, cfg.reward)
        reward -= overlong_penalty(len(completion.token_ids), cfg.rollout.sampling.max_new_tokens, cfg.overlong)
        return Rollout(
            prompt_ids=prompt_ids,
            completion=completion,
            verdict=verdict,
            reward=reward,
            is_positive=is_positive(completion, verdict, cfg.reward),
            custom_rewards=custom,
        )

    @property
    def num_finished_requests(self) -> int:
        """Return how many answers were sampled and how many judged, together."""
        return self._num_finished_requests

    def stall_error(self, timeout_s: float) -> TrainingError:
        """Return the error that says what is still pending."""
        return TrainingError(
            f"rollouts stalled: in {timeout_s:g} s no answer was sampled or judged; still pending: "
            f"{self._num_sampling} answers from {self._engine_status()}, {self._num_judging} verdicts from the judges"
        )

    def pending(self) -> str:
        """Return what is waited for, with what came of it last."""
        return (
            f"{self._num_sampling} answers from {self._engine_status()}{_ago('answer', self._sampled_at)}, "
            f"{self._num_judging} verdicts from the judges{_ago('verdict', self._judged_at)}"
        )

    @property
    def stall_timeout_s(self) -> float:
        """Return the seconds without progress after which rollouts count as stalled."""
        return self._cfg.runtime.stall_timeout_s


class StallWatch:
    """Notice that the engines have finished nothing for the stall timeout."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        # The count when it last changed, and the time at which that was seen.
        self._seen, self._seen_at = client.num_finished_requests, now()
        self._silence = Silence()

    @property
    def check_s(self) -> float:
        """Return the seconds to wait between two checks."""
        return min(self._client.stall_timeout_s / _CHECKS_PER_TIMEOUT, self._silence.check_s)

    def check(self) -> None:
        """Raise TrainingError if there was no progress for the stall timeout; before that, name what is pending."""
        # First: answers may have come since the last check, which is made only where a wait for them has timed out.
        if self._seen != self._client.num_finished_requests:
            self._seen, self._seen_at = self._client.num_finished_requests, now()
        silent_s = now() - self._seen_at
        self._silence.check(silent_s, self._client.pending)
        if silent_s >= self._client.stall_timeout_s:
            raise self._client.stall_error(self._client.stall_timeout_s)


def _ago(what: str, at: float | None) -> str:
    return f" (no {what} yet)" if at is None else f" (the last {what} {now() - at:.0f} s ago)"


class Collector:
    """Sample prompts in rounds until a step has enough informative groups or `max_rounds` is reached."""

    def __init__(self, client: RolloutClient, stream: PromptStream, cfg: RlConfig) -> None:
        self._client = client
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
        reasons = ReasonCounts()
        for _ in range(rollout.max_rounds):
            # Sample complete rounds rather than refilling prompt by prompt, because the prompts must not depend on
            # which answers are finished first.
            prompts = self._stream.take(rollout.prompts_per_round)
            sampled = await self._sample_groups(prompts, reasons, num_wanted=rollout.groups_per_step - len(kept))
            informative = filter_groups(sampled, self._cfg)
            reasons.add(informative.reasons)
            groups += sampled
            kept += informative.groups
            if len(kept) >= rollout.groups_per_step:
                break
        # Keep the first groups in stream order, because the fastest would be biased towards short answers.
        for surplus in kept[rollout.groups_per_step :]:
            reasons.count("group", SURPLUS)
            reasons.count("rollout", f"group_{SURPLUS}", len(surplus.rollouts))
        return StepRollouts(
            groups=tuple(groups),
            kept=tuple(kept[: rollout.groups_per_step]),
            reasons=reasons,
            position=self._stream.position,
            seconds=now() - started,
            curriculum=self._stream.end_step(groups),
        )

    async def _sample_groups(
        self, items: Sequence[StreamItem], reasons: ReasonCounts, *, num_wanted: int
    ) -> list[RolloutGroup]:
        """Return one group for each prompt that is not too long, in the order of `items`.

        With `surplus = "cancel"`, groups still unfinished when `num_wanted` are informative are cancelled and counted.
        """
        round_ = _Round(self._cfg, num_wanted)
        for item in items:
            prompt_ids = self._client.prompt(item)
            if item.pool is not None:
                reasons.count(POOL_UNIT, item.pool)
            if prompt_ids is None:
                reasons.count("group", "prompt_too_long")
                self._stream.reject(item)
                continue
            samples = range(self._cfg.rollout.samples_per_group)
            round_.add(item, [asyncio.create_task(self._rollout(item, prompt_ids, i)) for i in samples])
        await self._wait_for_all(round_.tasks)
        # Errors were raised above, so a group without all of its results was cancelled.
        groups = round_.groups()
        for _ in range(len(round_.items) - len(groups)):
            reasons.count("group", CANCELLED)
            reasons.count("rollout", f"group_{CANCELLED}", self._cfg.rollout.samples_per_group)
        return groups

    async def _rollout(self, item: StreamItem, prompt_ids: tuple[int, ...], sample_idx: int) -> Rollout:
        completion = await self._client.sample(item, prompt_ids, sample_idx)
        return await self._client.judge(item, prompt_ids, completion)

    async def _wait_for_all(self, tasks: Sequence[asyncio.Task[Rollout]]) -> None:
        """Wait for all tasks, and raise the first failure.

        Raise TrainingError after `stall_timeout_s` without progress.
        """
        pending: set[asyncio.Task[Rollout]] = set(tasks)
        watch = StallWatch(self._client)
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
                rollouts = complete_rewards([task.result() for task in tasks], self._cfg)
                groups.append(RolloutGroup(problem=item.problem, rollouts=rollouts))
        return groups

    def _cancel_surplus(self, group: Sequence[asyncio.Task[Rollout]], _done: asyncio.Task[Rollout]) -> None:
        """Cancel all unfinished requests of the round once enough of its complete groups are informative."""
        # Only a group that has just become complete changes the number of informative groups.
        if not all(_has_result(task) for task in group):
            return
        # What it drops is not counted here: `collect` filters the groups of the whole round again.
        informative = filter_groups(self.groups(), self._cfg)
        if len(informative.groups) >= self._num_wanted:
            for task in self.tasks:
                task.cancel()  # no effect on one that is done


def _has_result(task: asyncio.Task[Rollout]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class Lookahead:
    """Collect batches one after the other in the background, at most `depth` ahead of the batch in use.

    Each call of `advance` permits one more; entering the context permits `depth + 1`. With `waits_for_all` a
    batch is given only when all permitted ones are complete, so that the policy of exactly `depth` versions before
    sampled it.
    """

    def __init__(
        self,
        collect: Callable[[], Awaitable[StepRollouts]],
        *,
        depth: int,
        num_batches: int,
        waits_for_all: bool = False,
    ) -> None:
        self._collect = collect
        self._waits_for_all = waits_for_all
        self._num_left = num_batches
        self._tasks: deque[asyncio.Task[StepRollouts]] = deque()
        self._depth = depth

    async def __aenter__(self) -> Self:
        for _ in range(self._depth + 1):
            self.advance()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Wait for the cancelled tasks and retrieve their errors: the loop is already ending for another reason.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def advance(self) -> None:
        """Permit one more batch; its collection starts when the batch before it is complete."""
        if self._num_left > 0:
            self._num_left -= 1
            # A batch that was taken is complete, so with an empty queue there is none to wait for.
            previous = self._tasks[-1] if self._tasks else None
            self._tasks.append(asyncio.create_task(self._after(previous)))

    async def next(self) -> StepRollouts:
        """Return the oldest batch not yet taken, waiting until it is complete."""
        if self._waits_for_all:
            await asyncio.wait(self._tasks)
        return await self._tasks.popleft()

    async def _after(self, previous: asyncio.Task[StepRollouts] | None) -> StepRollouts:
        # One batch at a time: all take their prompts from one stream, whose position a batch records at its end.
        if previous is not None:
            await asyncio.wait([previous])  # does not raise: `next` raises the error of that batch
        return await self._collect()
