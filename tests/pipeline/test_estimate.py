from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.engine import SamplingConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig, RolloutConfig
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
