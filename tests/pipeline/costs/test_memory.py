"""Memory of learners and engines in closed form. The measured figures are of our learner on fake tensors."""

import tomllib
from dataclasses import replace

import pytest
from pydantic import ValidationError

from klear_core.config.evaluate import HardwareConfig, SamplingConfig, VllmEngineConfig, VllmRuntime
from klear_core.config.rl import RlConfig, RlRuntime, RolloutConfig
from klear_core.config.train import LoraConfig, SftConfig, SftOptimConfig, SftRuntime
from klear_core.generate.model_size import ModelSize, engine_fit, known_size
from klear_core.pipeline.costs.memory import (
    LearnerLoad,
    learner_load,
    learner_peak,
    resident_bytes,
    state_bytes,
    with_margin_gb,
)
from klear_core.pipeline.preflight.capacity import _fits_offloaded, _remedy


def _of(name: str) -> ModelSize:
    size = known_size(name)
    assert size is not None
    return size


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_tokens", "checkpointing", "measured_gb"),
    [
        ("Qwen/Qwen3-8B-Base", 8, 32768, True, 37.28),
        ("Qwen/Qwen3-8B", 32, 32768, True, 25.00),
        ("Qwen3-8B", 8, 9216, True, 26.16),
        ("Qwen3-8B", 4, 9216, True, 42.54),
        ("Qwen3-8B", 8, 16384, False, 104.8),
        ("Qwen3-1.7B", 1, 16384, True, 35.86),
        ("Qwen3-14B", 16, 16384, True, 32.94),
        ("Llama-3.1-8B", 8, 16384, True, 29.61),
        ("Llama-3.2-1B-Instruct", 2, 8192, False, 27.60),
        ("Qwen2.5-7B", 8, 16384, True, 28.73),
    ],
)
def test_the_closed_form_is_within_two_per_cent_of_what_was_measured(
    name: str, num_ranks: int, num_tokens: int, checkpointing: bool, measured_gb: float
) -> None:
    load = LearnerLoad(num_ranks=num_ranks, num_tokens=num_tokens, value_bytes=2, has_checkpointing=checkpointing)
    assert learner_peak(_of(name), load).num_bytes / 1e9 == pytest.approx(measured_gb, rel=0.02)


def test_a_row_longer_than_a_micro_batch_counts_in_full() -> None:
    short = SftConfig(max_tokens=4096, runtime=SftRuntime(tokens_per_microbatch=8192))
    long = SftConfig(max_tokens=32768, runtime=SftRuntime(tokens_per_microbatch=8192))
    assert learner_load(short).num_tokens == 8192
    assert learner_load(long).num_tokens == 32768


def test_a_micro_batch_has_no_more_tokens_than_the_rows_of_an_update() -> None:
    assert learner_load(SftConfig(max_tokens=192, rows_per_step=16)).num_tokens == 16 * 192
    rollout = RolloutConfig(
        groups_per_step=12, samples_per_group=8, max_prompt_tokens=100, sampling=SamplingConfig(max_new_tokens=64)
    )
    assert learner_load(RlConfig(rollout=rollout, minibatches_per_step=2)).num_tokens == 12 * 8 // 2 * (100 + 64)


SMOL = ModelSize(
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    is_tied=True,
    is_fused=True,
)
"""SmolLM2-135M."""


def test_short_rows_of_a_small_model_on_a_cpu_need_what_can_be_counted_by_hand() -> None:
    """16 rows of 192 tokens, all in float32, as in configs/smol: 6 GB, where a full micro-batch would need 26."""
    cfg = SftConfig(max_tokens=192, rows_per_step=16, dtype="float32", runtime=SftRuntime(device="cpu"))
    state = 16 * SMOL.num_params  # weight, gradient and two moments
    assert SMOL.num_params == 49_152 * 576 + 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    # A token of a layer: inputs and outputs of both norms, queries, keys, values, gate, up, their product, and 18 of attention.
    layer = 4 * 576 + 3 * 576 + 3 * 192 + 3 * 1536 + 2 * 9
    activations = 4 * 16 * 192 * (30 * layer + 3 * 576)
    # Logits of 615 tokens with their gradient; the head's gradient; that of the states.
    head = 8 * 615 * 49_152 + 4 * 49_152 * 576 + 4 * 16 * 192 * 576
    peak = learner_peak(SMOL, learner_load(cfg))
    assert peak.moment == "head"
    assert peak.num_bytes == state + activations + head
    assert 5.9e9 < peak.num_bytes < 6.1e9


def test_ranks_that_share_a_row_hold_their_slice_of_it() -> None:
    rollout = RolloutConfig(max_prompt_tokens=4096, sampling=SamplingConfig(max_new_tokens=32768))
    runtime = RlRuntime(num_workers=8, context_parallel=4, tokens_per_microbatch=16384)
    assert learner_load(RlConfig(rollout=rollout, runtime=runtime)).num_tokens == (4096 + 32768) // 4


def test_a_reference_model_adds_four_bytes_a_weight() -> None:
    load = LearnerLoad(num_ranks=4, num_tokens=9216, value_bytes=2, has_checkpointing=True)
    with_reference = LearnerLoad(
        num_ranks=4, num_tokens=9216, value_bytes=2, has_checkpointing=True, has_reference=True
    )
    size = _of("Qwen3-8B")
    more = learner_peak(size, with_reference).num_bytes - learner_peak(size, load).num_bytes
    assert more == pytest.approx(size.num_params)  # 4 bytes over 4 ranks


