"""Write settings as TOML: a config as a profile with every setting, or one setting as an option of a command."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from klear_core.config.pipeline import PipelineConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(text: str) -> object:
    """Return the value of a TOML expression; text that is none stands for itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def as_option(key: str, value: object) -> str:
    """Return the option that sets a setting, quoted for the shell: `--set 'given.score_despite=["aime24"]'`."""
    stands_for_itself = isinstance(value, str) and toml_value(value) == value
    text = value if stands_for_itself else _value(value)
    return f"--set {shlex.quote(f'{key}={text}')}"


def profile_toml(config: PipelineConfig) -> str:
    """Return a profile's file with the settings of a run, without workspace and machine. Other versions' defaults
    cannot change it.

    A setting of None is left out, because TOML has no null; where None is not the default, it is written as "none".
    """
    tree = config.model_dump(mode="json", exclude_none=True, exclude={"workspace", "hardware"})
    _name_nones(config, tree)
    top = [f"{_key(name)} = {_value(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    tables = []
    for name, value in tree.items():
        if isinstance(value, dict):
            tables += ["", f"[{_key(name)}]", *(f"{key} = {_value(leaf)}" for key, leaf in _leaves(value, ""))]
    return "\n".join([*top, *tables]) + "\n"


def _name_nones(cfg: BaseModel, tree: dict[str, Any]) -> None:
    """Add to the tree the settings that are None and not so by default: left out, they would take the default."""
    for name, field in type(cfg).model_fields.items():
        value = getattr(cfg, name)
        if value is None and field.default is not None:
            tree[name] = "none"
        elif isinstance(value, BaseModel) and name in tree:
            _name_nones(value, tree[name])


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
