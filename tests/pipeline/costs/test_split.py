"""How a plan divides the GPUs of RL between engines and learner."""

import pytest

from klear_core.config.evaluate import HardwareConfig
from klear_core.config.rl import RlConfig
from klear_core.generate.model_size import known_size, step_seconds
from klear_core.pipeline.costs.throughput import estimate_split

QWEN3_8B = known_size("Qwen/Qwen3-8B")
H100 = HardwareConfig(gpu_memory_gb=80)


def rl(num_workers=8, num_engines=4, **changes):
    runtime = {"num_workers": num_workers, "context_parallel": 4, "num_rollout_actors": num_engines}
    runtime |= {"tokens_per_microbatch": 36864, "activation_checkpointing": True}
    rollout = {"engine": {"kind": "vllm", "runtime": {"tensor_parallel": 2}}}
    return RlConfig.model_validate({"runtime": runtime, "rollout": rollout} | changes)


def test_the_better_split_of_16_gpus_has_4_learner_ranks_and_6_engines():
    """Sampling takes more: 8 answers of about 12,000 tokens a group, and a quarter of the groups is sampled in vain."""
    found = estimate_split(rl(), QWEN3_8B, H100)
    assert (found.now.num_engines, found.now.num_workers) == (4, 8)
    assert (found.best.num_engines, found.best.num_workers) == (6, 4)
    assert found.best.step_s < 0.75 * found.now.step_s
    assert found.now.sampling_s / found.best.sampling_s == pytest.approx(6 / 4)
    assert found.best.learning_s / found.now.learning_s == pytest.approx(8 / 4)
    assert estimate_split(rl(4, 6), QWEN3_8B, H100).best == found.best


def test_no_split_has_a_learner_that_does_not_fit():
    """On 8 GPUs 4 ranks need 47 GB each; context 4 allows no fewer."""
    found = estimate_split(rl(4, 2), QWEN3_8B, H100)
    assert found.best == found.now


def test_a_decoding_step_reads_the_weights_and_the_cache():
    """16.4 GB of weights and 100 answers of 8,000 tokens at 147,456 bytes, at 0.8 of 2 x 3.35 TB/s."""
    read = 2 * QWEN3_8B.num_params + 100 * 8000 * 147_456
    found = step_seconds(QWEN3_8B, rl().rollout.engine, H100, batch=100, cached_tokens=800_000)
    assert found == pytest.approx(read / (0.8 * 2 * 3.35e12))


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"rollout": {"engine": {"kind": "torch"}}}, {"runtime": {"learner_gpus": 0.5}}]
)
def test_no_split_is_named_where_there_is_none_to_choose(changes):
    assert estimate_split(rl(**changes), QWEN3_8B, H100) is None
