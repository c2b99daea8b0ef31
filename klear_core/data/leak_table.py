"""Write the prompts that overlap with benchmark questions beside the questions, for a person to judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.data.decontaminate import Leak

LEAKS_PAGE = "leaks.html"

_SHOWN_PER_KIND = 20
"""Rows of the page for each set of rules and each benchmark; the Parquet file has all."""
_SHOWN_CHARS = 600

_HEAD = """<!doctype html><meta charset="utf-8"><title>Prompts like benchmark questions</title>
<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;width:100%}
td,th{border:1px solid #ccc;padding:6px;vertical-align:top;text-align:left}td.text{width:38%;white-space:pre-wrap}
</style><h1>Prompts like benchmark questions</h1>
"""


def write_leaks(workdir: Path, leaks: Sequence[Leak]) -> None:
    """Write all leaks to `leaks/*.parquet`, and some of every kind to `leaks.html`."""
    write_shard(workdir / "leaks" / shard_name(0, 1), leaks)
    (workdir / LEAKS_PAGE).write_text(_page(leaks), encoding="utf-8", errors="replace")


def _page(leaks: Sequence[Leak]) -> str:
    num_of_kind = Counter((leak.rules, leak.benchmark) for leak in leaks)
    shown: Counter[tuple[str, str]] = Counter()
    rows = ["<table><tr><th>rules, benchmark<th>shared<th>prompt<th>benchmark question</tr>"]
    for leak in sorted(leaks, key=lambda leak: (leak.rules, leak.benchmark, leak.problem_id)):
        kind = (leak.rules, leak.benchmark)
        shown[kind] += 1
        if shown[kind] <= _SHOWN_PER_KIND:
            rows.append(_row(leak))
        elif shown[kind] == _SHOWN_PER_KIND + 1:
            rows.append(f"<tr><td colspan=4>and {num_of_kind[kind] - _SHOWN_PER_KIND} more like these</tr>")
    num_dropped = sum(leak.is_dropped for leak in leaks)
    told = f"<p>{len(leaks)} prompts match at least one rule; {num_dropped} were dropped.</p>\n"
    return _HEAD + told + "\n".join(rows) + "</table>\n"


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
