"""With a real server and a real worker: what a team does from the UI and the command line."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prefect_server import ROOT, Server, once, server_and_worker

from klear_core.artifacts.manifest import read_manifest

pytestmark = pytest.mark.slow

SETTINGS = {
    "benchmarks": [{"name": "heldout", "source": {"kind": "procedural", "split": "heldout", "num_problems": 8}}],
    "curate": {"sources": [{"kind": "procedural", "num_problems": 32}]},
    "sft": {"optim": {"lr": 1e-3}, "num_epochs": 1, "rows_per_step": 16, "max_tokens": 256, "dtype": "float32"},
    "rl": {"rollout": {"sampling": {"max_new_tokens": 96}}},
}

DEMO = """
import json, sys
from pathlib import Path

from prefect import flow

from flows.environment import StageSelection
from flows.pipeline import PipelineRun, tracked_run
from klear_core.config.pipeline import PipelineConfig
from klear_core.artifacts.manifest import StageSummary
from tasks.stages import TASKS
from tasks.stage import run_stage
from tasks.stage import stage_task


@stage_task
def rl(info, job, inputs):
    def body(*, workdir, telemetry):
        import fragile

        telemetry.log({"rl/reward/mean": 0.5}, step=1)
        fragile.train(workdir)
        return StageSummary(counts={"steps": 1})

    return run_stage(info, job, inputs, body)


def run_stages(run: PipelineRun):
    for stage in run.stages:
        if stage.name in run.chosen:
            task = rl if stage.name == "rl" else TASKS[stage.kind]  # all stages are real but one, which can be broken
            run.artifacts[stage.name] = run.call(task, stage, run.inputs_of(stage))


@flow(name="demo", persist_result=False)
def demo(settings: PipelineConfig):
    tracked_run(settings, run_stages, StageSelection(until="rl"))
"""
BROKEN = "def train(workdir):\n    raise TypeError('a bug in the RL stage')\n"
FIXED = "def train(workdir):\n    (workdir / 'model').write_text('trained')\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Server]:
    home = shutil.copytree(prefect_database, tmp_path_factory.mktemp("server") / "prefect")
    with server_and_worker(home) as running:
        yield running


@pytest.fixture(scope="module")
def deployed(server: Server) -> Server:
    """With those deployments of the repository that the tests use; CI deploys all with the commands of docs/operations.md."""
    server.prefect("deploy", *(f"--name={name}" for name in ("pipeline", "base", "retrain")), cwd=ROOT)
    return server


def made_at(workspace: Path) -> dict[str, str]:
    folders = [f.parent for f in (workspace / "artifacts").glob("*/*/manifest.json")]
    return {read_manifest(f).stage: read_manifest(f).created_at.isoformat() for f in folders}


def test_retry_from_the_ui_runs_only_what_had_failed_also_after_its_code_was_fixed(
    server: Server, tmp_path: Path, tracked: Path
):
    (tmp_path / "demo.py").write_text(DEMO)
    (tmp_path / "fragile.py").write_text(BROKEN)
    pool = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pool"]
    deployment = {"name": "demo", "entrypoint": "demo.py:demo", "work_pool": pool}
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [deployment]}))
    server.prefect("deploy", "--all", cwd=tmp_path)
    workspace = tracked

    run_id = server.start_run("demo", "demo", {"settings": SETTINGS | {"workspace": {"root": str(workspace)}}})
    assert server.wait(run_id)["state_type"] == "FAILED", server.logs(run_id)
    finished = ["benchmarks", "curate", "base", "distill", "sft"]
    assert_tasks(server, run_id, 1, dict.fromkeys(finished, "Completed") | {"rl": "Failed"})
    before = made_at(workspace)
    assert before.keys() == set(finished)
    report = workspace / "failed" / run_id / "report.html"
    assert "TypeError: a bug in the RL stage" in report.read_text()
    assert_logged(server, run_id, str(report))

    (tmp_path / "fragile.py").write_text(FIXED)
    server.press_retry(run_id)
    run = server.wait(run_id)
    assert (run["state_type"], run["run_count"]) == ("COMPLETED", 2), server.logs(run_id)
    assert_tasks(server, run_id, 2, dict.fromkeys(finished, "Cached") | {"rl": "Completed"})
    after = made_at(workspace)
    assert {name: after[name] for name in finished} == before
    assert not report.exists()
    assert mlflow_children(workspace) == dict.fromkeys([*finished, "rl"], 1)
    assert {"klear-sft", "klear-rl", "klear-curate-ledger"} <= server.artifact_keys(run_id)
    assert_logged(server, run_id, "sft: made")  # the core's and the tasks' logs are in the run's


def assert_tasks(server: Server, run_id: str, attempt: int, expected: dict[str, str]) -> None:
    assert once(lambda: server.task_states(run_id, attempt=attempt), lambda seen: seen == expected) == expected


def assert_logged(server: Server, run_id: str, text: str) -> None:
    assert text in once(lambda: "\n".join(server.logs(run_id)), lambda seen: text in seen)


def mlflow_children(workspace: Path) -> dict[str, int]:
    """Runs by stage; all have one parent, and it links to Prefect."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{workspace}/mlflow/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("klear").experiment_id])
    (parent,) = [r for r in runs if "klear.stage" not in r.data.tags]
    children = [r for r in runs if r is not parent]
    assert {r.data.tags["mlflow.parentRunId"] for r in children} == {parent.info.run_id}
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert "/runs/flow-run/" in parent.data.tags["prefect.flow_run_url"]
    stages = [r.data.tags["klear.stage"] for r in children]
    return {s: stages.count(s) for s in stages}


