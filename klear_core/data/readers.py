"""Stream the rows of JSONL, JSON, CSV, TSV, Parquet and Arrow files with their positions; broken rows are reported."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

from klear_core.data.arrow_batches import (
    ALL_COLUMNS,
    Span,
    arrow_batches,
    check_arrow_end,
    parquet_batches,
    rows_at_a_time,
    rows_within,
    with_class_names,
)
from klear_core.data.json_arrays import CHUNK_CHARS, DECODER, array_elements
from klear_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Codec by the suffix of a compressed text file."""
_TEXT_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*_TEXT_KINDS, *(kind + packed for kind in _TEXT_KINDS for packed in _PACKED), *_TABLES)
"""Names of data files end in one of these."""

MAX_ROW_BYTES = 128 << 20
"""Limit for one row of a text file, twice `verify.code.max_test_mb`. A longer row is dropped unparsed: one takes 5
times its size in memory, and 15 times if every text has a character of four bytes."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One object (JSON object, Parquet or Arrow row) of a file."""

    where: str
    """File and line number of JSONL, CSV and TSV, row number in other files (both from 1), for messages."""
    fields: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRow:
    """A row that could not be read as an object."""

    where: str
    reason: str
    detail: str


def read_rows(
    path: Path,
    *,
    label: str = "",
    max_row_bytes: int = MAX_ROW_BYTES,
    columns: frozenset[str] = ALL_COLUMNS,
    span: Span | None = None,
    names_classes: bool = False,
) -> Iterator[FileRow | BrokenRow]:
    """Yield all rows of the file or of one span, in order, without loading the file into memory.

    Messages call the file `label`. Of Parquet and Arrow files only `columns` are read, as far as they exist; JSON rows
    come whole. If `names_classes`, the classes that the library `datasets` wrote down come by name, and else by number.
    Raise ConfigError if the file is missing or of an unknown kind, DataError if it cannot be read to its end.
    """
    check_file(path)
    label = label or str(path)
    with damage_as_data_error(label) as progress:
        progress.num_rows = span.rows_before if span else 0
        if path.suffix in _TABLES:
            batches = _batches_of(path, label, columns, span)
            named = map(with_class_names, batches) if names_classes else batches
            rows = _table_rows(named, label, first=progress.num_rows)
        else:
            rows = _text_rows(path, label, max_row_bytes, columns, span)
        for row in rows:
            yield row
            progress.num_rows += 1


@dataclass(slots=True)
class ReadProgress:
    """The number of rows that were read so far."""

    num_rows: int = 0


@contextmanager
def damage_as_data_error(label: str) -> Iterator[ReadProgress]:
    """Turn a library's error about a damaged file into a DataError that says how far it was read."""
    import pyarrow as pa

    progress = ReadProgress()
    try:
        yield progress
    except (OSError, pa.ArrowException, UnicodeDecodeError) as e:
        raise DataError(
            f"{label}: cannot be read beyond row {progress.num_rows} ({e}); the file is damaged or cut short: fetch it "
            "again"
        ) from e


def check_file(path: Path) -> None:
    """Raise ConfigError if `path` is not an existing file of a supported kind."""
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; relative paths are taken from the working directory, which is {Path.cwd()}"
        )
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"{path}: unknown kind of file; allowed: {', '.join('*' + s for s in SUFFIXES)}")


def check_ends(path: Path, *, label: str) -> None:
    """Raise DataError if a Parquet file lacks its footer or an Arrow stream its end mark; rows are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            pq.read_metadata(path)
        elif path.suffix == ".arrow":
            check_arrow_end(path, label)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as e:
        raise DataError(f"{label}: not a whole Parquet file ({e}): fetch it again") from e


def stem_of(path: Path) -> str:
    """Return the file's name without its format suffix (`.jsonl.gz` is one suffix)."""
    suffix = max((s for s in SUFFIXES if path.name.endswith(s)), key=len, default="")
    return path.name.removesuffix(suffix)


def _batches_of(path: Path, label: str, columns: frozenset[str], span: Span | None) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        return parquet_batches(path, columns, span)
    check_arrow_end(path, label)
    batches = arrow_batches(path, columns)
    return batches if span is None else rows_within(batches, 0, span)


def _text_rows(
    path: Path, label: str, max_row_bytes: int, columns: frozenset[str], span: Span | None
) -> Iterator[FileRow | BrokenRow]:
    if separators := separators_of(path):
        return _cell_rows(path, label, max_row_bytes, columns, separators)
    if span is None and is_array(path):
        return _array_rows(path, label, max_row_bytes)
    return _line_rows(path, label, max_row_bytes, span)


def _open(path: Path) -> BinaryIO:
    codec = _PACKED.get(path.suffix)
    if codec is None:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression=codec))  # raises OSError if it is cut short


