"""Flows look at what they need before they begin, whoever starts them."""

from pathlib import Path

import pytest

from flows.environment import StageSelection
from flows.pipeline import run_stages, tracked_run
from klear_core.config.curate import CurateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
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
