"""Compute rewards of the user's own for a judged answer, in the judges' worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from klear_core.config.reward import CustomReward
from klear_core.config.user_code import source_digest
from klear_core.errors import JudgeError, RewardError
from klear_core.types import Completion, JudgedAnswer, MathReference, Problem, Verdict
from klear_core.verify import JudgeHealth, JudgePool

log = logging.getLogger(__name__)


class UserRewards:
    """Computes the configured functions' values; see `RewardValues`. Their source must not change afterwards."""

    def __init__(self, rewards: Sequence[CustomReward], judges: JudgePool) -> None:
        """Hash the sources. Raise ConfigError if one is missing."""
        self._judges = judges
        # The digest goes with each request, so that a worker notices if the source is another by now.
        self._rewards = {reward: source_digest(reward.module) for reward in rewards}
        self._health = {
            reward.label: JudgeHealth(
                max_failed_frac=judges.cfg.max_failed_frac,
                min_failed_count=judges.cfg.min_failed_count,
                what=f"values of the reward {reward.label!r}",
            )
            for reward in rewards
        }

    async def __call__(self, problem: Problem, completion: Completion, verdict: Verdict) -> dict[str, float | None]:
        """Return each reward's value by name, None where the function failed.

        Raise RewardError when one fails too often: the limits are those of the judges.
        """
        if not verdict.outcome.counts_for_model or completion.finish_reason == "abort":
            return {}  # such an answer is dropped from its group, whatever its rewards are
        reference = problem.reference
        answer = JudgedAnswer(
            problem_id=problem.problem_id,
            source=problem.source,
            question=problem.question,
            answers=reference.answers if isinstance(reference, MathReference) else (),
            text=completion.text,
            score=verdict.score,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        values = await asyncio.gather(*(self._value(reward, answer) for reward in self._rewards))
        return dict(zip(self._health, values, strict=True))  # both dicts are in the order of the settings

    async def _value(self, reward: CustomReward, answer: JudgedAnswer) -> float | None:
        future = self._judges.submit_reward(reward, self._rewards[reward], answer)
        result = await asyncio.wrap_future(future)
        health = self._health[reward.label]
        # Before `record`, which counts this one: a warning for each failure would flood the log.
        is_first_failure = not result.outcome.counts_for_model and health.num_failed == 0
        try:
            health.record(result)
        except JudgeError as e:
            raise RewardError(str(e)) from e
        if result.outcome.counts_for_model:
            return result.score
        if is_first_failure:
            log.warning("the reward %r failed on an answer: %s", reward.label, result.detail)
        return None
