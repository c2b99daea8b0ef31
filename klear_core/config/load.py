"""Load a profile folder and `--set key=value` overrides into one validated config; errors name the key and the fix."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from klear_core.config.losses import GPPO_PRESETS
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import leaves_of
from klear_core.config.train import OptimConfig
from klear_core.errors import ConfigError, meant

Tree = dict[str, Any]
"""Nested settings as plain dicts and values, as parsed from TOML or JSON."""


def load_profile(folder: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read every `*.toml` of a profile folder, apply `key.path=value` overrides and validate.

    Tables have full names (`[rl.optim]`), so a key is spelled the same in a file and after `--set`. A ConfigError names
    the file or override, the key, its value and the allowed values.
    """
    return validate(apply_overrides(read_profile(folder), overrides), origin=str(folder))


def read_profile(folder: Path, extending: tuple[Path, ...] = ()) -> Tree:
    """Return the settings in a profile's files, without defaults, over those of the profile that it `extends`.

    Raise ConfigError if the folder is no profile, its TOML is invalid, two files set the same table, or profiles extend
    each other in a circle. `extending` are the folders of the profiles that extend this one.
    """
    chain = (*extending, folder.resolve())
    settings = _own_settings(folder)
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ConfigError(f'{folder}: extends = {base!r} must be a folder, relative to this one: "../klear_8b"')
    extended = (folder / base).resolve()
    if extended in chain:
        circle = " extends ".join(path.name for path in (*chain, extended))
        raise ConfigError(f"{folder}: profiles extend each other in a circle: {circle}")
    return overlay(read_profile(extended, chain), settings, kinds=_default_kinds())


def extended_by(folder: Path) -> tuple[str, ...]:
    """Return the names of the profiles that a profile extends, the nearest first."""
    names: list[str] = []
    read_profile(folder)  # refuses a circle, in which the loop below would not end
    while base := _own_settings(folder).get("extends"):
        folder = (folder / base).resolve()
        names.append(folder.name)
    return tuple(names)


def _own_settings(folder: Path) -> Tree:
    if folder.is_file():
        raise ConfigError(f"{folder}: a file; a profile is a folder of TOML files, perhaps {folder.parent}")
    if not folder.is_dir():
        parent = folder.parent if folder.parent.is_dir() else Path("configs")
        names = profiles_in(parent) if parent.is_dir() else []
        raise ConfigError(f"{folder}: no such profile folder; {meant(folder.name, names, f'profiles in {parent}')}")
    files = _toml_files(folder)
    if not files:
        raise ConfigError(f"{folder}: no *.toml file in this folder, so it is not a profile")
    settings: Tree = {}
    for file in files:
        try:
            # UTF-8 in every locale; editors of Windows begin a file with a mark.
            tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as e:
            raise ConfigError(f"{file}: cannot be read ({e.strerror})") from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file}: not valid TOML: {e}") from e
        if _is_grid(tables):
            raise ConfigError(f"{file}: a grid of runs, not a profile; klear ablate {file}")
        for key in tables:
            if key in settings:
                raise ConfigError(
                    f"{file}: [{key}] is already set by another file of this profile; keep each table in one file"
                )
        settings |= tables
    return settings


def _toml_files(folder: Path) -> list[Path]:
    """Return the files of a profile in the order of their names."""
    # Editors keep hidden files beside a file that is being changed: Emacs `.#rl.toml`, a link to nothing.
    return sorted(file for file in folder.glob("*.toml") if not file.name.startswith("."))


def apply_overrides(settings: Mapping[str, Any], overrides: Sequence[str]) -> Tree:
    """Return a copy of `settings` with all overrides applied in turn.

    Raise ConfigError if another `kind` would remove what an earlier override has set: it would have no effect.
    """
    tree = _copy(settings)
    removed_by: dict[str, str] = {}
    for i, override in enumerate(overrides):
        before, tree = tree, apply_override(tree, override)
        if _keys(override)[-1] == "kind":
            gone = [earlier for earlier in overrides[:i] if _has(before, _keys(earlier)) > _has(tree, _keys(earlier))]
            removed_by |= dict.fromkeys(gone, override)
    for override, later in removed_by.items():
        if not _has(tree, _keys(override)):  # else set again after the kind
            raise ConfigError(
                f"--set {override!r} has no effect before --set {later!r}, which begins the table anew: "
                "set it after the kind, or leave it out"
            )
    return tree


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")


