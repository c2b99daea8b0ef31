"""Check and name the places that commands write to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from klear_core.errors import ConfigError

_MAX_BYTES = 120  # a file system's limit is 255; below this, names of folders stay readable


def check_folder_place(option: str, folder: Path) -> None:
    """Raise ConfigError if a folder cannot be made there: a file is in the way, or nothing can be written there."""
    with _writing(option, folder):
        for place in (folder, *folder.parents):
            if place.is_dir():
                _write_to(place)
                return
            if place.exists():
                raise ConfigError(f"{option} {folder}: {place} is a file; name a folder")


def check_file_place(option: str, file: Path) -> None:
    """Raise ConfigError if a file cannot be written there: it is a folder or below a file, or nothing can be."""
    with _writing(option, file):
        if file.is_dir():
            raise ConfigError(f"{option} {file}: a folder; name a file")
        for place in file.parents:
            if place.is_dir():
                _write_to(place)
                return
            if place.exists():
                raise ConfigError(f"{option} {file}: {place} is a file")


@contextmanager
def _writing(option: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(f"{option} {place}: cannot be written to ({e.strerror})") from e


def _write_to(folder: Path) -> None:
    """Make a folder there and remove it: permissions alone do not tell, least of all for root."""
    with TemporaryDirectory(dir=folder, prefix=".klear-"):
        pass


def folder_name(parts: list[str]) -> str:
    """Return a folder's name for all parts; one that would be too long ends in a checksum of what is left out."""
    name = "-".join(parts)
    content = name.encode()
    if len(content) <= _MAX_BYTES:
        return name
    start = content[:_MAX_BYTES].decode(errors="ignore")  # without the part of a character
    return f"{start}-{hashlib.sha256(content).hexdigest()[:8]}"