def is_array(path: Path) -> bool:
    """Return whether a JSON file holds one array, by its first character; published suffixes are unreliable."""
    with _open(path) as f:
        while chunk := f.read(64):
            if text := chunk.lstrip(b" \t\r\n\xef\xbb\xbf"):
                return text.startswith(b"[")
    return False


def whole_text(path: Path) -> str:
    """Return the text of a JSON file, unpacked. Raise OSError or UnicodeDecodeError if it is damaged."""
    with _open(path) as f:
        return f.read().decode("utf-8-sig")


def _line_rows(path: Path, label: str, max_row_bytes: int, span: Span | None) -> Iterator[FileRow | BrokenRow]:
    with _open(path) as f:
        number = 0
        if span is not None:
            f.seek(span.start)
            number = span.rows_before
        # a span ends at the end of a line
        while (span is None or f.tell() < span.stop) and (line := f.readline(max_row_bytes + 1)):
            number += 1
            where = f"{label}:{number}"
            if len(line) > max_row_bytes:
                _skip_line(f, line)
                yield _too_large(where, max_row_bytes)
            elif line.strip():
                yield _parsed(line, where=where)


def _too_large(where: str, max_row_bytes: int) -> BrokenRow:
    return BrokenRow(where=where, reason="row_too_large", detail=f"more than {max_row_bytes} bytes")


