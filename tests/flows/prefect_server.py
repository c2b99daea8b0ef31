"""A Prefect server and a process worker of our own on loopback, for tests; nothing of them survives the block."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import httpx
from loopback import free_port

from flows.servers import SURVIVES_RESTARTS

ROOT = Path(__file__).parents[2]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    url: str
    env: dict[str, str]
    home: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def prefect(self, *args: str, cwd: Path) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *args]
        result = subprocess.run(
            command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=400, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def post(self, path: str, body: dict) -> dict | list:
        return self._ask("POST", path, body)

    def get(self, path: str) -> dict:
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: dict | None) -> dict | list:
        for _ in range(20):  # SQLite answers 503 now and then
            reply = httpx.request(method, f"{self.url}{path}", json=body, timeout=60)
            if reply.status_code != 503:
                break
            time.sleep(0.5)
        assert reply.is_success, reply.text
        return reply.json()

    def start_run(self, flow: str, deployment: str, parameters: dict) -> str:
        found = self.get(f"/deployments/name/{flow}/{deployment}")
        return self.post(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"]

    def press_cancel(self, run_id: str) -> None:
        """What the UI's Cancel button posts."""
        self.post(f"/flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def press_retry(self, run_id: str) -> None:
        """What the UI's Retry button posts."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        self.post(f"/flow_runs/{run_id}/set_state", {"state": state, "force": True})

    def wait(self, run_id: str, *, timeout_s: float = 600) -> dict:
        deadline = time.monotonic() + timeout_s
        while True:
            run = self.get(f"/flow_runs/{run_id}")
            if run["state_type"] in FINAL:
                return run
            assert time.monotonic() < deadline, f"still {run['state_name']}; {self.log_tail()}"
            time.sleep(0.5)

    def task_states(self, run_id: str, *, attempt: int) -> dict[str, str]:
        """Names and states of the task runs of one attempt."""
        runs = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}, "limit": 200})
        return {r["name"]: r["state_name"] for r in runs if r["flow_run_run_count"] == attempt}

    def logs(self, run_id: str) -> list[str]:
        rows = self.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200})
        return [r["message"] for r in rows]

    def artifact_keys(self, run_id: str) -> set[str]:
        rows = self.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "limit": 200})
        return {r["key"] for r in rows if r["key"]}

    def log_tail(self) -> str:
        return "".join(p.read_text()[-3000:] for p in self.home.glob("*.log"))

    def start(self, name: str, *command: str) -> None:
        """Start a server, worker or sweeper, its output at the end of `NAME.log`."""
        with (self.home / f"{name}.log").open("a") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], cwd=self.home, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def start_server(self) -> None:
        """Start the API server, and return when it answers."""
        self.start("server", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        deadline = time.monotonic() + 300
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).is_success:
                    return
            except httpx.HTTPError:
                pass
            assert self.processes["server"].poll() is None, self.log_tail()
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.5)

    def start_worker(self) -> None:
        self.start("worker", "-m", "prefect", "worker", "start", "--pool", "klear")

    def start_sweeper(self) -> None:
        self.start("sweep", "-c", "from flows.cli import main; main()", "sweep", "--pool", "klear")

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a process and all that it has started in its session."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def once(look: Callable[[], T], is_so: Callable[[T], bool], *, timeout_s: float = 120) -> T:
    """What is seen once it is so, or at last: a run's logs and tasks reach the server in batches, some only after its final state."""
    deadline = time.monotonic() + timeout_s
    while not is_so(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return seen


@contextmanager
def server_and_worker(
    home: Path, *, limit: int | None = 1, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """A server with the settings of `klear ui` or others, a work pool `klear` with this limit, and a worker."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))} | SURVIVES_RESTARTS
    env |= {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    env |= settings
    server = Server(env["PREFECT_API_URL"], env, home, port)
    try:
        server.start_server()
        server.post("/work_pools/", {"name": "klear", "type": "process"})
        if limit is not None:
            server.prefect("work-pool", "set-concurrency-limit", "klear", str(limit), cwd=ROOT)
        server.start_worker()
        yield server
    finally:
        for name in reversed(list(server.processes)):
            server.stop(name)
