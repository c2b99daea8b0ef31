"""Read files of answers that other programs wrote: one reader for each layout, chosen by the keys of the first row.

| layout | rows |
|---|---|
| `klear` | Klear-Reasoner's published generations: `messages` that end with the assistant's, `meta` or `answer` |
| `lm-eval` | `samples_*.jsonl` of lm-evaluation-harness: `doc`, `target`, `resps` |
| `lighteval` | details in Parquet: `doc` and `model_response`, or `predictions` and `gold` (before version 0.11) |
| `matharena` | outputs by answer (`problem`, `gold_answer`, `answer`), or a file a problem (`messages`) |
| `qwen-math` | Qwen2.5-Math's harness, also SimpleRL's and SkyThought's: `question`, `answer`, `code`, `score` |
| `rows` | `id`, `response` and `reference`, as `klear judge` reads them |

Only answers to math problems are read. A row that does not fit is returned as `UnreadRow`, and counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from klear_core.data.fields import RowError
from klear_core.data.rowfiles import SUFFIXES, BrokenRow, FileRow, is_array, read_rows, stem_of
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.generations import AnswerSource, Generation, UnreadRow
from klear_core.evaluate.layout_rows import READERS, SIGNATURES, AnswerRow, Layout
from klear_core.types import Domain, Outcome, Verdict, problem_id_of

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_DATE = re.compile(r"_\d{4}-\d{2}-\d{2}T[\d.:-]+$")
"""End of a file's name that says when it was written."""


def foreign_answers(path: Path, *, layout: Layout | None = None, name: str = "") -> AnswerSource:
    """Return the answers in a file, or in all data files of a folder.

    Raise ConfigError if there is none, DataError if its layout is not known.
    """
    files = _files_in(path)
    found = layout or _layout_of(files[0])
    return AnswerSource(
        name=name or stem_of(path),
        origin=str(path),
        layout=found,
        verify=None,
        read=lambda: _generations(files, found),
    )


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES))
    if not files:
        raise ConfigError(f"{path}: no such file, or a folder without data files ({', '.join(SUFFIXES)})")
    return files


def _layout_of(file: Path) -> Layout:
    for row in _rows(file):
        if isinstance(row, BrokenRow):
            continue
        keys = set(row.fields)
        for layout, signatures in SIGNATURES.items():
            if any(signature <= keys for signature in signatures):
                return layout
        raise DataError(
            f"{file}: a row with the keys {sorted(keys)[:12]} fits none of the layouts {', '.join(LAYOUTS)}; "
            "--layout names one"
        )
    raise DataError(f"{file}: has no row that can be read")


def _rows(file: Path) -> Iterator[FileRow | BrokenRow]:
    """Yield the rows of a file; a `.json` file that is one object is one row."""
    if file.suffix == ".json" and not is_array(file):
        try:
            value = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError:
            value = None  # several objects: lines of JSON under another suffix
        if isinstance(value, dict):
            yield FileRow(where=str(file), fields=value)
            return
    yield from read_rows(file)


def _generations(files: Sequence[Path], layout: Layout) -> Iterator[Generation | UnreadRow]:
    """Yield the answers of all files. Answers to one problem that come in several rows are numbered in their order."""
    num_of: Counter[tuple[str, str]] = Counter()
    for file in files:
        benchmark = _benchmark_name(file, layout)
        first_filter: object = None
        for raw in _rows(file):
            if isinstance(raw, BrokenRow):
                yield UnreadRow(where=raw.where, reason=f"{raw.reason}: {raw.detail}")
                continue
            if layout == "lm-eval" and "filter" in raw.fields:
                # the harness repeats each answer for every filter that it scored
                first_filter = first_filter or raw.fields["filter"]
                if raw.fields["filter"] != first_filter:
                    continue
            try:
                row = READERS[layout](raw.fields)
            except (RowError, DataError) as e:
                yield UnreadRow(where=raw.where, reason=str(e))
                continue
            of = f"{benchmark}, {row.model}" if row.model else benchmark
            yield from _numbered(row, of, num_of)


def _numbered(row: AnswerRow, benchmark: str, num_of: Counter[tuple[str, str]]) -> Iterator[Generation]:
    problem_id = problem_id_of(row.question, Domain.MATH) if row.question else row.problem
    for answer in row.answers:
        index = num_of[benchmark, problem_id]
        num_of[benchmark, problem_id] += 1
        verdict = None
        if answer.score is not None:
            verdict = Verdict(outcome=Outcome.SCORED, score=answer.score, detail="stated by the file")
        yield Generation(
            benchmark=benchmark,
            problem_id=problem_id,
            question=row.question,
            reference=row.reference,
            decoding="sampled",
            sample_idx=index,
            response=answer.text,
            num_tokens=answer.num_tokens,
            finish_reason=None,
            verdict=verdict,
        )


def _benchmark_name(file: Path, layout: Layout) -> str:
    """Return the task that a file's name states: `samples_gsm8k_2026-01-31T10-00-00.0.jsonl` is `gsm8k`."""
    stem = _DATE.sub("", stem_of(file))
    match layout:
        case "lm-eval":
            return stem.removeprefix("samples_")
        case "lighteval":
            return stem.removeprefix("details_")
        case "matharena" if stem.isdecimal():
            return file.parent.name  # a file for each problem
        case _:
            return stem
