"""Count what entered a step, what left it, and what was dropped by reason; the sums must agree."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from klear_core.config.settings import Settings


class LedgerStep(Settings):
    """One step of a stage. `num_in == num_out + sum(dropped)`, checked on construction."""

    step: str
    """The step as a slug: `dedup`, `judge`, `group_filter`."""
    unit: str
    """The items counted: `problem`, `trace`, `rollout`, `answer`, `row`."""
    num_in: int = Field(ge=0)
    num_out: int = Field(ge=0)
    dropped: dict[str, int] = {}
    """Count by reason slug."""
    noted: dict[str, int] = {}
    """Counts of items that were kept all the same (cut, retried, wrong but kept); not part of the sum."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        lost = sum(self.dropped.values())
        if self.num_in != self.num_out + lost:
            raise ValueError(
                f"ledger step {self.step!r} does not add up: {self.num_in} in, {self.num_out} out, {lost} dropped"
            )
        return self


class FileRecord(Settings):
    """One file of an artifact, or one that it refers to."""

    path: str
    """Path relative to the artifact or the given folder, with `/`."""
    size: int
    """Size in bytes."""
    sha256: str


class GivenRecord(Settings):
    """The origin of a given result, with its files, checksums and licence."""

    origin: str
    """Folder, or `owner/name@0123456` on the Hub."""
    licence: str
    """Licence that is declared or that its card states; `not stated` otherwise."""
    files: tuple[FileRecord, ...]


class StageSummary(Settings):
    """A stage's summary of its result; it becomes part of the artifact's manifest."""

    counts: dict[str, int | float] = {}
    """The few numbers to see first (problems, tokens, steps, score)."""
    ledger: tuple[LedgerStep, ...] = ()
    seeds: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    """Warnings for the reader of the report (less isolation than asked for, all ratios were 1)."""
    given: GivenRecord | None = None
    """Origin of the result, if the stage took one that exists."""
