"""An MLflow server is stopped and started again while stages run, and has everything in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from klear_core.artifacts.manifest import StageSummary, read_manifest
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.stage import BaseJob
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import Telemetry
from tasks import tracking
from tasks.delivery import Undelivered
from tasks.stage import run_stage
from tasks.tracking import RunInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
_IN_TIME_S = 300.0


class Server:
    """An MLflow server of our own that can be stopped and started again on the same port and database."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        store = (
            "--backend-store-uri",
            f"sqlite:///{folder}/server.db",
            "--artifacts-destination",
            str(folder / "artifacts"),
        )
        where = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
        self._command = [sys.executable, "-m", "mlflow", "server", *store, *where]
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        until(self._is_healthy)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def _is_healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.TransportError:
            return False


@pytest.fixture
def server(tmp_path: Path, mlflow_folder: Path) -> Iterator[Server]:
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shutil.copy(mlflow_folder / "mlflow.db", tmp_path / "server.db")
    running = Server(tmp_path, port)
    running.start()
    yield running
    running.stop()


def test_a_server_that_goes_and_comes_back_ends_up_with_everything(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    workspace = WorkspaceConfig(root=str(tmp_path / "ws"))
    first = run_stage(info(workspace, "base"), job(1), {}, Steps(server, away_at=2, back_at=5))
    second = run_stage(info(workspace, "sft"), job(2), {"model": first}, Steps(server, away_at=2, back_at=None))
    assert "did not answer" in read_manifest(second.path).notes[0]
    undelivered = Undelivered(tmp_path / "ws" / "mlflow" / "undelivered")
    assert [r.stage for r in undelivered.records(server.url.removeprefix("http://"))] == ["sft"]
    server.start()
    run_stage(info(workspace, "rl"), job(3), {"model": second}, Steps(server, away_at=None, back_at=None))
    tracking.end_pipeline(info(workspace, "rl"), "FINISHED")
    assert undelivered.records(server.url.removeprefix("http://")) == []

    runs = {r.data.tags.get("klear.stage", "pipeline"): r for r in runs_on(server)}
    assert {name: r.info.status for name, r in runs.items()} == dict.fromkeys(
        ("base", "sft", "rl", "pipeline"), "FINISHED"
    )
    for stage in ("base", "sft", "rl"):
        assert steps_on(server, runs[stage].info.run_id) == list(range(8)), stage
        assert runs[stage].data.params["model.hidden_size"] == "64"
        assert runs["pipeline"].data.metrics[f"{stage}/counts/steps"] == 8
        assert len(runs[stage].outputs.model_outputs) == 1


class Steps:
    """A body of eight steps, during which the server goes away and comes back."""

    def __init__(self, server: Server, *, away_at: int | None, back_at: int | None) -> None:
        self.server, self.away_at, self.back_at = server, away_at, back_at

    def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
        for step in range(8):
            if step == self.away_at:
                self.server.stop()
            if step == self.back_at:
                self.server.start()
            telemetry.log({"base/loss/train": 1.0 / (step + 1)}, step=step)
            time.sleep(1.5)  # some are sent in the middle
        (workdir / "weights").write_text("w")
        if self.away_at is not None and self.back_at is not None:
            until(lambda: len(steps_on(self.server, runs_on(self.server)[0].info.run_id)) == 8)
        return StageSummary(counts={"steps": 8})


def info(workspace: WorkspaceConfig, stage: str) -> RunInfo:
    return RunInfo(workspace=workspace, run_id="one", run_name="test", stage=stage, started_at=datetime.now(UTC))


def job(seed: int) -> BaseJob:
    return BaseJob(seed=seed, model=TinyModelConfig())


def runs_on(server: Server):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.url)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])


def steps_on(server: Server, run_id: str) -> list[int]:
    from mlflow import MlflowClient

    return [m.step for m in MlflowClient(tracking_uri=server.url).get_metric_history(run_id, "base/loss/train")]


def until(is_so) -> None:
    deadline = time.monotonic() + _IN_TIME_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.3)
