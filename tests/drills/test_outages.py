"""A real server is stopped for a while under running flows: healthy ones end well, and dead ones are brought back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from prefect_server import ROOT, Server, once, server_and_worker

FLOW = """
import os, time
from pathlib import Path

from prefect import flow

from flows.environment import StageSelection
from flows.pipeline import PipelineRun, tracked_run
from klear_core.config.pipeline import PipelineConfig
from klear_core.artifacts.manifest import StageSummary
from tasks.stage import run_stage
from tasks.stage import stage_task


@stage_task
def base(info, job, inputs):
    root = Path(info.workspace.root)

    def body(*, workdir, telemetry):
        (root / "pid").write_text(str(os.getpid()))
        worst_s, steps = 0.0, 0
        while not (root / "go").exists():
            before = time.monotonic()
            steps += 1
            telemetry.progress(min(steps, 99), 100)
            worst_s = max(worst_s, time.monotonic() - before)
            time.sleep(0.2)
        (root / "worst_s").write_text(str(worst_s))
        (workdir / "model").write_text("trained")
        return StageSummary(counts={"steps": steps})

    return run_stage(info, job, inputs, body)


def make_base(run: PipelineRun):
    (stage,) = [stage for stage in run.stages if stage.name == "base"]
    run.artifacts["base"] = run.call(base, stage, run.inputs_of(stage))  # a stage that runs until it is told to end


@flow(name="drill", persist_result=False)
def drill(settings: PipelineConfig):
    return tracked_run(settings, make_base, StageSelection(only="base"))
"""
BROKEN = """
if "PREFECT__FLOW_RUN_ID" in os.environ:
    raise ImportError("not on this machine")
"""
STEP_S = 10.0
"""A step of training that waited for a server that is away would take a minute."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Server]:
    """With a deployment as those of the repository, another with a concurrency limit, a pool without one, and a sweeper."""
    folder = tmp_path_factory.mktemp("drill")
    (folder / "drill.py").write_text(FLOW)
    (folder / "broken.py").write_text(FLOW + BROKEN)
    pool = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pool"]
    plain = {"name": "plain", "entrypoint": "drill.py:drill", "work_pool": pool}
    limited = plain | {"name": "limited", "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"}}
    broken = plain | {"name": "broken", "entrypoint": "broken.py:drill"}
    (folder / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [plain, limited, broken]}))
    home = shutil.copytree(prefect_database, folder / "prefect")
    with server_and_worker(home, limit=None) as running:
        running.prefect("deploy", "--all", cwd=folder)
        running.start_sweeper()
        yield running


class Run:
    """A run of the drill's flow, and the folder through which it is told to end."""

    def __init__(self, server: Server, root: Path, *, deployment: str = "plain") -> None:
        self.server, self.root = server, root
        root.mkdir()
        settings = {"name": root.name, "workspace": {"root": str(root)}}
        self.run_id = server.start_run("drill", deployment, {"settings": settings})

    def wait_until_it_runs(self, *, but: int | None = None) -> int:
        """The process id, once there is one other than `but`."""
        file = self.root / "pid"
        pid = once(
            lambda: int(file.read_text() or 0) if file.exists() else 0, lambda seen: seen not in (0, but), timeout_s=300
        )
        assert pid not in (0, but), self.server.log_tail()
        return pid

    def finish(self) -> None:
        (self.root / "go").touch()

    def ended(self) -> tuple[str, int]:
        """Its final state, and how often it was executed."""
        run = self.server.wait(self.run_id)
        return run["state_name"], run["run_count"]

    def progress(self) -> list[tuple[float, str]]:
        wanted = {"artifacts": {"flow_run_id": {"any_": [self.run_id]}, "type": {"any_": ["progress"]}}}
        return [
            (artifact["data"], artifact["description"]) for artifact in self.server.post("/artifacts/filter", wanted)
        ]

    def worst_step_s(self) -> float:
        return float((self.root / "worst_s").read_text())

    def states(self) -> list[str]:
        import httpx

        reply = httpx.get(f"{self.server.url}/flow_run_states/", params={"flow_run_id": self.run_id}, timeout=60)
        return [state["name"] for state in sorted(reply.json(), key=lambda s: s["timestamp"])]


@pytest.mark.slow
def test_runs_outlast_a_server_and_a_sweeper_that_are_killed_and_one_that_dies_meanwhile_is_retried(
    server: Server, tmp_path: Path
):
    outage(server, tmp_path, away_s=10)


@pytest.mark.bench
@pytest.mark.timeout(3600)  # ten minutes of waiting by design, and then what a busy machine adds
@pytest.mark.parametrize("away_s", [130, 300])
def test_runs_outlast_a_long_outage_also_under_a_lease_and_a_silent_one_is_found(
    server: Server, tmp_path: Path, away_s: int
):
    outage(server, tmp_path, away_s=away_s, before_s=215 - away_s / 2, after_s=240)


@pytest.mark.bench
def test_a_flow_that_cannot_be_imported_ends_failed_in_its_third_attempt(server: Server, tmp_path: Path):
    run = Run(server, tmp_path / "broken", deployment="broken")
    last = once(
        lambda: server.get(f"/flow_runs/{run.run_id}"), lambda seen: seen["state_type"] == "FAILED", timeout_s=600
    )
    assert (last["state_type"], last["run_count"]) == ("FAILED", 0), server.log_tail()
    assert run.states().count("Crashed") == 3


def outage(server: Server, tmp_path: Path, *, away_s: float, before_s: float = 0.0, after_s: float = 0.0) -> None:
    """Take the server away for a while. With time before and after, leases (225 s) are renewed in it, and a worker dies with its run."""
    is_long = after_s > 0
    middle, end, dead, cancelled = (Run(server, tmp_path / name) for name in ("middle", "end", "dead", "cancelled"))
    healthy = [middle, end, *([Run(server, tmp_path / "limited", deployment="limited")] if is_long else [])]
    pids = {run: run.wait_until_it_runs() for run in (*healthy, dead, cancelled)}
    time.sleep(before_s)

    server.stop("server", signal.SIGKILL)
    server.stop("sweep", signal.SIGKILL)
    end.finish()
    if is_long:
        server.stop("worker", signal.SIGKILL)
    os.kill(pids[dead], signal.SIGKILL)
    time.sleep(away_s)
    server.start_server()
    server.start_sweeper()
    if is_long:
        server.start_worker()

    server.press_cancel(cancelled.run_id)
    assert end.ended() == ("Completed", 1), server.log_tail()
    assert "klear-base" in server.artifact_keys(end.run_id)  # the summary of a stage that ended meanwhile
    dead.wait_until_it_runs(but=pids[dead])
    time.sleep(after_s)
    for run in (*healthy, dead):
        run.finish()
    assert [run.ended() for run in healthy] == [("Completed", 1)] * len(healthy), server.log_tail()
    assert dead.ended() == ("Completed", 2), server.log_tail()
    assert cancelled.ended() == ("Cancelled", 1), server.log_tail()
    assert not once(lambda: psutil.pid_exists(pids[cancelled]), lambda is_there: not is_there, timeout_s=300)
    assert all("Crashed" not in run.states() for run in healthy)
    assert max(run.worst_step_s() for run in healthy) < STEP_S
    assert (100.0, "base: done") in middle.progress()  # a request that timed out may have made another one
