"""Find the data files of a source, and divide them into spans that can be read in parallel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, assert_never

from klear_core.artifacts.files import fixed_part, is_pattern, matching
from klear_core.artifacts.hub import HubFiles, cached_names, fetch, published_files
from klear_core.config.data import DatasetsSource, FileSource, HubRuntime, HubSource, StoredSource
from klear_core.data.arrow_batches import Span, arrow_batches, check_arrow_end
from klear_core.data.formats.fields import EMPTY_ROW, READ, RowError, has_surrogate, is_empty_row, stated_id
from klear_core.data.hf_datasets import check_first_row, loaded_files, made_files
from klear_core.data.readers import (
    SUFFIXES,
    BrokenRow,
    FileRow,
    check_ends,
    check_file,
    damage_as_data_error,
    is_array,
    line_ends,
    read_rows,
    separators_of,
    stem_of,
)
from klear_core.errors import ConfigError, DataError
from klear_core.types import Dropped

if TYPE_CHECKING:
    import pyarrow.parquet as pq

T = TypeVar("T")

_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json")
"""Files about the data that `datasets` writes beside it."""
_SPLITS = frozenset(["train", "test", "validation", "valid", "val", "dev"])
"""Names of splits by which `datasets` recognises files."""
_SHARD = re.compile(r"(?P<before>.*?)(?P<index>\d{4,6})(?P<after>-of-(?P<count>\d{4,6}).*)")
"""Name of one of several shards, `data/train-00002-of-00010.parquet`."""
_SHARD_HASH = re.compile(r"(?<=-of-\d{5})-[0-9a-f]{16}(?=\.)")
"""Hash in each shard's name, as `datasets` wrote them until 2023: `train-00000-of-00039-e991a271dbfa9925.parquet`."""
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of rows."""

    path: Path
    label: str
    """Name in messages and ledgers, the same on every machine that the source can be read on."""
    names_classes: bool = False
    """Classes are read by their names, and not by their numbers."""


class NoSuchSplitError(ConfigError):
    """A source has data files, but none of the split or subset that its settings name."""


def data_files(source: StoredSource) -> list[DataFile]:
    """Return the files of a source, sorted by name; those of a Hub source are downloaded unless they are there.

    Raise ConfigError if there is none, or if the source's settings leave open which of several splits or folders are
    meant; DataError if a shard is missing or empty.
    """
    match source:
        case FileSource():
            return _local_files(source)
        case HubSource():
            repo, names = repo_of(source), cached_files(source)
            if names is None:
                names = _published_names(source)
                fetch(repo, names)
            return _existing({f"{source.repo}/{name}": repo.folder / name for name in names})
        case DatasetsSource():
            return _labelled(source, loaded_files(source))
        case _:
            assert_never(source)


def cached_files(source: HubSource) -> list[str] | None:
    """Return the names of a Hub source's files if all are in the cache; None if one is missing. Nothing is fetched."""
    repo = repo_of(source)
    cached = cached_names(repo)
    if not cached:
        return None
    try:
        names = chosen_names(cached, source)
    except DataError:
        return None  # a copied cache without some of the shards
    is_complete = all((repo.folder / name).is_file() for name in names)
    return names if is_complete else None


def is_cached(source: HubSource | DatasetsSource) -> bool:
    """Return whether all files of a source are in their cache; False also if its settings leave them open."""
    try:
        found = cached_files(source) if isinstance(source, HubSource) else made_files(source)
        return found is not None
    except ConfigError:
        return False


def check_files(source: StoredSource) -> list[DataFile] | None:
    """Return the source's files if all are on this machine; None for a Hub source that is still to be downloaded.

    Raise ConfigError or DataError as `data_files` does, also for a file that lacks its end. The Hub is only asked for
    the names of its files.
    """
    if isinstance(source, HubSource) and cached_files(source) is None:
        _published_names(source)
        return None
    if isinstance(source, DatasetsSource) and made_files(source) is None:
        check_first_row(source)
        return None
    files = data_files(source)
    for file in files:
        check_ends(file.path, label=file.label)
    return files


def default_name(source: StoredSource) -> str:
    """Return the name of a source that was given none: that of its file, folder or repository."""
    match source:
        case HubSource(repo=repo):
            return repo.rsplit("/", 1)[1]
        case DatasetsSource(path=path, repo=repo):
            return Path(path or repo).name
        case FileSource(path=path) if is_pattern(path):
            return fixed_part(path).name or "files"
        case FileSource(path=path):
            return stem_of(Path(path))
        case _:
            assert_never(source)


def origin(source: StoredSource) -> str:
    """Return where the rows come from, for messages."""
    match source:
        case HubSource(repo=repo, revision=revision):
            return f"{repo}@{revision[:7]}"
        case DatasetsSource(path=path, repo=repo, revision=revision):
            return path or f"{repo}@{revision[:7]}"
        case FileSource(path=path):
            return path
        case _:
            assert_never(source)