def test_deployments_take_parameters_from_the_command_line_and_from_the_form(deployed: Server, tracked: Path):
    root = {"workspace": {"root": str(tracked)}}

    overrides = json.dumps([f"workspace.root={tracked}", "model.num_layers=1"])
    flat = ["-p", "profile=smoke", "-p", f"overrides={overrides}", "-p", "only=base"]
    begun = [deployed.prefect("deployment", "run", "klear/pipeline", *flat, cwd=ROOT)]

    nested = json.dumps({"profile": "smoke", "settings": root | {"seed": 7}})
    begun.append(deployed.prefect("deployment", "run", "klear/base", "--params", nested, cwd=ROOT))

    settings = root | {"seed": 8, "model": {"kind": "tiny", "num_layers": 2}}
    run_id = deployed.start_run(
        "klear", "pipeline", {"profile": "smoke", "settings": settings, "overrides": [], "until": None, "only": "base"}
    )
    from_command_line = [re.findall(r"UUID: ([0-9a-f-]{36})", output)[0] for output in begun]
    assert [deployed.wait(one)["state_type"] for one in from_command_line] == ["COMPLETED", "COMPLETED"]
    assert deployed.wait(run_id)["name"] == "base-smoke-seed8-gppo"

    folders = [f.parent for f in (tracked / "artifacts").glob("base/*/manifest.json")]
    made = {(read_manifest(f).config["seed"], read_manifest(f).config["model"]["num_layers"]) for f in folders}
    assert made == {(0, 1), (7, 2), (8, 2)}


def test_retraining_with_a_fresh_seed_is_listed_under_that_seed(deployed: Server):
    nothing = {"profile": "smoke", "seed": "fresh", "overrides": ['curate.sources=["no/such.jsonl"]']}
    run = deployed.wait(deployed.start_run("klear-retrain", "retrain", nothing))
    assert run["state_type"] == "FAILED"
    assert re.fullmatch(r"retrain-smoke-seed[1-9]\d+-gppo", run["name"])


def test_a_misspelt_setting_ends_the_run_failed_once_with_the_reason(deployed: Server):
    run = deployed.wait(deployed.start_run("klear", "pipeline", {"profile": "smoke", "overrides": ["rl.num_stepz=8"]}))
    assert (run["state_type"], run["run_count"], run["name"]) == ("FAILED", 1, "smoke-unresolved")
    assert run["state"]["message"] == "ConfigError: profile smoke: rl.num_stepz: unknown key; did you mean num_steps?"
    assert_logged(deployed, run["id"], "Finished in state Failed")
    time.sleep(12)  # the engine's own last words come after the state, and logs are sent every few seconds
    assert "Traceback" not in "\n".join(deployed.logs(run["id"]))


def test_a_parameter_out_of_bounds_is_refused_at_once(deployed: Server):
    import httpx

    found = deployed.get("/deployments/name/klear/pipeline")
    reply = httpx.post(
        f"{deployed.url}/deployments/{found['id']}/create_flow_run", json={"parameters": {"settings": {"seed": -1}}}
    )
    assert reply.status_code == 409
