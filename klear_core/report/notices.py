"""Collect failures and warnings that a reader must know before trusting the run's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from klear_core.report.facts import Facts, MissingStage, StageFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line at the top of the page. A failure means a missing result, a warning a less reliable one."""

    level: Literal["failure", "warning"]
    where: str
    text: str


def notices(facts: Facts) -> list[Notice]:
    """Return failures first, then warnings, each in pipeline order."""
    return [
        *_missing(facts),
        *_stage_notes(facts),
        *_lacking(facts),
        *_code_state(facts),
        *_unscored(facts),
        *_score_warnings(facts),
    ]


def _missing(facts: Facts) -> list[Notice]:
    """Report missing stages: those with an error failed, the others were not reached."""
    found = [
        Notice(level="failure", where=m.name, text=f"This stage failed: {m.trouble}")
        for m in facts.missing
        if m.trouble
    ]
    not_run = ", ".join(m.name for m in facts.missing if not m.trouble)
    if not_run:
        found.append(Notice(level="failure", where="not run", text=f"No result of {not_run}."))
    return found


def _stage_notes(facts: Facts) -> list[Notice]:
    return [Notice(level="warning", where=s.name, text=note) for s in facts.stages for note in s.manifest.notes]


def _lacking(facts: Facts) -> list[Notice]:
    """Warn of steps where a metric is null: files of earlier versions have null where an update was skipped."""
    found = []
    stages: tuple[StageFacts | MissingStage, ...] = (*facts.stages, *facts.missing)
    for stage in stages:
        steps = {step for series in stage.metrics for step in series.steps}
        names: list[str] = []
        steps_without: set[int] = set()
        for series in stage.metrics:
            without = [t for t, v in zip(series.steps, series.values, strict=True) if v is None]
            # A step counts once, however many of its metrics are missing.
            steps_without |= {*without}
            if without:
                names.append(series.name)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = (
                f"{len(steps_without):,} of {len(steps):,} steps have no number for {', '.join(names[:3])}{more}: "
                f"they are in no curve or mean."
            )
            found.append(Notice(level="warning", where=stage.name, text=text))
    return found


def _code_state(facts: Facts) -> list[Notice]:
    found = []
    dirty = [s.name for s in facts.stages if s.manifest.git_dirty]
    if dirty:
        where = "all stages" if len(dirty) == len(facts.stages) else ", ".join(dirty)
        text = f"Built from code with uncommitted changes ({where}): the commit alone does not reproduce it."
        found.append(Notice(level="warning", where="code", text=text))
    commits = {s.manifest.git_commit for s in facts.stages if s.manifest.git_commit}
    if len(commits) > 1:
        text = f"Stages were built by {len(commits)} different commits; the table of stages says which."
        found.append(Notice(level="warning", where="code", text=text))
    return found


def _unscored(facts: Facts) -> list[Notice]:
    """Warn of problems that are missing from a mean because none of their samples could be judged."""
    return [
        Notice(
            level="warning",
            where=m.stage.name,
            text=f"{len(r.unscored_problems):,} of {r.num_problems:,} problems of {r.benchmark} "
            f"could not be judged at all; "
            f"the score of {m.maker.label} leaves them out.",
        )
        for m in facts.models
        for r in m.scores
        if r.unscored_problems
    ]


def _score_warnings(facts: Facts) -> list[Notice]:
    return [Notice(level="warning", where=w.where, text=w.text) for w in facts.score_warnings]