def chosen_names(names: Iterable[str], source: FileSource | HubSource) -> list[str]:
    """Return the data files that the source's settings choose among these, sorted.

    Names are relative to the source's root. Raise ConfigError or DataError as `data_files` does.
    """
    there = sorted(name for name in names if _is_data(name) and _is_wanted(name, source))
    chosen = there
    if source.subset:
        chosen = [name for name in chosen if source.subset in name.split("/")[:-1]]
    if source.split:
        chosen = [name for name in chosen if source.split.lower() in _words(name)]
    if not chosen:
        raise (NoSuchSplitError if there else ConfigError)(_nothing_left(there, source))
    if not _pattern(source):
        _check_one_split(chosen, source)
        _check_one_folder(chosen, source)
    _check_shards(chosen, source)
    return chosen


def repo_of(source: HubSource | DatasetsSource) -> HubFiles:
    """Return the repository that a source is downloaded from; that of `datasets` is the one of its environment."""
    runtime = source.runtime if isinstance(source, HubSource) else HubRuntime()
    return HubFiles(type="dataset", repo=source.repo, revision=source.revision, runtime=runtime)


def files_to_fetch(source: HubSource) -> dict[str, int | None]:
    """Return the files that are still to be downloaded with their bytes; None if the Hub does not say."""
    if is_cached(source):
        return {}
    published = published_files(repo_of(source))
    names = set(chosen_names([file.name for file in published], source))
    return {file.name: file.size for file in published if file.name in names}


def _published_names(source: HubSource) -> list[str]:
    published = published_files(repo_of(source))
    return chosen_names([file.name for file in published], source)


def _local_files(source: FileSource) -> list[DataFile]:
    path = Path(source.path)
    if not is_pattern(source.path) and not path.is_dir():
        check_file(path)
        _check_split_of(path.name, source)
        return _existing({source.path: path}, may_be_empty=True)
    found: Iterable[Path] = path.rglob("*")
    root = path
    if is_pattern(source.path):
        root, found = fixed_part(source.path), matching(source.path)
    names = chosen_names([file.relative_to(root).as_posix() for file in _files_among(found, root)], source)
    return _existing({str(root / name): root / name for name in names})


def check_name(label: str) -> None:
    """Raise ConfigError for a name that is not UTF-8, because it could be written in no table and no message."""
    if has_surrogate(label):
        raise ConfigError(f"{label!a}: the name of this file is not UTF-8: rename it")


def _files_among(found: Iterable[Path], root: Path) -> Iterator[Path]:
    """Yield the files among files and folders. Raise DataError for a data file that is a link to nothing, as in a copy
    of the Hub's cache that lacks the files themselves.
    """
    for path in found:
        if path.is_file():
            yield path
        elif path.is_symlink() and not path.exists() and _is_data(path.relative_to(root).as_posix()):
            raise DataError(f"{path}: is a link to {path.readlink()}, which is not there: copy or fetch it again")


def _labelled(source: DatasetsSource, files: Sequence[Path]) -> list[DataFile]:
    return [DataFile(path=file, label=f"{origin(source)}/{file.name}", names_classes=True) for file in files]


def _existing(files: dict[str, Path], *, may_be_empty: bool = False) -> list[DataFile]:
    for label, path in files.items():
        check_name(label)
        if not may_be_empty and path.stat().st_size == 0:
            raise DataError(f"{label}: is empty (0 bytes): fetch it again")
    return [DataFile(path=path, label=label) for label, path in files.items()]


def _is_data(name: str) -> bool:
    parts = name.split("/")
    is_hidden = any(part.startswith(".") for part in parts)
    return parts[-1].endswith(SUFFIXES) and parts[-1] not in _NOT_DATA and not is_hidden


def _pattern(source: FileSource | HubSource) -> str:
    """Return the pattern, relative to the source's root, that names the files; empty if they are left to choose."""
    match source:
        case HubSource(files=files):
            return files
        case FileSource(path=path):
            return str(Path(path).relative_to(fixed_part(path))) if is_pattern(path) else ""
        case _:
            assert_never(source)


def _is_wanted(name: str, source: FileSource | HubSource) -> bool:
    pattern = _pattern(source)
    return not pattern or isinstance(source, FileSource) or fnmatchcase(name, pattern)


def _nothing_left(there: Sequence[str], source: FileSource | HubSource) -> str:
    wanted = [f"{key} {value!r}" for key in ("subset", "split") if (value := getattr(source, key))]
    of_what = f" of {' and '.join(wanted)}" if wanted else ""
    listed = f"there are {_some(there)}" if there else f"such files end in {', '.join(SUFFIXES)}"
    where = f"; relative paths are taken from {Path.cwd()}" if isinstance(source, FileSource) else ""
    return f"{origin(source)}: holds no data file{of_what}; {listed}{where}"


