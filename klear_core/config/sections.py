"""Tell which sections of the config belong to stages, and which of them the stages of a run use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from klear_core.config.given_jobs import GivenModelJob, GivenProblemsJob, GivenTracesJob
from klear_core.config.jobs import BaseJob, EvaluateJob

STAGE_SECTIONS = frozenset(
    ("curate", "curate_rl", "tag", "tag_rl", "model", "distill", "sft", "rl", "rl_code", "evaluate", "promote")
)
"""Sections that stages use; the others, such as `seed` and `verify`, concern the whole run."""


def section_of(key: str) -> str:
    """Return the stage's section that a dotted key of the config belongs to; empty if it concerns the whole run."""
    first, *others = key.split(".")
    if first == "judge" and others:  # judge settings of a single stage
        first = others[0]
    return first if first in STAGE_SECTIONS else ""


def unused_overrides(overrides: Sequence[str], used: Collection[str]) -> dict[str, str]:
    """Return the `key.path=value` overrides of stages' sections that are not among those used, with the section."""
    sections = {override: section_of(override.partition("=")[0].strip()) for override in overrides}
    return {override: section for override, section in sections.items() if section and section not in used}


def sections_used(stages: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the sections that stages use, each given by its name and kind."""
    return frozenset(section for name, kind in stages for section in _sections_of(name, kind))


def _sections_of(name: str, kind: str) -> tuple[str, ...]:
    match kind:
        case BaseJob.kind:
            return ("model",)
        case EvaluateJob.kind:
            return ("evaluate",)
        case GivenModelJob.kind:
            return ()
        case GivenTracesJob.kind | GivenProblemsJob.kind:
            return ("curate", name)  # curation's rules keep their questions apart from the benchmarks
        case _:
            return (name,)
