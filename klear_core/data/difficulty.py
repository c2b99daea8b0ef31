"""Derive difficulty tags from the source's rating."""

from __future__ import annotations

from klear_core.config.curate import DifficultyConfig
from klear_core.types import Difficulty


def difficulty_of(rating: float | None, cfg: DifficultyConfig) -> Difficulty:
    """Return the tag of a rating in [0, 1]; unknown if the rating is None."""
    if rating is None:
        return Difficulty.UNKNOWN
    if rating < cfg.easy_below:
        return Difficulty.EASY
    return Difficulty.HARD if rating >= cfg.hard_from else Difficulty.MEDIUM
