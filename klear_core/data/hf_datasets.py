"""Load sources with the library `datasets`, into files that our readers read."""

from __future__ import annotations

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from klear_core.artifacts.files import content_digest
from klear_core.config.data import DatasetsSource
from klear_core.errors import ConfigError, DataError


def loaded_files(source: DatasetsSource) -> list[Path]:
    """Return the Arrow files that `datasets` makes of the source in its cache, or a Parquet file of its streamed rows.

    They are made once (HF_DATASETS_CACHE). Raise ConfigError if the source is not there, has no such config or split,
    or needs a loading script; DataError if its files are damaged.
    """
    builder, split = _builder(source)
    found = _made(builder, split, source)
    if found is not None:
        return found
    import datasets

    datasets.disable_progress_bars()
    with _explained(source, DataError):
        if source.streaming:
            _stream(builder, split, source)
        else:
            builder.download_and_prepare()
    found = _made(builder, split, source)
    assert found is not None, builder.cache_dir
    return found


def made_files(source: DatasetsSource) -> list[Path] | None:
    """Return the files if they were made before; None if they were not. Raise ConfigError as `loaded_files` does."""
    builder, split = _builder(source)
    return _made(builder, split, source)


def check_first_row(source: DatasetsSource) -> None:
    """Raise ConfigError or DataError if a folder has no row or its first one cannot be loaded.

    Of a repository only the names of configs and splits are checked, and so they are of a folder whose archives cannot
    be streamed, unless `streaming` is set.
    """
    builder, split = _builder(source)
    if not source.path:
        return
    with _explained(source, DataError):
        try:
            # As Arrow, so that images and sounds are not decoded.
            rows = builder.as_streaming_dataset(split=split).with_format("arrow")
            is_empty = next(iter(rows), None) is None
        except NotImplementedError:
            if source.streaming:
                raise
            return
    if is_empty:
        raise ConfigError(f"{_origin(source)}: holds no row")


def _builder(source: DatasetsSource) -> tuple[Any, str]:
    """Return the builder of `datasets` and the split to read."""
    import datasets

    if source.path and not Path(source.path).is_dir():
        raise ConfigError(
            f"{source.path}: no such folder; relative paths are taken from {Path.cwd()}; a repository of the Hub is "
            'named by `repo`, and a single file by kind = "file"'
        )
    place = str(Path(source.path).absolute()) if source.path else source.repo
    with _explained(source, ConfigError):
        builder = datasets.load_dataset_builder(
            place, source.subset or None, revision=source.revision or None, cache_dir=_cache_of(source)
        )
    splits = [str(split) for split in builder.config.data_files or builder.info.splits or ()]
    if source.split in splits:
        return builder, source.split
    if not source.split and len(splits) == 1:
        return builder, splits[0]
    there = ", ".join(splits)
    if source.split:
        raise ConfigError(f"{_origin(source)}: no split {source.split!r}; it has {there}; `limit` reads a part of one")
    raise ConfigError(f"{_origin(source)}: holds the splits {there}; set `split` to one of them")


def _cache_of(source: DatasetsSource) -> str | None:
    """Return the cache of a folder's content: `datasets` itself tells a folder's files apart by their times alone."""
    import datasets

    if not source.path:
        return None
    root = Path(datasets.config.HF_DATASETS_CACHE)
    return str(root / content_digest(Path(source.path), cache=root / "klear_hashes.json"))


def _made(builder: Any, split: str, source: DatasetsSource) -> list[Path] | None:
    if source.streaming:
        file = _streamed_file(builder, split, source)
        return [file] if file.is_file() else None
    folder = Path(builder.cache_dir)
    if not (folder / "dataset_info.json").is_file():  # written last
        return None
    start = f"{builder.dataset_name}-{split}"
    return sorted([*folder.glob(f"{start}.arrow"), *folder.glob(f"{start}-*-of-*.arrow")])


def _streamed_file(builder: Any, split: str, source: DatasetsSource) -> Path:
    # Beside the folder of the whole files, which `datasets` takes for made as soon as it is there.
    return Path(f"{builder.cache_dir}.streamed") / f"{split}-{source.limit or 'all'}.parquet"


def _stream(builder: Any, split: str, source: DatasetsSource) -> None:
    rows = builder.as_streaming_dataset(split=split)
    file = _streamed_file(builder, split, source)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    (rows if source.limit is None else rows.take(source.limit)).to_parquet(str(temporary))
    temporary.replace(file)


_DAMAGE = (EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)
"""Errors of Python about packed files, which `datasets` lets through."""


def _text_of(error: BaseException) -> str:
    """Return an error's text, or what it means if it does not say so."""
    if isinstance(error, StopIteration):  # of JSON
        return "its first split holds no row"
    text = " ".join(str(error).split())
    if text == "BatchSize must be greater than 0, got 0":
        return "a Parquet file holds no row"
    return text or type(error).__name__


@contextmanager
def _explained(source: DatasetsSource, kind: type[ConfigError | DataError]) -> Iterator[None]:
    """Turn an error of `datasets`, whose errors have no class in common, into one that names the source."""
    import yaml
    from datasets.exceptions import DatasetsError

    known = (DatasetsError, OSError, ValueError, RuntimeError, TypeError, KeyError, StopIteration, yaml.YAMLError)
    try:
        yield
    except (*known, *_DAMAGE) as e:
        # "An error occurred while generating the dataset" says less than its cause
        text = _text_of(e.__cause__ or e)
        if isinstance(e, yaml.YAMLError):
            text = f"the head of its README.md is no YAML: {text}"
        scripts = (
            "; its rows can be read by naming its data files: kind = 'hub', files = ..." if "script" in text else ""
        )
        raise kind(f"{_origin(source)}: the library datasets cannot load it ({text}){scripts}") from e


def _origin(source: DatasetsSource) -> str:
    return source.path or f"{source.repo}@{source.revision[:7]}"
