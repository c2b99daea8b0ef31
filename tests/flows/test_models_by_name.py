"""Every command that takes a model or an artifact takes it in every form that a command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from stored_evaluations import RIGHT, evaluation, given_model, made_model, published_report, said, sample
from test_runs import put, record

from flows.compare import _find_report
from flows.show import find_artifact, find_model
from klear_core.artifacts.manifest import read_manifest
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base


@pytest.fixture
def made(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    files.mkdir()
    prepare_base(TinyModelConfig(hidden_size=16, num_layers=1), seed=0, workdir=files, telemetry=NullTelemetry())
    return made_model(tmp_path, files=files).path


@pytest.mark.parametrize(
    "form", ["rl", "rl00", "rl/rl00", "rl rl00", "{uri}", "{folder}", "{folder}/model", "{folder}/model/config.json"]
)
def test_a_model_is_found_by_every_form_that_is_printed(tmp_path: Path, made: Path, form: str) -> None:
    which = form.format(folder=made, uri=made.as_uri())
    assert find_artifact(which, tmp_path) == made
    found = find_model(which, tmp_path, Console())
    assert (found.artifact, found.folder) == (made, made / "model")


def test_a_given_model_is_found_by_its_folder_and_its_origin(tmp_path: Path, made: Path) -> None:
    elsewhere = (made / "model").rename(tmp_path / "elsewhere")
    given = given_model(tmp_path, elsewhere, work=tmp_path / "work").path
    for which in (str(elsewhere), str(given), str(read_manifest(given).given.origin)):
        assert find_artifact(which, tmp_path) == given
        assert find_model(which, tmp_path, Console()).folder == elsewhere


def test_a_folder_of_no_artifact_is_a_model_and_no_artifact(tmp_path: Path, made: Path) -> None:
    folder = (made / "model").rename(tmp_path / "mine")
    found = find_model(str(folder), tmp_path, Console())
    assert (found.folder, found.artifact) == (folder, None)
    with pytest.raises(ArtifactError, match="no artifact"):
        find_artifact(str(folder), tmp_path)


def test_a_misspelt_name_is_answered_by_the_one_that_is_close(tmp_path: Path, made: Path) -> None:
    assert made.is_dir()
    with pytest.raises(ArtifactError, match=r"no artifact 'rll' under .*; did you mean rl\?"):
        find_artifact("rll", tmp_path)


def test_a_run_is_compared_by_the_model_that_it_printed(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    (record,) = [record for record in read_manifest(scored.path).inputs if record.role == "model"]
    report = published_report(tmp_path, {"evaluate_rl": scored}, {"seed": 0})
    assert _find_report(f"{record.kind}/{record.fingerprint}", tmp_path) == report
    assert _find_report(str(report / "manifest.json"), tmp_path) == report


def test_a_run_is_compared_by_its_id_or_name_as_klear_runs_prints_them(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    report = published_report(tmp_path, {"evaluate_rl": scored}, {"seed": 0})
    put(tmp_path, record(7, report=str(report / "report.html")))
    assert _find_report("00000007", tmp_path) == report
    assert _find_report("smoke-seed7", tmp_path) == report


def test_the_start_of_the_ids_of_several_runs_names_none_of_them(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    report = published_report(tmp_path, {"evaluate_rl": scored}, {"seed": 0})
    for number in (7, 8):
        put(tmp_path, record(number, report=str(report / "report.html")))
    with pytest.raises(ConfigError, match=r"'0000000' begins the ids of 2 runs; give more of it"):
        _find_report("0000000", tmp_path)


def test_a_later_run_of_the_name_that_failed_does_not_hide_the_finished_one(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    report = published_report(tmp_path, {"evaluate_rl": scored}, {"seed": 0})
    put(tmp_path, record(7, report=str(report / "report.html")))
    page = tmp_path / "failed" / "00000008" / "report.html"
    put(tmp_path, record(8, name="smoke-seed7", state="failed", report=str(page)))
    assert _find_report("smoke-seed7", tmp_path) == report
    with pytest.raises(ArtifactError, match=r"00000008: run 00000008 \(failed\) has no report of its end"):
        _find_report("00000008", tmp_path)
