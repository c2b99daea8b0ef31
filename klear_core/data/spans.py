"""Divide data files into spans that can be read in parallel; the division depends on the files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.data.rowfiles import (
    Span,
    arrow_batches,
    check_arrow_end,
    check_file,
    damage_as_data_error,
    is_array,
    line_ends,
)

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_PACKED = (".gz", ".zst")
_MAX_SPANS_PER_ROW_GROUP = 16
"""A span in the middle of a row group of a Parquet file costs decoding the rows before it."""


def spans_of(path: Path, *, label: str, num_bytes: int, limit: int | None) -> list[Span] | None:
    """Return spans of about `num_bytes` that make up the file, or its first `limit` rows.

    Return None for a file that can only be read from its start: a compressed one, or a JSON array. Raise errors as
    `read_rows` does.
    """
    check_file(path)
    with damage_as_data_error(label):
        if path.suffix == ".parquet":
            return _parquet_spans(path, num_bytes, limit)
        if path.suffix == ".arrow":
            return _arrow_spans(path, label, num_bytes, limit)
        if path.suffix in _PACKED or is_array(path):
            return None
        return _line_spans(path, num_bytes, limit)


def _line_spans(path: Path, num_bytes: int, limit: int | None) -> list[Span]:
    spans: list[Span] = []
    start = end = lines_before = num_rows = num_before = 0

    def close() -> None:
        size, rows = end - start, num_rows - num_before
        spans.append(Span(start=start, stop=end, rows_before=lines_before, num_rows=rows, num_bytes=size))

    for num_lines, (position, is_blank) in enumerate(line_ends(path), 1):
        if num_rows == limit:
            break
        end = position
        num_rows += not is_blank
        if end - start >= num_bytes:
            close()
            start, lines_before, num_before = end, num_lines, num_rows
    if end > start:
        close()
    return spans


def _parquet_spans(path: Path, num_bytes: int, limit: int | None) -> list[Span]:
    import pyarrow.parquet as pq

    metadata: pq.FileMetaData = pq.read_metadata(path)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    total_bytes = sum(group.total_byte_size for group in groups)
    least_rows = max((group.num_rows for group in groups), default=0) // _MAX_SPANS_PER_ROW_GROUP
    return _row_spans(metadata.num_rows, total_bytes, num_bytes, limit, least_rows=least_rows)


def _arrow_spans(path: Path, label: str, num_bytes: int, limit: int | None) -> list[Span]:
    check_arrow_end(path, label)
    num_rows = total_bytes = 0
    for batch in arrow_batches(path):
        num_rows += batch.num_rows
        total_bytes += batch.nbytes
    return _row_spans(num_rows, total_bytes, num_bytes, limit, least_rows=1)


def _row_spans(num_rows: int, total_bytes: int, num_bytes: int, limit: int | None, *, least_rows: int) -> list[Span]:
    row_bytes = max(1, total_bytes // max(1, num_rows))
    step = max(1, least_rows, num_bytes // row_bytes)
    stop = num_rows if limit is None else min(num_rows, limit)
    starts = range(0, stop, step)
    ends = [min(stop, start + step) for start in starts]
    return [
        Span(start=start, stop=end, rows_before=start, num_rows=end - start, num_bytes=(end - start) * row_bytes)
        for start, end in zip(starts, ends, strict=True)
    ]
