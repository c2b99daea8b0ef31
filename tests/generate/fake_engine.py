"""An engine that answers from a script, for tests of code that uses engines. No model, threads or clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from klear_core.generate.engine import OpenRequests, SamplingParams, WeightSource, check_room, scored
from klear_core.types import Completion, FinishReason

END_ID = 256
"""Token id that ends every fake answer with finish reason `stop`. All other token ids are bytes of UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAnswer:
    """One scripted completion. With `after`, it is returned only once that event is set."""

    text: str
    logp: float = -0.5
    """Log-probability of every token, in nats."""
    finish_reason: FinishReason = "stop"
    after: asyncio.Event | None = None


Script = Callable[[tuple[int, ...], SamplingParams, int], FakeAnswer | Exception]
"""Maps (prompt_ids, params, sample index) to the answer, or to the exception that the request fails with."""


class FakeEngine:
    """An `InferenceEngine` and `TrainableEngine` that answers from a script and records requests and weight loads.

    Answers longer than `max_new_tokens` or `max_len` are cut and finish with `length`, as a model's would.
    """

    def __init__(self, script: Script, *, max_len: int = 1_000_000, version: int = 0) -> None:
        self.version = version
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.loads: list[tuple[WeightSource, int]] = []
        self._script = script
        self._max_len = max_len
        self._open = OpenRequests("fake engine")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return the script's answers, in sample order."""
        check_room(len(prompt_ids), params, self._max_len)
        return await self._open.run(self._answer(tuple(prompt_ids), params))

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Record the weights, and label further tokens with this version."""
        self.loads.append((weights, version))
        self.version = version

    async def close(self) -> None:
        """Fail all open requests with ResourceError."""
        self._open.close()

    async def _answer(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[Completion]:
        self.requests.append((prompt_ids, params))
        budget = min(params.max_new_tokens, self._max_len - len(prompt_ids))
        completions = []
        for sample_idx in range(params.num_samples):
            answer = self._script(prompt_ids, params, sample_idx)
            if isinstance(answer, Exception):
                raise answer
            if answer.after is not None:
                await answer.after.wait()
            if params.scored_ids:
                num = len(params.scored_ids)
                return [
                    scored(
                        params,
                        [answer.logp] * num,
                        version=self.version,
                        top_ids=tuple(range(params.num_top)) * num,
                        top_logps=[answer.logp] * num * params.num_top,
                    )
                ]
            completions.append(_completion(answer, budget=budget, version=self.version))
        return completions


def scripted(answers: dict[str, str]) -> Script:
    """Return a script that gives every sample of a prompt one text. A prompt's token ids are its UTF-8 bytes."""
    return lambda prompt_ids, _params, _sample_idx: FakeAnswer(text=answers[bytes(prompt_ids).decode()])


def _completion(answer: FakeAnswer, *, budget: int, version: int) -> Completion:
    text, finish_reason = answer.text, answer.finish_reason
    token_ids = tuple(text.encode())
    if finish_reason == "stop":
        token_ids += (END_ID,)
    if len(token_ids) > budget:
        token_ids = token_ids[:budget]
        # the cut may fall inside a character
        text, finish_reason = bytes(token_ids).decode(errors="replace"), "length"
    return Completion(
        text=text,
        token_ids=token_ids,
        logps=(answer.logp,) * len(token_ids),
        finish_reason=finish_reason,
        policy_versions=(version,) * len(token_ids),
    )