def _words(name: str) -> set[str]:
    """Return the words of a name in which splits are named: `data/train_sft-00000.parquet` has train and train_sft."""
    lower = name.lower()
    return {*re.findall(r"[a-z0-9]+", lower), *re.findall(r"[a-z0-9_]+", lower)}


def _check_one_split(names: Sequence[str], source: FileSource | HubSource) -> None:
    splits = sorted({word for name in names for word in _words(name) & _SPLITS})
    if len(splits) > 1 and not source.split:
        raise ConfigError(f"{origin(source)}: holds the splits {', '.join(splits)}; set `split` to one of them")


def _check_split_of(name: str, source: FileSource) -> None:
    """Raise NoSuchSplitError if the name of the source's only file says that it holds another split."""
    words = _words(name)
    if source.split and words & _SPLITS and source.split.lower() not in words:
        raise NoSuchSplitError(_nothing_left([name], source))


def _check_one_folder(names: Sequence[str], source: FileSource | HubSource) -> None:
    folders = sorted({name.rpartition("/")[0] or "." for name in names})
    if len(folders) > 1:
        raise ConfigError(
            f"{origin(source)}: its data files lie in several folders ({_some(folders)}), which may hold the same rows "
            "in several forms; set `subset` to one, or give each a source of its own"
        )


def _check_shards(names: Sequence[str], source: FileSource | HubSource) -> None:
    """Raise DataError if a file is called `…-00002-of-00010…` and another of the ten is missing.

    A pattern that leaves some of them out on purpose is followed.
    """
    pattern = _pattern(source) or "*"
    plain = [_SHARD_HASH.sub("-*", name) for name in names]
    shards = [match for match in map(_SHARD.fullmatch, plain) if match]
    sets = {(shard["before"], len(shard["index"]), shard["after"], int(shard["count"])) for shard in shards}
    expected: set[str] = set()
    for before, width, after, count in sets:
        numbers = range(count)
        if f"{before}{count:0{width}d}{after}" in plain:
            numbers = range(1, count + 1)  # some count from 1
        expected |= {f"{before}{i:0{width}d}{after}" for i in numbers}
    missing = sorted(name for name in expected.difference(plain) if fnmatchcase(name, pattern))
    if missing:
        raise DataError(
            f"{origin(source)}: {len(missing)} of its shards are missing ({_some(missing)}): fetch them, or "
            "name the files to read by a pattern"
        )


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


# ---- spans ----
# Divide data files into spans that can be read in parallel; the division depends on the files alone.


_PACKED = (".gz", ".zst")
_MAX_SPANS_PER_ROW_GROUP = 16
"""A span in the middle of a row group of a Parquet file costs decoding the rows before it."""


def spans_of(path: Path, *, label: str, num_bytes: int, limit: int | None) -> list[Span] | None:
    """Return spans of about `num_bytes` that make up the file, or its first `limit` rows.

    Return None for a file that can only be read from its start: a compressed one, a JSON array, or CSV, in which a line
    may end within a cell. Raise errors as
    `read_rows` does.
    """
    check_file(path)
    with damage_as_data_error(label):
        if path.suffix == ".parquet":
            return _parquet_spans(path, num_bytes, limit)
        if path.suffix == ".arrow":
            return _arrow_spans(path, label, num_bytes, limit)
        if path.suffix in _PACKED or separators_of(path) or is_array(path):
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


# ---- rows ----


def rows_of(files: Iterable[DataFile]) -> Iterator[FileRow | BrokenRow]:
    """Yield the rows of files in order."""
    return (row for file in files for row in read_rows(file.path, label=file.label, names_classes=file.names_classes))


def parse_rows(
    rows: Iterable[FileRow | BrokenRow], parse: Callable[[FileRow], T], *, limit: int | None
) -> Iterator[T | Dropped]:
    """Yield the result of `parse` for each row up to the limit; a drop record if it is broken, empty or a RowError."""
    for row in islice(rows, limit):
        if isinstance(row, BrokenRow):
            yield Dropped(problem_id=row.where, step=READ, reason=row.reason, detail=f"{row.where}: {row.detail}")
            continue
        if is_empty_row(row.fields):
            detail = f"{row.where}: no key has a value"
            yield Dropped(problem_id=row.where, step=READ, reason=EMPTY_ROW, detail=detail)
            continue
        try:
            yield parse(row)
        except RowError as e:
            given = stated_id(row.fields)
            named = f"{row.where} (id {given})" if given else row.where
            yield Dropped(problem_id=row.where, step=READ, reason=e.reason, detail=f"{named}: {e}")
