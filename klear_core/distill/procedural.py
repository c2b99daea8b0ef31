"""Solve chain problems step by step without a network, with configurable errors."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from klear_core.config.distill import ProceduralTeacherConfig
from klear_core.data.procedural import ChainProblem, ChainStep, apply_step, parse_chain
from klear_core.distill.teacher import TeacherFailure, TeacherSample, Usage
from klear_core.errors import DataError
from klear_core.seeding import seed_for
from klear_core.types import Problem, TeacherReply


class ProceduralTeacher:
    """Writes `3+4=7`, `7*7=9`, ... and boxes the last value; later steps continue from the result of a wrong one."""

    name = "procedural"
    prompt_version = "chain-1"
    is_costly = False
    retries: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()

    def __init__(self, cfg: ProceduralTeacherConfig) -> None:
        self.cfg = cfg

    def count_earlier(self, usage: Usage) -> None:
        """Do nothing; this teacher costs nothing."""

    def expect(self, num_samples: int) -> None:
        """Do nothing: no engines run here."""

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample; samples differ only in their random errors. Other than chain problems are
        `unsupported`."""
        try:
            chain = parse_chain(problem.question)
        except DataError as e:
            return TeacherSample(result=TeacherFailure(reason="unsupported", detail=str(e)))
        rng = Random(seed_for(seed, "distill/teacher", problem.problem_id, sample_idx))  # noqa: S311
        return TeacherSample(result=self._write(chain, rng))

    async def close(self) -> None:
        """Do nothing; this teacher has no connections."""

    def _write(self, chain: ChainProblem, rng: Random) -> TeacherReply:
        lines: list[str] = []
        value = chain.start
        for step in chain.steps:
            result = self._result(value, step, chain.modulus, rng)
            lines.append(f"{value}{step.operator}{step.operand}={result}")
            value = result
        reasoning, answer = "\n".join(lines), f"\\boxed{{{value}}}"
        num_words = len(reasoning.split()) + len(answer.split())
        return TeacherReply(reasoning=reasoning, answer=answer, finish_reason="stop", num_tokens=num_words)

    def _result(self, value: int, step: ChainStep, modulus: int, rng: Random) -> int:
        """Return the correct value, or with `slip_rate` any other one.

        For multiplications in the blind spot, return the correct value plus one with `blind_spot_rate`: a systematic
        error that SFT imitates, unlike a slip.
        """
        right = apply_step(value, step, modulus)
        if step.operator == "*" and step.operand in self.cfg.blind_spot_factors:
            return (right + 1) % modulus if rng.random() < self.cfg.blind_spot_rate else right
        if rng.random() < self.cfg.slip_rate:
            return (right + rng.randrange(1, modulus)) % modulus
        return right
