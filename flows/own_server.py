"""Start a Prefect server for a run that has none. It starts during the caller's imports and ends with its process.

Prefect's temporary server does not: Ctrl-C in a terminal ends it before the run can report its final state, and a
killed run leaves it running for ever.
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

_OWN_SERVER_START_S = 600.0  # the first start creates the database: seconds, but more on a busy machine
_STOP_S = 5.0
_LOOK_FOR_CALLER_S = 0.5
_TEMPORARY = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    # As for Prefect's own temporary server: without most background services, and as the only app of its process.
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # the server's console is the log file
}
_IS_OURS = "KLEAR_OWN_PREFECT_SERVER"


class OwnServer:
    """A server process and its address."""

    def __init__(self, log: Path) -> None:
        """Start the server and set PREFECT_API_URL. The socket listens at once, so early requests wait in its queue."""
        self._log = log
        self._starting = ExitStack()  # two servers must not create or migrate the same database at once
        self._starting.enter_context(file_lock(log.with_suffix(".lock"), on_wait=_log_wait))
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
                start_new_session=True,  # Ctrl-C must not reach the server: the run still has to report its final state
            )
        # Exit handlers run last in, first out: registered before Prefect is imported, this one runs after Prefect's.
        atexit.register(self.stop)
        os.environ |= {"PREFECT_API_URL": self.api_url, _IS_OURS: self.api_url}

    def wait_until_ready(self) -> None:
        """Return once the server answers; ResourceError if it exits first or does not answer within ten minutes."""
        import httpx

        try:  # one request is enough: it waits in the socket's queue until the server accepts it
            httpx.get(f"{self.api_url}/health", timeout=_OWN_SERVER_START_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as e:
            raise ResourceError(f"Prefect's server did not start: {e}; {self._log} says why") from e
        finally:
            self._starting.close()

    def stop(self) -> None:
        """Terminate the server; kill it if it has not exited after 5 s."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def is_temporary_server(api_url: str) -> bool:
    """Return whether the address is that of this process's server: it ends with the run, so links to it are useless."""
    return api_url == os.environ.get(_IS_OURS)


def _log_wait(who: str) -> None:
    logging.getLogger(__name__).info("waiting for the Prefect server of %s to start", who)


def _serve(fd: int, caller: int) -> None:
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    import uvicorn

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


def _end_with(caller: int) -> None:
    # A killed caller cannot stop this server. But the kernel then gives the server another parent, which it notices.
    while os.getppid() == caller:
        time.sleep(_LOOK_FOR_CALLER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
