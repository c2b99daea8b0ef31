"""The public names of klear_core have these signatures, load nothing early, and are all that docs/recipes needs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import klear_core
from klear_core.config.settings import Settings
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.scores import read_reports
from klear_core.train.base_model import prepare_base

RECIPES = sorted((Path(__file__).parents[1] / "docs" / "recipes").glob("*.py"))
SIGNATURES = {
    "curate": "cfg * workdir benchmarks=None verify=None open_judges= seed=0 telemetry=",
    "evaluate_model": "cfg verify suite * model workdir seed=0 telemetry= compute=",
    "judge_file": "path cfg * out=None bare_code=False progress=None",
    "load_benchmark": "benchmark * seed",
    "read_reports": "folder",
    "take_traces": "sources decontaminate= * workdir keep_truncated=False floors= benchmarks=None telemetry=",
    "train_rl": "setup verify * problems telemetry= workers=None open_inline_eval= open_teacher=",
    "train_sft": "cfg * model traces workdir seed=0 telemetry= run_ranks= open_scorer=",
}
RECORDS = {
    "Benchmark": "name problems num_samples clusters= prompt= earlier=",
    "RlSetup": "cfg model workdir seed=0 remote=None",
}
SETTINGS = {
    "BenchmarkConfig": {"name", "source", "num_samples"},
    "CurateConfig": {"sources", "dedup", "decontaminate", "select"},
    "EvaluateConfig": {"engine", "sampling", "greedy", "templates", "confidence"},
    "FileSource": {"path", "row_schema", "fields"},
    "RlConfig": {"num_steps", "loss", "advantage", "reward", "rollout", "optim", "lora"},
    "SftConfig": {"num_epochs", "rows_per_step", "max_tokens", "optim", "lora"},
    "VerifyConfig": {"tags", "window", "judges"},
}


def signature(function: Callable[..., object]) -> str:
    """The parameters in order, `*` before the first that is given by name alone; simple defaults after a `=`."""
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else "="
        simple = default and isinstance(parameter.default, int | None)
        shown.append(f"{parameter.name}{default}{parameter.default if simple else ''}")
    return " ".join(shown)


def test_the_public_names_are_these():
    assert sorted(klear_core.__all__) == sorted([*SIGNATURES, *RECORDS, *SETTINGS])


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_function_takes_these_arguments(name: str):
    assert signature(getattr(klear_core, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_public_record_has_these_fields(name: str):
    record = getattr(klear_core, name)
    assert dataclasses.is_dataclass(record)
    assert signature(record).removeprefix("* ") == RECORDS[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_public_settings_have_these_fields(name: str):
    settings = getattr(klear_core, name)
    assert issubclass(settings, Settings)
    assert SETTINGS[name] <= set(settings.model_fields)


def test_importing_klear_core_loads_none_of_its_modules():
    code = "import sys, klear_core; print([m for m in sys.modules if m.startswith('klear_core.')])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'gppo'"):
        _ = klear_core.gppo


# ---- recipes ----


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, problems, traces of them, an exam, and the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    tiny = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=24)
    prepare_base(tiny, seed=0, workdir=folder, telemetry=NullTelemetry())
    sums = [(f"What is {a} + {3 * a + 1}?", str(4 * a + 1)) for a in range(1, 13)]
    problems = [{"question": q, "reference": {"kind": "math", "answers": [a]}} for q, a in sums]
    write(folder / "problems.jsonl", problems)
    write(folder / "exam.jsonl", problems[:3])
    write(folder / "traces.jsonl", [{"prompt": q, "response": f"<think>\n{a}\n</think>\n\n{a}"} for q, a in sums])
    answers = [
        {"id": i, "response": f"\\boxed{{{i}}}", "reference": {"kind": "math", "answers": ["1"]}} for i in range(3)
    ]
    write(folder / "answers.jsonl", answers)
    for recipe in RECIPES:
        (folder / recipe.name).write_text(recipe.read_text())
    return folder


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(recipe: str, *args: str) -> str:
        monkeypatch.chdir(given)
        monkeypatch.setattr(sys, "argv", [recipe, *args])
        runpy.run_path(recipe, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_answers_are_judged(run: Callable[..., str], given: Path):
    assert "1 of 3 right" in run("judge.py", "answers.jsonl", "verdicts.jsonl")
    assert (given / "verdicts.jsonl").read_text().count('"outcome": "scored"') == 3


def test_files_are_curated(run: Callable[..., str], given: Path):
    assert "decontaminate: 12 -> 9 problems" in run("curate.py", "curated", "exam.jsonl", "problems.jsonl")
    assert list((given / "curated" / "problems").glob("*.parquet"))


def test_a_model_is_fine_tuned_on_traces(run: Callable[..., str], given: Path):
    assert "12 traces of 12 problems" in run("sft.py", "model", "traces.jsonl", "tuned")
    assert (given / "tuned" / "sft" / "model" / "model.safetensors").is_file()


def test_a_model_is_trained_with_a_reward_of_ones_own(run: Callable[..., str], given: Path):
    assert "'rollouts': 64" in run("gppo.py", "model", "problems.jsonl", "trained")
    before, after = (read_weights(given / f) for f in ("model", "trained/rl/model"))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


def read_weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_model_is_evaluated_with_intervals(run: Callable[..., str], given: Path):
    (shown, *_) = run("evaluate.py", "model", "problems.jsonl", "scored").splitlines()
    (report,) = read_reports(given / "scored")
    assert shown == f"avg@4 {100 * report.avg.value:.1f} % on 12 problems"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_uses_public_names_alone(recipe: Path):
    text = recipe.read_text()
    assert len(text.splitlines()) <= 50
    nodes = [*ast.walk(ast.parse(text))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules == {"sys", "pathlib", "klear_core"}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    used = {node.attr for node in attributes if node.value.id == "klear"}  # type: ignore[attr-defined]
    assert used
    assert used <= set(klear_core.__all__)
