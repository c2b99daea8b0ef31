"""Read the header of a GGUF file: its metadata and the table of its tensors, without libraries and without weights.

The library `gguf` reads the same in seconds, for it makes an array of every token. Format:
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from klear_core.errors import ConfigError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
"""Versions of the format in use; 1 counted in 32 bits."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct`, by the type of a value."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """Sizes as torch counts them: the outermost dimension first."""
    type: int
    """Number of the quantisation, as ggml counts."""
    offset: int
    """Its first byte, counted from the start of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The header of a GGUF file: all that stands before its weights."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, texts, and lists of numbers by key; of a list of texts, such as the vocabulary, only the length."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the model's family, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_params(self) -> int:
        """Number of values in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def of_model(self, key: str) -> Any:
        """Return the value of a key of the model, such as `attention.head_count`; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def is_gguf(path: Path | str) -> bool:
    """Return whether a path names a GGUF file, by its ending."""
    return str(path).lower().endswith(SUFFIX)


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file; ConfigError if there is no such file, or it is another or not whole."""
    if path.is_dir() or not path.exists():
        found = "a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {found}; a GGUF file is needed; relative paths are taken from {Path.cwd()}")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != _MAGIC or len(start) < 8:
            raise ConfigError(f"{path}: not a GGUF file: it begins with {start[:4]!r} and not with {_MAGIC!r}")
        version = struct.unpack("<I", start[4:])[0]
        if version not in _VERSIONS:
            raise ConfigError(f"{path}: GGUF of version {version}; versions {_VERSIONS} of little-endian are known")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                metadata, tensors = _read(content)
            except (struct.error, ValueError, OverflowError) as e:
                raise ConfigError(f"{path}: its header is cut off or damaged ({e}); fetch the file again") from e
    last = max((tensor.offset for tensor in tensors.values()), default=0)
    if last >= size:
        raise ConfigError(
            f"{path}: cut off: it has {size:,} bytes, and a tensor begins at byte {last:,}; fetch the file again"
        )
    return GgufHeader(path=path, metadata=metadata, tensors=tensors)


class _Cursor:
    """A place in the file, which moves on by what is read."""

    def __init__(self, content: mmap.mmap, at: int) -> None:
        self.content, self.at = content, at

    def numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        found = struct.unpack_from(layout, self.content, self.at)
        self.at += struct.calcsize(layout)
        return found

    def text(self) -> str:
        (length,) = self.numbers("Q")
        end = self.at + length
        if end > len(self.content):
            raise ValueError(f"a text of {length} bytes reaches behind the end")
        found = self.content[self.at : end].decode("utf-8")
        self.at = end
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        inner, count = self.numbers("IQ")
        if inner in _NUMBERS:
            return list(self.numbers(f"{count}{_NUMBERS[inner]}"))
        if inner != _STRING:
            raise ValueError(f"a list of the unknown type {inner}")
        for _ in range(count):
            (length,) = self.numbers("Q")
            self.at += length
        return count


def _read(content: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(content, len(_MAGIC) + 4)
    num_tensors, num_keys = cursor.numbers("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        (num_dims,) = cursor.numbers("I")
        dims = cursor.numbers(f"{num_dims}Q")
        kind, offset = cursor.numbers("IQ")
        table[name] = (dims[::-1], kind, offset)  # ggml names the innermost dimension first
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ValueError(f"general.alignment = {alignment!r}, and not a multiple of 8")
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(shape=shape, type=kind, offset=start + offset) for name, (shape, kind, offset) in table.items()
    }
    return metadata, tensors
