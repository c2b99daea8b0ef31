"""Define the record of a decision on the champion, as stored in `decision.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from klear_core.config.promote import PromoteConfig
from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.gate import Comparison

DECISION_FILE = "decision.json"
PROBLEMS_FILE = "problems.json"
"""Ids of the problems that both models were asked, by benchmark."""

RuleName = Literal[
    "comparable", "non-inferior", "better", "contaminated", "truncated", "no answer", "judge failed", "not rolled back"
]
RivalIs = Literal["champion", "first model of the run", "nobody"]


class Contender(Settings):
    """A model of the comparison and its scores, as artifacts `kind/fingerprint`."""

    model: str
    evaluation: str
    run: str
    """Flow run that made it champion, or that is being decided on."""
    version: int | None = None
    """Version in the registry; None for a model that is not champion."""


class Check(Settings):
    """One part of the rule, on one benchmark or on all."""

    rule: RuleName
    benchmark: str = ""
    """Empty: all benchmarks."""
    is_passed: bool
    text: str
    """Figures and limit."""

    @property
    def name(self) -> str:
        """The rule, and the benchmark if it is about one: `non-inferior on aime24`."""
        return f"{self.rule} on {self.benchmark}" if self.benchmark else self.rule


class SharedProblems(Settings):
    """The problems of one benchmark that both models were asked."""

    benchmark: str
    num_shared: int
    num_only_new: int
    num_only_old: int


class Decision(Settings):
    """The decision on one model, with its evidence."""

    is_passed: bool
    sentence: str
    candidate: Contender
    rival: Contender | None
    rival_is: RivalIs
    rule: PromoteConfig
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    """Paired differences, the new model minus the other; empty if the two cannot be compared."""
    shared: tuple[SharedProblems, ...]


def read_decision(folder: Path) -> Decision:
    """Return the decision of an artifact folder; ArtifactError names the file."""
    path = folder / DECISION_FILE
    try:
        return Decision.model_validate_json(path.read_bytes())
    except OSError as e:
        raise ArtifactError(f"{path}: cannot be read ({e.strerror})") from e
    except ValidationError as e:
        raise ArtifactError(f"{path}: not a decision of this version of Klear: {e}") from e


def short_name(artifact: str) -> str:
    """Shorten `kind/fingerprint` for people: `rl 259c66eb`."""
    kind, _, fingerprint = artifact.partition("/")
    return f"{kind} {fingerprint[:8]}"
