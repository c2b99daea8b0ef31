"""Choose the prompts of RL: each problem once an epoch, or with `rl.curriculum` by what is known of its pass rate.

A group teaches by its advantages, so it needs right and wrong answers. For a pass rate p and n answers the probability
of both is 1 - p^n - (1 - p)^n. p is known only from answers: those of RL's own groups and, at first, of a `tag` stage.
With a Beta(a, b) posterior the expectation over p has a closed form (the beta-binomial's two ends):

    mixed_probability = 1 - E[p^n] - E[(1 - p)^n],    E[p^n] = prod over i < n of (a + i) / (a + b + i)

The prior is fitted to all problems with answers. Where most are always right or always wrong it has little weight, so
that one group decides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from klear_core.config.rl import CurriculumConfig
from klear_core.seeding import seed_for
from klear_core.types import PassRate, Problem, RolloutGroup

Pool = Literal["new", "mixed", "easy", "hard", "unusable"]
"""`new`: neither asked nor tagged; `mixed`: admitted; `easy` and `hard`: not admitted; `unusable`: asked without a
judged answer, because the prompt is too long or no answer could be judged."""

POOLS: tuple[Pool, ...] = ("new", "mixed", "easy", "hard", "unusable")
POOL_UNIT = "pool"
"""Unit under which `ReasonCounts` counts the drawn prompts by pool."""

_SEEN, _DRAWN = "seen/", "drawn/"
"""Prefixes of keys in checkpoints. A new name would make a killed run forget when it resumes."""
_MOST_WITHIN = 0.9
"""Bound on the share of the variance that is within problems, at which the prior counts for 9 answers."""
_LEAST = 1e-12
"""Smallest weight of a draw: where all answers are right, that of new problems rounds to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Counts of a problem's positive and judged answers, faded as of the step of its last group."""

    right: float
    """Answers that are right and well-formed; of a tag, those that are right."""
    judged: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumState:
    """State of a curriculum between two steps, saved with every checkpoint; empty without a curriculum."""

    seen: Mapping[str, Seen] = field(default_factory=dict)
    """By the id of each problem that was asked in a finished step."""
    drawn: Mapping[int, str] = field(default_factory=dict)
    """Ids of the problems at the positions whose groups are in no step yet."""

    def counters(self) -> dict[str, int | float]:
        """Return everything as a flat dict of numbers, which is what a checkpoint holds."""
        flat: dict[str, int | float] = {}
        for problem_id, seen in self.seen.items():
            for name in ("right", "judged", "step"):
                flat[f"{_SEEN}{name}/{problem_id}"] = getattr(seen, name)
        return flat | {f"{_DRAWN}{position}/{problem_id}": 1 for position, problem_id in self.drawn.items()}

    @classmethod
    def of(cls, counters: Mapping[str, int | float]) -> Self:
        """Rebuild it from `counters`; other keys are left out."""
        right, judged, step = (_starting(counters, f"{_SEEN}{name}/") for name in ("right", "judged", "step"))
        seen = {i: Seen(right=right[i], judged=judged[i], step=int(step[i])) for i in step}
        drawn = {}
        for key in _starting(counters, _DRAWN):
            position, _, problem_id = key.partition("/")
            drawn[int(position)] = problem_id
        return cls(seen=seen, drawn=drawn)

    @staticmethod
    def holds(key: str) -> bool:
        """Return whether a key of a checkpoint is of a curriculum's state."""
        return key.startswith((_SEEN, _DRAWN))


