"""What a Prefect server does by itself with runs whose server was away, that are silent, or that nobody cancels.

`klear bench prefect` takes ten minutes of waiting. PREFECT_PYTHON is the Python whose Prefect is tried, so that two
versions can be tried beside one another. docs/data/prefect.json has what came out, docs/data/drills.md the table.
Flows sleep, servers are on SQLite, heartbeats come every 30 s, and requests are tried as often as those of our runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "flows")]

from loopback import free_port  # noqa: E402

PYTHON = os.environ.get("PREFECT_PYTHON", sys.executable)
FLOWS = """
import os, time
from pathlib import Path
from prefect import flow

def sleep(folder, seconds):
    Path(folder, "pid").write_text(str(os.getpid()))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.5)

@flow(persist_result=False)
def plain(folder: str, seconds: int):
    sleep(folder, seconds)

@flow(persist_result=False)
def watched(folder: str, seconds: int):
    sleep(folder, seconds)
"""
POOL = "    work_pool: {name: klear}\n"
DEPLOYMENTS = f"""
deployments:
  - name: limited
    entrypoint: sleeping.py:plain
    concurrency_limit: {{limit: 1, collision_strategy: ENQUEUE}}
{POOL}  - name: free
    entrypoint: sleeping.py:plain
{POOL}  - name: watched
    entrypoint: sleeping.py:watched
{POOL}"""
ENDS = [f"prefect.flow-run.{state}" for state in ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed")]
SILENT_IS_CRASHED = {
    "name": "silent",
    "enabled": True,
    "trigger": {
        "type": "event",
        "posture": "Proactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": "watched"},
        "after": ["prefect.flow-run.heartbeat"],
        "expect": ENDS,
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "within": 90,
    },
    "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "message": "silent"}],
}
"""The automation of Prefect's documentation for runs that died, for one flow."""
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
IN_FILES = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem"}
Row = Mapping[str, object]


class Server:
    """A server of one version, which can be stopped and started again."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder, self.port, self._client = folder, free_port(), httpx.Client()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "PYTHONPATH"))}
        self.env |= {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_CLIENT_MAX_RETRIES": "8",
            **settings,
        }
        (folder / "sleeping.py").write_text(FLOWS)
        (folder / "prefect.yaml").write_text(DEPLOYMENTS)
        self.start()
        self.ask("/work_pools/", {"name": "klear", "type": "process"})
        command = [PYTHON, "-m", "prefect", "--no-prompt", "deploy", "--all"]
        subprocess.run(command, cwd=folder, env=self.env, check=True, capture_output=True, timeout=600)

    def popen(self, *args: str) -> subprocess.Popen[bytes]:
        """Start a command of Prefect."""
        with (self.folder / "log").open("ab") as out:
            command = [PYTHON, "-m", "prefect", *args]
            return subprocess.Popen(
                command, cwd=self.folder, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self.process = self.popen("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        deadline = time.monotonic() + 600
        while True:
            try:
                if self._client.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def be_away(self, seconds: float) -> None:
        """Kill the server, and start it again later."""
        end_all(self.process.pid)
        time.sleep(seconds)
        self.start()

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """Return the answer to a request."""
        method = "GET" if body is None else "POST"
        for _ in range(20):  # SQLite answers 503 now and then
            answer = self._client.request(method, f"{self.url}{path}", json=body, timeout=120)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        found: dict[str, object] = answer.raise_for_status().json()
        return found


class Run:
    """A run of a deployment, with its runner: a process as a process worker starts one."""

    def __init__(self, server: Server, name: str, seconds: int) -> None:
        self.server, self.folder = server, server.folder / f"{name.replace('/', '-')}-{seconds}"
        self.folder.mkdir()
        deployment = server.ask(f"/deployments/name/{name}")["id"]
        parameters = {"folder": str(self.folder), "seconds": seconds}
        self.id = server.ask(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
        # A worker asks for Pending before it starts the runner, and the run gets its lease.
        server.ask(f"/flow_runs/{self.id}/set_state", {"state": {"type": "PENDING", "name": "Pending"}})
        self.runner = server.popen("flow-run", "execute", str(self.id))

    def wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + 600
        while not (self.folder / "pid").exists() or not (self.folder / "pid").read_text():
            assert time.monotonic() < deadline, (self.server.folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        self.pid = int((self.folder / "pid").read_text())
        self.since = time.monotonic()

    def state(self) -> str:
        """Return the state's name."""
        return str(self.server.ask(f"/flow_runs/{self.id}")["state_name"])

    def cancel(self) -> None:
        """Ask for what the UI's button asks for."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.server.ask(f"/flow_runs/{self.id}/set_state", {"state": state})

    def ended(self, since: float, *, within: float) -> tuple[str, float]:
        """Return the final state, or the state after so many seconds, and when it was seen."""
        while True:
            after, state = time.monotonic() - since, self.state()
            if state.upper() in FINAL or after > within:
                return state, after
            time.sleep(1)

    def process_ended(self, since: float, *, within: float) -> float:
        """Return when the run's process was gone, or `within` if it was not."""
        while psutil.pid_exists(self.pid) and time.monotonic() - since < within:
            time.sleep(0.5)
        return time.monotonic() - since


