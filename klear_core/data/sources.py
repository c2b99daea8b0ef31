"""Read candidates from configured sources; every unusable row is reported with its place, field and reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, assert_never

from klear_core.artifacts.files import fixed_part, hash_all
from klear_core.artifacts.hub import fetch
from klear_core.artifacts.manifest import FileRecord, GivenRecord
from klear_core.artifacts.model_files import CARD, licence_in
from klear_core.config.data import (
    DatasetsSource,
    FileSource,
    GeneratedSource,
    GymSource,
    HubSource,
    ProceduralSource,
    PuzzleSource,
    Source,
    StoredSource,
)
from klear_core.data.arrow_batches import Span
from klear_core.data.candidates import Candidate
from klear_core.data.datafiles import (
    DataFile,
    check_files,
    data_files,
    default_name,
    is_cached,
    origin,
    parse_rows,
    repo_of,
    rows_of,
)
from klear_core.data.formats.code_rows import QuestionTables
from klear_core.data.formats.detect import schema_for
from klear_core.data.formats.fields import (
    Fields,
    RowError,
    Schema,
    check_is_whole,
    contest_id,
    head_of,
    is_empty_row,
    stated_id,
)
from klear_core.data.formats.references import has_half_character
from klear_core.data.generated.puzzles import check_generated, domain_of_generated, generate
from klear_core.data.readers import BrokenRow, FileRow, read_rows
from klear_core.errors import ConfigError, DataError
from klear_core.types import CodeReference, CustomReference, Domain, Dropped, MathReference, domain_of

T = TypeVar("T")


def read_source(source: Source, *, seed: int) -> Iterator[Candidate | Dropped]:
    """Yield all rows of a source in order, each as a candidate or a drop record; only generated sources use `seed`.

    Raise ConfigError or DataError if the source itself cannot be read.
    """
    match source:
        case ProceduralSource() | PuzzleSource() | GymSource():
            yield from generate(source, seed=seed)
        case FileSource() | HubSource() | DatasetsSource():
            yield from _parse_rows(
                source, rows_of(data_files(source)), _parser_of(source, QuestionTables(source.lookup))
            )
        case _:
            assert_never(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The rows of one file, or of one span of it."""

    path: Path
    label: str
    span: Span | None


_MOST_FILLING = 1000
"""Rows in which the values are looked for that the first row lacks."""
_MAX_TELLING = 1000
"""Characters of a value that tells a format from another of the same keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The first intact row of a source, as far as it determines the format of all rows."""

    fields: Mapping[str, object]
    """Its fields; None in place of long or nested values, by which no format is told from another."""
    where: str


def first_row(source: StoredSource, files: Sequence[DataFile]) -> FirstRow | None:
    """Return the first intact row with a value, up to the source's limit; None if there is none."""
    first = _first_full(islice(rows_of(files), source.limit))
    if first is None:
        return None
    return FirstRow(fields={key: _telling(value) for key, value in first.fields.items()}, where=first.where)


def _telling(value: object) -> str | float | None:
    return value if isinstance(value, str | int | float) and len(str(value)) <= _MAX_TELLING else None


def read_pieces(
    source: StoredSource, pieces: Sequence[Piece], first: FirstRow | None, tables: QuestionTables | None
) -> Iterator[Candidate | Dropped]:
    """Yield the rows of some pieces of a source as `read_source` does; `first` is the source's first intact row."""
    names_classes = isinstance(source, DatasetsSource)
    rows = (
        row
        for piece in pieces
        for row in read_rows(piece.path, label=piece.label, span=piece.span, names_classes=names_classes)
    )
    schema = None if first is None else schema_for(source, first.fields, where=first.where)
    yield from _parse_rows(source, rows, _parser_of(source, tables), schema)


def read_questions(source: FileSource) -> Iterator[str | Dropped]:
    """Yield the questions alone; rows need no reference."""
    return _parse_rows(source, rows_of(data_files(source)), lambda fields, schema, _row: schema.question(fields))


def read_contest_questions(source: FileSource) -> Iterator[tuple[str, str] | Dropped]:
    """Yield each question with its contest id, which may be empty; rows need no reference."""

    def parse(fields: Fields, schema: Schema, _row: str) -> tuple[str, str]:
        return schema.question(fields), contest_id(fields)

    return _parse_rows(source, rows_of(data_files(source)), parse)


def check_sources(sources: Sequence[Source]) -> None:
    """Run `check_names`, and `check_source` for each source."""
    check_names(sources)
    for source in sources:
        check_source(source)


