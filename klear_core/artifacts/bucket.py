"""Read and write the objects of a shared store (S3 or any other fsspec file system), with errors that name the host.

This module is the one door to fsspec.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from klear_core.artifacts.files import BEING_CREATED, DISK_FULL, beside, write_whole
from klear_core.errors import ConfigError, ResourceError, reporting
from klear_core.metrics import made_progress
from klear_core.waits import waiting

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_TRANSFERS = 8
"""Files that are sent or fetched at a time; a large file is sent in several parts at a time, too."""
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_FIRST_TRIES, _LATER_TRIES = 3, 8
"""Tries of a request, with growing pauses. The address of a server that has never answered may be misspelt, so its
tries take seconds. One that has answered before may be overloaded or restarting, and is tried for half a minute."""
_LOCAL = ("file", "local")
"""Protocols of folders, in fsspec."""
_EXTRAS = {"s3": "pip install 'klear[s3]'", "s3a": "pip install 'klear[s3]'"}
_REFUSED_CONDITIONS = ("PreconditionFailed", "ConditionalRequestConflict", "412")
"""Codes of a refused conditional write; the second is S3's while another writer creates the object."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
_NO_CONNECTION = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ProxyConnectionError")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """An object as a listing shows it."""

    size: int
    stamp: str
    """Text that changes whenever the object does."""
    written_at: datetime | None
    """Time of the last write by the store's clock; None if the store does not say."""

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Self:
        """Return the facts in a listing of fsspec: S3 gives a hash of the content, a folder the inode and the time."""
        modified = about.get("LastModified") or about.get("mtime") or about.get("created")
        if isinstance(modified, int | float):
            modified = datetime.fromtimestamp(modified, UTC)
        stamp = "-".join(str(about.get(fact)) for fact in ("ETag", "size", "mtime", "ino"))
        return cls(size=int(about.get("size") or 0), stamp=stamp, written_at=modified)


class Bucket:
    """Objects below one URL. Keys are relative and use `/`."""

    def __init__(self, url: str) -> None:
        """Connect lazily: the first request raises ConfigError or ResourceError if the store cannot be used."""
        self.url = checked_url(url)
        self._is_s3 = self.url.startswith("s3")
        self._fs, self._root = _file_system(self.url, max_tries=_FIRST_TRIES)
        self._has_answered = False

    @property
    def host(self) -> str:
        """Return the server's address if the settings name it, for messages."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint and self._is_s3:
            return urlsplit(endpoint).netloc.rpartition("@")[2]
        return "AWS S3" if self._is_s3 else self.url

    def read(self, key: str) -> bytes | None:
        """Return an object's content; None if there is no such object."""
        with self._errors():
            try:
                content: bytes = self._fs.cat_file(self._path(key))
            except FileNotFoundError as e:
                if "bucket does not exist" in str(e):
                    raise
                return None
        return content

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes; None if there is no such object."""
        with self._errors():
            try:
                # a listing cached by fsspec would hide what other nodes wrote
                self._fs.invalidate_cache()
                found: int = self._fs.info(self._path(key))["size"]
            except FileNotFoundError:
                return None
        return found

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists, in one atomic step where the server has conditional writes.

        Returns whether this call wrote it.
        """
        with self._errors():
            self._make_parent(key)
            try:
                if self._is_local:
                    # fsspec looks for the file and then writes it, in two steps, between which another node may write
                    _create_file(Path(self._path(key)), content)
                else:
                    self._fs.pipe_file(self._path(key), content, mode="create")
            except FileExistsError:
                return False
            except OSError as e:
                if not _is_precondition(e):
                    raise
                return False
        return True

    def write(self, key: str, content: bytes) -> None:
        """Write an object, or replace it, in one atomic step."""
        with self._errors():
            self._make_parent(key)
            if self._is_local:
                # fsspec writes in place, so that a process killed meanwhile would leave a part
                write_whole(Path(self._path(key)), content)
            else:
                self._fs.pipe_file(self._path(key), content)

    def upload(self, file: Path, key: str) -> None:
        """Copy a local file to the store; large ones go in parts. Each part counts as progress."""
        with self._errors():
            self._make_parent(key)
            self._fs.put_file(str(file), self._path(key), callback=_counting(f"upload of {file.name}"))
        made_progress(f"upload of {file.name}")

    def download(self, key: str, file: Path) -> bool:
        """Copy an object to a local file; returns False if there is no such object. Each part counts as progress."""
        with self._errors():
            try:
                self._fs.get_file(self._path(key), str(file), callback=_counting(f"download of {file.name}"))
            except FileNotFoundError:
                return False
        made_progress(f"download of {file.name}")
        return True

    def delete(self, key: str) -> None:
        """Delete an object; one that is missing is no error."""
        with self._errors():
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def move(self, key: str, target: str) -> None:
        """Rename an object; one that is missing is no error."""
        with self._errors():
            self._make_parent(target)
            try:
                if self._is_local:
                    # a copy that is cut short would be taken for the object
                    Path(self._path(key)).replace(self._path(target))
                    return
                self._fs.cp_file(self._path(key), self._path(target))
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix that ends at a `/`, sorted."""
        with self._errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix))
            except FileNotFoundError:
                return []
        start = len(self._root) + 1
        return sorted(str(path)[start:] for path in found if not str(path).endswith(BEING_CREATED))

    def stamps(self, prefix: str) -> dict[str, str]:
        """Return the keys below a prefix that ends at a `/`, each with a text that changes with the object."""
        return {key: found.stamp for key, found in self.facts(prefix).items()}

    def facts(self, prefix: str) -> dict[str, ObjectFacts]:
        """Return what a listing tells of the objects below a prefix that ends at a `/`.

        That is one request for a thousand objects, and reads none of them.
        """
        with self._errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root) + 1
        return {
            str(path)[start:]: ObjectFacts.of(about)
            for path, about in sorted(found.items())
            if not str(path).endswith(BEING_CREATED)
        }

    @property
    def _is_local(self) -> bool:
        return self.url.partition("://")[0] in _LOCAL

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _make_parent(self, key: str) -> None:
        # object stores have no folders
        if not self._is_s3:
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate the errors of the file system's library; no message of ours repeats what may hold a key."""
        try:
            with waiting(f"the store {self.url} (host {self.host})", "answer a request"):
                yield
            self._note_answer()
        except (ConfigError, ResourceError):
            raise
        except Exception as e:
            error = self._translated(e)
            if error is None:
                raise
            # the library's own text may quote signed requests
            raise error from None

    def _note_answer(self) -> None:
        """Allow more tries from now on, because the server has answered once."""
        if self._is_s3 and not self._has_answered:
            self._fs, _ = _file_system(self.url, max_tries=_LATER_TRIES)
            self._has_answered = True

    def _translated(self, e: Exception) -> ConfigError | ResourceError | None:
        kinds = {cls.__name__ for cls in type(e).__mro__}
        where = f"workspace.store = {self.url!r} (host {self.host})"
        if kinds.intersection(_NO_CREDENTIALS):
            remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            return ConfigError(f"{where}: no credentials; {remedy}")
        if isinstance(e, PermissionError):
            return ConfigError(f"{where}: access denied; the credentials may not read and write there")
        if isinstance(e, FileNotFoundError | NotADirectoryError):
            return ConfigError(f"{where}: no such bucket or folder")
        if kinds.intersection(_NO_CONNECTION) or isinstance(e, ConnectionError | socket.gaierror | TimeoutError):
            return ResourceError(f"{where}: cannot be reached ({type(e).__name__})")
        from_library = type(e).__module__.partition(".")[0] in ("botocore", "aiobotocore", "aiohttp")
        if from_library or (isinstance(e, OSError) and self._is_s3 and e.errno not in DISK_FULL):
            return ResourceError(f"{where}: the request failed ({_code(e)})")
        return None


