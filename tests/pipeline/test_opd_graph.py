"""On-policy distillation is three stages between SFT and RL; its teacher is known, and warned of, before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import AutoConfig

from klear_core.config.load import load_profile
from klear_core.config.opd import OpdConfig
from klear_core.config.opd_jobs import OpdScoresJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import config_digest
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.model_checks import model_problems, token_problems
from klear_core.report.run.warnings import teacher_notes
from klear_core.train.base_model import prepare_base

CONFIGS = Path(__file__).parents[2] / "configs"
GIVEN = {"kind": "given", "model": {"repo": "Qwen/Teacher-30B", "revision": "0" * 40}}


LIVE = {"rl_teacher": {"source": GIVEN}, "rl": {"distill": {}}}
ENDPOINT = {"base_url": "http://localhost/v1", "model": "teacher-30b"}
SERVED = {"source": GIVEN, "runtime": {"num_engines": 0, "endpoints": [ENDPOINT]}}


def config(opd: dict[str, object] | None, **changes: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"opd": opd, **changes})


def inputs_of(config: PipelineConfig) -> dict[str, dict[str, str]]:
    return {stage.name: dict(stage.inputs) for stage in stages_of(config)}


def test_distillation_stands_between_sft_and_rl() -> None:
    graph = inputs_of(config({"teacher": {"source": GIVEN}}))
    assert graph["opd_teacher"] == {}
    assert graph["opd_rollouts"] == {"model": "sft", "problems": "curate"}
    assert graph["opd_scores"] == {"rollouts": "opd_rollouts", "student": "sft", "teacher": "opd_teacher"}
    assert graph["opd"] == {"model": "sft", "scores": "opd_scores"}
    assert graph["rl"]["model"] == "opd"
    assert [name for name in graph if name.startswith("evaluate")] == [
        "evaluate_base",
        "evaluate_sft",
        "evaluate_opd",
        "evaluate_rl",
    ]
    assert "opd" not in inputs_of(PipelineConfig())


def test_a_teacher_of_rl_is_an_input_of_the_stages_that_learn_from_it() -> None:
    graph = inputs_of(config(None, **LIVE, rl_code={}))
    assert graph["rl_teacher"] == {}
    assert graph["rl"] == {"model": "sft", "problems": "curate", "teacher": "rl_teacher"}
    assert graph["rl_code"] == {"model": "rl", "problems": "curate"}
    trained = inputs_of(config(None, rl_teacher={}, rl={"distill": {}}))
    assert trained["rl_teacher"] == {"model": "rl_teacher_base", "traces": "distill"}
    assert "teacher" not in inputs_of(PipelineConfig())["rl"]


def test_the_place_of_rls_teacher_changes_no_settings_and_what_it_scores_does() -> None:
    def digest(**teacher: object) -> str:
        made = config(None, **LIVE | {"rl_teacher": {"source": GIVEN, **teacher}})
        (job,) = (stage.job for stage in stages_of(made) if stage.name == "rl")
        return config_digest(job)

    assert digest() == digest(source={"kind": "given", "model": {"path": "elsewhere"}}) == digest(**SERVED)
    assert digest() != digest(top_k=0)


def test_a_teacher_that_is_trained_here_learns_the_same_traces() -> None:
    graph = inputs_of(config({"then_rl": False}))
    assert graph["opd_teacher"] == {"model": "opd_teacher_base", "traces": "distill"}
    assert "rl" not in graph
    assert [name for name in graph if name.startswith("evaluate")] == ["evaluate_base", "evaluate_sft", "evaluate_opd"]
    assert list(graph)[-1] == "report"


def test_answers_to_code_problems_can_have_a_teacher_of_their_own() -> None:
    other = {"kind": "given", "model": {"repo": "Qwen/Coder-30B", "revision": "1" * 40}}
    two = config({"teacher": {"source": GIVEN}, "code_teacher": {"source": other}})
    graph = inputs_of(two)
    scores = {"rollouts": "opd_rollouts", "student": "sft", "problems": "curate"}
    assert graph["opd_scores"] == scores | {"teacher": "opd_teacher"}
    assert graph["opd_code_scores"] == scores | {"teacher": "opd_code_teacher"}
    assert graph["opd"] == {"model": "sft", "scores": "opd_scores", "code_scores": "opd_code_scores"}
    domains = {stage.name: stage.job.domain for stage in stages_of(two) if isinstance(stage.job, OpdScoresJob)}
    assert domains == {"opd_scores": "math", "opd_code_scores": "code"}
    assert [note.split("@")[0] for note in teacher_notes(two)] == [
        "opd.teacher is Qwen/Teacher-30B",
        "opd.code_teacher is Qwen/Coder-30B",
    ]
    trained = inputs_of(config({"code_teacher": {}}))
    assert trained["opd_code_teacher"] == {"model": "opd_code_teacher_base", "traces": "distill"}


def test_a_config_without_distillation_is_as_before() -> None:
    assert "opd" not in PipelineConfig().model_dump()
    assert config_digest(PipelineConfig()) == config_digest(PipelineConfig.model_validate({"opd": None}))


def test_rollouts_depend_on_no_teacher_and_scores_on_no_training() -> None:
    def digests(opd: dict[str, object]) -> dict[str, str]:
        return {stage.name: config_digest(stage.job) for stage in stages_of(config(opd))}

    first = digests({"teacher": {"source": GIVEN}})
    other_teacher = {"kind": "given", "model": {"path": "elsewhere"}}
    # The teacher itself is an input, so its place changes no settings.
    assert digests({"teacher": {"source": other_teacher}})["opd_scores"] == first["opd_scores"]
    longer = digests({"teacher": {"source": GIVEN}, "train": {"num_steps": 7}})
    assert {name for name in first if longer[name] != first[name]} == {"opd", "report"}


@pytest.mark.parametrize(
    ("opd", "changes", "message"),
    [
        ({"then_rl": False}, {"rl_code": {}}, "leave rl_code out"),
        ({"rollouts": {"sampling": {"temperature": 0.6}}, "teacher": {"engine": {"kind": "vllm"}}}, {}, "set it to 1"),
        ({"rollouts": {"sampling": {"temperature": 0}}}, {}, "greedy"),
        (
            {"rollouts": {"sampling": {"top_p": 0.9}}, "teacher": {"top_k": 0}},
            {},
            "set opd.train.old_logps to 'learner'",
        ),
        ({"code_teacher": {"top_k": 5}}, {}, "opd.code_teacher.top_k = 5 and opd.teacher.top_k = 20"),
        (None, {"rl": {"distill": {}}}, "rl.distill is set, but no teacher"),
        (None, {"rl_code": {"distill": {}}}, "rl_code.distill is set, but no teacher"),
        (None, {"rl_teacher": {}}, "no RL stage learns from it"),
        (None, {"rl": {"distill": {}}, "rl_teacher": {"engine": {"kind": "vllm"}}}, "serve the model with vLLM"),
        (
            None,
            {"rl": {"distill": {}}, "rl_teacher": {"engine": {"kind": "torch", "runtime": {"device": "cuda"}}}},
            "serve the model",
        ),
        (None, {"rl": {"distill": {}}, "rl_teacher": {"runtime": {"num_engines": 2}}}, "at most one engine"),
        (
            None,
            {"rl": {"distill": {}, "rollout": {"sampling": {"temperature": 0.6}}}, "rl_teacher": SERVED},
            "set it to 1",
        ),
        (None, {"rl": {"distill": {}, "loss": {"kind": "gspo"}}, "rl_teacher": {}}, "set rl_teacher.top_k = 0"),
        (None, {"rl": {"distill": {}, "max_negative_kl": 0.5}, "rl_teacher": {}}, "set rl_teacher.top_k = 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    opd: dict[str, object] | None, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(opd, **changes)


@pytest.mark.usefixtures("no_hub")
def test_tokens_that_the_hub_cannot_show_now_are_compared_before_the_teacher_is_loaded(tmp_path: Path) -> None:
    runtime = {"cache_dir": str(tmp_path / "cache")}
    away = {"kind": "given", "model": {"repo": "Qwen/Teacher-30B", "revision": "0" * 40, "runtime": runtime}}
    assert list(token_problems(PendingWork.of(config({"teacher": {"source": away}}), None, ()))) == []


def http(model: str) -> dict[str, object]:
    return {"teacher": {"kind": "http", "base_url": "http://localhost/v1", "model": model}}


@pytest.mark.parametrize(
    ("changes", "made_by"),
    [
        ({}, "the procedural teacher, a program"),
        ({"distill": http("other")}, "other"),
        ({"distill": {"teacher": {"kind": "local"}}}, "the base model"),
        ({"given": {"sft": {"path": "m"}}}, "whoever made the traces of the given SFT model"),
        ({"given": {"distill": "t.jsonl"}}, "whoever made the given traces"),
        ({"distill": http("teacher-30b")}, ""),
        ({"distill": {"teacher": {"kind": "local", "model": GIVEN["model"]}}}, ""),
    ],
)
def test_a_teacher_other_than_that_of_the_traces_is_warned_of(changes: dict[str, object], made_by: str) -> None:
    notes = list(teacher_notes(config({"teacher": {"source": GIVEN}}, **LIVE, **changes)))
    assert [note.partition(" is ")[0] for note in notes] == (["opd.teacher", "rl_teacher"] if made_by else [])
    assert all(f"the SFT traces are by {made_by}" in note for note in notes)


def test_without_distillation_or_with_a_teacher_trained_on_the_same_traces_nothing_is_warned_of() -> None:
    assert list(teacher_notes(PipelineConfig())) == []
    assert list(teacher_notes(config({}))) == []
    later = config({"teacher": {"source": GIVEN}}, **LIVE, given={"rl": {"path": "m"}})
    assert list(teacher_notes(later)) == []  # its stages are not in the run
    (note,) = teacher_notes(config({}, given={"sft": {"path": "m"}}))  # but not on the traces of that model
    assert note.startswith(
        "opd.teacher is trained on other traces, those of distill, and the SFT traces are by whoever"
    )


def test_a_teacher_of_other_tokens_is_found_before_anything_runs(tmp_path: Path) -> None:
    prepare_base(PipelineConfig().model, seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    folder = tmp_path / "model"

    def problems() -> list[str]:
        source = {"kind": "given", "model": {"path": str(folder)}}
        made = config({"teacher": {"source": source}}, workspace={"root": str(tmp_path / "runs")})
        return list(token_problems(PendingWork.of(made, None, ())))

    assert problems() == []
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = token["content"].replace("im_start", "begin")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (problem,) = problems()
    assert problem.startswith("opd.teacher.source.model: 1 of the student's tokens have another id")


def test_likeliest_tokens_are_learnt_without_a_ratio_from_answers_however_sampled() -> None:
    answers = {"sampling": {"top_p": 0.95, "top_k": 50}}
    assert config({"rollouts": answers}).opd
    assert config({"rollouts": answers, "teacher": {"top_k": 0}, "train": {"old_logps": "learner"}}).opd


def test_the_laptop_profile_ends_with_the_distilled_model() -> None:
    stages = stages_of(load_profile(CONFIGS / "laptop_opd"))
    assert [stage.name for stage in stages if stage.job.makes_model][-1] == "opd"
    assert any(isinstance(stage.job, OpdScoresJob) for stage in stages)
    assert OpdConfig().train.num_steps == 150


def test_a_teacher_may_be_a_mixture_of_experts_which_a_student_may_not(tmp_path: Path) -> None:
    """Nobody trains a teacher: Qwen3-30B-A3B is that of configs/klear_8b_opd."""
    prepare_base(PipelineConfig().model, seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    folder = tmp_path / "model"
    own = AutoConfig.from_pretrained(folder)  # the weights are of its sizes
    sizes = {"vocab_size": own.vocab_size, "hidden_size": own.hidden_size, "num_hidden_layers": own.num_hidden_layers}
    AutoConfig.for_model("qwen3_moe", **sizes).save_pretrained(folder)
    model = {"path": str(folder)}
    scored = {"teacher": {"source": {"kind": "given", "model": model}, "engine": {"kind": "vllm"}}, "then_rl": False}
    student = {"given": {"sft": {"path": str(folder)}}}
    assert list(model_problems(PendingWork.of(config(scored), None, ()))) == []
    (problem,) = model_problems(PendingWork.of(config({"then_rl": False}, **student), None, ()))
    assert problem.startswith(f"given.sft: {folder}/config.json: qwen3_moe is a mixture of 128 experts")
    # also by a call that ends before its training, and pays for its answers
    sampled = PendingWork.of(config({"then_rl": False}, **student), ("sft", "opd_rollouts", "opd_scores"), ())
    assert "opd" not in {stage.name for stage in sampled.stages}
    assert list(model_problems(sampled)) == [problem]
    # only scored: no stage trains what is evaluated
    assert list(model_problems(PendingWork.of(config(None, given={"evaluate": model}), None, ()))) == []
