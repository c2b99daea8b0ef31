"""From a flow's parameters to one config: a profile, some of its settings replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klear_core.config.load import apply_override, overlay, profiles_in, read_profile, validate, with_defaults
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError

CONFIGS = (Path(__file__).parent / "profiles").resolve()
"""The profiles that go by their name: configs/ of a checkout, a copy of it in an installed package."""


def resolve(profile: str | None, overrides: Sequence[str], settings: PipelineConfig | None) -> PipelineConfig:
    """The profile's settings, over them what was given of `settings`, over these the `key.path=value` overrides.

    Prefect replaces a nested parameter whole, so that a form or a command line that names one learning rate would reset all
    others to the defaults of the code. Here only what was given counts. Without a profile, `settings` stand alone.
    """
    if profile is None:
        if settings is None or overrides:
            raise ConfigError("without a profile, settings must be given, and overrides have nothing to go over")
        return settings
    tree = read_profile(profile_folder(profile))
    if settings is not None:
        tree = overlay(with_defaults(tree), settings.model_dump(mode="json", exclude_unset=True))
    for override in overrides:
        tree = apply_override(tree, override)
    return validate(tree, origin=f"profile {profile}")


def grid_file(grid: str) -> Path:
    """Return a grid's file: a path, or the name of one under configs/ablations."""
    named = CONFIGS / "ablations" / f"{grid}.toml"
    return named if named.is_file() else Path(grid)


def profile_folder(profile: str) -> Path:
    """A folder, or the name of one under configs/. ConfigError lists the names if there is no such folder."""
    named, given = CONFIGS / profile, Path(profile)
    if named.is_dir():
        return named
    if given.name == profile and not given.is_dir():
        raise ConfigError(f"{profile}: no such profile folder; profiles that go by their name: {', '.join(profiles_in(CONFIGS))}")
    return given
