"""A retraining goes through the gate, says what was new, and does not run beside another one."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from manifests import manifest
from test_runs import put, record

from flows.retraining import gated, previous_run, summary, turn
from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.artifacts.run_history import RunStage
from klear_core.artifacts.store import LocalStore
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig, PromoteConfig, WorkspaceConfig
from klear_core.errors import ConfigError

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"
NOW = datetime.now(UTC)


def smoke(root: Path, *overrides: str) -> PipelineConfig:
    return load_profile(SMOKE, [f"workspace.root={root}", *overrides])


def test_every_retraining_has_a_gate_its_own_or_the_default(tmp_path: Path):
    assert gated(smoke(tmp_path)).promote == PromoteConfig()
    own = gated(smoke(tmp_path, "promote.margin=9"))
    assert own.promote is not None
    assert own.promote.margin == 9
    with pytest.raises(ConfigError, match=r"goes through the gate, and there is nothing to compare"):
        gated(PipelineConfig(workspace=WorkspaceConfig(root=str(tmp_path))))


@pytest.mark.parametrize("has_store", [False, True])
def test_of_two_retrainings_at_once_one_waits_and_says_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_store: bool
):
    store = f'workspace.store="{(tmp_path / "store").as_uri()}"'
    ours, theirs = (
        gated(smoke(tmp_path / name, *([store, "workspace.lease_s=4"] if has_store else [])))
        for name in (("a", "b") if has_store else ("a", "a"))  # nodes that share a store, or processes of one workspace
    )
    order: list[str] = []

    def second() -> None:
        with turn(theirs):
            order.append("second")

    with turn(ours):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(3.0)
        assert order == []
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "retraining-klear is running already: waiting for process" in caplog.text


def test_retrainings_of_other_registered_models_do_not_wait(tmp_path: Path):
    with (
        turn(gated(smoke(tmp_path, "promote.registered_model=math"))),
        turn(gated(smoke(tmp_path, "promote.registered_model=code"))),
    ):
        pass


def made(root: Path, fingerprint: str, *, data: str, rows: int, at: datetime) -> ArtifactRef:
    inputs = (InputRecord(kind="file", fingerprint=data, role="data/problems.jsonl"),)
    with LocalStore(root / "artifacts").create("curate", fingerprint) as slot:
        about = {"inputs": inputs, "counts": {"rows": rows, "problems": rows - 1}, "created_at": at}
        return slot.publish(manifest("curate", fingerprint, **about))


def test_the_summary_says_which_data_is_new_and_what_was_made(tmp_path: Path):
    before = record(1, stages=(RunStage(name="curate", kind="curate", fingerprint="f1", state="made"),))
    made(tmp_path, "f1", data="d1", rows=1024, at=NOW - timedelta(days=7))
    base = {"base": made(tmp_path, "f0", data="d0", rows=1, at=NOW - timedelta(days=9))}
    new = base | {"curate": made(tmp_path, "f2", data="d2", rows=1310, at=NOW)}
    workspace = WorkspaceConfig(root=str(tmp_path))
    assert summary(new, before, workspace, started_at=NOW - timedelta(hours=1)).splitlines() == [
        "- problems.jsonl has changed (curate: 1,024 -> 1,310 rows, 1,023 -> 1,309 problems)",
        "- made: curate; reused: base",
    ]
    assert summary(base, before, workspace, started_at=NOW).splitlines() == [
        "- no new data since the last run",
        "- made: nothing; reused: base",
    ]


def test_the_run_before_is_the_newest_of_the_profile_that_ended_well(tmp_path: Path):
    put(tmp_path, record(1), record(2, profile="laptop"), record(3, state="failed"), record(4))
    workspace = WorkspaceConfig(root=str(tmp_path))
    found = previous_run(workspace, "smoke", run_id=record(4).run_id)
    assert found is not None
    assert found.run_id == record(1).run_id
    assert previous_run(workspace, "desk", run_id="") is None
