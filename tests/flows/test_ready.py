"""Flows look at what they need before they begin, whoever starts them."""

from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from webhook import receiving

from flows.environment import StageSelection
from flows.pipeline import run_stages, tracked_run
from klear_core.config.curate import CurateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.pipeline import NotifyConfig, PipelineConfig, WorkspaceConfig
from klear_core.errors import ConfigError


@pytest.mark.parametrize("choice", [{"only": "curate"}, {"until": "sft"}, {"only": "curate", "rerun_from": "curate"}])
def test_a_flow_refuses_a_config_that_cannot_run_here_before_anything_is_made(tmp_path: Path, choice: dict[str, str]):
    config = PipelineConfig(
        workspace=WorkspaceConfig(root=str(tmp_path / "ws")),
        benchmarks=(BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout")),),
        curate=CurateConfig(sources=(FileSource(path="no/such.jsonl"),)),
    )
    with pytest.raises(ConfigError, match=r"cannot run here yet:\s+curate\.sources: no/such\.jsonl: no such file"):
        tracked_run(config, run_stages, StageSelection(**choice))
    assert not (tmp_path / "ws").exists()


def test_somebody_is_told_of_a_run_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A schedule starts it at night. It has no record, so no log is named."""
    config = PipelineConfig(
        workspace=WorkspaceConfig(root=str(tmp_path / "ws"), notify=NotifyConfig(webhook_env="OPS_HOOK")),
        benchmarks=(BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout")),),
        curate=CurateConfig(sources=(FileSource(path="no/such.jsonl"),)),
    )
    run = FlowRun(flow_id=uuid4(), name="retrain-smoke")
    with receiving("hook") as receiver, FlowRunContext.model_construct(flow_run=run):
        monkeypatch.setenv("OPS_HOOK", receiver.url)
        with pytest.raises(ConfigError, match="cannot run here yet"):
            tracked_run(config, run_stages, StageSelection(only="curate"))
    (got,) = receiver.got
    assert (got["event"], got["run"], got["name"]) == ("waiting", str(run.id), "retrain-smoke")
    assert "curate.sources: no/such.jsonl: no such file" in got["line"]
    assert got["text"] == f"retrain-smoke waits for a person\n{got['line']}"
