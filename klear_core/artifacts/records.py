"""Write frozen dataclasses to Parquet shards, and read them back. A shard is renamed into place when complete.

Large tests of programs are in a file beside their shard (`00000-of-00010.tests`). Both can be moved together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import shutil
import typing
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Self, TypeVar, assert_never

from pydantic import TypeAdapter, ValidationError

from klear_core.errors import ArtifactError
from klear_core.types import AssertTests, CallTests, CodeReference, Reference, StdinTests, StoredTests, TestKind, Tests

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

R = TypeVar("R")

_TESTS = ".tests"
"""Suffix of the file of a shard's large tests; there is none if all are small."""
_TABLE_CHARS = 32 << 20
"""Characters of references in one table of `whole_tables`."""

_RENAMED_COLUMNS = {"old_logps": "sampler_logps"}
"""Today's names of columns that finished artifacts have under earlier ones."""


def write_shard(path: Path, records: Iterable[R]) -> int:
    """Write records of one dataclass as one Parquet file, atomically; returns how many there were.

    Nested records (references, verdicts) become JSON text columns, so that every shard of a kind has one schema.
    `records` may be an iterator: large tests are written as it goes, and are in memory for one record at a time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, tests_file = path.with_name(path.name + ".tmp"), path.with_suffix(_TESTS)
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
    if not path.with_suffix(_TESTS).exists():
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
    plain = {_RENAMED_COLUMNS.get(name, name): value for name, value in row.items()}
    for name in shape.nested & plain.keys():
        text = plain[name]
        if isinstance(text, str):  # None where an optional record is absent
            plain[name] = located(json.loads(text), folder)
    try:
        record: R = shape.adapter.validate_python(plain)
    except ValidationError as e:
        raise ArtifactError(f"{where}: not a {record_type.__name__}: {e}") from e
    return record


# ---- shards ----
# Process items in shards, the unit of resume, with bounded concurrency; yield a shard when all its items are done.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Generic[T]):
    """Items whose results go to the file `path`; the shard is done if and only if that file exists."""

    path: Path
    items: tuple[T, ...]

    @property
    def is_done(self) -> bool:
        """Whether the file exists; files appear complete or not at all."""
        return self.path.exists()


def plan_shards(
    folder: Path, items: Sequence[T], *, items_per_shard: int, prefix: str = "", begun: Path | None = None
) -> list[Shard[T]]:
    """Cut `items` into consecutive shards of nearly equal size, at most `items_per_shard` each.

    If an earlier run left shards here, their number is kept, so that a changed `items_per_shard` repeats no work. The
    same holds for files in `begun`, which belong to unfinished shards.
    """
    earlier = [*folder.glob(f"{prefix}?????-of-?????.parquet")]
    if begun is not None:
        earlier += begun.glob("?????-of-?????.*")
    # The names of shards tell their number.
    count = int(earlier[0].stem.rpartition("-of-")[2]) if earlier else -(-len(items) // items_per_shard)
    return [
        Shard(
            path=folder / f"{prefix}{shard_name(i, count)}",
            items=tuple(items[i * len(items) // count : (i + 1) * len(items) // count]),
        )
        for i in range(count)
    ]


async def work_shards(
    shards: Iterable[Shard[T]], work: Callable[[Shard[T], T], Awaitable[R]], *, limit: int
) -> AsyncGenerator[tuple[Shard[T], list[R]], None]:
    """Yield each shard when it is done, with its results in item order; at most `limit` items run at a time.

    The next shard's items start as soon as there is room, so that one slow item delays no other. The first error ends
    the work and cancels what is running. Use with `contextlib.aclosing`, so that this also happens when the caller
    stops early.
    """
    jobs = iter((shard, i) for shard in shards for i in range(len(shard.items)))
    running: dict[asyncio.Task[R], tuple[Shard[T], int]] = {}
    finished: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()
    results: dict[Path, dict[int, R]] = {}
    try:
        while True:
            for shard, i in islice(jobs, limit - len(running)):
                task = asyncio.ensure_future(work(shard, shard.items[i]))
                # a queue of finished tasks, so that finding one takes no search through all running tasks
                task.add_done_callback(finished.put_nowait)
                running[task] = (shard, i)
            if not running:
                return
            task = await finished.get()
            shard, i = running.pop(task)
            by_index = results.setdefault(shard.path, {})
            by_index[i] = task.result()
            if len(by_index) == len(shard.items):
                del results[shard.path]
                yield shard, [by_index[j] for j in range(len(by_index))]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# ---- tests file ----
# Keep large tests of programs in a file, so that a problem in memory holds a handle to its tests.
#
# The released KlearReasoner-CodeSub-15K has 278 KB of tests a problem, 4.2 GB in all. A stage that holds its problems
# (curation, RL, evaluation) needs the number of tests at most; a judging process reads those of one problem at a time.


INLINE_BYTES = 16 << 10
"""Tests whose JSON is longer are stored; shorter ones stay in their record (those of HumanEval and MBPP all do)."""
_LEVEL = 1
"""zlib's fastest level halves the size of numbers; slower levels gain hardly more."""

