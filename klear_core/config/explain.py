"""Explain errors in settings: the key as a user writes it, its value, and what is allowed or may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from klear_core.config.toml import as_option


def explained(invalid: ValidationError, model: type[BaseModel]) -> str:
    """Describe all errors in settings of `model`: each key with its value and what is allowed or may be meant."""
    return "; ".join(dict.fromkeys(_explain(error, model) for error in invalid.errors()))


def _explain(error: Any, model: type[BaseModel]) -> str:
    """Format one validation error as `key = value: problem`, with a suggestion for a misspelt key."""
    loc = [str(part) for part in error["loc"]]
    key = ".".join(_without_tags(loc, model))
    if error["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1], model)
        close = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{key}: missing, and it has no default"
    if error["type"] == "value_error":  # from our validators, whose messages name the values
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    problem = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    if _may_hold_a_key(loc, str(error["input"])):
        return f"{key}: {problem}; its value is not shown, because it may hold a key"
    return f"{key} = {error['input']!r}: {problem}{_typed(key, error)}"


def _typed(key: str, error: Any) -> str:
    """Return how to type a list or table if there is text in its place: a shell takes quotes away, or there were none.

    Empty for other errors, and for places inside lists, which `--set` does not reach.
    """
    text = error["input"]
    if not isinstance(text, str) or any(part.isdigit() for part in key.split(".")):
        return ""
    if error["type"] == "tuple_type":
        words = [word.strip(" \"'") for word in text.strip("[] ").split(",")]
        return f"; a list is typed as {as_option(key, [{'key': 'text'}] if '{' in text else words)}"
    if error["type"] in ("dict_type", "model_type"):
        return f"; a table is typed as {as_option(key, {'key': 'text'})}"
    return ""


def _may_hold_a_key(loc: Sequence[str], value: str) -> bool:
    """Return whether the value may be an API key that was put into this setting by mistake."""
    setting = loc[-1] if loc else ""
    return setting in ("api_key_env", "api_key_block") or (setting == "base_url" and not {"@", "?"}.isdisjoint(value))


def _without_tags(loc: Sequence[str], model: Any) -> list[str]:
    """Return the key path as a user writes it, without the tags that pydantic inserts for tagged unions."""
    keys: list[str] = []
    for part in loc:
        options = _models_in(model)
        tagged = [o for o in options if _tag_of(o) == part]
        fields = [o.model_fields[part] for o in options if part in o.model_fields]
        if tagged and not fields:
            model = tagged[0]
            continue
        keys.append(part)
        if fields:
            model = fields[0].annotation
    return keys


def _known_keys(loc: Sequence[str], model: Any) -> list[str]:
    """Return the keys that are allowed at a place in the settings, in alphabetical order."""
    for part in loc:
        options = _models_in(model)
        tagged = [o for o in options if _tag_of(o) == part]
        fields = [o.model_fields[part] for o in options if part in o.model_fields]
        if tagged:
            model = tagged[0]
        elif fields:
            model = fields[0].annotation
    return sorted({name for option in _models_in(model) for name in option.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes in an annotation: the class itself, a union's members, a tuple's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]


def _tag_of(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    return str(kind.default) if kind is not None else None
