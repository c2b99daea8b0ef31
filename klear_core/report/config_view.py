"""List the settings of a run's config that differ from the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from klear_core.report.text import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that differs from its default: dotted key, both values as JSON, and help text."""

    key: str
    default: str
    value: str
    help_text: str


def changed_settings(cfg: BaseModel) -> list[Setting]:
    """Return every leaf setting that differs from its default, or from its class's if another class was chosen."""
    return list(_changes(cfg, _own_default(cfg), ""))


def _changes(cfg: BaseModel, default: BaseModel | None, prefix: str) -> Iterator[Setting]:
    for name, info in type(cfg).model_fields.items():
        value = getattr(cfg, name)
        # A class with required settings has no default object, but its other fields have defaults.
        default_value = getattr(default, name) if default is not None else info.default
        yield from _value_changes(value, default_value, f"{prefix}{name}", info.description or "")


def _value_changes(value: object, default: object, key: str, help_text: str) -> Iterator[Setting]:
    if value == default:
        return
    match value:
        case BaseModel():
            yield from _model_changes(value, default, key)
        case tuple() if value and all(isinstance(item, BaseModel) for item in value):
            defaults = default if isinstance(default, tuple) else ()
            for i, item in enumerate(value):
                yield from _model_changes(item, defaults[i] if i < len(defaults) else None, f"{key}.{i}")
        case _:
            yield Setting(key=key, default=_as_json(default), value=_as_json(value), help_text=help_text)


def _model_changes(value: BaseModel, default: object, key: str) -> Iterator[Setting]:
    """Compare with `default` if the classes are equal; else yield `kind` and compare with the class's defaults."""
    if isinstance(default, BaseModel) and type(default) is type(value):
        yield from _changes(value, default, f"{key}.")
        return
    if isinstance(default, BaseModel) and hasattr(value, "kind"):
        yield Setting(
            key=f"{key}.kind",
            default=_as_json(getattr(default, "kind", None)),
            value=_as_json(value.kind),
            help_text=_first_line(value),
        )
    yield from _changes(value, _own_default(value), f"{key}.")


def _first_line(cfg: BaseModel) -> str:
    return (type(cfg).__doc__ or "").strip().partition("\n")[0]


def _own_default(cfg: BaseModel) -> BaseModel | None:
    """Return an instance with all defaults; None if the class has required settings."""
    is_complete = all(not info.is_required() for info in type(cfg).model_fields.values())
    return type(cfg)() if is_complete else None


def _as_json(value: object) -> str:
    if value is PydanticUndefined:
        return NONE
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)  # dates are no JSON of their own
