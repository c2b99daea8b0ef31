"""Start Prefect's server for a run, check the servers that a run names, and serve the web pages of a workspace."""

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console

from flows.environment import prepare_environment
from flows.process import Supervised, refuse_taken_port
from klear_core.artifacts.bucket import probe
from klear_core.artifacts.files import file_lock
from klear_core.artifacts.object_store import ObjectStore
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.pipeline.graph import open_store, workspace_root

if TYPE_CHECKING:
    import httpx

# ---- the server of a run that has none ----
# It starts during the caller's imports and ends with its process. Prefect's temporary server does not: Ctrl-C in a
# terminal ends it before the run can report its final state, and a killed run leaves it running for ever.


def own_server(workspace: WorkspaceConfig) -> OwnServer | None:
    """Start a Prefect server for this process without waiting for it; None if PREFECT_API_URL names one already."""
    return None if os.environ.get("PREFECT_API_URL") else OwnServer(workspace_root(workspace) / "prefect-server.log")


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
        lock = file_lock(
            log.with_suffix(".lock"),
            on_wait=lambda who: logging.getLogger(__name__).info("waiting for the Prefect server of %s to start", who),
        )
        self._starting.enter_context(lock)
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


# ---- servers that must answer ----
# Without these checks a wrong address shows only after minutes of retries, or as pages of traceback.


T = TypeVar("T")

NOTICE_AFTER_S = 1.0
GIVE_UP_AFTER_S = 5.0
_CLIENT_S = 60.0  # MLflow's client is imported first, which takes seconds of a busy processor
"""Seconds before a check fails; a healthy server on a busy machine may need more than one."""


def check_prefect(
    remedy: str = "start that server, or unset PREFECT_API_URL to run with a server of its own",
) -> None:
    """Raise ConfigError if PREFECT_API_URL is set but no Prefect API answers there."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    reply = check_endpoint(url, "PREFECT_API_URL", path="/health", remedy=remedy)
    # Prefect's UI answers every path outside /api with its page.
    if reply.is_success and "html" in reply.headers.get("content-type", ""):
        raise ConfigError(
            f"PREFECT_API_URL: {_host_of(url)} answers with a web page; the API's address usually ends in /api"
        )


@contextmanager
def prefect_refusals() -> Iterator[None]:
    """Raise ConfigError with what Prefect's client says of a server that answers: a wrong password or certificate."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as e:
        remedy = "; set PREFECT_API_AUTH_STRING" if e.response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise ConfigError(f"PREFECT_API_URL: that server answers with {e.response.status_code}{remedy}") from e
    except httpx.ConnectError as e:
        remedy = "; SSL_CERT_FILE names the certificate of your authority" if "CERTIFICATE" in str(e) else ""
        raise ConfigError(f"PREFECT_API_URL: {e}{remedy}") from e


def check_prefect_access() -> None:
    """Raise ConfigError unless the server takes the password of Prefect's client, which checks its certificate too."""
    from prefect.client.orchestration import get_client

    with prefect_refusals(), get_client(sync_client=True) as client:
        client.api_version()


def check_tracking(workspace: WorkspaceConfig) -> None:
    """Raise ConfigError if MLFLOW_TRACKING_URI cannot be used, or if MLflow's database is damaged and holds runs.

    MLflow's client is opened once, whatever the scheme. Without the variable that is left to the first stage, because
    making the workspace's database takes seconds.
    """
    from tasks.mlflow_backend import TRACKING_VARIABLE, check_client
    from tasks.mlflow_database import database_file, refuse_broken_with_runs
    from tasks.tracking import tracking_uri

    uri = tracking_uri(workspace)
    file = database_file(uri)
    if file is not None:
        refuse_broken_with_runs(file)
    if not os.environ.get(TRACKING_VARIABLE):
        return
    remedy = f"start that server, or unset {TRACKING_VARIABLE} to track in a file of the workspace"
    if uri.startswith(("http://", "https://")):
        check_endpoint(uri, TRACKING_VARIABLE, path="/api/2.0/mlflow/experiments/search?max_results=1", remedy=remedy)
    if file is not None:
        check_client(uri)  # may make the file, which takes as long as it takes
        return
    try:
        import mlflow  # noqa: F401  takes seconds on a busy machine, which are not the server's

        _within_limit(partial(check_client, uri), f"{TRACKING_VARIABLE}: MLflow's client", limit_s=_CLIENT_S)
    except TimeoutError as e:
        raise ConfigError(f"{TRACKING_VARIABLE}: MLflow's client gets no answer ({e}); {remedy}") from e


