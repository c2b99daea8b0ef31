"""Settings of long-CoT SFT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.base import Floor, Settings
from klear_core.config.train import OptimConfig, TrainRuntime


class SftOptimConfig(OptimConfig):
    """AdamW for SFT: cosine from the peak to half of it (section 4.1)."""

    lr: float = Field(default=8e-5, gt=0, le=1)
    """Peak learning rate (section 4.1)."""
    min_lr_ratio: float = Field(default=0.5, ge=0, le=1)
    """The floor of the cosine as a share of the peak; 1 keeps the rate constant. Section 4.1: 4e-5 of 8e-5."""


class SftRuntime(TrainRuntime):
    """Where SFT runs."""

    rows: Floor = Floor()
    """Of the traces: those that give a training row."""


class SftConfig(Settings):
    """Long-CoT supervised fine-tuning; numbers of Klear-Reasoner section 4.1 where it states them."""

    optim: SftOptimConfig = SftOptimConfig()
    num_epochs: int = Field(default=4, ge=1)
    """Passes over the traces; section 4.1."""
    max_steps: int | None = Field(default=None, ge=1)
    """Ends the run early; the schedule ends there too."""
    rows_per_step: int = Field(default=128, ge=1)
    """Undisclosed in the paper."""
    max_tokens: int = Field(default=32_768, ge=2)
    """Longest row, prompt and response."""
    overlong: Literal["drop", "cut"] = "drop"
    """Rows longer than `max_tokens` are left out, or lose their end and with it the answer; counted either way. Ours: undisclosed."""
    normalise: Literal["token", "sample"] = "token"
    """Divide the loss by all loss tokens of the step, or average rows first. Equation 8 reads per sample."""
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """How often a source's rows come in an epoch: 2 is twice, 0.5 a different half each epoch, unnamed sources once. Paper: undisclosed."""
    validation_frac: float = Field(default=0.02, ge=0, lt=0.5)
    """Share of problems, all their traces included, that is held out."""
    max_validation_rows: int = Field(default=512, ge=1)
    """Held-out problems that would make it more rows than this go back into training, with all their traces."""
    eval_every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between two validation losses; there is one at the end in any case."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the forward and backward pass and of the saved model; weights and optimizer are float32 either way. Undisclosed in the paper."""
    runtime: SftRuntime = SftRuntime()
