"""Solve generated problems step by step without a network, with configurable errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import add, mul, sub
from random import Random

from klear_core.config.distill import ProceduralTeacherConfig, PuzzleTeacherConfig
from klear_core.data.generated.chains import ChainProblem, ChainStep, apply_step, parse_chain
from klear_core.data.generated.puzzles import (
    INNERMOST,
    MODULUS,
    Operation,
    Pipeline,
    Residues,
    parse_brackets,
    parse_programs,
    parse_residues,
    replace_operation,
    value_of,
)
from klear_core.distill.teachers.teacher import TeacherFailure, TeacherSample, Usage
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


# ---- puzzles ----
# Solve puzzles step by step without a network, with configurable errors that are carried on to the answer.


_BLIND_FACTORS = (4, 5, 6)
"""Brackets and chains: products by these."""
_BLIND_DIGITS = (7, 8, 9)
"""Residues: sums beyond the modulus with this last digit."""
_BLIND_SIGNS = {"at least": (">=", ">"), "at most": ("<=", "<")}
"""Programs: phrases whose comparison is written without the equal sign."""
_OPERATORS = {"+": add, "-": sub, "*": mul}
_SUM = re.compile(r"(?<![\w.()/^+*-])(?<![/^+*-] )-?\d+(?: [-+*] -?\d+)+(?![.,]?\d)(?! ?[-+*/^()])")
"""Sums: whole numbers joined by + - *, as reasoning-gym writes them (`What is 36 + 19 - 4 * 3?`); no brackets, no /."""
_MAX_TRIES = 30
"""Residues: number of tries after which a search ends without an answer. The longest right one takes 12."""


class PuzzleTeacher:
    """Writes every step of the procedure, and the answer that follows from what it wrote."""

    name = "puzzles"
    prompt_version = "puzzles-2"
    is_costly = False
    retries: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()

    def __init__(self, cfg: PuzzleTeacherConfig) -> None:
        self.cfg = cfg

    def count_earlier(self, usage: Usage) -> None:
        """Do nothing; this teacher costs nothing."""

    def expect(self, num_samples: int) -> None:
        """Do nothing: no engines run here."""

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample; samples differ only in their random errors. Other problems are `unsupported`.

        Chains are solved, too, so that a run can have them beside puzzles.
        """
        rng = Random(seed_for(seed, "distill/teacher", problem.problem_id, sample_idx))  # noqa: S311
        reply = _solve(problem.question, _Errors(cfg=self.cfg, rng=rng))
        if reply is None:
            detail = f"not a puzzle: {problem.question[:100]!r}"
            return TeacherSample(result=TeacherFailure(reason="unsupported", detail=detail))
        return TeacherSample(result=reply)

    async def close(self) -> None:
        """Do nothing; this teacher has no connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errors:
    """Draws the teacher's errors."""

    cfg: PuzzleTeacherConfig
    rng: Random

    def slips(self) -> bool:
        return self.rng.random() < self.cfg.slip_rate

    def is_blind(self) -> bool:
        return self.rng.random() < self.cfg.blind_spot_rate

    def residue(self, right: int, modulus: int, *, in_blind_spot: bool) -> int:
        """Return the value that is written for `right`.

        In the blind spot that is often one too many, a systematic error that SFT imitates; elsewhere a slip is any
        other value.
        """
        if in_blind_spot:
            return (right + 1) % modulus if self.is_blind() else right
        return (right + self.rng.randrange(1, modulus)) % modulus if self.slips() else right


def _solve(question: str, errors: _Errors) -> TeacherReply | None:
    """Return the reply to a puzzle, a chain or a sum; None for other questions."""
    if (text := parse_brackets(question)) is not None:
        return _reply(*_solve_brackets(text, errors))
    if (residues := parse_residues(question)) is not None:
        return _reply(*_solve_residues(residues, errors))
    if (pipeline := parse_programs(question)) is not None:
        return _reply(*_write_program(pipeline, errors))
    try:
        chain = parse_chain(question)
    except DataError:
        sums = _SUM.findall(question)
        return _reply(*_solve_sum(sums[0].split(), errors)) if len(sums) == 1 else None
    return _reply(*_solve_chain(chain, errors))


