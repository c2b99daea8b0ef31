"""Prefect's server on PostgreSQL and Redis, as a team runs it: both are killed under runs, which end well all the same.

Needs PostgreSQL, Redis (Debian: postgresql, redis-server) and prefect-redis; without them it is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from loopback import free_port
from prefect_server import ROOT, Server, once, server_and_worker
from test_outages import FLOW, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's programs; Debian has them in a folder of the version."""
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class Databases:
    """A PostgreSQL and a Redis of our own, whose files outlive a kill."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, postgres_programs()
        self.postgres_port, self.redis_port = free_port(), free_port()
        # PostgreSQL refuses to run as root.
        self.user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self.user:
            account = pwd.getpwnam("postgres")
            os.chown(folder, account.pw_uid, account.pw_gid)
        self.run("initdb", "-D", str(folder / "db"), "-U", "klear", "--auth=trust")
        self.start()
        url = ("-h", "127.0.0.1", "-p", str(self.postgres_port), "-U", "klear")
        self.run("createdb", *url, "prefect")

    def run(self, program: str, *args: str) -> None:
        command = [*self.user, str(self.programs / program), *args]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=120)

    def start(self) -> None:
        options = f"-p {self.postgres_port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
        self.run("pg_ctl", "-D", str(self.folder / "db"), "-o", options, "-l", str(self.folder / "log"), "-w", "start")
        redis = ["redis-server", "--port", str(self.redis_port), "--dir", str(self.folder), "--appendonly", "yes"]
        self.redis = subprocess.Popen([*self.user, *redis], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL to all processes of both."""
        number = int((self.folder / "db" / "postmaster.pid").read_text().split()[0])
        leaders = [psutil.Process(number), psutil.Process(self.redis.pid)]
        doomed = [*leaders, *(child for each in leaders for child in each.children(recursive=True))]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):  # PostgreSQL's own end with their leader
                process.send_signal(signal.SIGKILL)
        self.redis.wait()
        psutil.wait_procs(doomed, timeout=90)

    @property
    def settings(self) -> dict[str, str]:
        """Environment of Prefect's server."""
        return {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": (
                f"postgresql+asyncpg://klear@127.0.0.1:{self.postgres_port}/prefect"
            ),
            "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_MESSAGING_CACHE": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
            "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",
            "PREFECT_REDIS_MESSAGING_PORT": str(self.redis_port),
            "PREFECT_SERVER_DOCKET_URL": f"redis://127.0.0.1:{self.redis_port}/1",
        }


@pytest.fixture
def databases() -> Iterator[Databases]:
    if postgres_programs() is None or shutil.which("redis-server") is None:
        pytest.skip("needs PostgreSQL and Redis: apt-get install postgresql redis-server")
    if importlib.util.find_spec("prefect_redis") is None:
        pytest.skip("needs prefect-redis: pip install prefect-redis")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # the test's own folder is root's alone
        running = Databases(Path(folder))
        yield running
        running.kill()


@pytest.fixture
def server(databases: Databases, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "drill.py").write_text(FLOW)
    pool = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pool"]
    deployment = {"name": "plain", "entrypoint": "drill.py:drill", "work_pool": pool}
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [deployment]}))
    (tmp_path / "prefect").mkdir()
    with server_and_worker(tmp_path / "prefect", limit=None, settings=databases.settings) as running:
        running.prefect("deploy", "--all", cwd=tmp_path)
        running.start_sweeper()
        yield running


def test_runs_outlive_the_kill_of_postgresql_and_redis(server: Server, databases: Databases, tmp_path: Path):
    healthy, dead = (Run(server, tmp_path / name) for name in ("healthy", "dead"))
    healthy.wait_until_it_runs()
    pid = dead.wait_until_it_runs()
    databases.kill()
    os.kill(pid, signal.SIGKILL)
    time.sleep(20)
    databases.start()
    dead.wait_until_it_runs(but=pid)
    for run in (healthy, dead):
        run.finish()
    assert healthy.ended() == ("Completed", 1), server.log_tail()
    assert dead.ended() == ("Completed", 2), server.log_tail()
    assert "klear-base" in once(lambda: server.artifact_keys(healthy.run_id), lambda keys: "klear-base" in keys)
