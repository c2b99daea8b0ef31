"""Parquet and Arrow files in batches of a bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

ALL_COLUMNS: frozenset[str] = frozenset()
"""Stands for all columns of a file."""

_BATCH_BYTES = 16 << 20
"""Size of the part of a Parquet or Arrow file that is turned into Python objects at a time."""
_MAX_BATCH_ROWS = 1024
_READ_AHEAD_BYTES = 1 << 20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a whole Arrow stream. Arrow itself reads a stream without them as if it were whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of a file that can be read without what comes before it: bytes of a JSONL file, rows of a table."""

    start: int
    stop: int
    rows_before: int
    """Lines of a JSONL file, rows of a table."""
    num_rows: int
    """Rows in the span; blank lines are none."""
    num_bytes: int
    """Size on disk of JSONL, in memory of a table."""


def parquet_batches(
    path: Path, columns: frozenset[str] = ALL_COLUMNS, span: Span | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file or of one span in batches of about 16 MB, or of one row if rows are larger."""
    import pyarrow.parquet as pq

    # Pages are read one by one: a column of a row group may have hundreds of megabytes.
    with pq.ParquetFile(path, buffer_size=_READ_AHEAD_BYTES, pre_buffer=False) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        batch_size = rows_at_a_time(file.metadata.num_rows, sum(group.total_byte_size for group in groups))
        wanted = _wanted(file.schema_arrow, columns)
        if span is None:
            yield from file.iter_batches(batch_size=batch_size, columns=wanted)
            return
        end = 0
        for i, group in enumerate(groups):
            start, end = end, end + group.num_rows
            if start < span.stop and span.start < end:
                batches = file.iter_batches(batch_size=batch_size, row_groups=[i], columns=wanted)
                yield from rows_within(batches, start, span)


def _wanted(schema: pa.Schema, columns: frozenset[str]) -> list[str]:
    return [name for name in schema.names if not columns or name in columns]


def rows_within(batches: Iterable[pa.RecordBatch], first: int, span: Span) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a span as slices of batches. `first` is the number of the first row in the batches."""
    end = first
    for batch in batches:
        start, end = end, end + batch.num_rows
        if start >= span.stop:
            return
        if end > span.start:
            skipped = max(0, span.start - start)
            yield batch.slice(skipped, min(end, span.stop) - start - skipped)


def arrow_batches(path: Path, columns: frozenset[str] = ALL_COLUMNS) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file that `datasets` wrote: an Arrow stream, or an Arrow file in random-access format.

    The file is mapped into memory, so that a batch costs little until its values are read.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            yield batch.select(_wanted(batch.schema, columns))


def with_class_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with the names of classes in place of their numbers, where `datasets` wrote their names down.

    A number without a name becomes null; -1 is that of a row without a class.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for column, names in _class_names(batch.schema).items():
        i = batch.schema.get_field_index(column)
        if i >= 0 and pa.types.is_integer(batch.schema.field(i).type):
            numbers = batch.column(i)
            has_name = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
            named = pa.array(names, pa.string()).take(pc.if_else(has_name, numbers, None))
            batch = batch.set_column(i, column, named)
    return batch


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the classes of each column that has some, by the features in the schema."""
    try:
        written = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):  # other programs wrote the file, or wrote it anew
        return {}
    features = written.items() if isinstance(written, dict) else ()
    return {column: feature["names"] for column, feature in features if _is_named_class(feature)}


def _is_named_class(feature: object) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and bool(feature.get("names"))


def check_arrow_end(path: Path, label: str) -> None:
    """Raise DataError if an Arrow stream lacks its end mark."""
    with path.open("rb") as f:
        is_file_format = f.read(6) == b"ARROW1"  # its footer is checked when it is opened
        f.seek(max(0, path.stat().st_size - 8))
        if not is_file_format and not f.read().endswith(_END_OF_STREAM):
            raise DataError(f"{label}: the Arrow stream lacks its end mark, so it was cut short: fetch it again")


def rows_at_a_time(num_rows: int, num_bytes: int) -> int:
    """Return the number of rows of a batch of about 16 MB, of a table with so many rows and bytes."""
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))
