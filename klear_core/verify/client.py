"""The caller's end of the judging process: start it when first needed, keep futures, survive its death."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from klear_core.config.verify import VerifyConfig
from klear_core.types import Verdict
from klear_core.verify.work import Fault, Task

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 20.0  # on a loaded machine ending all jails takes seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """One judging process and what it still owes."""

    process: subprocess.Popen[bytes]
    connection: Connection
    pending: dict[int, Future[Verdict | Fault]] = field(default_factory=dict)


class JudgeClient:
    """Sends tasks to one `klear_core.verify.server` and resolves their futures. Thread-safe; `close` ends the process.

    Callbacks of the futures run in the thread that reads, and may submit: the process reads on whether or not its answers are read, so
    that who waits for the lock or for room in the socket does not wait for himself.
    """

    def __init__(self, cfg: VerifyConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._link: _Link | None = None

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """The verdict to come; `Fault` where the judging process failed or was closed. OSError if it cannot be started."""
        future: Future[Verdict | Fault] = Future()
        with self._lock:
            link = self._link = self._link or self._start()
            task_id = next(self._ids)
            link.pending[task_id] = future
            with contextlib.suppress(OSError):  # the process is gone: the reader sees that too, and resolves all that is pending
                link.connection.send((task_id, task))
        return future

    def close(self) -> None:
        """End the judging process and everything below it; what was pending resolves as a fault."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                _shut(link.connection)  # under the lock, which the reader takes before it closes the connection
        if link is not None:
            _wait_or_kill(link.process)

    def _start(self) -> _Link:
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "klear_core.verify.server", str(fd)]
        process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        theirs.close()
        link = _Link(process=process, connection=Connection(ours.detach()))
        link.connection.send_bytes(self._cfg.model_dump_json().encode())
        threading.Thread(target=self._read, args=(link,), name="klear-judge-reader", daemon=True).start()
        return link

    def _read(self, link: _Link) -> None:
        try:
            while True:
                task_id, result = link.connection.recv()
                link.pending.pop(task_id).set_result(result)
        except (EOFError, OSError):
            self._on_end(link)

    def _on_end(self, link: _Link) -> None:
        with self._lock:  # from here on nothing is added to what is pending
            is_closed = self._link is not link
            if not is_closed:
                self._link = None
                _wait_or_kill(link.process)
                status = link.process.returncode
                _LOG.warning("the judging process ended by itself (exit status %s); the next answer starts another", status)
        link.connection.close()
        died, closed = Fault(kind="died", detail="the judging process ended"), Fault(kind="closed", detail="the judges were closed")
        for future in link.pending.values():
            future.set_result(closed if is_closed else died)


def _shut(connection: Connection) -> None:
    """Make both sides see the end; closing alone would not wake our reader."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was first


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
