"""Name, seal and verify the files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from klear_core.progress import made_progress

SEAL = "seal.json"
_HASH_THREADS = 8  # a thread hashes about 1 GB a second, so that 8 are as fast as a local disk


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank has written of a checkpoint; rank 0 has also written what describes all."""
    # DCP's names: `__RANK_NUMBER.distcp`, and `.metadata`, which says where in them each tensor is.
    own = [file for file in sorted(folder.iterdir()) if file.name.startswith(f"__{rank}_")]
    return [*own, folder / ".metadata"] if rank == 0 else own


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "blake2b").hexdigest()[:32]  # 128 bits: against accidents, not attacks
    made_progress(f"checksum of {file.name}")
    return digest


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the checksum of each file by its name, several files at a time: hashing releases Python's lock."""
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip([file.name for file in files], threads.map(_digest, files), strict=True))


def sealed_files(content: bytes) -> dict[str, str]:
    """Return the checksums that a seal names by file. Raise ValueError if the content is not a complete seal."""
    seal = json.loads(content)
    if not isinstance(seal, dict) or not isinstance(seal.get("files"), dict):
        raise ValueError("it names no files")
    files: dict[str, str] = seal["files"]
    return files


def find_damage(folder: Path) -> str | None:
    """Return in words what is wrong with a checkpoint; None if it is complete."""
    try:
        files = sealed_files((folder / SEAL).read_bytes())
    except (OSError, ValueError) as e:
        return f"{SEAL} cannot be read ({e})"
    # Names first, because checksums read all files to their end.
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    found = digests_of([folder / name for name in files])
    damaged = [name for name, digest in files.items() if found[name] != digest]
    return f"{damaged[0]} is damaged" if damaged else None
