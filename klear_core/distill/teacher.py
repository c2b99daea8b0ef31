"""What a teacher is: it is asked for samples of one problem and gives each back, or says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from klear_core.errors import TeacherError
from klear_core.types import Problem, TeacherReply


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """One sample that was not had. `reason` is a slug to count by, `detail` says more to a person."""

    reason: str
    detail: str


TeacherResult = TeacherReply | TeacherFailure


class TeacherRejectsError(TeacherError):
    """The teacher refuses to work with these settings (key, address, model); asking again cannot help."""

    is_permanent = True


class Teacher(Protocol):
    """Solves problems. Calls overlap freely: bounding its requests is the teacher's own business."""

    name: str
    prompt_version: str
    """Changes whenever a problem is put to the teacher in other words."""

    @property
    def retries(self) -> Mapping[str, int]:
        """Requests that were asked again so far, by reason."""
        ...

    async def solve(self, problem: Problem, *, num_samples: int, seed: int) -> Sequence[TeacherResult]:
        """`num_samples` results in sample order; `seed` is the run's. TeacherError if nobody can be asked at all."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
