"""Run one optimizer step over a packed batch, for SFT and RL alike: accumulate gradients, check, clip, update."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from klear_core.config.train import OptimConfig
from klear_core.errors import TrainingError
from klear_core.progress import made_progress
from klear_core.train.logps import HeadOutput
from klear_core.train.model import Head
from klear_core.train.optim import apply_update, grad_norm, lr_at, make_optimizer
from klear_core.train.packing import PackedBatch
from klear_core.train.world import World

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step. `outputs` are this rank's, one per micro-batch; `loss` is the sum over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    is_applied: bool
    """False if loss or gradient was not finite; the weights are then unchanged."""
    outputs: tuple[HeadOutput, ...]


class Updater:
    """Updates a (possibly sharded) model with AdamW and its learning-rate schedule."""

    def __init__(self, model: nn.Module, cfg: OptimConfig, world: World, *, num_steps: int) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, cfg)
        self.cfg = cfg
        self.world = world
        self.num_steps = num_steps

    def step(self, batch: PackedBatch, heads: Sequence[Head[HeadOutput]], *, step: int) -> StepResult:
        """Run forward and backward over all micro-batches, then one update at the rate of `step` (collective call).

        `heads` has one head per micro-batch. Their losses are summed over micro-batches and ranks, so each must divide
        by counts of the complete step.
        """
        outputs = []
        for i, (micro, head) in enumerate(zip(batch.micro_batches, heads, strict=True), start=1):
            out: HeadOutput = self.model(micro, head)
            # Gradients accumulate as a sum: the loss is already divided by the global count. FSDP sums over ranks in
            # every backward; to do so only in the last, each rank would have to hold whole gradients.
            out.loss.backward()  # type: ignore[no-untyped-call]
            # Detached, so that the graph of this micro-batch is freed.
            outputs.append(HeadOutput(out.loss.detach(), out.logp_N, out.entropy_N))
            made_progress(f"micro-batch {i} of {len(heads)} of an update")
        # Ranks without rows take part, too: every rank must make the same collective calls.
        loss = self.world.sum(torch.stack([o.loss for o in outputs]).sum())
        norm = grad_norm(self.model)
        # Loss and norm are global, so all ranks take the same decision; otherwise their weights would diverge.
        is_applied = bool(torch.isfinite(loss) & torch.isfinite(norm))
        # By the number of the step, so that a skipped update does not shift the schedule.
        lr = lr_at(step, self.cfg, self.num_steps)
        if is_applied:
            apply_update(self.model, self.optimizer, lr=lr, norm=norm, max_grad_norm=self.cfg.max_grad_norm)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss=loss.item(), grad_norm=norm.item(), lr=lr, is_applied=is_applied, outputs=tuple(outputs))


def save_bad_batch(
    folder: Path, rows: Sequence[DataclassInstance], *, step: int, num_skipped: int, max_skipped: int
) -> None:
    """Save the rows of a skipped update for inspection. Raise TrainingError if more than `max_skipped` were skipped.

    `num_skipped` includes this one. It is part of the file name, because an RL step has several updates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}-{num_skipped}.json"
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"  # all ranks write the same file at once
    temporary.write_text(json.dumps([_spell_nonfinite(asdict(row)) for row in rows], allow_nan=False))
    temporary.replace(path)
    log.warning("step %d skipped: loss or gradient not finite; its rows are in %s", step, path)
    if num_skipped > max_skipped:
        raise TrainingError(
            f"{num_skipped} steps with a loss or gradient that is not finite, {max_skipped} are allowed; see {folder}"
        )


def _spell_nonfinite(value: Any) -> Any:
    """Replace numbers that are not finite by "nan", "inf" and "-inf".

    JSON cannot express them otherwise; `float` reads these names.
    """
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _spell_nonfinite(item) for key, item in value.items()}
        case list() | tuple():
            return [_spell_nonfinite(item) for item in value]
        case _:
            return value
