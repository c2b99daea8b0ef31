"""Builders and fakes of distillation's seams."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from klear_core.artifacts.manifest import StageSummary
from klear_core.config.distill import DistillConfig
from klear_core.distill.collect import build_teacher, collect_traces
from klear_core.distill.teachers.teacher import Teacher, TeacherFailure, TeacherResult, TeacherSample, Usage
from klear_core.metrics import NullTelemetry
from klear_core.types import Difficulty, Domain, MathReference, Outcome, Problem, TeacherReply, TeacherTrace, Verdict

RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0)
WRONG = Verdict(outcome=Outcome.SCORED, score=0.0, detail="different text")
UNJUDGED = Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail="worker died")


def make_problem(index: int, difficulty: Difficulty = Difficulty.HARD, question: str = "") -> Problem:
    return Problem(
        problem_id=f"p{index:03d}",
        source="test",
        domain=Domain.MATH,
        question=question or f"question {index}",
        reference=MathReference(answers=(str(index),)),
        difficulty=difficulty,
    )


def make_reply(answer: str = "\\boxed{1}", **changes: object) -> TeacherReply:
    fields: dict[str, object] = {"reasoning": "1=1", "answer": answer, "finish_reason": "stop", "num_tokens": 3}
    return TeacherReply(**fields | changes)  # type: ignore[arg-type]


def make_trace(verdict: Verdict = RIGHT, difficulty: Difficulty = Difficulty.HARD, **changes: object) -> TeacherTrace:
    fields: dict[str, object] = {
        "problem_id": "p000",
        "question": "question 0",
        "difficulty": difficulty,
        "source": "test",
        "teacher": "fake",
        "sample_idx": 0,
        "reasoning": "1=1",
        "answer": "\\boxed{1}",
        "finish_reason": "stop",
        "num_tokens": 3,
        "verdict": verdict,
        "prompt_version": "1",
    }
    return TeacherTrace(**fields | changes)  # type: ignore[arg-type]


class FakeTeacher:
    """Answers with the problem's number, or as `script` says for a problem; counts how often each was asked."""

    name = "fake"
    prompt_version = "1"
    retries: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()

    def __init__(
        self, script: Mapping[str, Sequence[TeacherResult] | BaseException] | None = None, *, is_costly: bool = False
    ) -> None:
        self.script = script or {}
        self.asked: Counter[str] = Counter()
        self.is_costly = is_costly
        self.earlier = Usage()
        self.num_expected = 0

    def expect(self, num_samples: int) -> None:
        self.num_expected += num_samples

    def count_earlier(self, usage: Usage) -> None:
        self.earlier = usage

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        self.asked[problem.problem_id] += 1
        scripted = self.script.get(problem.problem_id)
        if isinstance(scripted, BaseException):
            raise scripted
        reply = make_reply(f"\\boxed{{{int(problem.problem_id[1:])}}}")
        result = scripted[sample_idx % len(scripted)] if scripted else reply
        if not self.is_costly:
            return TeacherSample(result=result)
        num_replies = int(isinstance(result, TeacherReply))
        return TeacherSample(
            result=result, usage=Usage(attempts=1, replies=num_replies, input_tokens=2, output_tokens=3, cost=0.5)
        )

    async def close(self) -> None:
        pass


class FakeJudge:
    """Right if the reference stands after the thinking; `verdicts` overrides by problem."""

    def __init__(self, verdicts: Mapping[str, Verdict] | None = None) -> None:
        self.verdicts = verdicts or {}
        self.judged: list[str] = []

    async def judge_async(self, problem: Problem, response: str) -> Verdict:
        self.judged.append(response)
        assert isinstance(problem.reference, MathReference)
        is_right = response.endswith(f"</think>\n\n\\boxed{{{problem.reference.answers[0]}}}")
        return self.verdicts.get(problem.problem_id, RIGHT if is_right else WRONG)


FAILED = TeacherFailure(reason="timeout", detail="no reply within 1 s, 6 tries")


def collect(
    cfg: DistillConfig, problems: Sequence[Problem], workdir: Path, teacher: Teacher | None = None
) -> StageSummary:
    """Collect traces of this teacher, by default the one that the settings name, as the stage does."""

    async def run() -> StageSummary:
        asked = teacher or build_teacher(cfg.teacher)
        judge = FakeJudge().judge_async
        try:
            return await collect_traces(cfg, asked, judge, problems, seed=7, workdir=workdir, telemetry=NullTelemetry())
        finally:
            await asked.close()

    return asyncio.run(run())
