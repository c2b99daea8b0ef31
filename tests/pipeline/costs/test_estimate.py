import gzip
from pathlib import Path

import pytest

from klear_core.config.curate import CurateConfig, TagConfig
from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.distill import DistillConfig
from klear_core.config.evaluate import (
    EvaluateConfig,
    EvaluateSamplingConfig,
    InlineEvalConfig,
    SamplingConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig, RlRuntime, RolloutConfig
from klear_core.config.train import SftConfig, SftRuntime, TinyModelConfig
from klear_core.pipeline.costs.estimate import estimate


def test_only_what_is_chosen_is_counted() -> None:
    benchmark = BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout", num_problems=8), num_samples=4)
    config = PipelineConfig(benchmarks=(benchmark,))
    assert [row.stage for row in estimate(config, ["base", "sft"])] == ["sft"]
    (scored,) = estimate(config, ["evaluate_rl"])
    assert scored.max_tokens == 8 * (4 + 1) * config.evaluate.sampling.max_new_tokens


def test_rl_samples_at_most_what_oversampling_and_all_rounds_ask_for() -> None:
    """3 steps, 4 groups asked twice over in up to 2 rounds, 8 answers each of up to 10 tokens."""
    rollout = RolloutConfig(
        groups_per_step=4, samples_per_group=8, oversample=2, max_rounds=2, sampling=SamplingConfig(max_new_tokens=10)
    )
    config = PipelineConfig(rl=RlConfig(num_steps=3, rollout=rollout))
    (rl,) = (row for row in estimate(config) if row.stage == "rl")
    assert rl.max_tokens == 3 * (4 * 2) * 2 * 8 * 10
    assert rl.note == "at most 384 rollouts in 3 steps"


def test_a_curve_of_each_training_is_counted_in_tokens() -> None:
    """Base, steps 10, 20 and 25 of SFT and base, 2 and 3 of RL: 4 and 3 models, 8 problems, 2 answers of up to 7 tokens."""
    benchmark = BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout", num_problems=8))
    evaluate = EvaluateConfig(sampling=EvaluateSamplingConfig(max_new_tokens=7))
    curve = InlineEvalConfig(benchmark="heldout", num_problems=32, num_samples=2, every_steps=10)
    config = PipelineConfig(
        benchmarks=(benchmark,),
        evaluate=evaluate,
        sft=SftConfig(max_steps=25, runtime=SftRuntime(curve=curve)),
        rl=RlConfig(num_steps=3, runtime=RlRuntime(curve=curve.model_copy(update={"every_steps": 2}))),
    )
    rows = {row.stage: row for row in estimate(config, ["sft", "rl"])}
    assert list(rows) == ["sft", "sft curve", "rl", "rl curve"]
    assert rows["sft curve"].max_tokens == 4 * 8 * 2 * 7
    assert rows["sft curve"].note == "4 models, 16 answers each by an engine beside the learner"
    assert rows["rl curve"].max_tokens == 3 * 8 * 2 * 7
    assert rows["rl curve"].note == "3 models, 16 answers each by the engines that sample"
    assert [row.stage for row in estimate(PipelineConfig(benchmarks=(benchmark,)), ["sft", "rl"])] == ["sft", "rl"]


def test_a_tagger_of_rls_own_problems_answers_those() -> None:
    """5 answers of up to 7 tokens to each problem: 100 for distillation, 8 for RL, or the 100 where RL has no own."""
    tag = TagConfig(samples_per_problem=5, sampling=EvaluateSamplingConfig(max_new_tokens=7))
    distilled, own = (CurateConfig(sources=(ProceduralSource(num_problems=n),)) for n in (100, 8))
    rows = estimate(PipelineConfig(curate=distilled, curate_rl=own, tag=tag, tag_rl=tag), ["tag", "tag_rl"])
    assert [row.max_tokens for row in rows] == [100 * 5 * 7, 8 * 5 * 7]
    (shared,) = estimate(PipelineConfig(curate=distilled, tag_rl=tag), ["tag_rl"])
    assert shared.max_tokens == 100 * 5 * 7


def test_sft_trains_at_most_on_rows_that_are_repeated_by_weight() -> None:
    """10 problems, a trace each, 2.5 times in each of 2 epochs: 50 rows, which are 7 steps of 8 rows."""
    curate = CurateConfig(sources=(ProceduralSource(name="mod10", num_problems=10),))
    curve = InlineEvalConfig(benchmark="heldout", num_problems=8, num_samples=1, every_steps=1)
    sft = SftConfig(
        num_epochs=2, rows_per_step=8, max_tokens=16, source_weights={"mod10": 2.5}, runtime=SftRuntime(curve=curve)
    )
    benchmark = BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout", num_problems=8))
    config = PipelineConfig(
        curate=curate, distill=DistillConfig(samples_per_problem=1), sft=sft, benchmarks=(benchmark,)
    )
    trained, scored = estimate(config, ["sft"])
    assert trained.max_tokens == 50 * 16
    assert scored.note.startswith("8 models, ")


@pytest.mark.parametrize(
    ("kind", "dtype", "num_bytes"), [("torch", "bfloat16", 2), ("torch", "float32", 4), ("vllm", "float32", 4)]
)
def test_an_engine_holds_its_weights_in_its_dtype(kind: str, dtype: str, num_bytes: int) -> None:
    """A tiny model of 16 channels, by hand: 320 rows of the tied embedding, and in its layer 16 * (4 * 16 + 3 * 8)."""
    model = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=8)
    engine = TorchEngineConfig(dtype=dtype) if kind == "torch" else VllmEngineConfig(dtype=dtype)
    benchmark = BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout", num_problems=8))
    config = PipelineConfig(model=model, benchmarks=(benchmark,), evaluate=EvaluateConfig(engine=engine))
    (scored,) = estimate(config, ["evaluate_rl"])
    assert scored.memory_gb == pytest.approx((320 * 16 + 16 * (4 * 16 + 3 * 8)) * num_bytes / 1e9)


