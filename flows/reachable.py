"""Check at the start of a command that the servers named by the environment answer.

Without these checks a wrong address shows only after minutes of retries, or as pages of traceback.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from klear_core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from klear_core.config.pipeline import WorkspaceConfig

T = TypeVar("T")

NOTICE_AFTER_S = 1.0
GIVE_UP_AFTER_S = 5.0
"""Seconds before a check fails; a healthy server on a busy machine may need more than one."""


def check_prefect() -> None:
    """Raise ConfigError if PREFECT_API_URL is set but no Prefect API answers there."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    remedy = "start that server, or unset PREFECT_API_URL to run with a server of its own"
    reply = check_endpoint(url, "PREFECT_API_URL", path="/health", remedy=remedy)
    # Prefect's UI answers every path outside /api with its page.
    if reply.is_success and "html" in reply.headers.get("content-type", ""):
        raise ConfigError(
            f"PREFECT_API_URL: {_host_of(url)} answers with a web page; the API's address usually ends in /api"
        )


def check_tracking(workspace: WorkspaceConfig) -> None:
    """Raise ConfigError if MLflow's server does not answer, or if its database is damaged and holds runs."""
    from tasks.mlflow_database import database_file, refuse_broken_with_runs
    from tasks.tracking import tracking_uri

    uri = tracking_uri(workspace)
    file = database_file(uri)
    if file is not None:
        refuse_broken_with_runs(file)
    if uri.startswith(("http://", "https://")):
        remedy = "start that server, or unset MLFLOW_TRACKING_URI to track in a file of the workspace"
        check_endpoint(
            uri, "MLFLOW_TRACKING_URI", path="/api/2.0/mlflow/experiments/search?max_results=1", remedy=remedy
        )


def check_ray() -> None:
    """Raise ConfigError if RAY_ADDRESS names a host and a port where nothing listens."""
    host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        check_port(
            host, int(port), "RAY_ADDRESS", remedy="start that cluster, or unset RAY_ADDRESS to run Ray on this machine"
        )


def check_endpoint(url: str, what: str, *, path: str, remedy: str) -> httpx.Response:
    """Return the reply to a GET of `path` below `url`; ConfigError, prefixed with `what`, on a timeout, a 404 or a 5xx.

    No password or key is sent and the certificate is not verified: the server's real client does both, with its own
    settings. "Not authorized" therefore counts as an answer. Messages name only the host.
    """
    import httpx

    try:
        address = httpx.URL(url).copy_with(username=None, password=None)
    except (httpx.InvalidURL, ValueError) as e:
        raise ConfigError(f"{what}: not a valid address") from e
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"{what}: not an http or https address")
    target = address.copy_with(raw_path=(address.path.rstrip("/") + path).encode())

    def ask() -> httpx.Response:
        return httpx.get(target, timeout=GIVE_UP_AFTER_S, verify=False)  # noqa: S501  nothing secret is sent

    host = _host_of(url)
    try:
        reply = _within_limit(ask, f"{what}: {host}")
    except (httpx.HTTPError, TimeoutError) as e:
        raise ConfigError(f"{what}: {host} does not answer ({_reason(e)}); {remedy}") from e
    if reply.status_code == httpx.codes.NOT_FOUND or reply.is_server_error:
        raise ConfigError(f"{what}: {host} answers {reply.status_code} {reply.reason_phrase} to {path}; {remedy}")
    return reply


def check_port(host: str, port: int, what: str, *, remedy: str) -> None:
    """Raise ConfigError, prefixed with `what`, unless a TCP connection succeeds within 5 s."""

    def connect() -> None:
        socket.create_connection((host, port), timeout=GIVE_UP_AFTER_S).close()

    try:
        _within_limit(connect, f"{what}: {host}:{port}")
    except OSError as e:
        raise ConfigError(f"{what}: {host}:{port} does not answer ({_reason(e)}); {remedy}") from e


def _within_limit(ask: Callable[[], T], who: str) -> T:
    """Return the result of `ask`, or raise TimeoutError after 5 s. It runs in a thread: socket timeouts omit DNS."""
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as e:  # noqa: BLE001  raised again below, in the caller's thread
            errors.append(e)

    thread = threading.Thread(target=work, name="reachable", daemon=True)
    thread.start()
    thread.join(NOTICE_AFTER_S)
    if thread.is_alive():
        typer.echo(f"{who} has not answered yet; waiting for {GIVE_UP_AFTER_S - NOTICE_AFTER_S:.0f} s more", err=True)
        thread.join(GIVE_UP_AFTER_S - NOTICE_AFTER_S)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {GIVE_UP_AFTER_S:.0f} s")
    return answers[0]


def _host_of(url: str) -> str:
    """Return host and port of an address, without user name and password."""
    import httpx

    address = httpx.URL(url)
    return f"{address.host}:{address.port}" if address.port else address.host


def _reason(error: Exception) -> str:
    """Return the error's text if it cannot contain the address with its password, else the error's type."""
    import httpx

    if isinstance(error, (OSError, httpx.ConnectError)):
        return str(error) or type(error).__name__
    return type(error).__name__