def test_frozen_weights_take_two_bytes_and_have_neither_gradients_nor_moments() -> None:
    size, training = _of("Qwen3-8B"), SftConfig(lora=LoraConfig(rank=16), runtime=SftRuntime(num_workers=2))
    assert state_bytes(size, learner_load(training)) == pytest.approx((2 * size.num_params + 16 * 43_646_976) / 2)
    in_float32 = learner_load(training.model_copy(update={"dtype": "float32"}))
    assert state_bytes(size, in_float32) == pytest.approx((4 * size.num_params + 16 * 43_646_976) / 2)
    assert resident_bytes(size, in_float32) == pytest.approx((4 * size.num_params + 12 * 43_646_976) / 2)


@pytest.mark.parametrize(
    ("name", "num_layers", "num_ranks", "num_tokens", "checkpointing", "rank", "measured_gb"),
    [
        ("Qwen3-1.7B", 3, 1, 8192, True, 16, 2.7464),
        ("Qwen3-1.7B", 3, 4, 8192, True, 256, 2.8820),
        ("Qwen3-8B", 4, 1, 32768, True, 16, 11.3302),
    ],
)
def test_with_adapters_the_closed_form_is_within_two_per_cent_of_what_was_measured(
    name: str, num_layers: int, num_ranks: int, num_tokens: int, checkpointing: bool, rank: int, measured_gb: float
) -> None:
    load = LearnerLoad(
        num_ranks=num_ranks, num_tokens=num_tokens, value_bytes=2, has_checkpointing=checkpointing, adapter_rank=rank
    )
    peak = learner_peak(replace(_of(name), num_layers=num_layers), load)
    assert peak.num_bytes / 1e9 == pytest.approx(measured_gb, rel=0.02)


def test_moments_in_eight_bits_take_two_bytes_a_weight_and_their_scales() -> None:
    size = _of("Qwen3-8B")
    plain, eight = (
        learner_load(SftConfig(optim=SftOptimConfig(kind=kind), runtime=SftRuntime(num_workers=4)))
        for kind in ("adamw", "adamw_8bit")
    )
    less = state_bytes(size, plain) - state_bytes(size, eight)
    assert less == pytest.approx(size.num_params * (8 - 2 - 2 * 4 / 256) / 4)
    assert learner_peak(size, plain).num_bytes - learner_peak(size, eight).num_bytes == pytest.approx(less)


def test_what_is_offloaded_is_in_host_memory_and_not_on_the_device() -> None:
    size, runtime = _of("Qwen3-8B"), SftRuntime(num_workers=1, activation_checkpointing=True)
    off = learner_load(SftConfig(max_tokens=16384, runtime=runtime.model_copy(update={"cpu_offload": True})))
    assert state_bytes(size, off) == pytest.approx(16 * size.num_params)
    assert resident_bytes(size, off) == 0
    peak = learner_peak(size, off)
    # Embedding, head and two layers in bfloat16, and the next layer as it is kept on the host, in float32.
    whole = 2 * (size.embedding_params + 2 * size.layer_params) + 4 * size.layer_params
    assert peak.by_kind["gathered weights"] == pytest.approx(whole)
    assert with_margin_gb(peak.num_bytes) < 24


def test_offloading_is_advised_where_it_alone_would_fit() -> None:
    size, sft = _of("Qwen3-8B"), SftConfig(max_tokens=16384, runtime=SftRuntime(num_workers=1))
    assert _fits_offloaded(sft, size, 24)
    assert not _fits_offloaded(sft, size, 12)


@pytest.mark.parametrize("training", [SftConfig, RlConfig])
def test_eight_bit_moments_in_host_memory_are_refused(training: type[SftConfig] | type[RlConfig]) -> None:
    both = {"optim": {"kind": "adamw_8bit"}, "runtime": {"cpu_offload": True}}
    with pytest.raises(ValidationError, match=r"'adamw_8bit' with runtime\.cpu_offload = true"):
        training.model_validate(both)


@pytest.mark.parametrize("gpu_gb", [24.0, 40.0, 80.0])
def test_the_settings_that_are_advised_fit(gpu_gb: float) -> None:
    size, sft = _of("Qwen3-8B"), SftConfig(runtime=SftRuntime(tokens_per_microbatch=32768))
    advice = tomllib.loads("\n".join(_remedy(sft, size, gpu_gb).split(", ")))
    changed = sft.model_copy(update={"runtime": sft.runtime.model_copy(update=advice)})
    assert with_margin_gb(learner_peak(size, learner_load(changed)).num_bytes) <= gpu_gb
    assert changed.runtime.num_workers % changed.runtime.context_parallel == 0


def test_an_engine_holds_its_cache_in_what_the_weights_leave() -> None:
    """Qwen3-8B on 2 GPUs of 80 GB: 0.9 * 160 - 16.4 of weights - 6 of work space leaves 121.6 GB.

    A token takes 2 * 36 layers * 8 key heads * 128 * 2 bytes = 147,456 bytes: 824,800 tokens, 22 answers of 36,864.
    """
    engine = VllmEngineConfig(max_model_len=36864, runtime=VllmRuntime(tensor_parallel=2))
    fit = engine_fit(_of("Qwen3-8B"), engine, HardwareConfig(gpu_memory_gb=80), longest=36864)
    assert fit.cache_tokens == pytest.approx(824_800, rel=0.001)
    assert fit.sequences == 22


def test_an_engine_without_room_for_its_weights_samples_nothing() -> None:
    fit = engine_fit(_of("Qwen3-8B"), VllmEngineConfig(), HardwareConfig(gpu_memory_gb=16), longest=4096)
    assert (fit.cache_tokens, fit.sequences, fit.tokens_per_s) == (0, 0, 0.0)
