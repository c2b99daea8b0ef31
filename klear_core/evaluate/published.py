"""Compare our scores with published ones of the same benchmark."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from klear_core.config.explain import explained
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError
from klear_core.scores import EvalReport

SIZES = {name: known.rows for name, known in KNOWN_BENCHMARKS.items()}
"""Problems of the published benchmarks; another number under the same name is another benchmark."""
_ROUNDING = 0.0005
"""Half of a tenth of a percent, to which published scores are rounded."""


class PublishedModel(Settings):
    """Scores of one model from one source, in percent, by benchmark."""

    model: str
    source: str
    scores: dict[str, float]
    num_samples: dict[str, Annotated[int, Field(ge=1)]]
    """n of avg@n, by benchmark."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.scores.keys() != self.num_samples.keys():
            raise ValueError(f"{self.model}: scores and num_samples name different benchmarks")
        unknown = self.scores.keys() - SIZES.keys()
        if unknown:
            raise ValueError(
                f"{self.model}: unknown benchmarks {', '.join(sorted(unknown))}; known: {', '.join(SIZES)}"
            )
        if any(not 0 <= score <= 100 for score in self.scores.values()):
            raise ValueError(f"{self.model}: scores are in percent, 0 to 100")
        return self


class _PublishedFile(Settings):
    """The file of published scores."""

    score: tuple[PublishedModel, ...] = Field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Our score beside a published one; all values in 0..1."""

    published: float
    num_samples: int
    bound: float
    """Largest difference of two runs of one model with this score, in 95 of 100 cases, whatever its problems."""
    difference: float
    """Our score minus the published one."""
    agrees: bool
    """Whether two runs of one model on these problems may differ so much, according to our re-run interval."""


def read_published(file: Path) -> tuple[PublishedModel, ...]:
    """Return the published scores in a file. Raise ConfigError that names the file and what is wrong."""
    try:
        return _PublishedFile.model_validate(tomllib.loads(file.read_text())).score
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, _PublishedFile)}") from e


def agreement_with(published: PublishedModel, ours: EvalReport) -> Agreement | None:
    """Return the comparison of our score with the published one; None if it has none of this benchmark."""
    name = ours.benchmark
    if name not in published.scores or ours.num_problems != SIZES[name] or ours.avg.rerun is None:
        return None
    value, n = published.scores[name] / 100, published.num_samples[name]
    difference = ours.avg.value - value
    # our re-run interval is that of one run with our n: the published run adds its own noise, with its n
    widening = math.sqrt(1 + ours.num_samples / n)
    low = (ours.avg.rerun.low - ours.avg.value) * widening - _ROUNDING
    high = (ours.avg.rerun.high - ours.avg.value) * widening + _ROUNDING
    return Agreement(
        published=value,
        num_samples=n,
        bound=rerun_bound(value, ours.num_problems, n, ours.num_samples, confidence=ours.confidence),
        difference=difference,
        agrees=low <= -difference <= high,
    )


def rerun_bound(score: float, num_problems: int, *num_samples: int, confidence: float) -> float:
    """Return the most that two runs of one model may differ by: the noise if all its problems were equally hard.

    For problems of different difficulty the noise is smaller, as p(1-p) is concave. 90.5 % on 30 problems with n = 64
    twice: 1.9 points.
    """
    from scipy.special import ndtri

    variance = score * (1 - score) / num_problems * sum(1 / n for n in num_samples)
    return float(ndtri(0.5 + confidence / 2)) * math.sqrt(variance)
