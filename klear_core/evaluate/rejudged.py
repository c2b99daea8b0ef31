"""Describe the result of judging stored answers again: scores under both judgements, and the changed verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from klear_core.config.settings import Settings
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ArtifactError
from klear_core.evaluate.counts import Difference, Shares
from klear_core.evaluate.generations import REJUDGE_FILE, Decoding
from klear_core.types import Outcome, Verdict

Mark = Literal["right", "wrong", "no answer", "not judged", "no verdict"]


class Change(Settings):
    """One answer whose verdict changed."""

    benchmark: str
    problem_id: str
    template: str
    """Name of the prompt template; empty for the question as it stands."""
    decoding: Decoding
    sample_idx: int
    before: Mark
    after: Mark
    detail_before: str
    detail_after: str


class Rescored(Settings):
    """One benchmark's answers of one template and decoding under both judgements."""

    benchmark: str
    template: str
    """Name of the prompt template; empty for the questions as they stand."""
    decoding: Decoding
    before: Shares
    after: Shares
    difference: Difference | None
    """After minus before over the problems scored in both; None if there is none."""
    changes: dict[str, int]
    """Answers by change of their verdict, such as `wrong to right`."""

    @property
    def num_changed(self) -> int:
        """Answers whose verdict changed."""
        return sum(self.changes.values())


class RejudgeSummary(Settings):
    """Result of judging a set of answers again, as stored in `rejudge.json`."""

    name: str
    origin: str
    layout: str
    verify_before: VerifyConfig | None
    """Settings of the judge whose verdicts were stored; None if another program judged, or nobody."""
    verify_after: VerifyConfig
    templates: dict[str, str]
    """Texts of the prompt templates, by name."""
    confidence: float
    benchmarks: tuple[Rescored, ...]
    num_unread: int
    unread: tuple[str, ...]
    """The first rows that could not be read, each with its place and the reason."""
    first_changes: tuple[Change, ...]
    notes: tuple[str, ...]


def mark_of(verdict: Verdict | None) -> Mark:
    """Return a verdict in a word. A program that passes some of its tests is wrong."""
    if verdict is None:
        return "no verdict"
    if not verdict.outcome.counts_for_model:
        return "not judged"
    if verdict.outcome is Outcome.NO_ANSWER:
        return "no answer"
    return "right" if verdict.is_correct else "wrong"


def read_summary(folder: Path) -> RejudgeSummary:
    """Return the summary of a folder that `klear rejudge` wrote."""
    path = folder / REJUDGE_FILE
    try:
        return RejudgeSummary.model_validate_json(path.read_bytes())
    except ValidationError as e:
        raise ArtifactError(f"{path}: not a summary of this version of Klear: {e}") from e
