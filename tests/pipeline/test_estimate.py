from klear_core.config.benchmark import BenchmarkConfig
from klear_core.config.curve import CurveConfig
from klear_core.config.data import ProceduralSource
from klear_core.config.engine import SamplingConfig
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig, RlRuntime
from klear_core.config.rollout import RolloutConfig
from klear_core.config.sft import SftConfig, SftRuntime
from klear_core.pipeline.estimate import estimate


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
    curve = CurveConfig(benchmark="heldout", num_problems=32, num_samples=2, every_steps=10)
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
