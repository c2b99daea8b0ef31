"""What a source hands over, before anything is decided about it."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.types import Domain, Reference, problem_id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A question with its reference as one source has it; curation turns it into a Problem or drops it."""

    source: str
    domain: Domain
    question: str
    reference: Reference
    rating: float | None
    """The source's own difficulty as a share of its scale, in [0, 1]; None where the source has none."""

    @property
    def problem_id(self) -> str:
        """The id that the Problem will have."""
        return problem_id_of(self.question, self.domain)
