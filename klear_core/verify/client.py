"""The caller's end of the judging process: start it when first needed, keep futures, survive its death."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection

from klear_core.config.verify import VerifyConfig
from klear_core.types import Verdict
from klear_core.verify.work import Fault, Task

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 20.0  # on a loaded machine ending all jails takes seconds


class JudgeClient:
    """Sends tasks to one `klear_core.verify.server` and resolves their futures. Thread-safe; `close` ends the process."""

    def __init__(self, cfg: VerifyConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pending: dict[int, Future[Verdict | Fault]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        """The verdict to come; `Fault` where the judging process failed."""
        future: Future[Verdict | Fault] = Future()
        with self._lock:
            if self._connection is None:
                self._start()
            task_id = next(self._ids)
            self._pending[task_id] = future
            assert self._connection is not None
            try:
                self._connection.send((task_id, task))
            except OSError as e:  # the reader will see the end too; whoever comes first resolves the future
                self._pending.pop(task_id, None)
                future.set_result(Fault(kind="died", detail=f"the judging process is gone ({e})"))
        return future

    def close(self) -> None:
        """End the judging process and everything below it; what was pending resolves as a fault."""
        with self._lock:
            connection, process = self._connection, self._process
            self._connection = self._process = None
        if connection is not None and process is not None:
            _shut(connection)
            _wait_or_kill(process)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "klear_core.verify.server", str(fd)]
        process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        theirs.close()
        connection = Connection(ours.detach())
        connection.send_bytes(self._cfg.model_dump_json().encode())
        self._process, self._connection = process, connection
        threading.Thread(target=self._read, args=(connection, process), name="klear-judge-reader", daemon=True).start()

    def _read(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                task_id, result = connection.recv()
                future = self._pending.pop(task_id, None)
                if future is not None:
                    future.set_result(result)
        except (EOFError, OSError):
            self._on_end(connection, process)

    def _on_end(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._connection is connection:
                _LOG.warning("the judging process ended by itself (exit status %s); the next answer starts another", process.poll())
                self._connection = self._process = None
                _wait_or_kill(process)
            lost, self._pending = self._pending, {}
        connection.close()
        for future in lost.values():
            future.set_result(Fault(kind="died", detail="the judging process ended"))


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
