"""Define the messages between the caller and the judging processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from klear_core.code_tests import CodeReference
from klear_core.config.reward import CustomReward
from klear_core.config.verify import CustomJudge, MathConfig
from klear_core.types import AnswerToJudge, JudgedAnswer
from klear_core.verify.math.values import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask:
    """Request to compare an answer with its references by algebra.

    For an answer without a box `comparison` is None, and math-verify's own extractors search `unboxed`.
    """

    golds: tuple[str, ...]
    comparison: Comparison | None
    unboxed: str
    answer: str
    """The answer as the verdict quotes it."""
    cfg: MathConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """Request to run a program on the tests that were chosen for it, or that the worker chooses from stored ones."""

    problem_id: str
    program: bytes
    reference: CodeReference
    num_tests: int
    """Number of tests to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSandbox:
    """Request to check that the sandbox isolates programs; the detail of the verdict names the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTask:
    """Request to call a reward or a judge of the user's own; the score of the verdict is the number that it returns."""

    function: CustomReward | CustomJudge
    digest: str
    """`source_digest` of the function's module when the stage began."""
    answer: JudgedAnswer | AnswerToJudge
    """The only argument: what a reward gets, or what a judge gets."""


Task = MathTask | CodeTask | CheckSandbox | UserTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The reason why a judging process gave no verdict.

    It exceeded its limit of time or memory, died, raised, was closed, was lost with its node, or has no sandbox that
    isolates.
    """

    kind: Literal["timed_out", "out_of_memory", "died", "raised", "closed", "lost", "no_sandbox"]
    detail: str
