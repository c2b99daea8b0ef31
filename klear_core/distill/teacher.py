"""Define the interface of teachers: they return samples for a problem, or the reason why a sample is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from klear_core.errors import TeacherError
from klear_core.types import Problem, TeacherReply


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """One sample that could not be obtained. `reason` is the slug to count by, `detail` the text for people."""

    reason: str
    detail: str


TeacherResult = TeacherReply | TeacherFailure


class TeacherRejectsError(TeacherError):
    """The teacher rejects these settings (key, address, model), so retrying cannot help."""

    is_permanent = True


class Teacher(Protocol):
    """Solves problems. `solve` may be called concurrently without limit; the teacher bounds its requests itself."""

    name: str
    prompt_version: str
    """Version of the prompt; it changes whenever the wording sent with a problem changes."""

    @property
    def retries(self) -> Mapping[str, int]:
        """Return the number of retried requests so far, by reason."""
        ...

    async def solve(self, problem: Problem, *, num_samples: int, seed: int) -> Sequence[TeacherResult]:
        """Return `num_samples` results in sample order; `seed` is the run's.

        Raise TeacherError if the teacher cannot be reached at all.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