def test_a_benchmark_whose_rows_cannot_be_counted_is_named(tmp_path: Path) -> None:
    """It need not be missing: rows of a compressed file are counted by reading all of it, which a plan does not do."""
    (tmp_path / "here.jsonl.gz").write_bytes(gzip.compress(b'{"question": "1 + 1?", "answer": "2"}'))
    source = FileSource(path=str(tmp_path / "here.jsonl.gz"))
    config = PipelineConfig(benchmarks=(BenchmarkConfig(name="here", source=source),))
    (scored,) = estimate(config, ["evaluate_rl"])
    assert (scored.max_tokens, scored.note) == (None, "unknown number of problems in here")


@pytest.mark.parametrize(("rows", "num_answers"), [(500, 50 * 4), (30, 30 * 4), (None, 50 * 4)])
def test_of_a_benchmark_only_the_part_that_is_scored_counts(rows: int | None, num_answers: int) -> None:
    """The plan says beside it how little 50 problems can show."""
    source = FileSource(path="not_counted.csv")
    benchmark = BenchmarkConfig(name="part", source=source, expected_rows=rows, num_samples=4, num_problems=50)
    config = PipelineConfig(benchmarks=(benchmark,), evaluate=EvaluateConfig(greedy=False))
    (scored,) = estimate(config, ["evaluate_rl"])
    assert scored.note.startswith(f"1 models, {num_answers} answers each")


def opd_config(**opd: object) -> PipelineConfig:
    curate = CurateConfig(sources=(ProceduralSource(num_problems=100),))
    rollouts = {"samples_per_prompt": 3, "max_prompt_tokens": 20, "sampling": {"max_new_tokens": 80}, "num_prompts": 10}
    train = {"num_steps": 4, "rows_per_step": 6}
    return PipelineConfig.model_validate({"curate": curate, "opd": {"rollouts": rollouts, "train": train, **opd}})


def test_distillation_is_counted_in_answers_and_rows_of_full_length() -> None:
    """10 prompts of up to 20 tokens, 3 answers of up to 80 each; 4 steps of 6 rows."""
    rows = {row.stage: row for row in estimate(opd_config())}
    assert rows["opd_rollouts"].max_tokens == 10 * 3 * 80
    assert rows["opd_scores"].max_tokens == 10 * 3 * (20 + 80)
    assert rows["opd"].max_tokens == 4 * 6 * (20 + 80)


def test_a_teachers_gpu_hours_are_those_of_a_forward_pass_and_a_served_one_has_none() -> None:
    """Two operations a weight and token, at .51 of 989 TFLOP/s; attention over 100 tokens is next to nothing."""
    source = {"kind": "given", "model": {"repo": "Qwen/Qwen3-8B", "revision": "0" * 40}}
    engine = {"kind": "vllm"}
    (scores,) = estimate(opd_config(teacher={"source": source, "engine": engine}), ["opd_scores"])
    assert scores.gpu_hours == pytest.approx(2 * 7.6e9 * 3000 / (0.51 * 989e12) / 3600, rel=0.05)
    runtime = {"num_engines": 0, "endpoints": [{"base_url": "http://localhost/v1", "model": "m"}]}
    (served,) = estimate(opd_config(teacher={"source": source, "engine": engine, "runtime": runtime}), ["opd_scores"])
    assert (served.gpu_hours, served.note) == (None, "30 answers scored by the teacher, which is served")


def test_a_teacher_that_is_trained_here_is_counted_by_its_own_settings() -> None:
    """100 problems, a trace each: 3 epochs of rows of 50 tokens, where the student has 1 of 7."""
    teacher = {"source": {"kind": "trained", "sft": {"num_epochs": 3, "max_tokens": 50}}}
    config = opd_config(teacher=teacher).model_copy(update={"sft": SftConfig(num_epochs=1, max_tokens=7)})
    rows = {row.stage: row for row in estimate(config, ["sft", "opd_teacher"])}
    per_problem = config.distill.samples_per_problem
    assert rows["sft"].max_tokens == 100 * per_problem * 7
    assert rows["opd_teacher"].max_tokens == 100 * per_problem * 3 * 50


def test_what_a_teacher_scores_within_rl_is_counted() -> None:
    rl = {"distill": {}, "num_steps": 5, "rollout": {"groups_per_step": 3, "samples_per_group": 4}}
    config = PipelineConfig.model_validate(
        {"rl": rl, "rl_teacher": {"source": {"kind": "given", "model": {"path": "teacher"}}}}
    )
    (row,) = estimate(config, ["rl"])
    assert "at most 60 scored by the teacher, on the driver's CPU" in row.note