def check_names(sources: Iterable[Source]) -> None:
    """Raise ConfigError if two sources share a name, because drops and repeats are counted by name."""
    names: dict[str, Source] = {}
    for source in sources:
        name = source_name(source)
        if name in names:
            raise ConfigError(
                f"two sources are called {name!r} ({_origin(names[name])} and {_origin(source)}); "
                "give one of them another name"
            )
        names[name] = source


def check_source(source: Source) -> None:
    """Raise ConfigError or DataError if files of a source are missing, cut short or ambiguous, or none of its first
    rows can be used.

    Of a Hub source that is not in the cache only the names of its files are checked.
    """
    match source:
        case ProceduralSource() | PuzzleSource() | GymSource():
            check_generated(source)
        case FileSource() | HubSource() | DatasetsSource():
            files = check_files(source)
            if files is not None:
                _check_formats(source, files)
                _refuse_unusable(source, _first_rows(source))
        case _:
            assert_never(source)


def check_questions(source: FileSource) -> None:
    """Raise ConfigError as `check_source` does, for a source of which only the questions are read."""
    _refuse_unusable(source, head_of(read_questions(source)))


def files_here(source: StoredSource) -> list[DataFile]:
    """Return the source's files if they are on this machine and its settings determine them; else an empty list."""
    if not isinstance(source, FileSource) and not is_cached(source):
        return []
    try:
        return data_files(source)
    except (ConfigError, DataError):
        return []


def is_without_references(source: Source) -> bool:
    """Return whether the format of a source's rows has no references, so that none can be judged."""
    if isinstance(source, GeneratedSource):
        return False
    first = _first_full(rows_of(files_here(source)))
    return first is not None and schema_for(source, first.fields, where=first.where).reference is None


def domains_of(source: Source) -> frozenset[Domain]:
    """Return the domains that occur in the first rows of a source; none for a Hub source not yet downloaded."""
    match source:
        case ProceduralSource() | PuzzleSource() | GymSource():
            return frozenset({domain_of_generated(source)})
        case FileSource() | HubSource() | DatasetsSource():
            if not files_here(source):
                return frozenset()
            return frozenset(row.domain for row in _first_rows(source) if isinstance(row, Candidate))
        case _:
            assert_never(source)


def judges_of(source: Source) -> frozenset[str]:
    """Return the judges of the user's own that the first rows of a source name; none if it is not yet downloaded."""
    if isinstance(source, GeneratedSource) or not files_here(source):
        return frozenset()
    references = [row.reference for row in _first_rows(source) if isinstance(row, Candidate)]
    return frozenset(reference.judge for reference in references if isinstance(reference, CustomReference))


def source_name(source: Source) -> str:
    """Return the name by which rows of this source are counted; by default that of its file, folder or repository."""
    if not source.name and not isinstance(source, GeneratedSource):
        return default_name(source)
    return source.name


def _check_formats(source: StoredSource, files: Sequence[DataFile]) -> None:
    """Raise ConfigError if the first rows of two files have different formats."""
    first: dict[str, str] = {}
    for file in files:
        row = _first_full(rows_of([file]))
        if row is not None:
            first[schema_for(source, row.fields, where=row.where).name] = file.label
    if len(first) > 1:
        listed = ", ".join(f"{label} is {name!r}" for name, label in first.items())
        raise ConfigError(f"{origin(source)}: its files have several row formats ({listed}); name one set by a pattern")


def _refuse_unusable(source: StoredSource, head: list[Candidate | Dropped] | list[str | Dropped]) -> None:
    if not head:
        raise ConfigError(f"{origin(source)}: holds no row")
    dropped = [row for row in head if isinstance(row, Dropped)]
    if len(dropped) == len(head):
        raise ConfigError(
            f"{origin(source)}: with row_schema {source.row_schema!r} none of the first {len(head)} rows can be used; "
            f"{dropped[0].detail}"
        )


def _first_rows(source: StoredSource) -> list[Candidate | Dropped]:
    """Return the first rows, up to a usable one; those whose question is looked up have a stand-in for it."""
    parse = _parser_of(source)
    check = QuestionTables(source.lookup).checked
    files = rows_of(data_files(source))
    rows = _parse_rows(source, files, lambda fields, schema, row: parse(check(fields), schema, row))
    return head_of(rows)


