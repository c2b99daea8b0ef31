"""`klear evaluate` of a model of the workspace takes what is known of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manifests import manifest
from rich.console import Console
from stored_evaluations import RIGHT, evaluation, said, sample

from flows.evaluate_model import EvaluateOptions, compared_with_training, evaluation_config, settings_of
from klear_core.artifacts.manifest import InputRecord, read_manifest
from klear_core.artifacts.records import write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.curate import CurateConfig
from klear_core.config.data import ProceduralSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.verify import VerifyConfig, judge_of
from klear_core.errors import ConfigError
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.pipeline.preflight.exposure import given_contamination
from klear_core.types import Difficulty, Domain, MathReference, Problem, problem_id_of

TRAINED = "mod 10: 3,+4,*7=?"


def trained_model(root: Path) -> Path:
    """A model with the problem that it was trained on, whose benchmarks were others."""
    store = LocalStore(root / "artifacts")
    problem = Problem(
        problem_id=problem_id_of(TRAINED, Domain.MATH),
        source="chain",
        domain=Domain.MATH,
        question=TRAINED,
        reference=MathReference(answers=("9",)),
        difficulty=Difficulty.EASY,
    )
    with store.create("benchmarks", "be") as slot:
        slot.publish(manifest("benchmarks", "be", result_config={"sources": {}}))
    with store.create("curate", "c0") as slot:
        write_shard(slot.workdir / "problems" / "00000-of-00001.parquet", [problem])
        inputs = (InputRecord(kind="benchmarks", fingerprint="be", role="benchmarks"),)
        config = {"curate": CurateConfig().model_dump(mode="json")}
        slot.publish(manifest("curate", "c0", inputs=inputs, config=config))
    with store.create("rl", "4d") as slot:
        (slot.workdir / "model").mkdir()
        window = {"model_type": "qwen3", "vocab_size": 8, "max_position_embeddings": 64, "hidden_size": 8}
        shape = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        (slot.workdir / "model/config.json").write_text(json.dumps(window | shape))
        inputs = (InputRecord(kind="curate", fingerprint="c0", role="problems"),)
        slot.publish(manifest("rl", "4d", inputs=inputs))
    return root / "artifacts/rl/4d"


def config(tmp_path: Path, artifact: Path, *questions: str, **options: object) -> PipelineConfig:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    fields = {"profile": None, "num_samples": None, "max_tokens": None, "engine": "auto", "overrides": ()} | options
    asked = EvaluateOptions(model="rl", benchmarks=[str(file)], root=tmp_path, **fields)  # type: ignore[arg-type]
    return evaluation_config(asked, {"kind": "folder", "path": str(artifact / "model")}, settings_of(artifact))


def test_a_benchmark_without_a_trained_question_counts_as_compared(tmp_path: Path) -> None:
    model = trained_model(tmp_path)
    compared = compared_with_training(config(tmp_path, model, "mod 10: 1,+4=?"), model, Console())
    assert compared.given.evaluate is not None
    assert compared.given.evaluate.decontaminated_against == ("own",)
    assert not [problem for problem in problems_with(compared) if "compared" in problem]


def test_a_benchmark_with_a_trained_question_is_scored_with_a_warning_that_names_it(tmp_path: Path, capsys) -> None:
    model = trained_model(tmp_path)
    compared = compared_with_training(config(tmp_path, model, "mod 10: 1,+4=?", TRAINED), model, Console(width=300))
    assert compared.given.evaluate is not None
    assert compared.given.evaluate.questions_seen == {"own": 1}
    (exposure,) = given_contamination(compared)
    assert exposure.warning.endswith("holds 1 question of own: scores may be of memory")
    assert (exposure.missed, exposure.unknown) == ((), ())
    assert f"1 of its 2 questions is there: {TRAINED!r}" in capsys.readouterr().out


def test_the_budget_of_a_model_that_nothing_else_is_known_of_is_its_window(tmp_path: Path) -> None:
    assert config(tmp_path, trained_model(tmp_path), "q").evaluate.sampling.max_new_tokens == 64


def test_a_model_brings_the_settings_of_its_last_evaluation(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    (record,) = [record for record in read_manifest(scored.path).inputs if record.role == "model"]
    taken = settings_of(tmp_path / "artifacts" / record.kind / record.fingerprint)
    assert taken is not None
    assert taken.origin == f"its evaluation {scored.fingerprint[:8]}"
    assert taken.sections["evaluate"]["sampling"]["max_new_tokens"] == 32_768


def test_a_benchmark_of_its_last_evaluation_goes_by_its_name(tmp_path: Path) -> None:
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)], seed=7)
    (record,) = [record for record in read_manifest(scored.path).inputs if record.role == "model"]
    model = tmp_path / "artifacts" / record.kind / record.fingerprint
    for names in (["toy"], []):
        asked = EvaluateOptions(
            model="rl",
            benchmarks=names,
            profile=None,
            num_samples=9,
            max_tokens=None,
            engine="auto",
            overrides=(),
            root=tmp_path,
        )
        again = evaluation_config(asked, {"kind": "folder", "path": str(model / "model")}, settings_of(model))
        (benchmark,) = again.benchmarks
        assert (benchmark.name, benchmark.num_samples, again.seed) == ("toy", 9, 7)
        assert benchmark.source == ProceduralSource(split="heldout", num_problems=1)


def test_a_model_is_judged_again_by_the_settings_of_its_last_evaluation(tmp_path: Path) -> None:
    """Stored are those of training, `tokens` and 16 tests, which are not the defaults of benchmarks."""
    scored = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    (record,) = [record for record in read_manifest(scored.path).inputs if record.role == "model"]
    model = tmp_path / "artifacts" / record.kind / record.fingerprint
    again = config(tmp_path, model, "q")
    judge = judge_of("evaluate", again.verify, again.judge)
    assert judge == VerifyConfig.model_validate(read_manifest(scored.path).config["verify"])
    assert (judge.code.compare, judge.code.max_tests) == ("tokens", 16)
    other = config(tmp_path, model, "q", overrides=["judge.evaluate.code.compare=exact", "verify.tags=none"])
    judge = judge_of("evaluate", other.verify, other.judge)
    assert (judge.code.compare, judge.code.max_tests, judge.tags) == ("exact", 16, "none")


def test_a_setting_of_verify_that_no_evaluation_has_is_refused_with_the_one_that_it_has(tmp_path: Path) -> None:
    model = trained_model(tmp_path)
    with pytest.raises(ConfigError, match=r"set judge\.evaluate\.code\.compare"):
        config(tmp_path, model, "q", overrides=["verify.code.compare=tokens"])
    assert config(tmp_path, model, "q", overrides=["verify.math.cpu_s=3"]).verify.math.cpu_s == 3


def test_the_prompt_of_all_benchmarks_can_be_named(tmp_path: Path) -> None:
    model = trained_model(tmp_path)
    asked = config(tmp_path, model, "q", prompt="boxed")
    assert [benchmark.prompt for benchmark in asked.benchmarks] == ["boxed"]
    with pytest.raises(ConfigError, match=r"prompt 'boxd' is neither one of plain, boxed"):
        config(tmp_path, model, "q", prompt="boxd")


def test_a_part_of_a_benchmark_has_a_name_of_its_own(tmp_path: Path) -> None:
    (part,) = config(tmp_path, trained_model(tmp_path), "q", "r", num_problems=1).benchmarks
    assert (part.name, part.num_problems) == ("own_part_1", 1)