def _skip_line(f: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = f.readline(CHUNK_CHARS)


def line_ends(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the position after each line of an uncompressed file, and whether the line is blank."""
    with path.open("rb") as f:
        position = 0
        is_blank = True
        while piece := f.readline(CHUNK_CHARS):
            position += len(piece)
            is_blank = is_blank and piece.isspace()
            if piece.endswith(b"\n"):
                yield position, is_blank
                is_blank = True
        if not is_blank:
            yield position, False


def _parsed(line: bytes, *, where: str) -> FileRow | BrokenRow:
    try:
        text = line.decode("utf-8-sig")
        value = DECODER.decode(text.strip())
    except UnicodeDecodeError as e:
        return BrokenRow(where=where, reason="not_utf8", detail=str(e))
    except json.JSONDecodeError as e:
        if line.endswith(b"\n"):
            return BrokenRow(where=where, reason="not_json", detail=str(e))
        return BrokenRow(where=where, reason="cut_short", detail=f"the file ends in the middle of this row: {e}")
    except RecursionError:
        return BrokenRow(where=where, reason="not_json", detail="nested too deeply")
    return _as_row(value, where=where, text=text)


def _array_rows(path: Path, label: str, max_row_bytes: int) -> Iterator[FileRow | BrokenRow]:
    """Yield the rows of a JSON array one element at a time; published arrays reach several gigabytes."""
    number = 0
    # surrogateescape: bytes that are not UTF-8 cost their own row alone, which `_as_row` finds
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape") as f:
        try:
            for element in array_elements(f, max_row_bytes):
                number += 1
                where = f"{label} row {number}"
                if element is None:
                    yield _too_large(where, max_row_bytes)
                    continue
                text, value = element
                row = _as_row(value, where=where, text=text)
                del element, text, value  # the caller may take long, and more memory, for a large row
                yield row
        except (json.JSONDecodeError, RecursionError) as e:
            raise DataError(
                f"{label}: starts like a JSON array but is not one to its end; row {number + 1} cannot be read ({e})"
            ) from e


def separators_of(path: Path) -> str:
    """Return the separators that a CSV or TSV file may have, the likeliest first; empty for other kinds of files."""
    name = path.name.removesuffix(path.suffix) if path.suffix in _PACKED else path.name
    return {".csv": ",;\t|", ".tsv": "\t"}.get(Path(name).suffix, "")


def _cell_rows(
    path: Path, label: str, max_row_bytes: int, columns: frozenset[str], separators: str
) -> Iterator[FileRow | BrokenRow]:
    """Yield the rows of a CSV or TSV file as RFC 4180 defines them; the first one has the names of the columns.

    An empty cell is null. An object, or a list of objects, as JSON text is what it holds, as in other files.
    """
    csv.field_size_limit(max_row_bytes)
    # surrogateescape: bytes that are not UTF-8 cost their own row alone
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
        lines = _Lines(f, max_row_bytes)
        head = next(lines, "")
        # Programs in some countries write semicolons.
        separator = max(separators, key=head.count)
        reader = csv.reader(chain([head], lines), delimiter=separator, strict=True)
        names: list[str] = []
        while True:
            where = f"{label}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as e:
                yield _no_cells(e, where, max_row_bytes)
                continue
            if cells is None:
                return
            if lines.take_too_long():
                yield _too_large(where, max_row_bytes)
            elif cells and not names:
                names = _column_names(cells, label)
            elif cells:
                yield _cell_row(names, cells, where, columns)


class _Lines:
    """The lines of a file; one that is too long is empty, and remembered."""

    def __init__(self, file: TextIO, max_chars: int) -> None:
        self._file, self._max_chars = file, max_chars
        self._has_too_long = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._max_chars + 1)
        if not line:
            raise StopIteration
        if len(line) <= self._max_chars:
            return line
        self._has_too_long = True
        while line and not line.endswith(("\n", "\r")):
            line = self._file.readline(CHUNK_CHARS)
        return "\n"

    def take_too_long(self) -> bool:
        """Return whether a line since the last call was too long."""
        found, self._has_too_long = self._has_too_long, False
        return found


_UTF_16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")
"""The byte order marks of UTF-16, as text that is not UTF-8 is read."""


def _column_names(cells: list[str], label: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if cells and cells[0].startswith(_UTF_16_MARKS):
        raise DataError(f'{label}: this is UTF-16, as Excel\'s "Unicode text" is; save it as CSV UTF-8')
    if not _is_utf8(cells) or any(name and names.count(name) > 1 for name in names):
        raise DataError(f"{label}: the first line of a CSV or TSV file must name its columns, not {cells!a:.200}")
    return names


def _cell_row(names: list[str], cells: list[str], where: str, columns: frozenset[str]) -> FileRow | BrokenRow:
    if len(cells) != len(names):
        detail = f"{len(cells)} cells under {len(names)} names of columns"
        return BrokenRow(where=where, reason="wrong_columns", detail=detail)
    named = zip(names, cells, strict=True)
    fields: dict[str, object] = {n: _value_of(c) for n, c in named if n and (not columns or n in columns)}
    return _as_row(fields, where=where, text="\n".join(cells))


def _no_cells(error: csv.Error, where: str, max_row_bytes: int) -> BrokenRow:
    if "field larger" in str(error):
        return _too_large(where, max_row_bytes)
    if "unexpected end of data" in str(error):
        return BrokenRow(where=where, reason="cut_short", detail="the file ends within quotes that begin in this row")
    return BrokenRow(where=where, reason="not_csv", detail=str(error))


def _is_utf8(cells: list[str]) -> bool:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:  # what surrogateescape made of other bytes
        return False
    return True


def _value_of(cell: str) -> object:
    """Return null for an empty cell, what JSON text of an object or of objects holds, else the text."""
    if not cell or cell[0] not in "[{" or "{" not in cell:
        return cell or None
    try:
        value = DECODER.decode(cell.strip())
    except (ValueError, RecursionError):
        return cell
    objects = value if isinstance(value, list) else [value]
    return value if all(isinstance(one, dict) for one in objects) else cell


def _table_rows(batches: Iterator[pa.RecordBatch], label: str, *, first: int) -> Iterator[FileRow | BrokenRow]:
    import pyarrow as pa

    number = first
    for batch in batches:
        step = rows_at_a_time(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            for value in _values(batch.slice(start, step)):
                number += 1
                where = f"{label} row {number}"
                if isinstance(value, Exception):
                    reason = "not_utf8" if isinstance(value, pa.ArrowInvalid) else "bad_value"
                    yield BrokenRow(where=where, reason=reason, detail=str(value))
                else:
                    yield FileRow(where=where, fields=value)


def _values(batch: pa.RecordBatch) -> list[dict[str, object] | Exception]:
    """Return the rows as dicts; a row with text that is not UTF-8, or with a value that Python has no type for (a day
    in the year 300,000, an unknown time zone), as the error that says so.

    Arrow trusts the offsets in a file. In a damaged one they lead outside of its memory, so they are checked first.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
        return cast("list[dict[str, object] | Exception]", batch.to_pylist())
    except (ValueError, OverflowError, LookupError) as e:  # ArrowInvalid is a ValueError
        is_damage = isinstance(e, pa.ArrowInvalid) and "UTF8" not in str(e)
        if batch.num_rows == 1 and not is_damage:
            return [e]
        if batch.num_rows <= 1:
            raise
    middle = batch.num_rows // 2
    return _values(batch.slice(0, middle)) + _values(batch.slice(middle))


def _as_row(value: object, *, where: str, text: str) -> FileRow | BrokenRow:
    try:
        text.encode()
        if _ESCAPED_SURROGATE.search(text):  # a pair of them is a character, a lone one cannot be written anywhere
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        return BrokenRow(where=where, reason="not_utf8", detail=f"bytes that are not text, or half a character: {e}")
    if not isinstance(value, dict):
        return BrokenRow(
            where=where, reason="not_an_object", detail=f"expected an object, found {type(value).__name__}"
        )
    return FileRow(where=where, fields=value)
