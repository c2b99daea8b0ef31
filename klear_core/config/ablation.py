"""Settings of an ablation: one profile in several variants, each at several learning rates, over several seeds."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from klear_core.config.base import Settings
from klear_core.config.load import explained
from klear_core.errors import ConfigError


class AblationConfig(Settings):
    """A grid of runs. Overrides are spelled as after `--set`: `key.path=value`."""

    profile: str
    """A folder under configs/, or a path to one."""
    overrides: tuple[str, ...] = ()
    """For all runs."""
    variants: dict[str, tuple[str, ...]] = Field(min_length=1)
    """What is compared: further overrides, by name."""
    reference: str
    """The variant from which the others' differences are taken, seed by seed."""
    learning_rates: tuple[float, ...] = Field(min_length=1)
    """Of math RL; every variant runs at each of them."""
    seeds: tuple[int, ...] = Field(min_length=2)
    """Intervals count these."""

    @model_validator(mode="after")
    def _can_be_compared(self) -> AblationConfig:
        if self.reference not in self.variants:
            raise ValueError(f"reference {self.reference!r} is not among the variants {', '.join(self.variants)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} name a seed twice")
        return self


def load_ablation(file: Path) -> AblationConfig:
    """ConfigError names the file and every wrong key."""
    try:
        return AblationConfig.model_validate(tomllib.loads(file.read_text()))
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: not valid TOML: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, AblationConfig)}") from e
