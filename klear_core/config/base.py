"""The base of every settings class, and the two readings of a config: all of it, and the part that changes the result."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Frozen, refuses unknown keys, no NaN; the docstring under a field is its help text in the UI and the docs.

    A field called `runtime` holds what never changes a result (workers, hosts, timeouts) and is left out of hashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Floor(Settings):
    """The share of its input that a stage must make something of. It is checked while the stage runs, and changes no result that passes."""

    stop_below: float = Field(default=0.5, ge=0, le=1)
    """A smaller share stops the stage. Half: where more is lost than kept, a setting or a file is wrong, not a few rows.
    With 0 only an empty result stops it."""
    warn_below: float = Field(default=0.9, ge=0, le=1)
    """A smaller share is a warning on the terminal and in the report."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.stop_below > self.warn_below:
            raise ValueError(f"stop_below = {self.stop_below} is above warn_below = {self.warn_below}")
        return self


class RareFloor(Floor):
    """A floor for what is rightly rare: a hard problem is seldom solved, and an easy one seldom teaches."""

    stop_below: float = Field(default=0.01, ge=0, le=1)
    """A smaller share stops the stage: one in a hundred is nothing that training could live on. With 0 only an empty result stops it."""
    warn_below: float = Field(default=0.1, ge=0, le=1)
    """A smaller share is a warning on the terminal and in the report."""


def result_settings(cfg: Settings) -> dict[str, Any]:
    """The settings that change the result: all but every `runtime`, at any depth, as plain JSON values."""
    kept = _without_runtime(cfg.model_dump(mode="json"))
    assert isinstance(kept, dict), type(kept)
    return kept


def config_digest(cfg: Settings) -> str:
    """20 hex digits over `result_settings`; the same for equal settings in every process and field order."""
    text = json.dumps(result_settings(cfg), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _without_runtime(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_runtime(v) for k, v in value.items() if k != "runtime"}
    if isinstance(value, list):
        return [_without_runtime(v) for v in value]
    return value
