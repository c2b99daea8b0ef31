"""Derive difficulty tags from the source's rating."""

from __future__ import annotations

from klear_core.config.data import DifficultyConfig
from klear_core.data.candidates import Candidate
from klear_core.types import Difficulty, Problem


def problem_from(candidate: Candidate, cfg: DifficultyConfig) -> Problem:
    """Return the candidate as a problem with its difficulty tag."""
    return Problem(
        problem_id=candidate.problem_id,
        source=candidate.source,
        domain=candidate.domain,
        question=candidate.question,
        reference=candidate.reference,
        difficulty=difficulty_of(candidate.rating, cfg),
    )


def difficulty_of(rating: float | None, cfg: DifficultyConfig) -> Difficulty:
    """Return the tag of a rating in [0, 1]; unknown if the rating is None."""
    if rating is None:
        return Difficulty.UNKNOWN
    if rating < cfg.easy_below:
        return Difficulty.EASY
    return Difficulty.HARD if rating >= cfg.hard_from else Difficulty.MEDIUM