def _has(tree: object, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def apply_override(settings: Mapping[str, Any], override: str) -> Tree:
    """Return a copy of `settings` with one `key.path=value` set; a value that is not valid TOML is taken as a string.

    Setting `X.kind` to another kind removes the other settings of X, which belong to the old kind: the one that X names
    or, without it, the default. Setting a preset removes the betas that it defines, and setting a path the
    repository in its place.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: expected key.path=value, for example --set rl.loss.eps_high=0.28")
    tree = _copy(settings)
    table = tree
    for i, key in enumerate(keys[:-1]):
        nested = table.setdefault(key, {})
        if not isinstance(nested, dict):
            raise ConfigError(
                f"--set {override!r}: {'.'.join(keys[: i + 1])} is {nested!r}, not a table with keys of its own"
            )
        table = nested
    value = toml_value(text.strip())
    if keys[-1] == "kind" and _is_other_class(value, table.get("kind", _default_kind(keys[:-1]))):
        table.clear()
    # A preset and other values of its betas contradict each other, and the later of the two was meant.
    if keys[-1] == "preset":
        for beta in GPPO_PRESETS.get(str(value), {}):
            table.pop(beta, None)
    _leave_other_place(table, keys)
    table[keys[-1]] = value
    return tree


def _is_other_class(kind: object, before: object) -> bool:
    """Return whether a table of this kind has other settings than one of the kind before. Those of AdamW have not."""
    return kind != before and kind not in get_args(OptimConfig.model_fields["kind"].annotation)


def _leave_other_place(table: Tree, keys: Sequence[str]) -> None:
    """Remove a repository of the Hub where a path is set in its place, and the other way round."""
    of_hub, place = ("repo", "revision", "files"), keys[-1]
    if (place == "path" and "repo" in table) or (place == "repo" and "path" in table):
        for key in of_hub if place == "path" else ("path",):
            table.pop(key, None)
        # `model` names its kind, and all others follow from their keys.
        if table.pop("kind", None) is not None and list(keys[:-1]) == ["model"]:
            table["kind"] = "hf" if place == "path" else "hub"


def validate(settings: Mapping[str, Any], *, origin: str) -> PipelineConfig:
    """Return `settings` over the defaults as a PipelineConfig; raise ConfigError that lists every wrong key."""
    try:
        return PipelineConfig.model_validate(with_defaults(settings))
    except ValidationError as e:
        raise ConfigError(f"{origin}: {explained(e, PipelineConfig)}") from e


def with_defaults(settings: Mapping[str, Any]) -> Tree:
    """Add the default `kind` of every tagged union to partial settings, so that their tables need not name it.

    An optional section that is "none" is left out: so a profile has none that the one it extends has.
    """
    optional = _optional_sections()
    settings = {key: value for key, value in settings.items() if not (key in optional and value == "none")}
    # An optional section that is left out stays out: with a kind in it, its stage would run.
    absent = [key for key in optional if not isinstance(settings.get(key), Mapping)]
    kinds = {key: value for key, value in _default_kinds().items() if key not in absent}
    return overlay(kinds, settings)


def _default_kinds() -> Tree:
    """Return the default `kind` of every tagged union, those of optional sections included."""
    kinds = _kinds_of(PipelineConfig())
    for key, section in _optional_sections().items():
        kinds[key] = _kinds_of(section())
    return kinds


def _default_kind(keys: Sequence[str]) -> object:
    """Return the kind of the table at these keys if it names none; None if it has no default."""
    table: object = _default_kinds()
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table.get("kind") if isinstance(table, dict) else None


def _optional_sections() -> dict[str, type[BaseModel]]:
    """Return the sections that a config may lack: fields of type `X | None` for settings X."""
    found = {}
    for key, field in PipelineConfig.model_fields.items():
        section, *others = get_args(field.annotation) or (None,)
        if others == [NoneType] and isinstance(section, type) and issubclass(section, BaseModel):
            found[key] = section
    return found


def _kinds_of(cfg: BaseModel) -> Tree:
    """Return only the `kind` of each nested table that has one; pydantic fills in the other defaults."""
    kinds: Tree = {}
    for key, value in cfg:
        if key == "kind":
            kinds[key] = value
        elif isinstance(value, BaseModel) and (below := _kinds_of(value)):
            kinds[key] = below
    return kinds


def overlay(base: Mapping[str, Any], over: Mapping[str, Any], kinds: Mapping[str, Any] | None = None) -> Tree:
    """Merge `over` into `base` recursively; a table of a `kind` with other settings replaces the base table instead.

    `kinds` has the kinds of the tables of `base` that name none.
    """
    kinds = kinds or {}
    if "kind" in over and _is_other_class(over["kind"], base.get("kind", kinds.get("kind"))):
        return _copy(over)
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[key] = overlay(below, value, kinds.get(key))
        else:
            merged[key] = value
    return merged


def _copy(tree: Mapping[str, Any]) -> Tree:
    copied: Tree = {}
    for key, value in tree.items():
        copied[key] = _copy(value) if isinstance(value, Mapping) else value
    return copied


def profiles_in(folder: Path) -> list[str]:
    """Return the names of the subfolders that hold a profile."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and _may_be_profile(path))


def _may_be_profile(folder: Path) -> bool:
    files = _toml_files(folder)
    try:
        return bool(files) and not any(_is_grid(tomllib.loads(file.read_text(encoding="utf-8-sig"))) for file in files)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return True  # a profile with a broken file, which `read_profile` reports


def _is_grid(tables: Mapping[str, Any]) -> bool:
    return "variants" in tables


# ---- toml ----
# Write settings as TOML: a config as a profile with every setting, or one setting as an option of a command.


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(text: str) -> object:
    """Return the value of a TOML expression; text that is none stands for itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def as_option(key: str, value: object) -> str:
    """Return the option that sets a setting, quoted for the shell: `--set 'given.score_despite=["aime24"]'`."""
    # Spaces around the text of an option are not part of its value.
    stands_for_itself = isinstance(value, str) and toml_value(value) == value == value.strip()
    text = value if stands_for_itself else _value(value)
    return f"--set {shlex.quote(f'{key}={text}')}"


def profile_toml(config: PipelineConfig, *, with_workspace: bool = False) -> str:
    """Return a profile's file with the settings of a run. Other versions' defaults cannot change it.

    Workspace and machine are left out unless they are asked for. A setting of None is left out, because TOML has no
    null; where None is not the default, it is written as "none".
    """
    excluded = set() if with_workspace else {"workspace", "hardware"}
    tree = config.model_dump(mode="json", exclude_none=True, exclude=excluded)
    _name_nones(config, tree)
    top = [f"{_key(name)} = {_value(value)}" for name, value in tree.items() if not isinstance(value, dict)]
    tables = []
    for name, value in tree.items():
        if isinstance(value, dict):
            tables += ["", f"[{_key(name)}]"]
            tables += [f"{'.'.join(map(_key, path))} = {_value(leaf)}" for path, leaf in leaves_of(value)]
    return "\n".join([*top, *tables]) + "\n"


def _name_nones(cfg: BaseModel, tree: dict[str, Any]) -> None:
    """Add to the tree the settings that are None and not so by default: left out, they would take the default."""
    for name, field in type(cfg).model_fields.items():
        value = getattr(cfg, name)
        if value is None and field.default is not None:
            tree[name] = "none"
        elif isinstance(value, BaseModel) and name in tree:
            _name_nones(value, tree[name])


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
    return name if _BARE_KEY.fullmatch(name) else _value(name)


# ---- explain ----
# Explain errors in settings: the key as a user writes it, its value, and what is allowed or may be meant.


def explained(invalid: ValidationError, model: type[BaseModel]) -> str:
    """Describe all errors in settings of `model`: each key with its value and what is allowed or may be meant."""
    return "; ".join(dict.fromkeys(_explain(error, model) for error in invalid.errors()))


def _explain(error: Any, model: type[BaseModel]) -> str:
    """Format one validation error as `key = value: problem`, with a suggestion for a misspelt key."""
    loc = [str(part) for part in error["loc"]]
    key = ".".join(_without_tags(loc, model))
    if error["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1], model)
        return f"{key}: unknown key; {meant(loc[-1], known, 'known here')}"
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
    return setting in ("api_key_env", "api_key_block", "webhook_env") or (
        setting == "base_url" and not {"@", "?"}.isdisjoint(value)
    )


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
