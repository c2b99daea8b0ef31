"""Define the settings of an ablation: variants of one profile over learning rates and seeds, and published results of
the same comparison."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from klear_core.config.load import explained
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError

Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
"""Learning rates of one variant."""
ComparedStage = Literal["sft", "rl", "rl_code", "last"]
"""Stages whose models a grid can compare; `last`: that which trains the last model of each variant."""


class PaperRows(Settings):
    """Published results of the variants, which the table puts beside ours."""

    source: str = Field(min_length=1)
    """Publication and table."""
    about: str = Field(min_length=1)
    """Scale and scoring of the published runs, in words."""
    scores: dict[str, dict[str, Annotated[float, Field(ge=0, le=100)]]] = Field(min_length=1)
    """Scores in percent, by variant, then by benchmark as the source calls it."""

    @model_validator(mode="after")
    def _same_benchmarks(self) -> Self:
        if len({tuple(sorted(scores)) for scores in self.scores.values()}) > 1:
            raise ValueError(f"{self.source}: all variants must have scores of the same benchmarks")
        return self


class GridAt(Settings):
    """Settings of a grid for another profile; those that are left out are the grid's."""

    overrides: tuple[str, ...] = ()
    """Overrides for all runs."""
    variants: dict[str, tuple[str, ...]] = {}
    """The variants; published results of other ones are left out."""
    learning_rates: Rates | None = None
    """Learning rates of the compared stage."""
    rates: dict[str, Rates] = {}
    """Learning rates by variant."""
    seeds: tuple[int, ...] = ()
    """Run seeds."""
    scored_on: tuple[str, ...] = ()
    """Benchmarks whose mean is the score."""


class AblationConfig(Settings):
    """A grid of runs. Overrides have the form that `--set` takes: `key.path=value`."""

    profile: str
    """A folder under configs/, or a path to one."""
    compare: ComparedStage = "rl"
    """The stage whose models are compared by their scores; stages that these do not need are not run."""
    overrides: tuple[str, ...] = ()
    """Overrides for all runs."""
    variants: dict[str, tuple[str, ...]] = Field(min_length=1)
    """The variants to compare: further overrides, by variant name."""
    reference: str
    """The variant that the others are compared with; differences are taken per seed."""
    references: dict[str, str] = {}
    """Other references, by variant."""
    learning_rates: Rates | None = None
    """Learning rates of the compared stage; every variant runs at each of them unless `rates` has its own. None: the
    rate that the profile or the variant sets."""
    rates: dict[str, Rates] = {}
    """Learning rates of a variant that does not run at `learning_rates`: the one that was chosen for it on other
    seeds."""
    seeds: tuple[int, ...] = Field(min_length=2)
    """Run seeds; confidence intervals are over seeds."""
    scored_on: tuple[str, ...] = ()
    """Benchmarks whose mean is the score; empty: all of the profile."""
    paper: PaperRows | None = None
    """Published results of these variants."""
    profiles: dict[str, GridAt] = {}
    """Settings for other profiles, which `--profile` chooses."""

    @model_validator(mode="after")
    def _can_be_compared(self) -> Self:
        _require_known("reference", [self.reference], self.variants)
        _require_known("rates", self.rates, self.variants)
        _require_known("references", [*self.references, *self.references.values()], self.variants)
        of_profiles = [variant for other in self.profiles.values() for variant in other.variants]
        _require_known(
            "paper.scores", self.paper.scores if self.paper else (), dict.fromkeys([*self.variants, *of_profiles])
        )
        if self.compare == "last" and (self.learning_rates or self.rates):
            raise ValueError(
                'compare = "last": the variants may end with different stages; leave out learning_rates and rates, and '
                "set the rate of each in its overrides"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} name a seed twice")
        return self

    def at(self, profile: str, extended: Sequence[str] = ()) -> AblationConfig:
        """Return the grid for another profile, a name or a folder; `extended` are the profiles that it extends.

        ConfigError if the grid has settings for none of them.
        """
        if profile == self.profile:
            return self
        names = [Path(profile).name, *extended]
        name = next((name for name in names if name in self.profiles), None)
        if name is None:
            known = ", ".join([self.profile, *self.profiles])
            raise ConfigError(
                f"this grid is for {known}, and its overrides and learning rates may be wrong for {names[0]}: "
                f"add a table [profiles.{names[0]}] with what to change; it may be empty"
            )
        other = self.profiles[name]
        changed = {key: getattr(other, key) for key in other.model_fields_set}
        grid: dict[str, object] = dict(self) | changed | {"profile": profile, "profiles": {}}
        if self.paper:
            variants = other.variants or self.variants
            scores = {variant: row for variant, row in self.paper.scores.items() if variant in variants}
            grid["paper"] = self.paper.model_copy(update={"scores": scores}) if scores else None
        return AblationConfig.model_validate(grid)


def _require_known(key: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: {name!r} is not among the variants {', '.join(known)}")


def load_ablation(file: Path, profile: str | None = None, extended: Sequence[str] = ()) -> AblationConfig:
    """Read and validate an ablation file, for its own profile or another one (see `AblationConfig.at`); raise
    ConfigError that names the file and every wrong key."""
    try:
        grid = AblationConfig.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
        return grid if profile is None else grid.at(profile, extended)
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: not valid TOML: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, AblationConfig)}") from e
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
