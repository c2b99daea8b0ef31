"""Write frozen dataclasses to Parquet shards, and read them back. A shard is renamed into place when complete.

Large tests of programs are in a file beside their shard (`00000-of-00010.tests`). Both can be moved together.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from klear_core.artifacts.tests_file import StoredTestsWriter, located, path_of_tests, with_tests
from klear_core.code_tests import CodeReference
from klear_core.errors import ArtifactError

if TYPE_CHECKING:
    import pyarrow as pa

R = TypeVar("R")

_TABLE_CHARS = 32 << 20
"""Characters of references in one table of `whole_tables`."""


def write_shard(path: Path, records: Iterable[R]) -> int:
    """Write records of one dataclass as one Parquet file, atomically; returns how many there were.

    Nested records (references, verdicts) become JSON text columns, so that every shard of a kind has one schema.
    `records` may be an iterator: large tests are written as it goes, and are in memory for one record at a time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, tests_file = path.with_name(path.name + ".tmp"), path_of_tests(path)
    temporary_tests = tests_file.with_name(tests_file.name + ".tmp")
    temporary_tests.unlink(missing_ok=True)  # of a killed attempt
    with StoredTestsWriter(temporary_tests, name=tests_file.name) as tests:
        rows = [_to_row(r, tests) for r in records]
    # Column by column: `Table.from_pylist` takes three times as long.
    names = rows[0].keys() if rows else ()
    columns = {name: _column(rows, name) for name in names}
    pq.write_table(pa.table(columns), temporary, compression="zstd")
    # A shard file says that its tests are there too. So it is renamed last, and an earlier one with other tests is
    # deleted first.
    if tests.has_tests or tests_file.exists():
        path.unlink(missing_ok=True)
        tests_file.unlink(missing_ok=True)
    if tests.has_tests:
        temporary_tests.replace(tests_file)
    temporary.replace(path)
    return len(rows)


def write_shards(folder: Path, records: Sequence[R], *, rows_per_shard: int) -> None:
    """Write the records as Parquet shards, at least one even if there are no records.

    The folder is emptied first, because a killed attempt may have left shards of another size.
    """
    shutil.rmtree(folder, ignore_errors=True)
    count = max(1, -(-len(records) // rows_per_shard))
    for i in range(count):
        write_shard(folder / shard_name(i, count), records[i * rows_per_shard : (i + 1) * rows_per_shard])


def read_shard(path: Path, record_type: type[R], *, rows: Sequence[int] | None = None) -> list[R]:
    """Return the records of one shard, validated against their type; ArtifactError names the file and the row.

    `rows` are the numbers of those to return, by default all. Large tests are not read: the references hold handles to
    them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as e:
        raise ArtifactError(f"{path}: not a readable Parquet file ({e})") from e
    numbers = range(table.num_rows) if rows is None else rows
    chosen = table if rows is None else table.take(pa.array(rows, pa.int64()))
    return [
        _from_row(row, record_type, folder=path.parent, where=f"{path} row {i}")
        for i, row in zip(numbers, chosen.to_pylist(), strict=True)
    ]


def read_shards(folder: Path, record_type: type[R]) -> Iterator[R]:
    """Yield all records of `folder/*.parquet`, shards in name order; ArtifactError if there is no shard."""
    shards = sorted(folder.glob("*.parquet"))
    if not shards:
        raise ArtifactError(f"{folder}: no Parquet shard here")
    for shard in shards:
        yield from read_shard(shard, record_type)


def whole_tables(path: Path) -> Iterator[pa.Table]:
    """Yield the rows of one shard as tables that need no other file; each has all tests of its references in it.

    There is one table; with stored tests there are several of limited size.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if not path_of_tests(path).exists():
        yield table
        return
    column = table.column_names.index("reference")
    texts: list[str] = []
    start = num_chars = 0
    for i, stored in enumerate(table["reference"].to_pylist()):
        texts.append(with_tests(json.loads(stored), path.parent))
        num_chars += len(texts[-1])
        if num_chars >= _TABLE_CHARS or i + 1 == table.num_rows:
            yield table.slice(start, len(texts)).set_column(column, "reference", pa.array(texts, pa.string()))
            start += len(texts)
            texts, num_chars = [], 0


def shard_name(index: int, count: int) -> str:
    """Return a name such as `00002-of-00010.parquet`: sorts by index and tells whether all shards are there."""
    assert 0 <= index < count, (index, count)
    return f"{index:05d}-of-{count:05d}.parquet"


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """A record type's validator, its fields, and those that hold other records."""

    adapter: TypeAdapter[Any]
    names: tuple[str, ...]
    nested: frozenset[str]


_SHAPES: dict[type[Any], _Shape] = {}


def _shape(record_type: type[Any]) -> _Shape:
    if record_type not in _SHAPES:
        hints = typing.get_type_hints(record_type)
        names = tuple(field.name for field in dataclasses.fields(record_type))
        options = {name: typing.get_args(hints[name]) or (hints[name],) for name in names}
        nested = frozenset(name for name, types in options.items() if any(map(dataclasses.is_dataclass, types)))
        _SHAPES[record_type] = _Shape(TypeAdapter(record_type), names, nested)
    return _SHAPES[record_type]


def _column(rows: Sequence[dict[str, object]], name: str) -> list[object]:
    return [row[name] for row in rows]


def _to_row(record: Any, tests: StoredTestsWriter) -> dict[str, object]:
    shape = _shape(type(record))
    row: dict[str, object] = {}
    for name in shape.names:
        value = getattr(record, name)
        if isinstance(value, CodeReference):
            value = tests.stored(value)
        if name in shape.nested:
            row[name] = _shape(type(value)).adapter.dump_json(value).decode()
        else:
            row[name] = list(value) if isinstance(value, tuple) else value
    return row


def _from_row(row: dict[str, object], record_type: type[R], *, folder: Path, where: str) -> R:
    shape = _shape(record_type)
    plain = dict(row)
    for name in shape.nested & row.keys():
        text = row[name]
        if isinstance(text, str):  # None where an optional record is absent
            plain[name] = located(json.loads(text), folder)
    try:
        record: R = shape.adapter.validate_python(plain)
    except ValidationError as e:
        raise ArtifactError(f"{where}: not a {record_type.__name__}: {e}") from e
    return record
