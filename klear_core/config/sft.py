"""Define the settings of long-CoT SFT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from klear_core.config.curve import CurveConfig
from klear_core.config.settings import Floor, Settings
from klear_core.config.train import LoraConfig, OptimConfig, TrainRuntime, check_moments


class SftOptimConfig(OptimConfig):
    """AdamW for SFT, with a cosine decay from the peak rate to half of it (section 4.1)."""

    lr: float = Field(default=8e-5, gt=0, le=1)
    """Peak learning rate (section 4.1)."""
    min_lr_ratio: float = Field(default=0.5, ge=0, le=1)
    """Final rate of the cosine as a share of the peak; 1 keeps the rate constant. Section 4.1: 4e-5 of 8e-5."""


class SftRuntime(TrainRuntime):
    """Processes, devices and checkpoints of SFT."""

    rows: Floor = Floor()
    """Share of the traces that give a training row."""
    curve: CurveConfig | None = None
    """Scores on a small fixed set of problems while training goes on, by an engine of evaluation beside it; None:
    none."""


class SftConfig(Settings):
    """Long-CoT supervised fine-tuning; defaults from Klear-Reasoner section 4.1 where it gives them."""

    optim: SftOptimConfig = SftOptimConfig()
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of all weights; None trains all, as the paper."""
    num_epochs: int = Field(default=4, ge=1)
    """Passes over the traces; section 4.1."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of optimizer steps; the schedule ends there too. None: no limit."""
    rows_per_step: int = Field(default=128, ge=1)
    """Rows per optimizer step. Undisclosed in the paper."""
    max_tokens: int = Field(default=32_768, ge=2)
    """Maximum length of a row in tokens, prompt and response together."""
    overlong: Literal["drop", "cut"] = "drop"
    """Rows longer than `max_tokens` are dropped, or lose their end and with it the answer; both are counted. Ours;
    undisclosed in the paper."""
    normalise: Literal["token", "sample"] = "token"
    """Divide the loss by all loss tokens of the step, or average within rows first. Equation 8 reads per sample."""
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Number of times a source's rows occur in an epoch: 2 is twice, 0.5 a different half each epoch; unnamed sources
    once. Undisclosed in the paper."""
    validation_frac: float = Field(default=0.02, ge=0, lt=0.5)
    """Share of the problems held out for validation, with all their traces."""
    max_validation_rows: int = Field(default=512, ge=1)
    """Maximum number of held-out rows; problems beyond it go back into training with all their traces."""
    eval_every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between two validation losses; one is always computed at the end."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of forward and backward pass and of the saved model; weights that train and the optimizer are always
    float32. Undisclosed in the paper."""
    runtime: SftRuntime = SftRuntime()

    @model_validator(mode="after")
    def _moments_are_on_the_device(self) -> SftConfig:
        check_moments(self.optim, self.runtime)
        return self
