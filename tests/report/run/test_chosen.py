"""Scores that a model was chosen by are marked wherever they are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import laptop_run
from rich.console import Console
from stored_evaluations import RIGHT, evaluation, given_model, made_model, published_report, said, sample

from klear_core.artifacts.manifest import read_manifest, write_manifest
from klear_core.config.data_jobs import GivenModelJob
from klear_core.config.train import GivenFolder, TinyModelConfig
from klear_core.errors import ArtifactError
from klear_core.metrics import NullTelemetry
from klear_core.report.run.build import build_report
from klear_core.report.run.facts import ReportInputs, read_facts
from klear_core.report.run.final_table import score_table
from klear_core.report.run.warnings import Choice, chosen_on, write_choice
from klear_core.report.several.compared_runs import read_run
from klear_core.report.several.comparison import COMPARISON_PAGE, compare_runs
from klear_core.train.base_model import prepare_base

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)

FIRST = "first among 12 models that were compared by this score (klear ablate grid); a score that a model is chosen by"


def folder_of(run: ReportInputs, name: str) -> Path:
    (folder,) = [stage.folder for stage in run.stages if stage.stage.name == name]
    assert folder is not None
    return folder


def choose(folder: Path, benchmark: str) -> None:
    """Record that a grid put this model first."""
    model = f"{folder.parent.name}/{folder.name}"
    choice = Choice(by="klear ablate grid", among=12, benchmarks=(benchmark,), models=(model,))
    write_choice(folder.parents[2], "grid", choice)


def shown(run: ReportInputs) -> str:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(score_table(read_facts(run)))
    return capture.get()


def test_the_mark_is_in_report_and_terminal_and_goes_on_to_models_trained_from_the_chosen_one(tmp_path: Path) -> None:
    run = laptop_run(tmp_path / "workspace" / "artifacts")
    assert "chosen on" not in shown(run)
    choose(folder_of(run, "sft"), "heldout")
    assert chosen_on(folder_of(run, "base")) == {}
    assert FIRST in chosen_on(folder_of(run, "sft"))["heldout"]
    assert chosen_on(folder_of(run, "rl")).keys() == {"heldout"}
    lines = [line for line in shown(run).splitlines() if "chosen on this benchmark" in line]
    assert [line.partition(":")[0] for line in lines] == ["SFT", "RL"]
    build_report(run, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count(f"Chosen on this benchmark: {FIRST}") == 2


def test_another_benchmarks_score_is_not_marked(tmp_path: Path) -> None:
    run = laptop_run(tmp_path / "workspace" / "artifacts")
    choose(folder_of(run, "rl"), "another")
    assert "chosen on" not in shown(run)


def test_what_a_user_declares_of_a_given_model_is_a_mark(tmp_path: Path) -> None:
    run = laptop_run(tmp_path / "workspace" / "artifacts")
    given = GivenModelJob.of(GivenFolder(path="/models/a", chosen_on=("heldout",)))
    stages = []
    for stage in run.stages:
        is_sft = stage.stage.name == "sft"
        stages.append(replace(stage, stage=replace(stage.stage, job=given)) if is_sft else stage)
    assert "RL: chosen on this benchmark: declared as chosen by this score" in shown(replace(run, stages=tuple(stages)))
    # elsewhere, such as in a comparison, the manifest tells
    folder = folder_of(run, "sft")
    manifest = read_manifest(folder).model_copy(update={"kind": given.kind, "config": given.model_dump(mode="json")})
    write_manifest(folder, manifest)
    assert "declared" in chosen_on(folder_of(run, "rl"))["heldout"]


def test_a_comparison_marks_the_score_of_the_run_that_was_chosen(tmp_path: Path) -> None:
    reports = []
    for seed in (0, 1):
        ref = evaluation(tmp_path / f"w{seed}", [sample(i, 0, said(i), RIGHT) for i in range(9)], seed=seed)
        reports.append(published_report(tmp_path / f"w{seed}", {"evaluate_rl": ref}, {"name": "toy", "seed": seed}))
    choose(tmp_path / "w1" / "artifacts" / "rl" / "rl1".ljust(20, "0"), "toy")
    comparison = compare_runs([read_run(report) for report in reports], tmp_path / "out")
    assert [bool(cell and cell.chosen) for cell in comparison.rows[0].cells] == [False, True]
    assert FIRST in (tmp_path / "out" / COMPARISON_PAGE).read_text()


def test_the_mark_stays_when_the_chosen_model_is_scored_by_its_folder(tmp_path: Path) -> None:
    """As `klear evaluate rl` does, in the same workspace or in another."""
    made = made_model(tmp_path / "w0", files=_tiny(tmp_path / "files"))
    choose(made.path, "toy")
    for name in ("w0", "w1"):
        given = given_model(tmp_path / name, made.path / "model", work=tmp_path / f"pointer_{name}")
        assert FIRST in chosen_on(given.path)["toy"]


def _tiny(folder: Path) -> Path:
    folder.mkdir()
    prepare_base(TINY, seed=0, workdir=folder, telemetry=NullTelemetry())
    return folder


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    run = laptop_run(tmp_path / "workspace" / "artifacts")
    (tmp_path / "workspace" / "choices").mkdir()
    (tmp_path / "workspace" / "choices" / "grid.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"grid\.json: not a record of a choice"):
        chosen_on(folder_of(run, "rl"))
