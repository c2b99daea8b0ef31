"""What travels between the caller and the judging processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from klear_core.config.verify import MathConfig
from klear_core.types import AssertTests, CodeReference
from klear_core.verify.math.values import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask:
    """Decide by algebra. `prose` is searched by math-verify's own extractors if there was no box."""

    golds: tuple[str, ...]
    question: Question | None
    prose: str
    cfg: MathConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """Run a program on the tests that were chosen for it."""

    problem_id: str
    program: bytes
    reference: CodeReference

    @property
    def num_tests(self) -> int:
        """How many tests there are."""
        tests = self.reference.tests
        return len(tests.programs) if isinstance(tests, AssertTests) else len(tests.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveSandbox:
    """Show that the sandbox isolates; answered by a verdict whose detail names the backend."""


Task = MathTask | CodeTask | ProveSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A judging process gave no verdict: it was stopped at its wall clock, died, raised, was closed, or has no sandbox that isolates."""

    kind: Literal["timed_out", "died", "raised", "closed", "no_sandbox"]
    detail: str