def check_store(workspace: WorkspaceConfig) -> None:
    """Raise ConfigError or ResourceError unless the shared store, if any, takes an object and gives it back."""
    store = open_store(workspace)
    if isinstance(store, ObjectStore):
        probe(store.bucket)


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
    ask = partial(httpx.get, target, timeout=GIVE_UP_AFTER_S, verify=False)  # nothing secret is sent
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
    try:
        _within_limit(
            lambda: socket.create_connection((host, port), timeout=GIVE_UP_AFTER_S), f"{what}: {host}:{port}"
        ).close()
    except OSError as e:
        raise ConfigError(f"{what}: {host}:{port} does not answer ({_reason(e)}); {remedy}") from e


def _within_limit(ask: Callable[[], T], who: str, *, limit_s: float = GIVE_UP_AFTER_S) -> T:
    """Return the result of `ask`, or raise TimeoutError after a limit. In a thread: socket timeouts omit DNS."""
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
        typer.echo(f"{who} has not answered yet; waiting for {limit_s - NOTICE_AFTER_S:.0f} s more", err=True)
        thread.join(limit_s - NOTICE_AFTER_S)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
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


# ---- klear ui ----


_LOOPBACK, _ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"  # noqa: S104
_PAGES_START_S = 120.0
_LOOK_AFTER_S = 0.5
SURVIVES_RESTARTS = {
    # A run under a concurrency limit renews a lease every 225 s. By default leases are in the server's memory, so after
    # a restart every such run ends itself. With leases in files and the repossessor on, a run still ends itself if its
    # lease ran out while the server was away.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
}
"""Settings of Prefect's server, unless the user has set them; for other servers see infra/prefect/README.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UiPorts:
    """Ports of the pages of a workspace."""

    runs: int = 5001
    prefect: int = 4200
    mlflow: int = 5000


def serve_uis(root: Path, *, ports: UiPorts, host: str = _LOOPBACK) -> None:
    """Start all servers, print their addresses, restart one that ends, and stop them on Ctrl-C.

    If MLFLOW_TRACKING_URI names a server, runs are tracked there and MLflow's is not started.
    """
    from tasks.mlflow_backend import without_password
    from tasks.mlflow_database import database_file, ensure_database
    from tasks.resources import no_orphans
    from tasks.tracking import tracking_uri

    if host != _LOOPBACK:
        _warn_of_visitors(host, ports.runs, ports.prefect, ports.mlflow)
    if not root.is_dir():
        typer.echo(f"{root}: nothing has run there yet; the pages fill as soon as something does")
    workspace = WorkspaceConfig(root=str(root))
    prepare_environment(workspace)
    store = tracking_uri(workspace)
    file = database_file(store)
    if file is not None:
        ensure_database(file)  # MLflow's server would create it in place, and leave it incomplete if stopped meanwhile
    is_elsewhere = store.startswith("http")
    wanted = [_runs(host, ports.runs, root), _prefect(host, ports.prefect)]
    wanted += [] if is_elsewhere else [_mlflow(host, ports.mlflow, store)]
    for server in wanted:
        refuse_taken_port(server.host, server.port, f"--{server.name.lower()}-port")
    with no_orphans(), ExitStack() as stopped:  # no server survives this process, even if it is killed
        running = []
        for server in wanted:
            log = root / f"{server.name.lower()}-server.log"
            running.append(Supervised(server.name, server.command, server.environment, log))
            stopped.callback(running[-1].stop)
        runs, prefect, *others = (_wait_for(server, each) for server, each in zip(wanted, running, strict=True))
        mlflow = others[0] if others else ""
        pages = without_password(store) if is_elsewhere else (mlflow and runs_page(mlflow))
        names = {"Runs": runs, "Prefect": prefect, "MLflow": pages}
        lines = [f"{name:<8} {address or 'does not answer yet'}" for name, address in names.items()]
        Console(soft_wrap=True).print("\n".join([*lines, "Ctrl-C stops what was started here."]))
        while True:
            for each in running:
                each.restart_if_ended()
            time.sleep(_LOOK_AFTER_S)


def _warn_of_visitors(host: str, *ports: int) -> None:
    tunnel = " ".join(f"-L {port}:127.0.0.1:{port}" for port in ports)
    typer.echo(
        f"warning: --host {host}: whoever reaches this machine can read, change and start runs, for these servers ask "
        f"for no password. Without --host, reach them through: ssh -N {tunnel} {socket.gethostname()}",
        err=True,
    )


def runs_page(mlflow: str, transport: httpx.BaseTransport | None = None) -> str:
    """Return the address of the page in MLflow's UI that lists our runs with their scores.

    Before the first score it is the list as MLflow shows it, and before the first run MLflow's front page, which is
    about language model applications. `transport` replaces the server at `mlflow` in tests.
    """
    import httpx

    from tasks.mlflow_backend import VIEW_PARAMETER, VIEW_TAG
    from tasks.tracking import EXPERIMENT

    with httpx.Client(base_url=mlflow, transport=transport, timeout=_PAGES_START_S) as client:
        reply = client.get("/api/2.0/mlflow/experiments/get-by-name", params={"experiment_name": EXPERIMENT})
    if reply.status_code == httpx.codes.NOT_FOUND:
        return mlflow
    experiment = reply.raise_for_status().json()["experiment"]
    has_view = any(tag["key"] == VIEW_TAG for tag in experiment.get("tags", []))
    view = f"&{VIEW_PARAMETER}" if has_view else ""
    return f"{mlflow}/#/experiments/{experiment['experiment_id']}/runs?workflowType=machine_learning{view}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """Command, address, environment and health path of one server."""

    name: str
    module: str
    port: int
    options: tuple[str, ...]
    environment: dict[str, str]
    health: str
    host: str = _LOOPBACK

    @property
    def url(self) -> str:
        """Its address for a person; that of this machine if it listens on all of them."""
        return f"http://{_shown(self.host)}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command that runs it in the foreground."""
        address = ("--host", self.host, "--port", str(self.port))
        return [sys.executable, "-m", self.module, *self.options, *address]


