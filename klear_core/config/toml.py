"""Write a config as the TOML of a profile, with every setting, so that other versions' defaults cannot change it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from klear_core.config.pipeline import PipelineConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def profile_toml(config: PipelineConfig) -> str:
    """Return a profile's file with the settings of a run, without workspace and machine.

    A setting of None is left out, because TOML has no null. That is safe: None is the default wherever it is allowed.
    """
    tree = config.model_dump(mode="json", exclude_none=True, exclude={"workspace", "hardware"})
    top = [f"{_key(name)} = {_value(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    tables = []
    for name, value in tree.items():
        if isinstance(value, dict):
            tables += ["", f"[{_key(name)}]", *(f"{key} = {_value(leaf)}" for key, leaf in _leaves(value, ""))]
    return "\n".join([*top, *tables]) + "\n"


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + _key(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_value(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # strings, numbers and booleans are written as in JSON, except for one character that only TOML escapes
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name)
