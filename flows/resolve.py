"""Resolve a flow's parameters (profile, settings, overrides) to one config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klear_core.config.load import apply_override, overlay, profiles_in, read_profile, validate, with_defaults
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError

CONFIGS = (Path(__file__).parent / "profiles").resolve()
"""The folder of profiles that can be given by name: configs/ of a checkout, or its copy in an installed package."""


def resolve(profile: str | None, overrides: Sequence[str], settings: PipelineConfig | None) -> PipelineConfig:
    """Return the profile's config with the given `settings` merged over it, then the `key.path=value` overrides.

    Prefect replaces a nested parameter as a unit: a form or a command line that sets one learning rate would reset all
    other settings to the code's defaults. Here only fields that were set replace the profile's. Without a profile,
    `settings` is the config.
    """
    if profile is None:
        if settings is None or overrides:
            raise ConfigError("without a profile, settings must be given, and overrides cannot be used")
        return settings
    tree = read_profile(profile_folder(profile))
    if settings is not None:
        tree = overlay(with_defaults(tree), settings.model_dump(mode="json", exclude_unset=True))
    for override in overrides:
        tree = apply_override(tree, override)
    return validate(tree, origin=f"profile {profile}")


def grid_file(grid: str) -> Path:
    """Return a grid's file, given as a path or as a name under configs/ablations."""
    named = CONFIGS / "ablations" / f"{grid}.toml"
    return named if named.is_file() else Path(grid)


def profile_folder(profile: str) -> Path:
    """Return a profile's folder, given as a path or a name under configs/. ConfigError lists the names if unknown."""
    named, given = CONFIGS / profile, Path(profile)
    if named.is_dir():
        return named
    if given.name == profile and not given.is_dir():
        raise ConfigError(
            f"{profile}: no such profile folder; profiles that go by their name: {', '.join(profiles_in(CONFIGS))}"
        )
    return given
