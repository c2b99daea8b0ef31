"""Write the prompts that overlap with benchmark questions beside the questions, for a person to judge."""

from __future__ import annotations

import shutil
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from pathlib import Path

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.data.decontaminate import Leak, drop_of

LEAKS_PAGE = "leaks.html"

_SHOWN_PER_KIND = 20
"""Rows of the page for each set of rules and each benchmark; the Parquet file has all."""
_SHOWN_CHARS = 600

_HEAD = """<!doctype html><meta charset="utf-8"><title>Prompts like benchmark questions</title>
<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;width:100%}
td,th{border:1px solid #ccc;padding:6px;vertical-align:top;text-align:left}td.text{width:38%;white-space:pre-wrap}
</style><h1>Prompts like benchmark questions</h1>
"""


@dataclass(slots=True)
class LeakCounts:
    """Numbers of leaks."""

    num_leaks: int = 0
    num_by_rules: Counter[str] = field(default_factory=Counter)
    """By `Leak.rules`."""
    num_dropped: Counter[str] = field(default_factory=Counter)
    """Dropped prompts by reason."""


def write_leaks(folder: Path, leaks: Iterable[Leak], *, rows_per_shard: int) -> LeakCounts:
    """Write all leaks to `leaks/*.parquet`, and some of every kind to `leaks.html`; return their numbers."""
    counts = LeakCounts()
    shown = _Shown()
    shutil.rmtree(folder / "leaks", ignore_errors=True)
    parts: list[Path] = []
    rows = iter(leaks)
    while (shard := list(islice(rows, rows_per_shard))) or not parts:
        parts.append(folder / "leaks" / f"{len(parts):05d}.parquet")
        write_shard(parts[-1], shard)
        for leak in shard:
            counts.num_leaks += 1
            counts.num_by_rules[leak.rules] += 1
            if leak.is_dropped:
                counts.num_dropped[drop_of(leak).reason] += 1
            shown.add(leak)
    # Only now is it known how many shards there are.
    for i, part in enumerate(parts):
        part.replace(part.with_name(shard_name(i, len(parts))))
    (folder / LEAKS_PAGE).write_text(shown.page(counts), encoding="utf-8", errors="replace")
    return counts


class _Shown:
    """The first leaks of each kind, in the order of their problems' ids."""

    def __init__(self) -> None:
        self._of_kind: dict[tuple[str, str], list[Leak]] = defaultdict(list)
        self._num_of_kind: Counter[tuple[str, str]] = Counter()

    def add(self, leak: Leak) -> None:
        """Take note of a leak."""
        kind = (leak.rules, leak.benchmark)
        self._num_of_kind[kind] += 1
        shown = self._of_kind[kind]
        insort(shown, leak, key=lambda leak: leak.problem_id)
        del shown[_SHOWN_PER_KIND:]

    def page(self, counts: LeakCounts) -> str:
        """Return the page."""
        rows = ["<table><tr><th>rules, benchmark<th>shared<th>prompt<th>benchmark question</tr>"]
        for kind, shown in sorted(self._of_kind.items()):
            rows += [_row(leak) for leak in shown]
            num_more = self._num_of_kind[kind] - len(shown)
            if num_more:
                rows.append(f"<tr><td colspan=4>and {num_more} more like these</tr>")
        num_dropped = counts.num_dropped.total()
        summary = f"<p>{counts.num_leaks} prompts match at least one rule; {num_dropped} were dropped.</p>\n"
        return _HEAD + summary + "\n".join(rows) + "</table>\n"


def _row(leak: Leak) -> str:
    state = "dropped" if leak.is_dropped else "kept"
    cells = (
        f"<td>{escape(leak.rules)}<br><b>{state}</b><br>{escape(leak.benchmark)} {escape(leak.question_id)}<br>"
        f"{escape(leak.source)} {leak.problem_id}</td>",
        f"<td>{leak.num_shared} times {escape(leak.shared)}</td>",
        f'<td class="text">{escape(leak.prompt[:_SHOWN_CHARS])}</td>',
        f'<td class="text">{escape(leak.question[:_SHOWN_CHARS])}</td>',
    )
    return f"<tr>{''.join(cells)}</tr>"
