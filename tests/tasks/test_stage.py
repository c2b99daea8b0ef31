import json
import math
import shutil
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from klear_core.artifacts.manifest import LedgerStep, StageSummary, read_manifest
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.stage import BaseJob, EvaluateJob
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.metrics import Telemetry, read_metrics
from tasks import tracking
from tasks.delivery import Undelivered
from tasks.mlflow_backend import VIEW_TAG, OpenRun, TrackedRun, mlflow_backend
from tasks.progress import Console, shown_on
from tasks.stage import run_stage
from tasks.tracking import RunInfo, code_commit


@pytest.fixture(scope="module")
def workspace(mlflow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkspaceConfig:
    """One for all tests here; each test has a seed of its own."""
    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(mlflow_folder, root / "mlflow")
    return WorkspaceConfig(root=str(root))


@pytest.fixture(autouse=True)
def _no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def info(workspace: WorkspaceConfig, run_id: str, stage: str = "base") -> RunInfo:
    return RunInfo(workspace=workspace, run_id=run_id, run_name="test", stage=stage, started_at=datetime.now(UTC))


def job(seed: int) -> BaseJob:
    return BaseJob(seed=seed, model=TinyModelConfig())


class Body:
    """Writes a line a step from `start` to `stop`, and fails at `fails_at`."""

    def __init__(
        self, *, start: int = 0, stop: int = 4, fails_at: int | None = None, error: Exception | None = None
    ) -> None:
        self.start, self.stop, self.fails_at = start, stop, fails_at
        self.error = error or RuntimeError("broken")
        self.calls = 0

    def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
        self.calls += 1
        for step in range(self.start, self.stop):
            if step == self.fails_at:
                raise self.error
            telemetry.log({"base/loss/train": 1.0 / (step + 1)}, step=step)
            telemetry.progress(step + 1, self.stop)
        (workdir / "model").mkdir(exist_ok=True)
        (workdir / "model" / "weights").write_text("w")
        ledger = LedgerStep(step="judge", unit="trace", num_in=5, num_out=3, dropped={"judge_failed": 2})
        return StageSummary(counts={"steps": self.stop}, ledger=(ledger,), seeds={"run": 1})


def steps_of(path: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(path / "metrics.jsonl")]


def test_a_stage_runs_once_and_is_reused_with_the_same_reference(workspace: WorkspaceConfig):
    body = Body()
    first = run_stage(info(workspace, "a"), job(1), {}, body)
    again = run_stage(info(workspace, "b"), job(1), {}, body)
    assert body.calls == 1
    assert first == again
    assert tracking.parent_run_id(info(workspace, "b")) is None  # reuse leaves no trace in MLflow


def test_the_manifest_tells_where_an_artifact_comes_from(workspace: WorkspaceConfig):
    source = run_stage(info(workspace, "c"), job(2), {}, Body())
    ref = run_stage(info(workspace, "c", "sft"), job(3), {"model": source}, Body())
    manifest = read_manifest(ref.path)
    assert [(i.role, i.kind, i.fingerprint) for i in manifest.inputs] == [("model", "base", source.fingerprint)]
    assert manifest.ledger[0].dropped == {"judge_failed": 2}
    assert manifest.seeds == {"run": 1}
    assert manifest.config["seed"] == 3
    assert manifest.versions["torch"]
    assert manifest.mlflow_run_id
    assert {f.path for f in manifest.files} == {"metrics.jsonl", "model/weights"}


def test_a_failed_stage_goes_on_where_it_was_in_the_same_mlflow_run(workspace: WorkspaceConfig):
    run = info(workspace, "d")
    with pytest.raises(RuntimeError):
        run_stage(run, job(4), {}, Body(fails_at=3))
    ref = run_stage(run, job(4), {}, Body(start=2))  # its checkpoint was older than its last metric
    assert steps_of(ref.path) == [0, 1, 2, 3]
    manifest = read_manifest(ref.path)
    assert manifest.attempts == 2
    runs = mlflow_runs(workspace, "d")
    assert {r.data.tags.get("klear.stage", "parent"): r.info.status for r in runs} == {
        "base": "FINISHED",
        "parent": "RUNNING",
    }
    assert [r.info.run_id for r in runs if "klear.stage" in r.data.tags] == [manifest.mlflow_run_id]


def test_steps_done_again_in_one_attempt_replace_their_rows(workspace: WorkspaceConfig):
    """As when RL loses its learner: its checkpoint is older than the last metric."""

    class GoesBack(Body):
        def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
            for step in (0, 1, 2, 3):
                telemetry.log({"base/loss/train": 9.0}, step=step)
            self.start = 2
            return super().__call__(workdir=workdir, telemetry=telemetry)

    ref = run_stage(info(workspace, "k"), job(12), {}, GoesBack())
    rows = read_metrics(ref.path / "metrics.jsonl")
    assert [(row["step"], row["base/loss/train"]) for row in rows] == [(0, 9), (1, 9), (2, 1 / 3), (3, 1 / 4)]


def test_a_new_run_that_finishes_a_killed_ones_stage_has_the_whole_curve_in_mlflow(workspace: WorkspaceConfig):
    with pytest.raises(KeyboardInterrupt):
        run_stage(info(workspace, "e"), job(5), {}, Body(fails_at=3, error=KeyboardInterrupt()))  # type: ignore[arg-type]
    assert {r.info.status for r in mlflow_runs(workspace, "e") if "klear.stage" in r.data.tags} == {"KILLED"}
    ref = run_stage(info(workspace, "f"), job(5), {}, Body(start=3))
    run_id = read_manifest(ref.path).mlflow_run_id
    history = client(workspace).get_metric_history(run_id, "base/loss/train")
    assert [m.step for m in history] == [0, 1, 2, 3]


def test_numbers_that_are_not_finite_are_in_no_record(workspace: WorkspaceConfig):
    """The first step's loss is missing, and so it is sent again by no later attempt."""

    class Diverges(Body):
        def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
            telemetry.log({"base/loss/train": math.nan, "base/optim/lr": 0.1}, step=0)
            telemetry.log({"base/loss/train": math.inf, "base/optim/lr": 0.2}, step=1)
            return super().__call__(workdir=workdir, telemetry=telemetry)

    with pytest.raises(RuntimeError):
        run_stage(info(workspace, "n"), job(13), {}, Diverges(start=2, fails_at=3))
    ref = run_stage(info(workspace, "n"), job(13), {}, Body(start=3))
    rows = read_metrics(ref.path / "metrics.jsonl")
    assert rows[:3] == [
        {"step": 0, "base/optim/lr": 0.1},
        {"step": 1, "base/optim/lr": 0.2},
        {"step": 2, "base/loss/train": 1 / 3},
    ]
    run_id = read_manifest(ref.path).mlflow_run_id
    assert [m.step for m in client(workspace).get_metric_history(run_id, "base/loss/train")] == [2, 3]


def test_mlflow_has_parameters_inputs_counts_and_the_model_by_reference(workspace: WorkspaceConfig):
    source = run_stage(info(workspace, "g"), job(6), {}, Body())
    ref = run_stage(info(workspace, "g", "sft"), job(7), {"model": source}, Body())
    run = client(workspace).get_run(read_manifest(ref.path).mlflow_run_id)
    assert run.data.params["model.hidden_size"] == "64"
    assert run.data.metrics["sft/counts/steps"] == 4
    assert [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs] == [("base", source.fingerprint)]
    assert run.data.tags["mlflow.source.name"] == "klear/tasks/stages.py"
    assert run.data.tags["mlflow.source.git.commit"] == code_commit().sha
    model = client(workspace).get_logged_model(run.data.tags["klear.model_id"])
    assert model.params == {"klear.uri": ref.uri, "klear.fingerprint": ref.fingerprint}
    parent = client(workspace).get_run(run.data.tags["mlflow.parentRunId"])
    assert {o.model_id for o in run.outputs.model_outputs} == {model.model_id}
    assert model.model_id in {o.model_id for o in parent.outputs.model_outputs}


def test_a_result_that_is_told_twice_names_its_model_once(workspace: WorkspaceConfig):
    """As after an outage in the midst of telling it, or when two processes of a workspace tell what a third left."""
    ref = run_stage(info(workspace, "t"), job(15), {}, Body())
    run_id = read_manifest(ref.path).mlflow_run_id
    run = client(workspace).get_run(run_id)
    told = OpenRun(run_id, run.data.tags["mlflow.parentRunId"], None)
    record = TrackedRun(server="", run_id="t", run_name="test", stage="base", makes_model=True, ref=ref, ended_ms=1)
    mlflow_backend(tracking.tracking_uri(workspace), Path(workspace.root)).finish(told, record)
    for each in (told.run_id, told.parent_id):
        assert len(client(workspace).get_run(each).outputs.model_outputs) == 1


def test_a_process_that_tracked_one_workspace_tracks_the_next_in_its_own_database(
    workspace: WorkspaceConfig, tmp_path: Path
):
    """MLflow itself leaves the address of the first in the environment, where it has priority."""
    run_stage(info(workspace, "m"), job(14), {}, Body())
    assert tracking.tracking_uri(WorkspaceConfig(root=str(tmp_path))) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"


def test_the_last_models_scores_are_in_a_column_that_all_runs_share(workspace: WorkspaceConfig):
    class Scores(Body):
        def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
            return (
                super()
                .__call__(workdir=workdir, telemetry=telemetry)
                .model_copy(update={"counts": {"heldout_avg_at_4": self.start / 10, "problems": 96}})
            )

    evaluate = EvaluateJob(seed=0, evaluate=EvaluateConfig(), verify=VerifyConfig(), benchmarks=())
    for tenths, model in ((9, "rl"), (2, "base")):  # whichever is told last
        job_of_model = evaluate.model_copy(update={"seed": tenths})
        of_model = info(workspace, "l", f"evaluate_{model}").model_copy(update={"position": tenths})
        run_stage(of_model, job_of_model, {}, Scores(start=tenths, stop=tenths))
    (parent,) = (r for r in mlflow_runs(workspace, "l") if "klear.stage" not in r.data.tags)
    assert {k: v for k, v in parent.data.metrics.items() if k.startswith("score/")} == {"score/heldout_avg_at_4": 0.9}
    view = client(workspace).get_experiment(parent.info.experiment_id).tags[VIEW_TAG]
    assert json.loads(json.loads(view)["state"])["columnOrder"] == ["metrics.`score/heldout_avg_at_4`"]


def test_a_stage_is_made_while_mlflow_is_away_and_says_what_mlflow_lacks(
    workspace: WorkspaceConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    ref = run_stage(info(workspace, "h"), job(8), {}, Body())
    manifest = read_manifest(ref.path)
    assert steps_of(ref.path) == [0, 1, 2, 3]
    assert manifest.mlflow_run_id is None
    assert "MLflow at 127.0.0.1:9 did not answer: a later run sends 4 metric values" in manifest.notes[0]
    tracking.end_pipeline(info(workspace, "h"), "FINISHED")
    (record, end) = Undelivered(Path(workspace.root) / "mlflow" / "undelivered").records("127.0.0.1:9")
    assert (record.stage, record.ref, end.stage) == ("base", ref, "")
    assert "secret" not in record.model_dump_json() + manifest.model_dump_json()


def test_tracking_trouble_while_a_stage_runs_loses_no_work(workspace: WorkspaceConfig):
    class DatabaseGoes(Body):
        def __call__(self, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
            client(workspace).delete_run(
                mlflow_runs(workspace, "i")[0].info.run_id
            )  # MLflow refuses records from here on
            return super().__call__(workdir=workdir, telemetry=telemetry)

    ref = run_stage(info(workspace, "i"), job(9), {}, DatabaseGoes())
    assert steps_of(ref.path) == [0, 1, 2, 3]
    assert "MLflow rejects further records" in read_manifest(ref.path).notes[0]


def test_the_console_is_told_of_start_progress_reuse_and_failure(workspace: WorkspaceConfig, told: list[str]):
    run_stage(info(workspace, "j"), job(10), {}, Body(stop=1))
    run_stage(info(workspace, "j"), job(10), {}, Body(stop=1))
    with pytest.raises(RuntimeError):
        run_stage(info(workspace, "j"), job(11), {}, Body(fails_at=0))
    assert told == [
        "start base 1",
        "base 1/1",
        "made base",
        "reused base",
        "start base 1",
        "failed base: broken (1 of 1)",
    ]


@pytest.fixture
def told() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(Console):
        def stage_started(self, stage, *, attempt):
            lines.append(f"start {stage} {attempt}")

        def stage_progress(self, stage, done, total, note):
            lines.append(f"{stage} {done}/{total}")

        def stage_done(self, stage, ref, *, was_reused, wall_s):
            lines.append(f"{'reused' if was_reused else 'made'} {stage}")

        def stage_failed(self, stage, error, attempt):
            lines.append(f"failed {stage}: {error} ({attempt.number} of {attempt.of})")

    with shown_on(Lines()):
        yield lines


def client(workspace: WorkspaceConfig):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking.tracking_uri(workspace))


def mlflow_runs(workspace: WorkspaceConfig, run_id: str):
    """The stages' runs of a pipeline run first, then its own."""
    c = client(workspace)
    experiment = c.get_experiment_by_name(tracking.EXPERIMENT)
    runs = c.search_runs([experiment.experiment_id], filter_string=f"tags.`klear.run` = '{run_id}'")
    return sorted(runs, key=lambda r: "klear.stage" not in r.data.tags)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_a_stage_has_freed_in_small_pieces_is_given_back(workspace: WorkspaceConfig) -> None:
    """The last piece of each thread lives, so that its heap cannot shrink by itself."""
    alive, used = [], []

    def fill() -> None:
        pieces = [bytearray(100_000) for _ in range(500)]
        alive.append(pieces[-1])

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:
        threads = [threading.Thread(target=fill) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used.append(psutil.Process().memory_info().rss)
        return StageSummary()

    run_stage(info(workspace, "memory"), job(99), {}, body)
    assert used[0] - psutil.Process().memory_info().rss > 100 << 20
    assert len(alive) == 8
