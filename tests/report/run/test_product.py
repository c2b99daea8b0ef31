"""The model that a run ends with is named, and what is shown to ask it works."""

from __future__ import annotations

import html as entities
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import laptop_run

from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.report.run.build import build_report
from klear_core.report.run.facts import Facts, ReportInputs, read_facts
from klear_core.report.run.shown_answers import pick_examples, product_of
from klear_core.train.base_model import prepare_base

TINY = TinyModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    """A run in the workspace `runs` of a folder."""
    return laptop_run(tmp_path_factory.mktemp("here") / "runs" / "artifacts")


@pytest.fixture(scope="module")
def facts(run: ReportInputs) -> Facts:
    return read_facts(run)


def without(facts: Facts, *names: str) -> Facts:
    return replace(facts, stages=tuple(s for s in facts.stages if s.name not in names))


def test_the_product_is_the_last_model_that_was_trained(facts: Facts) -> None:
    assert [made.stage.name for made in (product_of(facts), product_of(without(facts, "rl"))) if made] == ["rl", "sft"]
    assert product_of(without(facts, "rl", "sft")) is None


def test_it_is_shown_a_problem_that_the_last_step_fixed(facts: Facts) -> None:
    product, shown = product_of(facts), pick_examples(facts)
    assert product is not None
    assert shown is not None
    fixed, *_ = shown.groups
    assert product.question == min((example.question for example in fixed.examples), key=len)
    assert product.command("rl") == f"klear chat rl '{product.question}'"


def test_a_workspace_elsewhere_is_named_as_a_shell_takes_it(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    workspace = facts.config.workspace.model_copy(update={"root": "~/my runs"})
    product = product_of(replace(facts, config=facts.config.model_copy(update={"workspace": workspace})))
    assert product is not None
    assert product.command("rl").endswith(" --root '/home/ada/my runs'")
    assert str(product.folder).startswith("/home/ada/my runs/")


@pytest.mark.parametrize("question", ["x" * 61, "two\nlines"])
def test_a_question_that_fits_on_no_command_line_is_left_to_the_reader(facts: Facts, question: str) -> None:
    models = tuple(replace(m, samples=tuple(replace(s, question=question) for s in m.samples)) for m in facts.models)
    product = product_of(replace(facts, models=models))
    assert product is not None
    assert product.command("rl") == "klear chat rl 'your question'"


def test_the_page_says_where_the_model_is_and_its_lines_of_transformers_run(
    run: ReportInputs, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    where, command, lines = (
        entities.unescape(block) for block in re.findall(r"<h4>.*?</h4><pre>(.*?)</pre>", page, re.DOTALL)
    )
    product = product_of(facts)
    assert product is not None
    (folder,) = (s.folder for s in facts.stages if s.name == "rl")
    here = folder.parents[3]
    assert here / where == folder / "model"
    assert command == f"klear chat {folder.name[:8]} '{product.question}'"

    prepare_base(TINY, seed=0, workdir=folder, telemetry=NullTelemetry())
    monkeypatch.chdir(here)
    exec(lines, {})
    assert product.question in capsys.readouterr().out
