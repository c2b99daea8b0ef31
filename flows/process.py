"""Set up a command's process: its end by signals, proxies, and the servers that it starts."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from klear_core.errors import ConfigError
from klear_core.stopping import REQUEUE_STATUS, Requeued, requeued_by_signal

_AGAIN_AFTER_S = 0.05
"""Seconds before an interrupt that was lost is sent again."""


@contextmanager
def reliable_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGUSR1 into KeyboardInterrupt while the block runs; see `lost_interrupts_sent_again`."""
    signal.signal(signal.SIGTERM, _interrupt)
    with requeued_by_signal(), lost_interrupts_sent_again():
        yield


@contextmanager
def lost_interrupts_sent_again() -> Iterator[None]:
    """While the block runs, send the signal again a moment after an interrupt that Python would discard.

    Python only reports an exception raised in `__del__` or in a weak reference's callback, so the run would continue.
    """
    before = sys.unraisablehook

    def send_again(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            number = signal.SIGUSR1 if issubclass(lost.exc_type, Requeued) else signal.SIGTERM
            try:
                _send_later(number)
            except KeyboardInterrupt:  # another signal, which would be lost here, too; what is sent stands for both
                _send_later(number)
        else:
            before(lost)

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _send_later(number: signal.Signals) -> None:
    """Send a signal to the main thread, in whose system call it may block, once the code that discards has returned."""
    timer = threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True  # a process that ends meanwhile does not wait for it
    timer.start()


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def make_terminations_interrupts() -> None:
    """Make the exception that Prefect raises for SIGTERM in a flow a KeyboardInterrupt, for the whole process.

    A KeyboardInterrupt ends an event loop wherever in it the signal arrives. asyncio only logs any other exception of a
    callback, and keeps that of a task for whoever awaits it, so a cancelled run would continue.
    """
    from prefect.exceptions import ExternalSignal, TerminationSignal

    TerminationSignal.__bases__ = (ExternalSignal, KeyboardInterrupt)


def exit_at_once_when_interrupted() -> None:
    """Let signals end the process at once from now on: its work is done, and only exit handlers are left.

    A KeyboardInterrupt in an exit handler would print a traceback, and the other handlers would still run. Processes
    that the handlers would stop exit by themselves: our Prefect server checks whether its caller is alive.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _exit_at_once)


def _exit_at_once(signum: int, _frame: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe or file must not keep the process from exiting
            stream.flush()
    os._exit(REQUEUE_STATUS if signum == signal.SIGUSR1 else 128 + signum)


# ---- output ----


def escape_unprintable() -> None:
    """Print a character that the encoding of the output lacks as `\\u2713`; an error in its place would end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


# ---- proxies ----


def bypass_proxies_for_loopback() -> None:
    """Add loopback addresses to NO_PROXY: a proxy would look for these servers on its own machine."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if listed.strip() == "*":  # everything; in a list urllib and requests do not know it
        return
    hosts = dict.fromkeys([*filter(None, listed.split(",")), "127.0.0.1", "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # programs read one or the other


# ---- servers that a command starts ----


_RESTART_AFTER_S = 1.0
_STABLE_S = 60.0
"""Seconds after which a server that ends was healthy, and the longest delay of a restart."""
_SERVER_STOP_S = 10.0


class Supervised:
    """A server's processes; the server is started again if it ends."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it, with more variables in its environment."""
        self._name, self._command, self._environment, self._log = name, command, environment, log
        self._delay_s = _RESTART_AFTER_S
        self._restart_at: float | None = None
        self._start()

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started is dead; processes that it has started may live."""
        return self._process.poll() is not None

    def restart_if_ended(self) -> None:
        """Start the server again if it has ended, after a delay that grows while it ends soon after each start."""
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._start()
        elif self.has_ended:
            self.stop()  # what is left of it holds the port
            self._delay_s = min(2 * self._delay_s, _STABLE_S) if now - self._started < _STABLE_S else _RESTART_AFTER_S
            self._restart_at = now + self._delay_s
            ended = f"{self._name} ended (status {self._process.returncode})"
            typer.echo(f"{ended}; next start in {self._delay_s:.0f} s; see {self._log}", err=True)

    def stop(self) -> None:
        """End all processes of the server, also if the one that was started is dead."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _SERVER_STOP_S
        while time.monotonic() < deadline and not (self.has_ended and not self._signal(0)):
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._restart_at = None
        with self._log.open("ab") as out:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=out,
                env=os.environ | self._environment,
                start_new_session=True,  # all its processes can be stopped, and Ctrl-C reaches only this process
            )

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; return whether the group has a process."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def refuse_taken_port(host: str, port: int, option: str) -> None:
    """Raise ConfigError with the process that holds the port, or if the host is no address of this machine."""
    with socket.socket() as probe:
        # As the servers do: closed connections of a server that was just stopped do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise ConfigError(f"--host {host}: not an address of this machine ({e.strerror or e})") from e
            raise ConfigError(
                f"{option} {port}: the port is taken by {_holder_of(port)}; end that process, or choose "
                f"another port, for example {option} {port + 1}"
            ) from e


def _holder_of(port: int) -> str:
    """Return the process that listens on a port."""
    import psutil

    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
        pid = next(c.pid for c in listening if c.pid)
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except (psutil.Error, StopIteration):
        return "a process of another user"
