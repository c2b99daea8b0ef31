"""`klear ui`: serve the Prefect and MLflow web pages for the databases of one workspace, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import ConfigError, ResourceError

_PAGES_START_S = 120.0
SURVIVES_RESTARTS = {
    # A run under a concurrency limit renews a lease every 225 s. By default leases are in the server's memory, so after
    # a restart every such run ends itself. With leases in files and the repossessor on, a run still ends itself if its
    # lease ran out while the server was away.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
}
"""Settings of Prefect's server, unless the user has set them; for other servers see infra/prefect/README.md."""


def serve_uis(root: Path, *, prefect_port: int, mlflow_port: int) -> None:
    """Start both servers on loopback, print their addresses, and stop them on Ctrl-C or when one exits.

    If MLFLOW_TRACKING_URI names a server, runs are tracked there and only Prefect's is started.
    """
    from flows.environment import prepare_environment
    from tasks.delivery import without_password
    from tasks.mlflow_backend import database_file, ensure_database
    from tasks.tracking import tracking_uri

    if not root.is_dir():
        raise ConfigError(
            f"--root {root}: no such workspace; run something first, for example: klear run configs/laptop"
        )
    workspace = WorkspaceConfig(root=str(root))
    prepare_environment(workspace)
    store = tracking_uri(workspace)
    file = database_file(store)
    if file is not None:
        ensure_database(file)  # MLflow's server would create it in place, and leave it incomplete if stopped meanwhile
    wanted = (
        [_prefect(prefect_port)] if store.startswith("http") else [_prefect(prefect_port), _mlflow(mlflow_port, store)]
    )
    running: list[subprocess.Popen[bytes]] = []
    try:
        for server in wanted:
            _refuse_taken_port(server)
            running.append(_start(server, root / server.log))
        for server, process in zip(wanted, running, strict=True):
            _wait_for(server, process, root / server.log)
        lines = [
            f"Prefect  {wanted[0].url}",
            f"MLflow   {without_password(store) if len(wanted) == 1 else runs_page(wanted[1].url)}",
        ]
        Console(soft_wrap=True).print("\n".join([*lines, "Ctrl-C stops what was started here."]))
        while all(process.poll() is None for process in running):
            time.sleep(0.5)
        dead = ", ".join(
            server.name for server, process in zip(wanted, running, strict=True) if process.poll() is not None
        )
        raise ResourceError(f"{dead} ended unexpectedly; see the *-server.log files in {root}")
    finally:
        for process in running:
            _stop(process)


def runs_page(mlflow: str, transport: httpx.BaseTransport | None = None) -> str:
    """Return the address of the page in MLflow's UI that lists our runs with their scores.

    Before the first score it is the list as MLflow shows it, and before the first run MLflow's front page, which is
    about language model applications. `transport` replaces the server at `mlflow` in tests.
    """
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
    """Command, port, environment and health path of one server."""

    name: str
    module: str
    port: int
    options: tuple[str, ...]
    environment: dict[str, str]
    health: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return f"{self.module}-server.log"


def prefect_environment(port: int) -> dict[str, str]:
    """Return the environment variables of Prefect's server."""
    kept = {name: os.environ.get(name, value) for name, value in SURVIVES_RESTARTS.items()}
    return kept | {"PREFECT_SERVER_API_PORT": str(port)}  # the UI reads the API's address from the settings


def _prefect(port: int) -> _Server:
    environment = prefect_environment(port)
    return _Server(
        name="Prefect", module="prefect", port=port, options=("start",), environment=environment, health="/api/health"
    )


def _mlflow(port: int, store: str) -> _Server:
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # job execution costs eight processes and 2 GB
    options = ("--workers", "1", "--backend-store-uri", store)
    return _Server(
        name="MLflow", module="mlflow", port=port, options=options, environment=environment, health="/health"
    )


def _start(server: _Server, log: Path) -> subprocess.Popen[bytes]:
    """Start a server in its own session: all its processes can be stopped, and Ctrl-C reaches only this process."""
    address = ("--host", "127.0.0.1", "--port", str(server.port))
    command = [sys.executable, "-m", server.module, "server", *server.options, *address]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | server.environment, start_new_session=True
        )


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_for(server: _Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PAGES_START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ResourceError(f"{server.name} did not start (exit status {process.returncode}); see {log}")
        try:
            if httpx.get(server.url + server.health, timeout=2).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.5)
    raise ResourceError(f"{server.name} did not answer at {server.url} within {_PAGES_START_S:.0f} s; see {log}")


def _refuse_taken_port(server: _Server) -> None:
    with socket.socket() as probe:
        # As the servers do: closed connections of a server that was just stopped do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", server.port))
        except OSError as e:
            option = f"--{server.module}-port"
            raise ConfigError(
                f"{option} {server.port}: the port is taken; choose another, for example {option} {server.port + 1}"
            ) from e
