"""What a failed run leaves for a person to read, and that the error is the same as without it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest
from manifests import manifest

from flows.pipeline import PipelineRun, reporting_failures
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.errors import TrainingError
from klear_core.metrics import METRICS_FILE, MetricsFile
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of
from tasks.stages import failed_report
from tasks.tracking import RunInfo

CHOSEN = ("base", "distill", "sft", "rl", "report")


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return PipelineConfig(name="laptop", workspace=WorkspaceConfig(root=str(tmp_path / "ws")))


@pytest.fixture
def info(config: PipelineConfig) -> RunInfo:
    return RunInfo(
        workspace=config.workspace, run_id="5f2c", run_name="laptop-seed0-gppo", stage="", started_at=datetime.now(UTC)
    )


def run_of(config: PipelineConfig, info: RunInfo, artifacts: dict[str, ArtifactRef]) -> PipelineRun:
    return PipelineRun(config=config, info=info, stages=stages_of(config), chosen=CHOSEN, artifacts=artifacts)


def made(config: PipelineConfig, stage: str) -> ArtifactRef:
    """An artifact of a stage, without anything in it."""
    with open_store(config.workspace).create(stage, f"{stage}-0f") as slot:
        return slot.publish(manifest(stage, f"{stage}-0f", counts={"parameters": 168_480}))


def test_a_failed_run_leaves_a_report_of_what_is_done_what_failed_and_what_was_not_reached(
    config: PipelineConfig, info: RunInfo, caplog: pytest.LogCaptureFixture
) -> None:
    refs = {name: made(config, name) for name in ("base", "distill")}
    with pytest.raises(TrainingError), reporting_failures(run_of(config, info, refs)):
        raise TrainingError("6 non-finite steps in a row; \x1b[31mlast\x1b[0m: step 41")
    page = failed_report(info)
    assert page.is_relative_to(Path(config.workspace.root))
    html = page.read_text()
    assert "This run failed in sft, with 2 of 4 stages done." in html
    assert "TrainingError: 6 non-finite steps in a row; \\x1b[31mlast" in html
    assert "168,480" in html
    assert "No result of rl." in html  # and not of the report, which needs no line about itself
    assert str(page) in caplog.text


def test_the_failed_stages_curves_are_shown_as_far_as_it_came(config: PipelineConfig, info: RunInfo) -> None:
    refs = {name: made(config, name) for name in ("base", "distill", "sft")}
    own = fingerprints_of(stages_of(config), config.workspace)["rl"]
    with open_store(config.workspace).create(own.kind, own.fingerprint) as slot:
        for step in range(3):
            MetricsFile(slot.workdir / METRICS_FILE).append({"rl/grad/norm": 10.0**step}, step=step)
    with pytest.raises(TrainingError), reporting_failures(run_of(config, info, refs)):
        raise TrainingError("6 non-finite steps in a row")
    html = failed_report(info).read_text()
    assert "RL: learning from judged answers (failed)" in html
    assert "Gradient norm" in html


def test_the_error_is_the_one_that_was_raised_and_no_other_hangs_on_it(config: PipelineConfig, info: RunInfo) -> None:
    failure = TrainingError("stalled")
    with pytest.raises(TrainingError) as raised, reporting_failures(run_of(config, info, {})):
        raise failure
    assert raised.value is failure
    assert (failure.__context__, failure.__cause__) == (None, None)


def test_a_report_that_cannot_be_written_hides_no_error(
    config: PipelineConfig, info: RunInfo, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "ws").write_text("where a folder should be")
    with pytest.raises(TrainingError, match="stalled"), reporting_failures(run_of(config, info, {})):
        raise TrainingError("stalled")
    assert "could not write a report on this failed run" in caplog.text


def test_a_report_that_fails_itself_is_the_stage_that_failed(config: PipelineConfig, info: RunInfo) -> None:
    refs = {name: made(config, name) for name in CHOSEN[:-1]}
    with pytest.raises(OSError, match="disk"), reporting_failures(run_of(config, info, refs)):
        raise OSError("disk full")
    assert "This run failed in report, with 4 of 5 stages done." in failed_report(info).read_text()


def test_an_interrupted_run_has_not_failed(
    config: PipelineConfig, info: RunInfo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(SystemError), reporting_failures(run_of(config, info, {})):
        raise SystemError("in native code") from KeyboardInterrupt()
    assert not failed_report(info).exists()
    assert not caplog.records


def test_a_retry_that_ends_well_takes_the_failures_report_away_and_no_artifact_came_of_it(
    config: PipelineConfig, info: RunInfo
) -> None:
    refs = {"base": made(config, "base")}
    with pytest.raises(TrainingError), reporting_failures(run_of(config, info, refs)):
        raise TrainingError("stalled")
    assert failed_report(info).exists()
    with reporting_failures(run_of(config, info, refs)):
        pass
    assert not failed_report(info).exists()
    assert [folder.parent.name for folder in open_store(config.workspace).folders()] == ["base"]
