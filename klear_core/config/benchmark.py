"""Define the settings of one benchmark."""

from __future__ import annotations

from datetime import date
from typing import Self

from pydantic import Field, model_validator

from klear_core.config.data import Source
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS, DateWindow, with_known_facts
from klear_core.config.settings import Settings


class BenchmarkConfig(Settings):
    """A named set of problems that is never trained on."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name in scores and reports."""
    known: str = Field(default="", exclude_if=lambda name: not name)
    """Published benchmark that this is, such as `aime24` (docs/data.md has the list). It fills in what else is left
    out: name, source, number of rows, window and n. Empty: a set of one's own."""
    source: Source
    expected_rows: int | None = Field(default=None, ge=1)
    """Number of rows, checked when the benchmark is loaded or reused (AIME 30, LiveCodeBench v5 279, v6 131)."""
    window: DateWindow | None = Field(default=None, exclude_if=lambda window: window is None)
    """Days of the contests whose problems are read, by the column `contest_date`; None: all."""
    num_samples: int = Field(default=4, ge=1)
    """n of avg@n. The paper: 64 for AIME and HMMT, 8 for LiveCodeBench (Table 1)."""
    published: date | None = Field(default=None, exclude_if=lambda day: day is None)
    """First day on which one of its problems was public, for sets of one's own; None: unknown, or that of `known`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: object) -> object:
        if isinstance(settings, dict) and settings.get("known"):
            return with_known_facts(settings)
        return settings

    @model_validator(mode="after")
    def _is_the_known_one(self) -> Self:
        known = KNOWN_BENCHMARKS.get(self.known)
        if known and (self.expected_rows, self.window) != (known.rows, known.window):
            found = f"expected_rows = {self.expected_rows} and window = {self.window}"
            raise ValueError(
                f"{known.title} has {known.rows} rows and the window {known.window}, not {found}: "
                f"leave out known = {self.known!r} for another set of problems"
            )
        return self

    @property
    def published_on(self) -> date | None:
        """First day on which one of its problems was public; None if it is not known."""
        known = KNOWN_BENCHMARKS.get(self.known)
        return self.published or (known.published if known else None)
