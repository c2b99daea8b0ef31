"""Hash, lock and sync files for the artifact store, and turn a full disk into an error that says what to do."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType

from klear_core.errors import ConfigError, DiskFullError, KlearError, chain_of

_HASH_THREADS = 8  # a thread hashes about 1 GB a second, so that 8 are as fast as a local disk
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""
_DISK_FULL_TEXTS = (*(os.strerror(code) for code in DISK_FULL), "database or disk is full")
"""The system's texts, and SQLite's."""
BEING_CREATED = ".being-created"
"""Ending of a temporary file, before it gets its name."""
_held_locks: set[int] = set()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as 64 hex digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hash_all(paths: Sequence[Path], hash_of: Callable[[Path], str] = sha256_of) -> list[str]:
    """Return the hash of every file, in order, several at a time; SHA-256 by default."""
    if len(paths) < 2:
        return [hash_of(path) for path in paths]
    # Hashing releases the GIL, so threads bring it to the speed of the disk.
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(hash_of, paths))


def content_digest(path: Path, *, cache: Path | None = None) -> str:
    """Return 20 hex digits over a file, or over the names and contents of a folder's files (without hidden ones).

    A pattern (`data/train-*.parquet`) counts as a folder of the files that match it. `cache` is a JSON file that keeps
    hashes by path, size, inode and both time stamps, as git's index does: a 16 GB model is read once, not at every
    plan. ConfigError if there is nothing at `path`.
    """
    # Names count relative to the folder, and that of a single file not at all: content that is moved stays the same.
    if path.is_file():
        text = _cached_hashes([path], cache)[0]
    elif path.is_dir():
        # Tools leave hidden files beside the content, such as `.cache` of `hf download --local-dir`.
        found = (p for p in path.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(path).as_posix()}")
        text = _listing(sorted(found), path, cache)
    elif is_pattern(str(path)) and (files := matching_files(str(path))):
        text = _listing(files, fixed_part(str(path)), cache)
    else:
        raise ConfigError(f"{path}: no such file or folder (looked from {Path.cwd()})")
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:20]  # names need not be UTF-8


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern for several files; a file whose name has such characters is a file."""
    return glob.has_magic(path) and not Path(path).exists()


def fixed_part(path: str) -> Path:
    """Return the part of a pattern's path before its first part with a `*`, `?` or `[` that is no folder's own name."""
    parts = (Path(path), *Path(path).parents)
    return next(part for part in parts if not glob.has_magic(str(part)) or part.is_dir())


def matching(pattern: str) -> list[Path]:
    """Return the files and folders that match a pattern, sorted by name; `**` stands for any number of folders."""
    fixed = fixed_part(pattern)
    rest = str(Path(pattern).relative_to(fixed))
    return sorted(fixed / found for found in glob.glob(rest, root_dir=fixed, recursive=True))


def matching_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted by name."""
    return [path for path in matching(pattern) if path.is_file()]


def write_whole(path: Path, content: bytes) -> None:
    """Give a file its whole content by a rename, or leave it as it was: others may read it at any time."""
    temporary = beside(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """Return a hidden path that no other process uses, in the folder of `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{BEING_CREATED}")


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk, so that they are complete after a rename and a power cut."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(parent, name))
        sync_path(Path(parent))


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def file_lock(path: Path, *, on_wait: Callable[[str], None], notify_after_s: float = 2.0) -> Iterator[None]:
    """Hold the kernel lock on `path`; the kernel releases it when the process ends, however that happens.

    `on_wait` is called once, after `notify_after_s` of waiting, with the holder's note (process, machine, since when).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without O_TRUNC: the file has the note of its present holder, which a process that waits shows.
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    _held_locks.add(fd)
    try:
        _wait_for_lock(fd, on_wait, notify_after_s)
        note = f"process {os.getpid()} on {os.uname().nodename}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode(), 0)
        yield
    finally:
        # closing the file releases the lock; the file itself stays, for the next holder
        _held_locks.discard(fd)
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock, or is about to, or has just removed the file at its end."""
    try:
        fd = os.open(path, os.O_RDONLY)  # who looks need not have the right to write
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that others may look at the same time
        return os.fstat(fd).st_size == 0  # an empty file is about to be locked: `file_lock` creates, locks, then writes
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


class DiskErrors:
    """Context manager that turns a full disk, whichever library met it, into a DiskFullError with numbers and a fix."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        """Do nothing; errors are translated on exit."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Translate an error caused by a full disk; let any other through."""
        # A block within this one may have translated it already.
        if error is None or isinstance(error, DiskFullError) or not says_disk_full(error):
            return
        # an OSError names the file, other libraries' errors do not
        where = Path(getattr(error, "filename", None) or self.path)
        usage = shutil.disk_usage(next(p for p in (where, *where.absolute().parents) if p.exists()))
        raise DiskFullError(
            f"{where}: no space left on the disk ({usage.free / 1e6:.0f} MB free of {usage.total / 1e9:.1f} GB). "
            "Free some, or point workspace.root at a bigger disk; "
            "then run the same command again: what was done is kept"
        ) from error


def says_disk_full(error: BaseException) -> bool:
    """Return whether a full disk caused the error.

    Torch, safetensors and databases raise their own types for a failed write, with the system's message inside.
    """
    if not isinstance(error, Exception):
        return False  # Ctrl-C while an error of the disk was handled
    # What one of our own errors was raised after is no reason for it; what it was raised from is.
    chain = (error, *chain_of(error.__cause__)) if isinstance(error, KlearError) else chain_of(error)
    return any(_is_disk_full(e) for e in chain)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    return any(text in str(error) for text in _DISK_FULL_TEXTS)


def _wait_for_lock(fd: int, on_wait: Callable[[str], None], notify_after_s: float) -> None:
    notify_at = time.monotonic() + notify_after_s
    was_notified = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not was_notified and time.monotonic() > notify_at:
                on_wait(os.pread(fd, 200, 0).decode(errors="replace") or "another process")
                was_notified = True
            time.sleep(0.1)  # polling, so that Ctrl-C and a stage's timeout get through
        else:
            return


def _release_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise hold the locks after this process has ended."""
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_release_in_child)


def _listing(files: Sequence[Path], root: Path, cache: Path | None) -> str:
    hashes = _cached_hashes(files, cache)
    return "\n".join(f"{sha}  {p.relative_to(root).as_posix()}" for p, sha in zip(files, hashes, strict=True))


def _cached_hashes(files: Sequence[Path], cache: Path | None) -> list[str]:
    known: dict[str, str] = {}
    if cache is not None and cache.exists():
        try:
            known = json.loads(cache.read_text())
        except json.JSONDecodeError:
            known = {}  # a cache may be lost
    keys = [_stat_key(p) for p in files]
    unknown = [i for i, key in enumerate(keys) if key not in known]
    for i, sha in zip(unknown, hash_all([files[i] for i in unknown]), strict=True):
        known[keys[i]] = sha
    if cache is not None and unknown:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache, json.dumps(known).encode())
    return [known[key] for key in keys]


def _stat_key(path: Path) -> str:
    """Return a key that changes whenever the file may have been written or replaced."""
    s = path.stat()
    return f"{path.resolve()}|{s.st_size}|{s.st_ino}|{s.st_mtime_ns}|{s.st_ctime_ns}"
