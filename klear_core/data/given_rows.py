"""Describe given traces and problems: the files that they come from, with checksums and a licence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klear_core.artifacts.files import fixed_part, sha256_of_all
from klear_core.artifacts.hub import fetch
from klear_core.artifacts.ledger import FileRecord, GivenRecord
from klear_core.artifacts.model_files import CARD, licence_in
from klear_core.config.data import FileSource, HubSource
from klear_core.data.datafiles import data_files, is_cached, repo_of


def describe_rows(sources: Sequence[FileSource | HubSource], *, origin: str, licence: str) -> GivenRecord:
    """Return the record of the sources' files, which are downloaded if they are not there.

    If no licence is declared, the record has that of the dataset cards in the files' folders.
    """
    for source in sources:
        if isinstance(source, HubSource) and not is_cached(source):
            fetch(repo_of(source), [CARD])  # with the rows, because later there may be no network
    files = [file for source in sources for file in data_files(source)]
    checksums = sha256_of_all([file.path for file in files])
    records = [
        FileRecord(path=file.label, size=file.path.stat().st_size, sha256=sha256)
        for file, sha256 in zip(files, checksums, strict=True)
    ]
    stated = dict.fromkeys(licence_in(folder) for source in sources for folder in _folders_of(source))
    stated.pop("", None)
    return GivenRecord(origin=origin, licence=licence or ", ".join(stated) or "not stated", files=tuple(records))


def _folders_of(source: FileSource | HubSource) -> list[Path]:
    """Return the folders in which a source's card may be."""
    if isinstance(source, HubSource):
        return [repo_of(source).folder]
    return list(dict.fromkeys([fixed_part(source.path), *(file.path.parent for file in data_files(source))]))