def transfer_all(transfer: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `transfer` with every item, several at a time, and return the results; the first error is raised."""
    with ThreadPoolExecutor(_TRANSFERS) as threads:
        return list(threads.map(transfer, items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Findings about a store after a few requests with a small object of its own."""

    is_conditional: bool
    """Whether the server refused a conditional write to an object that exists."""
    latency_s: float
    """Mean time of a request."""


def probe(bucket: Bucket) -> Probe:
    """Write, read, write on condition and delete one object. ConfigError or ResourceError if any of it fails."""
    key, content = f"probe/{uuid.uuid4().hex}", b"klear doctor"
    started = time.monotonic()
    bucket.create(key, content)
    if bucket.read(key) != content:
        raise ResourceError(f"workspace.store = {bucket.url!r}: an object does not read as it was written")
    is_conditional = not bucket.create(key, b"second writer")
    bucket.delete(key)
    return Probe(is_conditional=is_conditional, latency_s=(time.monotonic() - started) / 4)


def checked_url(url: str) -> str:
    """Return a store's URL without a final `/`.

    ConfigError for URLs with credentials in them, of no known kind, or with a path that is not the same everywhere.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"workspace.store: the URL of {parts.netloc.rpartition('@')[2]} has credentials in it; they belong in the "
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
        )
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", url):
        raise ConfigError(f"workspace.store = {url!r}: not a URL such as s3://bucket/prefix or file:///shared/folder")
    protocol, _, path = url.partition("://")
    if protocol in _LOCAL and not path.startswith("/"):
        # fsspec would look for it in the working directory, which is another one for every process
        raise ConfigError(f"workspace.store = {url!r}: no absolute path: file:///{path}")
    if protocol.startswith("s3") and "//" in path.rstrip("/"):
        # s3fs lists other keys than it writes
        fixed = re.sub("/+", "/", path)
        raise ConfigError(f"workspace.store = {url!r}: an empty part in its path: {protocol}://{fixed}")
    return url.rstrip("/")


def _file_system(url: str, *, max_tries: int) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url, **_options(protocol, max_tries))
    except ImportError:
        fix = _EXTRAS.get(protocol, f"install the fsspec package for {protocol}://")
        raise ConfigError(f"workspace.store = {url!r}: its library is not installed: {fix}") from None
    except ValueError:
        raise ConfigError(f"workspace.store = {url!r}: fsspec knows no {protocol}://") from None
    return fs, str(root).rstrip("/")


def _counting(what: str) -> Any:
    """Return a callback of fsspec that counts every part of a file as progress."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"progress": lambda _size, _value, **_: made_progress(what)})


def _options(protocol: str, max_tries: int) -> dict[str, Any]:
    if not protocol.startswith("s3"):
        return {}
    # the library's defaults wait minutes for a host that is not there
    retries = {"max_attempts": max_tries, "mode": "standard"}
    config = {"connect_timeout": _CONNECT_TIMEOUT_S, "read_timeout": _READ_TIMEOUT_S, "retries": retries}
    return {"config_kwargs": config, "use_listings_cache": False}


def _create_file(path: Path, content: bytes) -> None:
    """Create a file with its whole content, or raise FileExistsError; a link is atomic, also on NFS."""
    temporary = beside(path)
    try:
        temporary.write_bytes(content)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _code(e: Exception) -> str:
    """Return the server's code for the error (`SlowDown`), or the error's type."""
    response = getattr(e.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code") or type(e).__name__)


def _is_precondition(e: OSError) -> bool:
    """Return whether the server refused a conditional write because the object exists."""
    # s3fs raises FileExistsError if the server's answer repeats the condition. Some servers leave that out, and then
    # only the code tells: the message is in words of the server's.
    return _code(e) in _REFUSED_CONDITIONS


# ---- lease ----
# Hold the right to build an artifact among nodes that share only an object store.
#
# A lease is a numbered term: an object that is created only if it does not exist. Its holder rewrites it as a
# heartbeat. Whoever sees no heartbeat for the time of expiry creates the next term, which at most one node can. Time
# is measured by the watcher's own clock between two changes of the object, so that clocks of nodes need not agree.


_BEATS_PER_EXPIRY = 4
"""Heartbeats within the time of expiry, so that a single lost one does not end the lease."""
_RELEASED = b"released"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Times of a lease, in seconds."""

    expiry_s: float = 60.0
    """A lease without a heartbeat for so long is taken over."""
    poll_s: float = 2.0
    """Wait between two looks at a lease that another node holds."""


@contextmanager
def lease(bucket: Bucket, key: str, times: LeaseTimes, *, node: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease below `key` for the block; `on_wait` is called once with the holder if another node has it.

    The caller holds a lock that excludes all other processes of `node`, so that a lease of this node's is of a process
    that has ended.
    """
    term = _take(bucket, key, times, node, on_wait)
    stop = threading.Event()
    beat = threading.Thread(target=_keep, args=(bucket, term, times, node, stop), name=f"lease {key}", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        # The artifact may be sealed by now.
        with reporting(f"the lease {term} could not be given back, and ends after {times.expiry_s:g} s"):
            bucket.write(term, _RELEASED)


def _take(bucket: Bucket, key: str, times: LeaseTimes, node: str, on_wait: Callable[[str], None]) -> str:
    seen, seen_at, was_told = b"", time.monotonic(), False
    while True:
        terms = bucket.keys(f"{key}/")
        content = bucket.read(terms[-1]) if terms else _RELEASED
        if content is None:
            continue  # deleted by its successor between the two requests
        # Every heartbeat changes the content, because it has a random part.
        if content != seen:
            seen, seen_at = content, time.monotonic()
        is_over = seen == _RELEASED or _note(seen).get("node") == node
        if is_over or time.monotonic() - seen_at > times.expiry_s:
            taken = _next_term(bucket, key, terms, node)
            if taken:
                return taken
            continue
        if not was_told:
            on_wait(_holder(seen))
            was_told = True
        time.sleep(times.poll_s)


def _next_term(bucket: Bucket, key: str, terms: list[str], node: str) -> str:
    """Create the term after the last one; returns its key, empty if another node was faster."""
    number = int(terms[-1].rpartition("/")[2]) + 1 if terms else 1
    term = f"{key}/{number:09d}"  # with zeros, so that keys sort as their numbers do
    if not bucket.create(term, _beat(node)):
        return ""
    for old in terms[:-1]:  # the last one stays until the next takeover: a slow watcher may still compare with it
        bucket.delete(old)
    return term


def _keep(bucket: Bucket, term: str, times: LeaseTimes, node: str, stop: threading.Event) -> None:
    while not stop.wait(times.expiry_s / _BEATS_PER_EXPIRY):
        # Losing the lease costs a second build, never a second artifact: sealing is conditional.
        with reporting(f"the lease {term} could not be renewed"):
            bucket.write(term, _beat(node))


def _beat(node: str) -> bytes:
    note = {
        "holder": f"process {os.getpid()} on {os.uname().nodename}",
        "node": node,
        "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "beat": uuid.uuid4().hex,
    }
    return json.dumps(note).encode()


def _note(content: bytes) -> dict[str, str]:
    try:
        note = json.loads(content)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _holder(content: bytes) -> str:
    note = _note(content)
    return f"{note['holder']} (last heartbeat {note['at']})" if {"holder", "at"} <= note.keys() else "another node"