def _shown(host: str) -> str:
    return socket.gethostname() if host == _ALL_ADDRESSES else host


def prefect_environment(port: int, host: str = _LOOPBACK) -> dict[str, str]:
    """Return the environment variables of Prefect's server."""
    kept = {name: os.environ.get(name, value) for name, value in SURVIVES_RESTARTS.items()}
    # The UI reads the API's address from the settings; a browser cannot use the address 0.0.0.0.
    api = {"PREFECT_SERVER_UI_API_URL": f"http://{_shown(host)}:{port}/api"} if host != _LOOPBACK else {}
    return kept | {"PREFECT_SERVER_API_PORT": str(port)} | api


def _runs(host: str, port: int, root: Path) -> _Server:
    options = (str(root.absolute()),)
    return _Server(
        name="Runs", module="flows.runs_page", port=port, options=options, environment={}, health="/health", host=host
    )


def _prefect(host: str, port: int) -> _Server:
    environment = prefect_environment(port, host)
    return _Server(
        name="Prefect",
        module="prefect",
        port=port,
        options=("server", "start"),
        environment=environment,
        health="/api/health",
        host=host,
    )


def _mlflow(host: str, port: int, store: str) -> _Server:
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # job execution costs eight processes and 2 GB
    options: tuple[str, ...] = ("server", "--workers", "1", "--backend-store-uri", store)
    if host != _LOOPBACK:
        # By default MLflow answers to addresses of private networks, but not to names.
        names = dict.fromkeys((_shown(host), host, "localhost", _LOOPBACK))
        hosts = ",".join(f"{name}:*" for name in names)
        options += ("--allowed-hosts", hosts, "--cors-allowed-origins", f"http://{_shown(host)}:{port}")
    return _Server(
        name="MLflow",
        module="mlflow",
        port=port,
        options=options,
        environment=environment,
        health="/health",
        host=host,
    )


def _wait_for(server: _Server, process: Supervised) -> str:
    """Return the server's address once it answers; empty if it ends first, or does not answer for two minutes."""
    import httpx

    deadline = time.monotonic() + _PAGES_START_S
    own = f"http://{_LOOPBACK if server.host == _ALL_ADDRESSES else server.host}:{server.port}"
    while time.monotonic() < deadline and not process.has_ended:
        try:
            if httpx.get(own + server.health, timeout=2).is_success:
                return server.url
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.5)
    return ""


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
