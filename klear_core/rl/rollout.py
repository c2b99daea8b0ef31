"""Sample answers and judge them. Every answer is a separate request, judged as soon as it arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from klear_core.config.rl import RlConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import InferenceEngine, one_sample
from klear_core.prompts import completed, opening_of, render_prompt
from klear_core.rl.groups import DropCounts
from klear_core.rl.rewards import custom_reward, is_positive, overlong_penalty, reward_of
from klear_core.seeding import seed_for
from klear_core.types import Completion, Judge, Problem, RewardValues, Rollout, RolloutGroup, Verdict

if TYPE_CHECKING:
    Tokenizer = Any

_CHECKS_PER_TIMEOUT = 8  # how often to check for a stall, per stall timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One problem of the stream; the same problem has a new `position` in every epoch."""

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
        # The epoch whose order was computed last, with the order; -1 is none.
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[StreamItem]:
        """Return the next problems; positions count from 0 and never repeat."""
        start, self.position = self.position, self.position + count
        return [self.at(i) for i in range(start, self.position)]

    def at(self, position: int) -> StreamItem:
        """Return the problem at a position; the stream stays where it is."""
        epoch, index = divmod(position, len(self._problems))
        # The order follows from seed and epoch alone, so a restored stream needs only its position.
        if self._order[0] != epoch:
            order = list(range(len(self._problems)))
            random.Random(seed_for(self._seed, "rl/stream", epoch)).shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return StreamItem(position=position, problem=self._problems[self._order[1][index]])


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
    """Time from the first request to the last verdict; in continuous mode, since the step before."""
    unfinished: tuple[int, ...] = ()
    """Positions before `position` whose groups are in no step yet: a resumed run samples them again."""

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens in all sampled answers."""
        return sum(len(r.completion.token_ids) for g in self.groups for r in g.rollouts)


class Rollouts(Protocol):
    """Source of the groups of each step. They are sampled while the context is open."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next(self) -> StepRollouts:
        """Return the groups of the next step."""
        ...

    def allow_another(self) -> None:
        """Note that the engines have new weights."""
        ...


async def no_rewards(_problem: Problem, _completion: Completion, _verdict: Verdict) -> Mapping[str, float | None]:
    """Return no values, for RL without rewards of the user's own."""
    return {}


class Sampler:
    """Sample and judge single answers, and notice when neither makes progress."""

    def __init__(
        self,
        engine: InferenceEngine,
        judge: Judge,
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
        self._tokenizer = tokenizer
        self._opening = opening_of(tokenizer)
        self._cfg = cfg
        self._seed = seed
        self._engine_status = engine_status
        self._num_sampling = 0
        self._num_judging = 0
        self._num_finished_requests = 0

    def prompt(self, item: StreamItem) -> tuple[int, ...] | None:
        """Return a problem's prompt; None if it is too long."""
        prompt_ids = render_prompt(self._tokenizer, item.problem.question)
        return prompt_ids if len(prompt_ids) <= self._cfg.rollout.max_prompt_tokens else None

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

    def watch(self) -> StallWatch:
        """Return a new watch on this sampler's progress."""
        return StallWatch(self)

    @property
    def num_finished_requests(self) -> int:
        """Return how many answers were sampled and how many judged, together."""
        return self._num_finished_requests

    def stalled(self, timeout_s: float) -> TrainingError:
        """Return the error that says what is still pending."""
        return TrainingError(
            f"rollouts stalled: in {timeout_s:g} s no answer was sampled or judged; still pending: "
            f"{self._num_sampling} answers from {self._engine_status()}, "
            f"{self._num_judging} verdicts from the judges"
        )

    @property
    def stall_timeout_s(self) -> float:
        """Return the seconds without progress after which rollouts count as stalled."""
        return self._cfg.runtime.stall_timeout_s


class StallWatch:
    """Notice that a sampler has finished nothing for its stall timeout."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        # The count when it last changed, and the time at which that was seen.
        self._seen, self._seen_at = sampler.num_finished_requests, now()

    @property
    def check_s(self) -> float:
        """Return the seconds to wait between two checks."""
        return self._sampler.stall_timeout_s / _CHECKS_PER_TIMEOUT

    def check(self) -> None:
        """Raise TrainingError if there was no progress for the stall timeout."""
        if self._seen != self._sampler.num_finished_requests:
            self._seen, self._seen_at = self._sampler.num_finished_requests, now()
        elif now() - self._seen_at >= self._sampler.stall_timeout_s:
            raise self._sampler.stalled(self._sampler.stall_timeout_s)


def now() -> float:
    """Return the time of the event loop. In simulations it runs faster than the clock."""
    return asyncio.get_running_loop().time()
