"""Define the settings of an ablation: variants of one profile, each at several learning rates and seeds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from klear_core.config.load import explained
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError

Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
"""Learning rates of one variant."""


class AblationConfig(Settings):
    """A grid of runs. Overrides have the form that `--set` takes: `key.path=value`."""

    profile: str
    """A folder under configs/, or a path to one."""
    overrides: tuple[str, ...] = ()
    """Overrides for all runs."""
    variants: dict[str, tuple[str, ...]] = Field(min_length=1)
    """The variants to compare: further overrides, by variant name."""
    reference: str
    """The variant that the others are compared with; differences are taken per seed."""
    learning_rates: Rates
    """Learning rates of math RL; every variant runs at each of them unless `rates` has its own."""
    rates: dict[str, Rates] = {}
    """Learning rates of a variant that does not run at `learning_rates`: the one that was chosen for it on other
    seeds."""
    seeds: tuple[int, ...] = Field(min_length=2)
    """Run seeds; confidence intervals are over seeds."""

    @model_validator(mode="after")
    def _can_be_compared(self) -> AblationConfig:
        if self.reference not in self.variants:
            raise ValueError(f"reference {self.reference!r} is not among the variants {', '.join(self.variants)}")
        if unknown := sorted(self.rates.keys() - self.variants):
            raise ValueError(f"rates name {unknown[0]!r}, which is not among the variants {', '.join(self.variants)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} name a seed twice")
        return self

    def rates_of(self, variant: str) -> Rates:
        """Return the learning rates at which a variant runs."""
        return self.rates.get(variant, self.learning_rates)


def load_ablation(file: Path) -> AblationConfig:
    """Read and validate an ablation file; raise ConfigError that names the file and every wrong key."""
    try:
        return AblationConfig.model_validate(tomllib.loads(file.read_text()))
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: not valid TOML: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, AblationConfig)}") from e
