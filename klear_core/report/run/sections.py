"""Prepare the ledgers and the settings of a run for its page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from klear_core.artifacts.manifest import LedgerStep
from klear_core.data.curation.write import LEAKS_PAGE
from klear_core.report.run.data import StageFacts
from klear_core.scores import NBSP, NONE, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that differs from its default: dotted key, both values as JSON, and help text."""

    key: str
    default: str
    value: str
    help_text: str


def changed_settings(cfg: BaseModel) -> list[Setting]:
    """Return every leaf setting that differs from its default, or from its class's if another class was chosen."""
    return list(_changes(cfg, _own_default(cfg), ""))


def _changes(cfg: BaseModel, default: BaseModel | None, prefix: str) -> Iterator[Setting]:
    for name, info in type(cfg).model_fields.items():
        value = getattr(cfg, name)
        # A class with required settings has no default object, but its other fields have defaults.
        default_value = getattr(default, name) if default is not None else info.default
        yield from _value_changes(value, default_value, f"{prefix}{name}", info.description or "")


def _value_changes(value: object, default: object, key: str, help_text: str) -> Iterator[Setting]:
    if value == default:
        return
    match value:
        case BaseModel():
            yield from _model_changes(value, default, key)
        case tuple() if value and all(isinstance(item, BaseModel) for item in value):
            defaults = default if isinstance(default, tuple) else ()
            for i, item in enumerate(value):
                yield from _model_changes(item, defaults[i] if i < len(defaults) else None, f"{key}.{i}")
        case _:
            yield Setting(key=key, default=_as_json(default), value=_as_json(value), help_text=help_text)


def _model_changes(value: BaseModel, default: object, key: str) -> Iterator[Setting]:
    """Compare with `default` if the classes are equal; else yield `kind` and compare with the class's defaults."""
    if isinstance(default, BaseModel) and type(default) is type(value):
        yield from _changes(value, default, f"{key}.")
        return
    if isinstance(default, BaseModel) and hasattr(value, "kind"):
        yield Setting(
            key=f"{key}.kind",
            default=_as_json(getattr(default, "kind", None)),
            value=_as_json(value.kind),
            help_text=_first_line(value),
        )
    yield from _changes(value, _own_default(value), f"{key}.")


def _first_line(cfg: BaseModel) -> str:
    return (type(cfg).__doc__ or "").strip().partition("\n")[0]


def _own_default(cfg: BaseModel) -> BaseModel | None:
    """Return an instance with all defaults; None if the class has required settings."""
    is_complete = all(not info.is_required() for info in type(cfg).model_fields.values())
    return type(cfg)() if is_complete else None


def _as_json(value: object) -> str:
    if value is PydanticUndefined:
        return NONE
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)  # dates are no JSON of their own


# ---- ledger view ----
# Turn ledgers into shares whose printed values add up to exactly 100 %.


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
