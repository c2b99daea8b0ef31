"""Define the base class of all settings, hash those that change a result, flatten them, and list those that differ."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

VariableName = Annotated[str, Field(pattern="^([A-Za-z_][A-Za-z0-9_]*)?$")]
"""Name of an environment variable, or empty: a key or an address that was put there by mistake is refused."""


class Settings(BaseModel):
    """Base class: frozen, refuses unknown keys and NaN; a field's docstring is its help text in the UI and the docs.

    A field called `runtime` holds settings that never change a result (workers, hosts, timeouts); hashes leave it out.
    """

    as_before: ClassVar[Mapping[str, JsonValue]] = {}
    """Fields added since the last release, and the value of each with which a stage does what it did without the field.
    Hashes leave a field out at that value, so that an upgrade does not make finished stages again."""

    places: ClassVar[Sequence[str]] = ()
    """Fields that only say where a file is. Its content is an input of the stage, so hashes leave the place out."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # pydantic's own message is in tracebacks; ours shows values that hold no key
    )


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~`; a `~name` without such a user is a name like others."""
    return Path(os.path.expanduser(path))


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this machine's processor has instructions for products of bfloat16 that Klear uses."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) is not None


def _by_processor(value: object) -> object:
    if value != "auto":
        return value
    return "bfloat16" if multiplies_bfloat16() else "float32"


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_by_processor)]
"""A data type. `auto` becomes bfloat16 where the processor of the machine that reads the settings multiplies it fast,
and float32 elsewhere; hashes have what it became."""


class YieldLimits(Settings):
    """Minimum share of a stage's input that must be usable. The check changes no result that passes it."""

    stop_below: float = Field(default=0.5, ge=0, le=1)
    """A smaller share stops the stage. Default one half: if more is lost than kept, a setting or a file is wrong, not
    just a few rows. With 0 only an empty result stops it."""
    warn_below: float = Field(default=0.9, ge=0, le=1)
    """A smaller share causes a warning on the terminal and in the report."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.stop_below > self.warn_below:
            raise ValueError(f"stop_below = {self.stop_below} is above warn_below = {self.warn_below}")
        return self


class RareYieldLimits(YieldLimits):
    """A floor for shares that may be small: hard problems are rarely solved, and easy ones rarely give a gradient."""

    stop_below: float = Field(default=0.01, ge=0, le=1)
    """A smaller share stops the stage: less than one in a hundred is too little to train on. With 0 only an empty
    result stops it."""
    warn_below: float = Field(default=0.1, ge=0, le=1)
    """A smaller share causes a warning on the terminal and in the report."""


def result_settings(cfg: Settings) -> dict[str, Any]:
    """Return the settings that change the result as JSON values, without `runtime`, `places` and `as_before` at any
    depth."""
    kept = _without_unhashed(cfg, cfg.model_dump(mode="json"))
    assert isinstance(kept, dict), type(kept)
    return kept


def config_digest(cfg: Settings) -> str:
    """Return a hash of `result_settings`, 20 hex digits; it does not depend on the process or the order of fields."""
    text = json.dumps(result_settings(cfg), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _without_unhashed(value: object, dumped: object) -> object:
    """Return `dumped`, the JSON form of `value`, without what hashes leave out; both are walked side by side."""
    if isinstance(dumped, dict):
        fields = {name: getattr(value, name) for name in dumped} if isinstance(value, Settings) else value
        assert isinstance(fields, Mapping), type(fields)
        unhashed = dict(value.as_before) if isinstance(value, Settings) else {}
        places = {"runtime", *value.places} if isinstance(value, Settings) else {"runtime"}
        return {
            name: _without_unhashed(fields.get(name), inner)
            for name, inner in dumped.items()
            if name not in places and not (name in unhashed and unhashed[name] == inner)
        }
    if isinstance(dumped, list):
        assert isinstance(value, Sequence | Set), type(value)
        return [_without_unhashed(item, inner) for item, inner in zip(value, dumped, strict=True)]
    return dumped


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentSetting:
    """A setting that is not the same in all runs, with each run's value as JSON."""

    key: str
    values: tuple[str, ...]


def different_settings(configs: Sequence[Mapping[str, JsonValue]], *, absent: str) -> list[DifferentSetting]:
    """Return every single setting that differs between the configs, by dotted key; workspaces are left out."""
    flat = []
    for config in configs:
        # Where artifacts are kept changes no result.
        others = {key: value for key, value in config.items() if key != "workspace"}
        leaves = leaves_of(others, into_lists=True)
        flat.append({".".join(path): json.dumps(value, ensure_ascii=False) for path, value in leaves})
    keys = dict.fromkeys(key for settings in flat for key in settings)
    found = []
    for key in keys:
        values = tuple(settings.get(key, absent) for settings in flat)
        is_table = any(other.startswith(f"{key}.") for other in keys)  # in another run, whose keys are listed
        if len(set(values)) > 1 and not is_table:
            found.append(DifferentSetting(key=key, values=values))
    return found


def leaves_of(
    tree: Mapping[str, JsonValue], *, into_lists: bool = False
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """Yield the path and value of every single setting. An empty table is a value, and so is a list.

    With `into_lists` each setting of a list of tables is a value of its own, with the table's index in its path.
    """
    for name, value in tree.items():
        inner = value if isinstance(value, dict) else {}
        if into_lists and isinstance(value, list) and any(isinstance(item, dict) for item in value):
            inner = {str(i): item for i, item in enumerate(value)}
        if not inner:
            yield (name,), value
        for path, leaf in leaves_of(inner, into_lists=into_lists):
            yield (name, *path), leaf