def _first_full(rows: Iterable[FileRow | BrokenRow]) -> FileRow | None:
    """Return the first intact row with a value; what is empty in it is taken from the next rows that have it."""
    intact = (row for row in rows if isinstance(row, FileRow) and not is_empty_row(row.fields))
    first = next(intact, None)
    if first is None:
        return None
    fields = dict(first.fields)
    for row in islice(intact, _MOST_FILLING):
        empty = [key for key, value in fields.items() if value in (None, "")]
        if not empty:
            break
        fields |= {key: row.fields[key] for key in empty if row.fields.get(key) is not None}
    return replace(first, fields=fields)


def _schema_of(source: StoredSource) -> Schema | None:
    """Return the format of a source by its first rows; None if it has no intact row."""
    first = _first_full(islice(rows_of(data_files(source)), source.limit))
    return None if first is None else schema_for(source, first.fields, where=first.where)


def _parser_of(
    source: StoredSource, tables: QuestionTables | None = None
) -> Callable[[Fields, Schema, str], Candidate]:
    """Return the function that makes a candidate of a row; questions that are elsewhere are looked up in `tables`."""
    domain = None if source.domain is None else Domain(source.domain)
    parse = partial(_candidate, source=source_name(source), domain=domain, is_mapped=source.fields is not None)
    if tables is None:
        return parse
    complete = tables.completed
    return lambda fields, schema, row: parse(complete(fields), schema, row)


def _parse_rows(
    source: StoredSource,
    rows: Iterable[FileRow | BrokenRow],
    parse: Callable[[Fields, Schema, str], T],
    schema: Schema | None = None,
) -> Iterator[T | Dropped]:
    """Yield the result of `parse` for each row up to the limit.

    `parse` gets a row's fields, their format, and the row's place in the source. The first intact row with a value
    determines the format, unless `schema` is given.
    """
    found = schema or _schema_of(source)

    def parse_row(row: FileRow) -> T:
        assert found is not None, "an intact row determines the format"
        return parse(row.fields, found, row.where)

    return parse_rows(rows, parse_row, limit=source.limit)


def _candidate(
    fields: Fields, schema: Schema, row: str, *, source: str, domain: Domain | None, is_mapped: bool
) -> Candidate:
    question = schema.question(fields)
    reference = schema.reference_of(fields, domain=domain)
    if isinstance(reference, MathReference) and not is_mapped:
        check_is_whole(question, fields)
    if has_half_character(reference):  # no file in UTF-8 could hold it
        raise RowError("not_utf8", "reference", "a JSON text in it escapes one half of a surrogate pair")
    return Candidate(
        source=source,
        domain=domain_of(reference),
        question=question,
        reference=reference,
        rating=schema.rating(fields),
        row=row,
        contest_id=contest_id(fields),
        contest_date=str(fields.get("contest_date") or ""),
        stated_id=stated_id(fields),
        solution=schema.solution(fields) if isinstance(reference, CodeReference) else "",
        cluster=schema.cluster(fields),
    )


def _origin(source: Source) -> str:
    return source.kind if isinstance(source, GeneratedSource) else origin(source)


# ---- given rows ----
# Describe given traces and problems: the files that they come from, with checksums and a licence.


def describe_rows(sources: Sequence[StoredSource], *, origin: str, licence: str) -> GivenRecord:
    """Return the record of the sources' files, which are downloaded if they are not there.

    If no licence is declared, the record has that of the dataset cards in the files' folders.
    """
    for source in sources:
        if isinstance(source, HubSource) and not is_cached(source):
            fetch(repo_of(source), [CARD])  # with the rows, because later there may be no network
    files = [file for source in sources for file in data_files(source)]
    checksums = hash_all([file.path for file in files])
    records = [
        FileRecord(path=file.label, size=file.path.stat().st_size, sha256=sha256)
        for file, sha256 in zip(files, checksums, strict=True)
    ]
    stated = dict.fromkeys(licence_in(folder) for source in sources for folder in _folders_of(source))
    stated.pop("", None)
    return GivenRecord(origin=origin, licence=licence or ", ".join(stated) or "not stated", files=tuple(records))


def _folders_of(source: StoredSource) -> list[Path]:
    """Return the folders in which a source's card may be."""
    if isinstance(source, HubSource):
        return [repo_of(source).folder]
    if isinstance(source, DatasetsSource):
        return [Path(source.path)] if source.path else []
    return list(dict.fromkeys([fixed_part(source.path), *(file.path.parent for file in data_files(source))]))
