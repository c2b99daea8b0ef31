"""Measure a training's memory by running its learner on fake tensors, to check the closed form of `memory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from klear_core.config.rl import RlConfig
from klear_core.config.sft import SftConfig
from klear_core.pipeline.memory import learner_load, learner_peak
from klear_core.pipeline.model_size import ModelSize

if TYPE_CHECKING:
    from klear_core.train.memory.measure import LearnerCase, Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A training's peak by both methods, in bytes."""

    measured: Peak
    closed_form: float

    @property
    def difference(self) -> float:
        """Return how far the closed form is from the measurement, as a share of it."""
        return self.closed_form / self.measured.num_bytes - 1


def measure_training(size: ModelSize, training: SftConfig | RlConfig) -> Comparison | None:
    """Return both peaks of a rank. Takes 10 to 60 s.

    None for training in float32 (which is for CPUs), with 8-bit moments, or with offloading to host memory, which fake
    tensors do not tell apart from device memory.
    """
    if training.dtype != "bfloat16" or training.optim.kind != "adamw" or training.runtime.cpu_offload:
        return None
    from klear_core.train.memory.measure import measure

    closed_form = learner_peak(size, learner_load(training)).num_bytes
    return Comparison(measured=measure(learner_case(size, training))[0], closed_form=closed_form)


def learner_case(size: ModelSize, training: SftConfig | RlConfig) -> LearnerCase:
    """Return the case that a training's settings describe."""
    from klear_core.rl.losses import joins_tokens
    from klear_core.train.memory.measure import LearnerCase

    load = learner_load(training)
    return LearnerCase(
        model=hf_config_of(size),
        num_ranks=load.num_ranks,
        cp_size=training.runtime.context_parallel,
        # The load counts the tokens of one rank, the case those of the whole context-parallel group.
        num_tokens=load.num_tokens * training.runtime.context_parallel,
        activation_checkpointing=load.has_checkpointing,
        joins_tokens=isinstance(training, RlConfig) and joins_tokens(training.loss),
        has_reference=load.has_reference,
        adapter_rank=load.adapter_rank,
    )


def hf_config_of(size: ModelSize) -> dict[str, Any]:
    """Return a config.json with these sizes: of a Qwen3 if the model is fused, else of a Llama."""
    return {
        "model_type": "qwen3" if size.is_fused else "llama",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.mlp_size,
        "tie_word_embeddings": size.is_tied,
        "max_position_embeddings": 1 << 17,  # more than any row
    }
