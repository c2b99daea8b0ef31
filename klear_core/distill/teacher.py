"""Define the interface of teachers: they return one sample at a time, or the reason why it is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from klear_core.errors import TeacherError
from klear_core.prompts import THINK_CLOSE, THINK_OPEN, split_response
from klear_core.types import Domain, Problem, TeacherReply


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """One sample that could not be obtained. `reason` is the slug to count by, `detail` the text for people."""

    reason: str
    detail: str


TeacherResult = TeacherReply | TeacherFailure

OVER_BUDGET = "over_budget"
"""Reason of samples that were not requested because the budget was spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and money spent on samples, failed attempts included."""

    attempts: int = 0
    replies: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    estimated: int = 0
    """Replies whose endpoint sent no token counts."""
    unseeded: int = 0
    """Replies to seeded requests without a `system_fingerprint`, by which a server vouches for its seeds."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def tokens(self) -> int:
        """Return prompt and reply tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSample:
    """The result of one sample and what all attempts at it used."""

    result: TeacherResult
    usage: Usage = field(default_factory=Usage)


class Instructions(Protocol):
    """Settings of a teacher that is asked in words."""

    @property
    def math_instruction(self) -> str:
        """Return what is appended to math questions; empty appends nothing."""
        ...

    @property
    def code_instruction(self) -> str:
        """Return what is appended to code questions; empty appends nothing."""
        ...


def question_of(problem: Problem, cfg: Instructions) -> str:
    """Return the question with the teacher's instruction for its domain."""
    instruction = cfg.math_instruction if problem.domain is Domain.MATH else cfg.code_instruction
    return f"{problem.question}\n\n{instruction}" if instruction else problem.question


def prompt_version_of(cfg: Instructions) -> str:
    """Return a name for the instructions, which changes with their wording."""
    # A separator that no text has: words that move from one instruction to the other change the name.
    instructions = f"{cfg.math_instruction}\x1f{cfg.code_instruction}".encode()
    return "chat-" + hashlib.blake2b(instructions, digest_size=4).hexdigest()


def split_tags(content: str, reasoning: str = "") -> tuple[str, str]:
    """Return reasoning and answer of a reply whose text may have think tags; `reasoning` is what came apart from it."""
    if THINK_CLOSE in content or (THINK_OPEN in content and not reasoning):
        parts = split_response(content)
        content, thought = parts.answer, parts.reasoning.strip()
        # A thought that came both ways is kept once.
        if thought not in reasoning:
            reasoning = f"{reasoning.strip()}\n\n{thought}"
    return reasoning.strip(), content.strip()


class TeacherRejectsError(TeacherError):
    """The teacher rejects these settings (key, address, model), so retrying cannot help."""

    is_permanent = True


class BudgetError(TeacherError):
    """The budget is spent before the stage is done; what was paid for is kept for the next run."""

    is_permanent = True


class Teacher(Protocol):
    """Solves problems. `sample` may be called concurrently without limit; the teacher bounds its requests itself."""

    name: str
    prompt_version: str
    """Version of the prompt; it changes whenever the wording sent with a problem changes."""
    is_costly: bool
    """Whether replies cost time or money, so that each is written to the disk as it arrives."""

    @property
    def retries(self) -> Mapping[str, int]:
        """Return the number of retried requests so far, by reason."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings about the endpoints, for the report."""
        ...

    def count_earlier(self, usage: Usage) -> None:
        """Count what earlier runs of the stage spent against the budget."""
        ...

    def expect(self, num_samples: int) -> None:
        """Count on so many more samples, or fewer if negative: a teacher whose engines run here closes idle ones."""
        ...

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample of a problem. `seed` is the run's; the sample's own seed is derived from it.

        Raise TeacherError if the teacher cannot be reached at all.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