def _reply(lines: list[str], answer: str) -> TeacherReply:
    reasoning = "\n".join(lines)
    num_words = len(reasoning.split()) + len(answer.split())
    return TeacherReply(
        reasoning=reasoning, answer=answer, finish_reason="stop" if answer else "length", num_tokens=num_words
    )


def _solve_brackets(text: str, errors: _Errors) -> tuple[list[str], str]:
    """Return each operation with the expression that is left after it, and the box."""
    lines: list[str] = []
    while found := INNERMOST.search(text):
        in_blind_spot = found[2] == "*" and int(found[3]) in _BLIND_FACTORS
        value = errors.residue(value_of(found[1], found[2], found[3]), MODULUS, in_blind_spot=in_blind_spot)
        text = replace_operation(text, found, value)
        lines.append(f"{found[0][1:-1]}={value} {text}")
    return lines, f"\\boxed{{{text}}}"


def _solve_chain(chain: ChainProblem, errors: _Errors) -> tuple[list[str], str]:
    """Return one line for each operation, and the box."""
    lines: list[str] = []
    value = chain.start
    for step in chain.steps:
        in_blind_spot = step.operator == "*" and step.operand in _BLIND_FACTORS
        result = errors.residue(apply_step(value, step, chain.modulus), chain.modulus, in_blind_spot=in_blind_spot)
        lines.append(f"{value}{step.operator}{step.operand}={result}")
        value = result
    return lines, f"\\boxed{{{value}}}"


def _solve_sum(terms: list[str], errors: _Errors) -> tuple[list[str], str]:
    """Return one line for each operation, products first, and the box; a slip is up to nine off."""
    lines: list[str] = []
    while len(terms) > 1:
        at = terms.index("*") if "*" in terms else 1
        left, operator, right = terms[at - 1 : at + 2]
        value = _OPERATORS[operator](int(left), int(right))
        if errors.slips():
            value += errors.rng.choice([-1, 1]) * errors.rng.randint(1, 9)
        lines.append(f"{left} {operator} {right} = {value}")
        terms[at - 1 : at + 2] = [str(value)]
    return lines, f"\\boxed{{{terms[0]}}}"


def _solve_residues(puzzle: Residues, errors: _Errors) -> tuple[list[str], str]:
    """Return one line for each x that is tried, and the box; no box if the search finds nothing."""
    lines: list[str] = []
    value = puzzle.start
    for x in range(1, _MAX_TRIES + 1):
        total = value + puzzle.step
        line = f"{x}:{value}+{puzzle.step}={total}"
        value = total
        if total >= puzzle.modulus:
            in_blind_spot = total % 10 in _BLIND_DIGITS
            value = errors.residue(total - puzzle.modulus, puzzle.modulus, in_blind_spot=in_blind_spot)
            line = f"{line}-{puzzle.modulus}={value}"
        # The target is written next to the value, because a small model cannot compare the value with a target that is
        # far away in the question.
        is_found = value == puzzle.target
        lines.append(f"{line} {puzzle.target}{'y' if is_found else 'n'}")
        if is_found:
            return lines, f"\\boxed{{{x}}}"
    return lines, ""


def _write_program(pipeline: Pipeline, errors: _Errors) -> tuple[list[str], str]:
    """Return the plan, which has the Python of each operation, and the program that follows it."""
    codes = [_code_of(operation, errors) for operation in pipeline.operations]
    plan = [f"{op.words}: {code}" for op, code in zip(pipeline.operations, codes, strict=True)]
    plan.append(f"{pipeline.ending.words}: {pipeline.ending.code}")
    return plan, "\n".join(_program_lines(pipeline, codes))


def _program_lines(pipeline: Pipeline, codes: list[str]) -> Iterator[str]:
    yield "```python"
    yield "def f(a):"
    for operation, code in zip(pipeline.operations, codes, strict=True):
        yield f" a={operation.form.format(code)}"
    yield f" return {pipeline.ending.code}"
    yield "```"


def _code_of(operation: Operation, errors: _Errors) -> str:
    """Return the Python that the teacher plans for an operation; a slip is another number."""
    phrase, _, number = operation.words.rpartition(" ")
    if phrase in _BLIND_SIGNS:
        right, wrong = _BLIND_SIGNS[phrase]
        return operation.code.replace(right, wrong) if errors.is_blind() else operation.code
    if number.isdigit() and errors.slips():
        return operation.code.replace(number, str(int(number) + 1))
    return operation.code
