"""Define the records that the model registry keeps: promotions, rollbacks and the versions they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.config.promote import Champion
from klear_core.config.settings import Settings


class Promotion(Settings):
    """A decision that a model becomes champion, as the registry keeps it."""

    model: str
    """Artifact of the model, `kind/fingerprint`."""
    model_uri: str
    evaluation: str
    evaluation_uri: str
    decision: str
    """Artifact of the decision, `kind/fingerprint`."""
    decision_uri: str
    run: str
    """Flow run that decided."""
    over: int | None
    """Version that was champion; None for the first champion."""


class Rollback(Settings):
    """Record of a rollback: who took the alias away from a version, when, and why."""

    by: str
    why: str
    to: int
    """Version that became champion again."""
    at: str
    """Time in UTC, ISO 8601. It is written last: with it the record is complete."""

    @property
    def sentence(self) -> str:
        """The facts in words."""
        return f"rolled back to version {self.to} by {self.by} at {self.at}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the registered model that Klear made."""

    number: int
    promotion: Promotion
    promoted_at: str
    """Time at which the alias moved here, in UTC; empty if it never did."""
    rollback: Rollback | None

    def as_champion(self) -> Champion:
        """Return what a decision needs to know of it."""
        return Champion(
            version=self.number,
            model=self.promotion.model,
            model_uri=self.promotion.model_uri,
            evaluation=self.promotion.evaluation,
            evaluation_uri=self.promotion.evaluation_uri,
            run=self.promotion.run,
        )