def _starting(counters: Mapping[str, int | float], prefix: str) -> dict[str, int | float]:
    return {key.removeprefix(prefix): value for key, value in counters.items() if key.startswith(prefix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One problem of the stream; the same problem has a new `position` every time it is drawn."""

    position: int
    problem: Problem
    pool: Pool | None = None
    """Where a curriculum drew it from; None without one, and where it is asked again after a restart."""


class PromptStream:
    """Endless stream of problems: shuffled anew for every epoch, or drawn by a curriculum.

    Without a curriculum the position alone is enough to restore it.
    """

    def __init__(
        self, problems: Sequence[Problem], *, seed: int, position: int = 0, curriculum: Curriculum | None = None
    ) -> None:
        assert problems, "a stream needs a problem"
        self.position = position
        # Sorted, so that the order does not depend on how the problems were stored.
        self._problems = sorted(problems, key=lambda p: p.problem_id)
        self._seed = seed
        # The epoch whose order was computed last, with the order; -1 is none.
        self._order: tuple[int, list[int]] = (-1, [])
        self.curriculum = curriculum

    def take(self, count: int) -> list[StreamItem]:
        """Return the next problems; positions count from 0 and never repeat."""
        start, self.position = self.position, self.position + count
        if self.curriculum is not None:
            return [self.curriculum.draw(i) for i in range(start, self.position)]
        return [self.at(i) for i in range(start, self.position)]

    def at(self, position: int) -> StreamItem:
        """Return the problem at a position; the stream stays where it is.

        With a curriculum only positions that were drawn and are in no step yet are known.
        """
        if self.curriculum is not None:
            return self.curriculum.drawn(position)
        epoch, index = divmod(position, len(self._problems))
        # The order follows from seed and epoch alone, so a restored stream needs only its position.
        if self._order[0] != epoch:
            order = list(range(len(self._problems)))
            random.Random(seed_for(self._seed, "rl/stream", epoch)).shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return StreamItem(position=position, problem=self._problems[self._order[1][index]])

    def reject(self, item: StreamItem) -> None:
        """Note that a prompt cannot be asked."""
        if self.curriculum is not None:
            self.curriculum.reject(item)

    def end_step(self, groups: Sequence[RolloutGroup], *, unfinished: Collection[int] = ()) -> CurriculumState:
        """Remember a step's groups, and return the state from which the next step's prompts are drawn.

        `unfinished` are the positions whose groups are in no step yet.
        """
        return CurriculumState() if self.curriculum is None else self.curriculum.end_step(groups, unfinished=unfinished)


class Curriculum:
    """Draw problems without replacement within a step, with weights of their probability of a mixed group.

    The order of a step's draws follows from the seed, the step and the state after the steps before it.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        cfg: CurriculumConfig,
        *,
        seed: int,
        samples_per_group: int,
        pass_rates: Mapping[str, PassRate],
        step: int = 0,
        state: CurriculumState | None = None,
    ) -> None:
        """`step` and `state` are those after the last finished step; `pass_rates` are tags, by problem id."""
        state = state or CurriculumState()
        self._problems = {p.problem_id: p for p in sorted(problems, key=lambda p: p.problem_id)}
        self._cfg = cfg
        self._seed = seed
        self._num_samples = samples_per_group
        self._tags = {i: _as_seen(rate, most=samples_per_group) for i, rate in pass_rates.items()}
        self._step = step
        self._seen = dict(state.seen)
        self._drawn = dict(state.drawn)
        self._rejected: list[str] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_turns = 0
        self._pool_of: dict[str, Pool] = {}
        self._admitted: list[str] = []
        self._revisits: list[str] = []

    def _fill_queues(self, avoid: Collection[str]) -> None:
        """Order all problems but those of `avoid` for this step's draws, the first last."""
        rng = random.Random(seed_for(self._seed, "rl/curriculum", self._step, self._num_turns))  # noqa: S311
        self._num_turns += 1
        admitted: list[tuple[float, str]] = []
        others: list[tuple[int, float, str]] = []
        prior = self.prior()
        for problem_id in self._problems:
            draw = 1 - rng.random()  # for every problem, and above 0; the order then depends on no other weight
            pool, weight = self._judge(problem_id, prior)
            self._pool_of[problem_id] = pool
            if problem_id in avoid:
                continue
            if pool in ("new", "mixed"):
                # In descending order of u^(1/w), each next problem is drawn in proportion to w from those that are left
                # (Efraimidis and Spirakis, 2006). `pop` takes the last, which is the largest.
                admitted.append((math.log(draw) / max(weight, _LEAST), problem_id))
            else:
                seen = self._seen.get(problem_id)
                others.append((-1 if seen is None else seen.step, draw, problem_id))
        self._admitted = [problem_id for *_, problem_id in sorted(admitted)]
        self._revisits = [problem_id for *_, problem_id in sorted(others, reverse=True)]

    def draw(self, position: int) -> StreamItem:
        """Return the problem for the next position."""
        if not self._admitted and not self._revisits:
            self._fill_queues(avoid=set(self._drawn.values()))
        if not self._admitted and not self._revisits:
            self._fill_queues(avoid=())  # every problem is being asked: ask some twice
        rng = random.Random(seed_for(self._seed, "rl/curriculum/revisit", position))  # noqa: S311
        is_revisit = rng.random() < self._cfg.revisit_frac
        queue = self._revisits if (is_revisit and self._revisits) or not self._admitted else self._admitted
        problem_id = queue.pop()
        self._drawn[position] = problem_id
        return StreamItem(position=position, problem=self._problems[problem_id], pool=self._pool_of[problem_id])

    def drawn(self, position: int) -> StreamItem:
        """Return the problem that was drawn for a position whose group is in no step yet."""
        return StreamItem(position=position, problem=self._problems[self._drawn[position]])

    def reject(self, item: StreamItem) -> None:
        """Note that a prompt cannot be asked; its problem is then unusable."""
        self._rejected.append(item.problem.problem_id)

    def end_step(self, groups: Sequence[RolloutGroup], *, unfinished: Collection[int]) -> CurriculumState:
        """See `PromptStream.end_step`."""
        for problem_id in self._rejected:
            self._remember(problem_id, num_right=0, num_judged=0)
        for group in groups:
            problem_id = group.problem.problem_id
            judged = [r.is_positive for r in group.rollouts if r.verdict.outcome.counts_for_model]
            # A failure of the judge says nothing against a problem of which there is a tag.
            if judged or problem_id not in self._tags:
                self._remember(problem_id, num_right=sum(judged), num_judged=len(judged))
        self._rejected = []
        self._drawn = {position: self._drawn[position] for position in unfinished}
        self._step += 1
        self._begin_step()
        return CurriculumState(seen=dict(self._seen), drawn=dict(self._drawn))

    def _remember(self, problem_id: str, *, num_right: int, num_judged: int) -> None:
        before = self._faded(self._seen.get(problem_id))
        self._seen[problem_id] = Seen(
            right=before.right + num_right, judged=before.judged + num_judged, step=self._step
        )

    def _faded(self, seen: Seen | None) -> Seen:
        """Return counts as they are remembered now."""
        if seen is None:
            return Seen(right=0.0, judged=0.0, step=self._step)
        share = 0.5 ** ((self._step - seen.step) / self._cfg.half_life_steps)
        return Seen(right=share * seen.right, judged=share * seen.judged, step=self._step)

    def known(self, problem_id: str) -> Seen:
        """Return the counts of RL's answers and the tag's, as they are remembered now."""
        own, tag = self._faded(self._seen.get(problem_id)), self._faded(self._tags.get(problem_id))
        return Seen(right=own.right + tag.right, judged=own.judged + tag.judged, step=self._step)

    def prior(self) -> tuple[float, float]:
        """Return a and b of a Beta distribution of the problems' pass rates, by the method of moments.

        With mean m and a + b = s, E[p (1 - p)] = m (1 - m) s / (1 + s). One problem with p = 1/2 and s = 1 is added.
        """
        weights, rates = [1.0], [0.5]
        within = [0.5 * 0.25]
        for problem_id in self._problems:
            known = self.known(problem_id)
            if known.judged > 0:
                rate = known.right / known.judged
                # Fresh answers of one group weigh 1; n / (n - 1) makes the variance of n answers unbiased.
                weights.append(min(1.0, known.judged / self._num_samples))
                rates.append(rate)
                within.append(rate * (1 - rate) * self._num_samples / (self._num_samples - 1))
        total = math.fsum(weights)
        mean = math.fsum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / total
        mean_within = math.fsum(weight * value for weight, value in zip(weights, within, strict=True)) / total
        share = min(mean_within / (mean * (1 - mean)), _MOST_WITHIN)
        strength = share / (1 - share)
        return strength * mean, strength * (1 - mean)

    def _judge(self, problem_id: str, prior: tuple[float, float]) -> tuple[Pool, float]:
        """Return a problem's pool and the probability that its group will be mixed."""
        known = self.known(problem_id)
        a, b = prior[0] + known.right, prior[1] + known.judged - known.right
        weight = mixed_probability(a, b, self._num_samples)
        seen = self._seen.get(problem_id)
        if seen is None and problem_id not in self._tags:
            return "new", weight
        # Whatever its tag says. Not `known`, which rounds to 0 after a thousand half-lives.
        if seen is not None and seen.judged == 0:
            return "unusable", weight
        if weight >= self._cfg.admit:
            return "mixed", weight
        return ("easy" if a > b else "hard"), weight


def mixed_probability(a: float, b: float, num_samples: int) -> float:
    """Return the probability that a group has right and wrong answers, for a pass rate drawn from Beta(a, b)."""
    of_both = math.lgamma(a + b) - math.lgamma(a + b + num_samples)
    all_right = math.exp(of_both + math.lgamma(a + num_samples) - math.lgamma(a))
    all_wrong = math.exp(of_both + math.lgamma(b + num_samples) - math.lgamma(b))
    return 1 - all_right - all_wrong


def _as_seen(rate: PassRate, *, most: int) -> Seen:
    """Return a tag as answers from before the first step, at most a group's: the tagger may be another model."""
    judged = min(most, rate.num_scored)
    return Seen(right=rate.value * judged, judged=judged, step=0)
