"""Prepare the settings, the ledgers with their flow, and the times and costs of a run for its page."""

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
from klear_core.report.run.facts import StageFacts
from klear_core.scores import NBSP, NONE, duration, shares


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


# ---- flow ----
# Lay out Sankey diagrams of the ledgers: what went on is a band along the top, each reason to drop leaves it downward.


FLOW_WIDTH = 900
_BAND_HEIGHT = 72
"""Height of all items that entered."""
_TOP, _LEFT, _RIGHT = 34, 2, 170
_NODE_WIDTH, _WIDEST_STEP = 7, 260
_LABEL_HEIGHT = 15
_MOST_KEPT = 0.99
"""Share beyond which a loss is too thin to be seen; the table has it."""
_MOST_REASONS = 4
"""Reasons of one step that have a band of their own; the rarest share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowNode:
    """A step, or the end: a bar as high as the items that are left there."""

    x: float
    height: float
    name: str
    count: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBand:
    """Items between two nodes, or those that leave for one reason; `label` is beside its end at `x`, `y`."""

    path: str
    tone: str
    label: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One Sankey diagram: steps of a stage of which each takes what the one before it let through."""

    title: str
    height: float
    top: float
    node_width: float
    nodes: tuple[FlowNode, ...]
    bands: tuple[FlowBand, ...]


def ledger_flows(ledgers: Sequence[StageLedger]) -> list[Flow]:
    """Return the diagrams of the stages that lost at least a hundredth, in order."""
    return [_flow(ledger.stage, losses) for ledger in ledgers for losses in _losing_chains(ledger.rows)]


def _losing_chains(rows: Sequence[LedgerRow]) -> Iterator[list[LedgerRow]]:
    """Yield the steps with losses of each chain of steps that take as many items as the step before let through."""
    chains: list[list[LedgerRow]] = []
    for row in rows:
        if not chains or chains[-1][-1].num_out != row.num_in:
            chains.append([])
        chains[-1].append(row)
    for chain in chains:
        losses = [row for row in chain if row.num_out < row.num_in]
        if losses and losses[-1].num_out <= _MOST_KEPT * losses[0].num_in:
            yield losses


def _flow(stage: str, steps: Sequence[LedgerRow]) -> Flow:
    scale = _BAND_HEIGHT / steps[0].num_in
    gap = min(_WIDEST_STEP, (FLOW_WIDTH - _LEFT - _RIGHT) / len(steps))
    places = [round(_LEFT + i * gap, 1) for i in range(len(steps) + 1)]
    nodes = [
        FlowNode(x=x, height=round(step.num_in * scale, 2), name=step.step.replace("_", " "), count=f"{step.num_in:,}")
        for x, step in zip(places, steps, strict=False)
    ]
    last = steps[-1]
    share = _share_of(last.num_out, steps[0].num_in)
    end = FlowNode(
        x=places[-1], height=round(last.num_out * scale, 2), name="went on", count=f"{last.num_out:,} ({share})"
    )
    bands: list[FlowBand] = []
    bottom = float(_TOP + _BAND_HEIGHT + _LABEL_HEIGHT)
    # From right to left, each lower than the one before: no band crosses the labels of another step.
    for i in reversed(range(len(steps))):
        left, right, kept = places[i] + _NODE_WIDTH, places[i + 1], round(steps[i].num_out * scale, 2)
        bands.append(
            FlowBand(path=f"M{left:g} {_TOP}H{right:g}v{kept:g}H{left:g}z", tone="kept", label="", x=right, y=_TOP)
        )
        start = _TOP + kept
        for part in _few_reasons(steps[i].parts):
            thick = max(1.0, round(part.count * scale, 2))
            x, y = left + 0.3 * gap, bottom
            bands.append(
                FlowBand(
                    path=_falling(left, start, x, y, thick),
                    tone=part.tone,
                    label=f"{part.reason.replace('_', ' ')} {part.count:,} ({part.share})",
                    x=round(x + 5, 1),
                    y=round(y + thick / 2 + 4, 1),
                )
            )
            start += part.count * scale
            bottom += max(_LABEL_HEIGHT, thick + 3)
    return Flow(
        title=f"{stage}: {', '.join(dict.fromkeys(f'{step.unit}s' for step in steps))}",
        height=round(bottom, 1),
        top=_TOP,
        node_width=_NODE_WIDTH,
        nodes=(*nodes, end),
        bands=tuple(bands),
    )


def _few_reasons(parts: Sequence[Part]) -> list[Part]:
    """Return the commonest reasons, and one part for all others."""
    drops = [part for part in parts if part.reason]
    few, others = drops[:_MOST_REASONS], drops[_MOST_REASONS:]
    if len(others) == 1:
        return drops
    if others:
        fraction = sum(part.fraction for part in others)
        count = sum(part.count for part in others)
        share = f"{100 * fraction:.1f}{NBSP}%"
        few.append(
            Part(reason=f"{len(others)} other reasons", count=count, fraction=fraction, share=share, tone="drop5")
        )
    return few


def _falling(left: float, start: float, right: float, end: float, thick: float) -> str:
    """Return SVG path data of a band that falls from `start` at `left` to `end` at `right`."""
    middle = round((left + right) / 2, 1)
    there = f"M{left:g} {start:g}C{middle:g} {start:g} {middle:g} {end:g} {right:g} {end:g}"
    back = f"v{thick:g}C{middle:g} {end + thick:g} {middle:g} {start + thick:g} {left:g} {start + thick:g}z"
    return there + back


# ---- time and cost ----


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Time that a stage took, as text and as a share of the longest, and what it cost; empty texts where not known."""

    stage: str
    was_reused: bool
    took: str
    fraction: float
    gpu_hours: str
    price: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of all stages, and the sums of those that this run made; only with GPUs there are GPU-hours."""

    stages: tuple[StageTime, ...]
    took: str
    gpu_hours: str
    price: str


def stage_times(stages: Sequence[StageFacts], *, price: float | None) -> Times:
    """Return times and costs at a price for a GPU-hour; what a reused stage took was paid for by an earlier run."""
    longest = max((stage.manifest.wall_s for stage in stages), default=0.0)
    made = [stage for stage in stages if not stage.was_reused]

    def hours_of(stage: StageFacts) -> float:
        return 0.0 if stage.was_reused else stage.num_gpus * stage.manifest.wall_s / 3600

    def cost(amount: float) -> tuple[str, str]:
        if not amount:
            return "", ""
        return f"{amount:,.2f}", "" if price is None else f"{amount * price:,.2f}"

    rows = []
    for stage in stages:
        gpu_hours, paid = cost(hours_of(stage))
        fraction = stage.manifest.wall_s / longest if longest else 0.0
        rows.append(
            StageTime(
                stage=stage.name,
                was_reused=stage.was_reused,
                took=duration(stage.manifest.wall_s),
                fraction=fraction,
                gpu_hours=gpu_hours,
                price=paid,
            )
        )
    gpu_hours, paid = cost(sum(map(hours_of, stages)))
    took = duration(sum(stage.manifest.wall_s for stage in made))
    return Times(stages=tuple(rows), took=took, gpu_hours=gpu_hours, price=paid)
