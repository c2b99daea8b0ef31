"""A schedule of a real server starts a retraining, which promotes and tells somebody; the next finds nothing new."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect_server import ROOT, Server, once, server_and_worker
from small_runs import BEFORE_SFT, SMALL, begin_with
from webhook import Receiver, receiving

from klear_core.artifacts.run_history import RunHistory
from klear_core.config.pipeline import WorkspaceConfig
from tasks.model_registry import open_registry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]  # minutes on a quiet machine

LENIENT = ("promote.first=any", "promote.max_truncated=1", "promote.max_no_answer=1", "promote.margin=100")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving("hook") as running:
        yield running


@pytest.fixture
def server(tmp_path: Path, receiver: Receiver, prefect_database: Path) -> Iterator[Server]:
    home = shutil.copytree(prefect_database, tmp_path / "prefect")
    often = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5"}  # how often runs are planned ahead, in place of 60
    with server_and_worker(home, settings={"OPS_HOOK": receiver.url, **often}) as running:
        running.prefect("deploy", "--name=retrain", cwd=ROOT)
        yield running


def runs_of(server: Server, deployment: str) -> list[dict[str, Any]]:
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 10}
    found = server.post("/flow_runs/filter", wanted)
    assert isinstance(found, list)
    return found


def test_a_schedule_promotes_and_tells_somebody_and_the_next_retraining_finds_nothing_new(
    server: Server, receiver: Receiver, fresh: Path, straight: Path
):
    begin_with(straight, fresh, *BEFORE_SFT, "sft")  # only RL trains
    notify = 'workspace.notify={webhook_env="OPS_HOOK", events=["promoted", "refused", "failed", "waiting"]}'
    parameters = {"profile": "smoke", "overrides": [*SMALL, *LENIENT, f"workspace.root={fresh}", notify]}
    deployment = server.get("/deployments/name/klear-retrain/retrain")["id"]
    soon = (datetime.now(UTC) + timedelta(seconds=90)).isoformat()  # later than the server needs to plan it
    schedule = {"interval": 30 * 24 * 3600, "anchor_date": soon}
    server.post(
        f"/deployments/{deployment}/schedules", [{"schedule": schedule, "active": True, "parameters": parameters}]
    )
    first = once(lambda: runs_of(server, deployment), bool, timeout_s=600)[0]
    assert server.wait(first["id"], timeout_s=1800)["state_type"] == "COMPLETED", server.logs(first["id"])
    champion = open_registry(WorkspaceConfig(root=str(fresh)), "klear").champion()
    assert champion is not None
    assert champion.promotion.run == first["id"]
    assert [(got["event"], got["run"]) for got in receiver.got] == [("promoted", first["id"])]
    assert "becomes champion" in receiver.got[0]["line"]
    assert first["id"] in receiver.got[0]["link"]

    again = server.start_run("klear-retrain", "retrain", parameters)
    assert server.wait(again, timeout_s=900)["state_type"] == "COMPLETED", server.logs(again)
    newest = RunHistory.of(fresh).find(again)
    assert newest.why.splitlines()[0] == "- no new data since the last run"
    assert newest.why.splitlines()[1].startswith("- made: nothing; reused: benchmarks, curate, base, distill, sft, rl")
    assert len(receiver.got) == 1
    assert open_registry(WorkspaceConfig(root=str(fresh)), "klear").champion() == champion
