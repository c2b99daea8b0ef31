"""Let a flow run survive an outage of its Prefect server: at its end it waits for the server; it can be cancelled."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tasks.prefect_client import fail_fast_client
from tasks.prefect_view import deliver_summaries

if TYPE_CHECKING:
    from uuid import UUID

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds between two requests to the server."""
CANCEL_GRACE_S = 60.0
"""Longer than Prefect's own cancellation, which takes about 45 s: up to 10 s to notice, then a kill after 30 s."""
PATIENCE_S = 3600.0
"""Most seconds that a run which has ended waits for a server that does not answer."""
_TIMEOUT_S = 5.0


class CancelWatch:
    """Sends SIGTERM to this process if its run stays Cancelling: after an outage Prefect 3.8's worker misses that."""

    def __init__(
        self, is_cancelling: Callable[[], bool], *, grace_s: float = CANCEL_GRACE_S, every_s: float = CHECK_EVERY_S
    ) -> None:
        self.has_fired = False
        self._is_cancelling, self._grace_s, self._every_s = is_cancelling, grace_s, every_s
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch from a separate thread while the block runs."""
        thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()

    def _watch(self) -> None:
        since_s: float | None = None
        while not self._is_over.wait(self._every_s):
            if not self._is_cancelling():
                since_s = None  # also during an outage: the worker gets its full time after it
            elif since_s is None:
                since_s = time.monotonic()
            elif time.monotonic() - since_s >= self._grace_s:
                log.warning(
                    "the run was cancelled %.0f s ago and its worker has not ended it: ending it here", self._grace_s
                )
                self.has_fired = True
                # Prefect's handler raises TerminationSignal in the main thread, as when a worker cancels the run.
                os.kill(os.getpid(), signal.SIGTERM)
                return


def is_cancelling(run_id: UUID) -> bool:
    """Return whether the server says that this flow run is being cancelled; False if it does not answer."""
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            state = client.read_flow_run(run_id).state
    except Exception as e:  # noqa: BLE001  the next request may succeed
        log.debug("the state of this run could not be read: %s: %s", type(e).__name__, e)
        return False
    return state is not None and state.is_cancelling()


@contextmanager
def server_awaited() -> Iterator[None]:
    """Wait for the server when the block returns or raises an Exception, but not after an interrupt or termination."""
    try:
        yield
    except Exception:
        _catch_up()
        raise
    _catch_up()


def _catch_up() -> None:
    await_server(ask_health)
    # Summaries that a stage could not send during the outage.
    deliver_summaries()


def await_server(
    ask: Callable[[], Exception | None], *, patience_s: float = PATIENCE_S, every_s: float = CHECK_EVERY_S
) -> None:
    """Wait until the server answers, so that it gets the run's final state at once; after `patience_s` warn and return.

    Prefect's client backs off exponentially: after minutes of outage, an ended run would look dead for minutes more.
    """
    error = ask()
    if error is None:
        return
    log.warning(
        "the Prefect server does not answer (%s); waiting for it, to tell it how this run ended", type(error).__name__
    )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(every_s)
        if ask() is None:
            return
    log.warning("the Prefect server has not answered for %.0f s; going on without it", patience_s)


def ask_health() -> Exception | None:
    """Return the error of a health check of Prefect's API, or None if it answers."""
    try:
        with fail_fast_client(timeout_s=_TIMEOUT_S) as client:
            return client.api_healthcheck()
    except Exception as e:  # noqa: BLE001  reported by the caller
        return e
