"""Single answers in MLflow, and the use of the machine: rollouts with their reward, what a gate found flipped."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.artifacts.records import write_shard
from klear_core.evaluate.compare.paired import FlippedAnswer
from klear_core.evaluate.compare.promotion import FLIPPED_FILE
from klear_core.rl.step_metrics import RewardParts, ShownRollout
from klear_core.scores import SHOWN_FILE
from klear_core.types import Difficulty, EvalSample, Outcome, Verdict
from tasks.answer_traces import answer_traces
from tasks.mlflow_backend import TrackedRun, mlflow_backend, mlflow_client


def rollout(step: int, parts: RewardParts | None = None) -> ShownRollout:
    return ShownRollout(
        step=step, problem_id=f"p{step}", question="1+1?", response="<think>2</think> 2", num_tokens=7,
        finish_reason="stop", outcome=Outcome.SCORED, score=1.0, reward=0.75,
        parts=parts or RewardParts(),
    )  # fmt: skip


def answer(text: str, *, score: float) -> EvalSample:
    return EvalSample(
        benchmark="heldout", problem_id="p", question="1+1?", difficulty=Difficulty.EASY, decoding="sampled",
        sample_idx=3, response=text, num_tokens=5, finish_reason="stop",
        verdict=Verdict(outcome=Outcome.SCORED, score=score),
    )  # fmt: skip


def test_a_rollout_has_its_verdict_and_all_parts_of_its_reward(tmp_path: Path) -> None:
    terms = {"answer": 1.0, "format": 0.0, "custom": -0.125, "overlong": -0.125, "length": 0.0}
    parts = RewardParts(is_positive=True, custom={"brief": -0.25, "failed": None}, terms=terms)
    write_shard(tmp_path / SHOWN_FILE, [rollout(3, parts)])
    [trace] = answer_traces(tmp_path)
    assert (trace.name, trace.question, trace.answers) == (
        "rollout, step 3", "1+1?", {"policy": "<think>2</think> 2"},
    )  # fmt: skip
    assert trace.found == {
        "verdict": "scored", "score": 1.0, "reward": 0.75, "right_and_well_formed": True, "reward/brief": -0.25,
        "reward_term/answer": 1.0, "reward_term/format": 0.0, "reward_term/custom": -0.125,
        "reward_term/overlong": -0.125, "reward_term/length": 0.0,
    }  # fmt: skip


def test_of_many_rollouts_some_of_all_steps_are_shown(tmp_path: Path) -> None:
    write_shard(tmp_path / SHOWN_FILE, [rollout(step) for step in range(120)])
    names = [trace.name for trace in answer_traces(tmp_path)]
    assert names == [f"rollout, step {step}" for step in range(0, 120, 3)]


def test_a_flipped_answer_stands_beside_the_one_before(tmp_path: Path) -> None:
    flips = [
        FlippedAnswer(before=answer("3", score=0.0), after=answer("2", score=1.0)),
        FlippedAnswer(before=answer("2", score=1.0), after=answer("4", score=0.0)),
    ]
    write_shard(tmp_path / FLIPPED_FILE, flips)
    fixed, broken = answer_traces(tmp_path)
    assert (fixed.name, fixed.answers) == ("fixed", {"before": "3", "after": "2"})
    assert fixed.found == {"before": "wrong (scored, 5 tokens)", "after": "right", "fixed": True}
    assert (broken.name, broken.found["fixed"]) == ("broken", False)
    assert broken.tags["klear.sample"] == "sampled 3"


def test_mlflow_has_each_answer_once_however_often_it_is_told(tracked: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    write_shard(artifact / SHOWN_FILE, [rollout(1), rollout(2)])
    uri = f"sqlite:///{tracked}/mlflow/mlflow.db"
    backend = mlflow_backend(uri, tracked)
    ref = ArtifactRef(
        kind="rl", fingerprint="f" * 20, uri=artifact.as_uri(), counts={}, created_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    record = TrackedRun(
        server="s", run_id="r", run_name="n", stage="rl", kind="rl", ref=ref, ended_ms=1_790_000_000_000
    )
    run = backend.open(record)
    for _ in range(2):
        backend.finish(run, record)
    client = mlflow_client(uri)
    experiment = client.get_run(run.run_id).info.experiment_id
    found = client.search_traces(locations=[experiment], run_id=run.run_id)
    assert [trace.info.tags["mlflow.traceName"] for trace in found] == ["rollout, step 2", "rollout, step 1"]
    span = found[0].data.spans[0]
    assert (span.inputs, span.outputs) == ({"question": "1+1?"}, {"policy": "<think>2</think> 2"})
    assert {a.name: a.feedback.value for a in found[0].info.assessments} == {
        "verdict": "scored", "score": 1.0, "reward": 0.75,
    }  # fmt: skip
    assert len(found[0].info.assessments) == 3


@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_use_of_the_machine_is_logged_while_a_run_is_open_if_mlflows_variable_asks(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(is_wanted).lower())
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    backend = mlflow_backend(f"sqlite:///{tracked}/mlflow/mlflow.db", tracked)
    run = backend.open(TrackedRun(server="s", run_id="r", run_name="n", stage="rl", kind="rl"))
    watching = [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    backend.end(run.run_id, "FINISHED", 1_790_000_000_000)
    assert len(watching) == is_wanted
    for thread in watching:
        thread.join(300)
        assert not thread.is_alive()
