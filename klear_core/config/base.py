"""The base of every settings class, and the two readings of a config: all of it, and the part that changes the result."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, refuses unknown keys, no NaN; the docstring under a field is its help text in the UI and the docs.

    A field called `runtime` holds what never changes a result (workers, hosts, timeouts) and is left out of hashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


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