_KINDS: dict[TestKind, TypeAdapter[Any]] = {
    "stdin": TypeAdapter(StdinTests),
    "call": TypeAdapter(CallTests),
    "asserts": TypeAdapter(AssertTests),
}
_REFERENCES: TypeAdapter[Reference] = TypeAdapter(Reference)


class StoredTestsWriter:
    """Appends large tests to a file, which is created for the first of them. Use as a context manager."""

    def __init__(self, file: Path, *, name: str = "") -> None:
        """Write to `file`, and call it `name` in the handles; by default `file`, where they can be read at once."""
        self._file = file
        self._name = name or str(file.absolute())
        self._out: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()

    @property
    def has_tests(self) -> bool:
        """Whether tests were stored, and so the file exists."""
        return self._out is not None

    def stored(self, reference: Reference) -> Reference:
        """Return the reference with a handle in place of large tests; tests that are stored elsewhere are copied."""
        if not isinstance(reference, CodeReference):
            return reference
        tests = reference.tests
        if isinstance(tests, StoredTests):
            # Copied as they are: the digest is that of the packed bytes.
            handle = dataclasses.replace(tests, path=self._name, offset=self._append(_packed(tests)))
            return dataclasses.replace(reference, tests=handle)
        content = _KINDS[reference.test_kind].dump_json(tests)
        if len(content) <= INLINE_BYTES:
            return reference
        packed = zlib.compress(content, _LEVEL)
        handle = StoredTests(
            path=self._name,
            offset=self._append(packed),
            num_bytes=len(packed),
            kind=reference.test_kind,
            num_tests=reference.num_tests,
            num_chars=sum(sizes_of_tests(tests)),
            digest=_digest(packed),
        )
        return dataclasses.replace(reference, tests=handle)

    def _append(self, packed: bytes) -> int:
        """Write to the end of the file and return where; unbuffered, so that it can be read at once."""
        if self._out is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._file.open("wb", buffering=0)
        offset = self._out.tell()
        rest = memoryview(packed)
        while rest:  # a write without a buffer may stop early
            rest = rest[self._out.write(rest) :]
        return offset


def load_tests(reference: CodeReference) -> Tests:
    """Return the tests of a reference. ArtifactError names a file that is missing, cut short or altered."""
    tests = reference.tests
    if not isinstance(tests, StoredTests):
        return tests
    try:
        loaded: Tests = _KINDS[tests.kind].validate_json(zlib.decompress(_packed(tests)))
    except (zlib.error, ValidationError) as e:
        raise ArtifactError(f"{_place(tests)}: not tests of kind {tests.kind} ({e})") from e
    return loaded


def sizes_of_tests(tests: Tests) -> list[int]:
    """Return the number of characters of each test."""
    match tests:
        case StdinTests():
            return [len(c.input) + len(c.output) for c in tests.cases]
        case CallTests():
            return [len(c.args_json) + len(c.expected_json) for c in tests.cases]
        case AssertTests():
            return [len(p) for p in tests.programs]
        case _:
            assert_never(tests)


def located(reference: object, folder: Path) -> object:
    """Return a reference's JSON with the full path of its stored tests, which are in `folder`."""
    match reference:
        case {"tests": {"path": str(name), **handle}, **rest}:
            # An artifact may come from elsewhere; no record of it may make a judge read files of this machine.
            if Path(name).name != name:
                raise ArtifactError(f"{folder}: a record names a tests file outside of its folder: {name!r}")
            return {"tests": {"path": str(folder.absolute() / name), **handle}, **rest}
        case _:
            return reference


def with_tests(reference: object, folder: Path) -> str:
    """Return a reference's JSON as text with all tests in it; stored ones are read from `folder`."""
    record = _REFERENCES.validate_python(located(reference, folder))
    if isinstance(record, CodeReference):
        record = dataclasses.replace(record, tests=load_tests(record))
    return _REFERENCES.dump_json(record).decode()


def _packed(tests: StoredTests) -> bytes:
    """Return the compressed bytes of stored tests."""
    try:
        with Path(tests.path).open("rb", buffering=0) as f:
            f.seek(tests.offset)
            packed = f.read(tests.num_bytes)
    except OSError as e:
        raise ArtifactError(f"{_place(tests)}: cannot be read ({e.strerror})") from e
    if len(packed) < tests.num_bytes:
        raise ArtifactError(f"{_place(tests)}: the file is cut short")
    if _digest(packed) != tests.digest:
        raise ArtifactError(f"{_place(tests)}: altered since they were written")
    return packed


def _place(tests: StoredTests) -> str:
    return f"{tests.path}: tests at byte {tests.offset}"


def _digest(packed: bytes) -> str:
    return hashlib.blake2b(packed, digest_size=16).hexdigest()
