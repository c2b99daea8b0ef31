"""Save RL steps in full (samples, weights and optimizer state before the step, metrics), to replay them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.toml import as_option
from klear_core.config.train import CheckpointConfig
from klear_core.errors import ArtifactError
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.world import World
from klear_core.types import TrainSample

_SAMPLES, _METRICS, _STATE = "samples.parquet", "metrics.json", "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """Samples that one RL step trained on, and the metrics that the learner returned for it."""

    step: int
    samples: tuple[TrainSample, ...]
    metrics: dict[str, float]


class SavedSteps:
    """The saved steps of one RL stage. Steps count from 1, as in the log; step n ends with the learner's version n."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder
        self._world = world

    def begin(
        self, step: int, samples: Sequence[TrainSample], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Save samples, weights and optimizer state before the step (collective call)."""
        folder = self._of(step)
        if self._world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that was killed in this step
            write_shard(folder / _SAMPLES, samples)
        # No rank may write its state before rank 0 has cleared the folder.
        self._world.barrier()
        self._state(step).save(step - 1, model, optimizer, {})

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the step's metrics, which makes it complete."""
        if self._world.rank > 0:
            return
        # NaN and infinity are not JSON; replay compares finite metrics only.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Renamed when whole, because the file marks the step as complete (see `steps`).
        beside = self._of(step) / f"{_METRICS}.tmp"
        beside.write_text(json.dumps(finite, indent=2))
        beside.replace(self._of(step) / _METRICS)

    def load(self, step: int) -> SavedStep:
        """Return a saved step. Raise ArtifactError, which lists the saved steps, if it is not one of them."""
        folder = self._of(step)
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ArtifactError(
                f"{self._folder.parent}: RL step {step} is not saved; saved steps: {there}. "
                f"Make the stage again (--rerun-from) with {as_option('rl.runtime.save_steps', [step])}"
            )
        samples = read_shard(folder / _SAMPLES, TrainSample)
        metrics = json.loads((folder / _METRICS).read_text())
        return SavedStep(step=step, samples=tuple(samples), metrics=metrics)

    def restore(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and optimizer state from before the step (collective call). ArtifactError if damaged."""
        if self._state(step).load_latest(model, optimizer) is None:
            raise ArtifactError(f"{self._of(step) / _STATE}: no complete state; the files of step {step} are damaged")

    def steps(self) -> list[int]:
        """Return the complete steps in order."""
        return sorted(int(file.parent.name) for file in self._folder.glob(f"*/{_METRICS}"))

    def states(self) -> list[Path]:
        """Return the folders of the states before the steps, also of steps that are not complete."""
        return sorted(self._folder.glob(f"*/{_STATE}"))

    def _of(self, step: int) -> Path:
        return self._folder / f"{step:08d}"

    def _state(self, step: int) -> Checkpoints:
        return Checkpoints(self._of(step) / _STATE, CheckpointConfig(keep=1), self._world)
