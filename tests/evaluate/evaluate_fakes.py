"""Builders and fakes of evaluation's seams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from klear_core.evaluate.sample import EngineAnswerer, EvalSetup
from klear_core.generate.engine import SamplingParams
from klear_core.types import (
    Completion,
    Difficulty,
    Domain,
    EvalSample,
    FinishReason,
    MathReference,
    Outcome,
    Problem,
    Verdict,
)

RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0)
WRONG = Verdict(outcome=Outcome.SCORED, score=0.0)
SILENT = Verdict(outcome=Outcome.NO_ANSWER, score=0.0)
UNJUDGED = Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail="worker died")


def make_problem(index: int, difficulty: Difficulty = Difficulty.HARD) -> Problem:
    return Problem(
        problem_id=f"p{index:03d}",
        source="test",
        domain=Domain.MATH,
        question=f"{index}",
        reference=MathReference(answers=(str(index),)),
        difficulty=difficulty,
    )


def make_sample(index: int, sample_idx: int, verdict: Verdict, **changes: object) -> EvalSample:
    fields: dict[str, object] = {
        "benchmark": "toy",
        "problem_id": f"p{index:03d}",
        "question": f"{index}",
        "difficulty": Difficulty.HARD,
        "decoding": "sampled",
        "sample_idx": sample_idx,
        "response": "text",
        "num_tokens": 10,
        "finish_reason": "stop",
        "verdict": verdict,
    }
    return EvalSample(**fields | changes)  # type: ignore[arg-type]


def render(question: str) -> tuple[int, ...]:
    return (int(question),)


Reply = tuple[str, FinishReason] | BaseException


class FakeEngine:
    """Answers prompt `(i,)` with `i` and the seed's parity, or as `script` says for that prompt; remembers what it was asked."""

    def __init__(self, script: Mapping[int, Reply] | None = None) -> None:
        self.script = script or {}
        self.asked: list[tuple[int, SamplingParams]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        (number,) = prompt_ids
        self.asked.append((number, params))
        await asyncio.sleep(0)
        reply = self.script.get(number, (f"answer {number}, {params.seed % 2}", "stop"))
        if isinstance(reply, BaseException):
            raise reply
        text, finish_reason = reply
        ids = tuple(text.encode())
        return [
            Completion(
                text=text,
                token_ids=ids,
                logps=(0.0,) * len(ids),
                finish_reason=finish_reason,
                policy_versions=(0,) * len(ids),
            )
        ] * params.num_samples

    async def close(self) -> None:
        pass


class FakeJudge:
    """Answers that end in 1 are right; `rule` overrides."""

    def __init__(self, rule: Callable[[Problem, str], Verdict | None] = lambda _p, _r: None) -> None:
        self.rule = rule
        self.judged: list[str] = []

    async def judge_async(self, problem: Problem, response: str) -> Verdict:
        self.judged.append(problem.problem_id)
        return self.rule(problem, response) or (RIGHT if response.endswith("1") else WRONG)


def make_setup(engine: FakeEngine | None = None, judge: FakeJudge | None = None) -> EvalSetup:
    answerer = EngineAnswerer(engine=engine or FakeEngine(), render=render)
    return EvalSetup(answer=answerer.answer, judge=(judge or FakeJudge()).judge_async)
