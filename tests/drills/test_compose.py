"""The services of infra/compose, by its own commands and environments, outlast an API server and come back from a backup.

Run by hand on one machine, in a network namespace: PostgreSQL, Redis and Caddy are Debian's, and moto is the S3 server.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra" / "compose"
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
SECRETS = {
    name: name.lower().replace("_", "")
    for name in re.findall(r"^([A-Z0-9_]+)=$", (COMPOSE / ".env.example").read_text(), re.MULTILINE)
}
PORTS = {"redis:6379": 6390, "prefect-1:4200": 4201, "prefect-2:4200": 4202}
"""Ports of services that would share one on a single machine."""
SAMPLES = """
import mlflow
print(*sorted(run.data.tags["mlflow.runName"] for run in mlflow.search_runs(experiment_names=["klear"], output_format="list")))
"""
_PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.getuid() != 0 or not POSTGRES or not shutil.which("caddy") or not shutil.which("redis-server"),
        reason="needs root, postgresql, redis-server and caddy",
    ),
]


def here(value: Any, name: str = "") -> Any:
    """The value with this machine's address in place of host names, and a service's own port."""
    if isinstance(value, dict):
        return {key: here(each, name) for key, each in value.items()}
    if isinstance(value, list):
        return [here(each, name) for each in value]
    if not isinstance(value, str):
        return value
    value = string.Template(value).safe_substitute(SECRETS)
    for address, port in PORTS.items():
        value = re.sub(rf"(?<![\w-]){address}\b", f"127.0.0.1:{port}", value)
    own = PORTS.get(f"{name}:4200")
    value = value if own is None else re.sub(r"^4200$|(?<=127\.0\.0\.1:)4200(?=/api/ready)", str(own), value)
    return re.sub(r"(?<![\w-])(?:(?:postgres|objects|proxy|ray-head)(?=:\d|$)|mlflow(?=:\d))", "127.0.0.1", value)


@dataclass
class Services:
    """Processes of the services, whose files are in a folder."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
        self.all = {name: here(service, name) for name, service in self.compose["services"].items()}
        auth = self.folder / "auth.ini"
        auth.write_text(here(self.compose["configs"]["mlflow-auth"]["content"]))
        self.all["mlflow"]["environment"]["MLFLOW_AUTH_CONFIG_PATH"] = str(auth)
        self.all["backup"]["environment"]["PGHOST"] = "127.0.0.1"
        (self.folder / "Caddyfile").write_text(here((COMPOSE / "Caddyfile").read_text()))
        (self.folder / "app").mkdir()
        tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", self.folder / "app"], input=tree, check=True)

    def env(self, name: str) -> dict[str, str]:
        own = {key: str(value) for key, value in self.all[name].get("environment", {}).items()}
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        inherited = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        return inherited | {"PATH": path, "HOME": str(home), "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"} | own

    def start(self, name: str, command: list[str] | None = None) -> None:
        """Start a service and wait until its own check passes."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command or self.all[name]["command"],
                env=self.env(name),
                cwd=self.folder / "app",
                stdout=log,
                stderr=log,
            )
        check = self.all[name].get("healthcheck", {}).get("test")
        if check and check[1] not in ("mc", "wget"):  # of the images of others
            command = ["sh", "-c", check[1]] if check[0] == "CMD-SHELL" else check[1:]
            command = [word.replace("redis-cli", "redis-cli -p 6390") for word in command]
            env = self.env(name)
            self.until(lambda: not subprocess.run(command, env=env, capture_output=True, check=False).returncode, name)

    def until(self, is_so: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            alive = name not in self.processes or self.processes[name].poll() is None
            if not alive or time.monotonic() > deadline:
                raise AssertionError((self.folder / f"{name}.log").read_text()[-3000:])
            time.sleep(0.5)

    def run(self, name: str, command: list[str] | None = None) -> str:
        command = command or self.all[name]["command"]
        done = subprocess.run(
            command, env=self.env(name), cwd=self.folder / "app", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    def start_stores(self) -> None:
        """An empty PostgreSQL with both databases, Redis, and an empty S3 server."""
        data, password = self.folder / "postgres" / "data", self.folder / "password"
        data.parent.mkdir(exist_ok=True)
        shutil.chown(data.parent, "postgres")
        password.write_text(SECRETS["POSTGRES_PASSWORD"])
        as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        init = ["initdb", "-N", "-D", str(data), "-U", "klear", f"--pwfile={password}", "-A", "scram-sha-256"]
        subprocess.run([*as_postgres, str(POSTGRES[0] / init[0]), *init[1:]], check=True, capture_output=True, cwd="/")
        server = [str(POSTGRES[0] / "postgres"), "-D", str(data), "-k", str(data.parent)]
        self.start("postgres", [*as_postgres, *server])
        for query in ("CREATE DATABASE prefect", self.compose["configs"]["databases"]["content"]):
            self.run("backup", ["psql", "-d", "postgres", "-c", query])
        self.start("redis", [*self.all["redis"]["command"], "--port", "6390", "--dir", str(self.folder)])
        self.start("objects", [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "9000"])
        self.until(lambda: answers("http://127.0.0.1:9000/moto-api/"), "objects")

    def start_servers(self) -> None:
        for name in ("prefect-1", "prefect-2", "prefect-services", "mlflow"):
            self.start(name)
        self.start("proxy", ["caddy", "run", "--config", str(self.folder / "Caddyfile"), "--adapter", "caddyfile"])
        self.until(lambda: answers("http://127.0.0.1:4200/api/ready"), "proxy")

    def backup(self, *arguments: str) -> None:
        self.run("backup", [sys.executable, *self.all["backup"]["entrypoint"][1:], *arguments])

    def api(self, path: str) -> Any:
        auth = ("klear", SECRETS["PREFECT_PASSWORD"])
        return httpx.post(f"http://127.0.0.1:4200/api{path}", json={}, auth=auth, timeout=60).raise_for_status().json()

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()
        self.processes.clear()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=8).is_success
    except httpx.HTTPError:
        return False


def test_the_services_run_a_profile_and_come_back_from_a_backup() -> None:
    pytest.importorskip("prefect_redis", reason="needs the extra `servers`")
    inside = ["unshare", "-n", "--mount-proc", "-pf", "--kill-child=KILL"]
    with tempfile.TemporaryDirectory(prefix="klear-compose-") as folder:  # pytest's own is closed to other users
        Path(folder).chmod(0o755)  # PostgreSQL is another user
        program = f"ip link set lo up; exec {sys.executable} {__file__} {folder}"
        subprocess.run([*inside, "sh", "-c", program], check=True, timeout=1700)


def drill(folder: Path) -> None:
    """A deployment runs the smoke profile while an API server dies. All is saved, lost, restored, and there again."""
    services = Services(folder)
    services.start_stores()
    for name in ("bucket", "migrate"):
        services.run(name)
    services.start_servers()
    for name in ("ray-head", "ray-worker"):
        services.start(name)
    services.run("deploy")
    for name in ("worker", "sweeper"):
        services.start(name)
    asked = ["prefect", "deployment", "run", "klear/pipeline", "-p", "profile=smoke", "--watch"]
    services.start("deploy", asked)
    services.until(lambda: bool(services.api("/task_runs/filter")), "deploy")
    services.processes.pop("prefect-1").kill()
    assert services.processes.pop("deploy").wait() == 0
    before = services.run("worker", ["python", "-c", SAMPLES])
    assert {"sft", "rl", "evaluate_rl"} <= set(before.split())
    artifacts = folder / "app" / "runs" / "artifacts"
    kept = sorted(str(file.relative_to(artifacts)) for file in artifacts.rglob("*.json"))
    services.backup("save", str(folder / "saved"))

    services.stop()
    for lost in ("postgres/data", "app/runs"):
        shutil.rmtree(folder / lost)
    services.start_stores()
    services.backup("restore", str(folder / "saved"))
    services.start_servers()
    assert services.run("worker", ["python", "-c", SAMPLES]) == before
    [run] = services.api("/flow_runs/filter")
    assert run["state_name"] == "Completed"
    assert sorted(str(file.relative_to(artifacts)) for file in artifacts.rglob("*.json")) == kept
    services.stop()


if __name__ == "__main__":
    drill(Path(sys.argv[1]))
