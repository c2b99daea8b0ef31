"""Turn ledgers into shares whose printed values add up to exactly 100 %."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from klear_core.artifacts.ledger import LedgerStep
from klear_core.data.leak_table import LEAKS_PAGE
from klear_core.report.facts import StageFacts
from klear_core.report.text import NBSP, NONE, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Items kept (empty reason) or dropped for one reason: count, exact share and printed share of the input."""

    reason: str
    count: int
    fraction: float
    share: str
    tone: str
    """CSS class: `kept`, or `drop1` (commonest reason) to `drop5` (all from the fifth on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Items that were counted under a reason but not dropped for it."""

    reason: str
    count: int
    share: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One ledger step; `parts` are first the kept items, then drops by falling count."""

    step: str
    unit: str
    num_in: int
    num_out: int
    parts: tuple[Part, ...]
    noted: tuple[Noted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLedger:
    """All ledger steps of a stage."""

    stage: str
    leaks: str
    """Relative address of the page that shows prompts beside benchmark questions; empty if there is none."""
    rows: tuple[LedgerRow, ...]


def stage_ledgers(stages: tuple[StageFacts, ...], *, home: Path) -> list[StageLedger]:
    """Return the ledgers of the stages that have one, in pipeline order, with links from a page in `home`."""
    ledgers = [
        stage_ledger(stage.name, stage.manifest.ledger, leaks=_link_to(stage.folder / LEAKS_PAGE, home))
        for stage in stages
    ]
    return [ledger for ledger in ledgers if ledger.rows]


def stage_ledger(stage: str, steps: Sequence[LedgerStep], *, leaks: str = "") -> StageLedger:
    """Return a stage's ledger for the page."""
    return StageLedger(stage=stage, leaks=leaks, rows=tuple(_row(step) for step in steps))


def _link_to(file: Path, home: Path) -> str:
    """Return the relative address of a file, empty if it does not exist. It works while both are in one workspace."""
    return quote(Path(os.path.relpath(file, home)).as_posix()) if file.is_file() else ""


def _row(step: LedgerStep) -> LedgerRow:
    drops = sorted(step.dropped.items(), key=lambda item: (-item[1], item[0]))
    drops = [(reason, count) for reason, count in drops if count]
    named = [("", step.num_out), *drops]
    # All parts at once: rounded one by one, they would not add up to 100 %.
    printed = shares([count for _, count in named])
    parts = []
    for i, ((reason, count), share) in enumerate(zip(named, printed, strict=True)):
        fraction = count / step.num_in if step.num_in else 0.0
        tone = f"drop{min(i, 5)}" if reason else "kept"
        parts.append(Part(reason=reason, count=count, fraction=fraction, share=share, tone=tone))
    noted = [
        Noted(reason=reason, count=count, share=_share_of(count, step.num_in))
        for reason, count in step.noted.items()
        if count
    ]
    return LedgerRow(
        step=step.step,
        unit=step.unit,
        num_in=step.num_in,
        num_out=step.num_out,
        parts=tuple(parts),
        noted=tuple(noted),
    )


def _share_of(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}{NBSP}%" if total else NONE
