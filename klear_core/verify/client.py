"""Start the judging process on first use, send it tasks, resolve their futures, and replace it if it dies."""

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
_STOP_GRACE_S = 20.0  # ending all jails takes seconds on a loaded machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """One judging process, the connection to it, and the futures of unanswered tasks by task id."""

    process: subprocess.Popen[bytes]
    connection: Connection
    pending: dict[int, Future[Verdict | Fault]] = field(default_factory=dict)


class JudgeClient:
    """Sends tasks to one `klear_core.verify.server` and resolves their futures. Thread-safe; `close` ends the process.

    Callbacks of the futures run in the reader thread and may call `submit`. The server keeps reading tasks even while
    nobody reads its answers, so that a submitter blocked by the lock or by a full socket cannot deadlock.
    """

    def __init__(self, cfg: VerifyConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._link: _Link | None = None

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """Send a task; the future resolves to its verdict, or to a `Fault` if the judging process fails or is closed.

        Raise OSError if the process cannot be started.
        """
        future: Future[Verdict | Fault] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: the reader thread must be able to set its result
        with self._lock:
            link = self._link = self._link or self._start()
            task_id = next(self._ids)
            link.pending[task_id] = future
            # If the process is gone, the reader thread notices too and resolves all pending futures.
            with contextlib.suppress(OSError):
                link.connection.send((task_id, task))
        return future

    def close(self) -> None:
        """End the judging process and its descendants; pending futures resolve to a `Fault`."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                _shut_down(link.connection)  # under the lock: the reader takes it before it closes the connection
        if link is not None:
            _wait_or_kill(link.process)

    def _start(self) -> _Link:
        our_end, server_end = socket.socketpair()
        fd = server_end.fileno()
        # One thread for each worker: there is a worker for every core.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "klear_core.verify.server", str(fd)]
        process = subprocess.Popen(
            command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        server_end.close()
        link = _Link(process=process, connection=Connection(our_end.detach()))
        # The settings are the first message; see `server.main`.
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
        with self._lock:  # once this block ends, no task can be added to link.pending
            is_closed = self._link is not link
            if not is_closed:
                self._link = None
                _wait_or_kill(link.process)
                status = link.process.returncode
                _LOG.warning(
                    "the judging process ended by itself (exit status %s); the next answer starts another", status
                )
        link.connection.close()
        if is_closed:
            fault = Fault(kind="closed", detail="the judges were closed")
        else:
            fault = Fault(kind="died", detail="the judging process ended")
        for future in link.pending.values():
            future.set_result(fault)


def _shut_down(connection: Connection) -> None:
    """Shut down both directions, so that both sides see the end; closing alone would not wake our reader."""
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side shut it down first


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
