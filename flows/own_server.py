"""A Prefect server for runs that have none. It starts while the caller still imports, and ends when the caller does, however it ends.

Prefect's temporary server does neither: Ctrl-C in a terminal ends it before the run can say how it ended, and a killed run
leaves it behind for ever.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from klear_core.artifacts.files import file_lock
from klear_core.errors import ResourceError

_START_TIMEOUT_S = 600.0  # a first start makes the database; seconds, but for a busy machine
_STOP_S = 5.0
_LOOK_FOR_CALLER_S = 0.5
_TEMPORARY = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # into the log file
}
_IS_OURS = "KLEAR_OWN_PREFECT_SERVER"


class OwnServer:
    """The process and its address."""

    def __init__(self, log: Path) -> None:
        """Start it, and point PREFECT_API_URL to it. The socket listens at once: what comes early waits in its queue."""
        self._log = log
        self._starting = ExitStack()  # two servers must not make or migrate a database at once
        self._starting.enter_context(file_lock(log.with_suffix(".lock"), on_wait=_say_who))
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, log.open("ab") as out:
            self.api_url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            fd = listener.fileno()
            command = [sys.executable, "-m", __name__, str(fd), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | _TEMPORARY,
                start_new_session=True,  # Ctrl-C is for the run, which then still has something to tell the server
            )
        atexit.register(self.stop)  # before Prefect is imported, so that it comes after what Prefect does at exit
        os.environ |= {"PREFECT_API_URL": self.api_url, _IS_OURS: self.api_url}

    def wait_until_ready(self) -> None:
        """Return once it answers; ResourceError if it ends before, or does not answer in ten minutes."""
        import httpx

        try:
            httpx.get(f"{self.api_url}/health", timeout=_START_TIMEOUT_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as e:
            raise ResourceError(f"Prefect's server did not start: {e}; {self._log} says why") from e
        finally:
            self._starting.close()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def is_own(api_url: str) -> bool:
    """Whether this is the address of a server that ends with the run, so that links to it are of no use."""
    return api_url == os.environ.get(_IS_OURS)


def _say_who(who: str) -> None:
    logging.getLogger(__name__).info("waiting for the Prefect server of %s to start", who)


def _serve(fd: int, caller: int) -> None:
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    import uvicorn

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


def _end_with(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(_LOOK_FOR_CALLER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