def end_all(pid: int) -> None:
    """SIGKILL to a process and all that it has started."""
    leader = psutil.Process(pid)
    for process in (*leader.children(recursive=True), leader):
        process.kill()
    if leader.is_running():
        leader.wait(60)


def row(name: str, seconds: float) -> Row:
    """Return one measurement."""
    return {"name": name, "value": round(seconds, 1), "unit": "s", "target": "none", "ok": True, "prefect": version()}


def version() -> str:
    """Return the version of the Prefect that is tried."""
    code = "from importlib.metadata import version; print(version('prefect'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def short_restart(folder: Path) -> list[Row]:
    """Restart a server with default settings; then kill one run with its runner, and the runner of another."""
    server = Server(folder, {})
    try:
        leased = Run(server, "plain/limited", 360)
        dead, deaf = (Run(server, "plain/free", seconds) for seconds in (900, 901))
        for run in (leased, dead, deaf):
            run.wait_until_it_runs()
        server.be_away(10)
        end_all(dead.runner.pid)
        killed_at = time.monotonic()
        deaf.runner.kill()
        deaf.cancel()
        state, after = deaf.ended(killed_at, within=420)
        lives = "lives" if psutil.pid_exists(deaf.pid) else "is gone"
        rows = [row(f"cancelled, the runner is gone: {state}, and the process {lives}", after)]
        state, after = leased.ended(leased.since, within=600)
        rows.append(row(f"lease in memory, server away for 10 s: {state}", after))
        state, after = dead.ended(killed_at, within=600)
        return [*rows, row(f"run and runner killed, no automation, no sweeper: {state}", after)]
    finally:
        end_all(server.process.pid)
        end_runs(folder)


def long_outage(folder: Path) -> list[Row]:
    """Take a server away across the renewal of a lease that is in a file, and the heartbeats of healthy runs."""
    server = Server(folder, IN_FILES)
    try:
        server.ask("/automations/", SILENT_IS_CRASHED)
        leased, watched = Run(server, "plain/limited", 480), Run(server, "watched/watched", 481)
        cancelled = Run(server, "plain/free", 900)
        for run in (leased, watched, cancelled):
            run.wait_until_it_runs()
        time.sleep(max(0.0, leased.since + 160 - time.monotonic()))
        server.be_away(130)
        back = time.monotonic()
        cancelled.cancel()
        cancelled_after = cancelled.process_ended(back, within=240)
        rows = [row("cancelled after an outage of 130 s: its process is gone", cancelled_after)]
        for what, run in (
            ("lease in a file, server away for 130 s across its renewal", leased),
            ("healthy run, server away for 130 s, automation for silent runs", watched),
        ):
            state, after = run.ended(run.since, within=900)
            rows.append(row(f"{what}: {state}", after))
        return rows
    finally:
        end_all(server.process.pid)
        end_runs(folder)


def end_runs(folder: Path) -> None:
    """Kill what is left of runs and runners."""
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def measure() -> list[Row]:
    """Return the rows of both servers, which are tried at once: nearly all of it is waiting."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second, ThreadPoolExecutor() as pool:
        found = [pool.submit(short_restart, Path(first)), pool.submit(long_outage, Path(second))]
        return [each for future in found for each in future.result()]


if __name__ == "__main__":
    for each in measure():
        print(json.dumps(each))
