"""Settings of the base model, and of training shared by SFT and RL."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from klear_core.config.base import Settings
from klear_core.errors import ConfigError


class TinyModelConfig(Settings):
    """A randomly initialised Qwen3 with a tokenizer built on the spot."""

    kind: Literal["tiny"] = "tiny"
    hidden_size: int = Field(default=64, ge=8)
    """Values a token carries between layers."""
    num_layers: int = Field(default=3, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads of a layer."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = Field(default=16, ge=2)
    """Values of one head; vLLM needs 32 or more."""
    intermediate_size: int = Field(default=192, ge=8)
    """Width of the MLP; three times the hidden size, as in Qwen3-8B."""
    max_position_embeddings: int = Field(default=512, ge=16)
    """The window in tokens (bytes, for its tokenizer): prompt and answer together."""
    embedding_std: float = Field(default=0.1, gt=0)
    """Standard deviation of the random embeddings, which are tied to the head. Ours, for a tiny model; 0.02 is usual."""


class HfModelConfig(Settings):
    """Any Hugging Face causal-LM folder on disk, with its tokenizer and chat template."""

    kind: Literal["hf"] = "hf"
    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(min_length=1)
    """The folder with config.json, weights and tokenizer; relative paths are taken from the working directory, `~` is the home folder."""
    max_position_embeddings: int | None = Field(default=None, ge=16)
    """Raised in the config of the trained model; the paper's RL needs 4096 + 32768 = 36864."""


ModelConfig = Annotated[TinyModelConfig | HfModelConfig, Field(discriminator="kind")]


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """AdamW with warm-up, then constant or cosine to a floor."""

    lr: float = Field(gt=0, le=1)
    """Peak learning rate."""
    min_lr_ratio: float = Field(default=1.0, ge=0, le=1)
    """The floor of the cosine as a share of the peak; 1 keeps the rate constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates in which the rate climbs in a straight line to its peak. RL scripts: 10; SFT: undisclosed."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of Adam's first and second moment. RL scripts and torch: (0.9, 0.999); SFT: undisclosed."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices only, not to norms and embeddings."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global 2-norm are scaled down to it. RL scripts: 1; SFT: undisclosed."""


class CheckpointConfig(Settings):
    """How often to save, so that a killed stage goes on. Does not change the result."""

    every_steps: int = Field(default=100, ge=1)
    """Steps that a killed stage loses at most: updates in SFT, RL steps in RL."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints left on disk; with two, a damaged one costs no more than `every_steps`."""
    asynchronous: bool = False
    """Write a copy while training goes on: no pause, at the price of the copy's host memory."""


class TrainRuntime(Settings):
    """Where training runs and how it is cut up; none of it changes the result beyond float rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if torch finds one, and else a CPU for models of up to 200 million parameters; larger ones need the word."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the learner."""
    num_workers: int = Field(default=1, ge=1)
    """Learner processes (FSDP2 ranks)."""
    context_parallel: int = Field(default=1, ge=1)
    """Learner processes that share one row, each with its slice of the tokens, so that longer rows fit (Ulysses).

    Must divide num_workers and the model's attention heads; activations of a process fall by about this factor."""
    tokens_per_microbatch: int = Field(default=16_384, ge=1)
    """Rows are packed up to this many tokens, a longer one alone; with context_parallel a process computes its share of them."""
    activation_checkpointing: bool = False
    """Keep a layer's input alone and compute the rest again in the backward pass: less memory, a third more work. RL scripts: on."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_nonfinite_steps: int = Field(default=5, ge=0)
    """More skipped steps than this stop the stage."""

    @model_validator(mode="after")
    def _contexts_are_whole(self) -> TrainRuntime:
        if self.num_workers % self.context_parallel:
            raise ValueError(f"context_parallel {self.context_parallel} does not divide num_workers {self.num_workers}")
        return self

    def check_heads(self, num_heads: int, model: object) -> None:
        """ConfigError if a model's query heads cannot be shared out evenly over `context_parallel` processes."""
        if num_heads % self.context_parallel:
            allowed = ", ".join(str(c) for c in range(1, num_heads + 1) if num_heads % c == 0)
            raise ConfigError(
                f"runtime.context_parallel = {self.context_parallel} does not divide the {num_heads} attention heads of {model}; "
                f"allowed: {allowed}"
            )
