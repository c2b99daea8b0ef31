"""Export the weights of some steps while training goes on, each to a folder that waits for its score."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from klear_core.artifacts.store import SCRATCH
from klear_core.config.curve import CurveConfig
from klear_core.errors import KlearError
from klear_core.train.checkpoint_copies import CheckpointCopies
from klear_core.train.gather import full_weights
from klear_core.train.model import Dtype, Policy, export_model
from klear_core.train.world import World

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")


class Points:
    """The models of one stage that wait for their score, in folders `step-00000020` below its working folder.

    With a shared store the copies there count, because learner and driver may have different disks.
    """

    def __init__(self, workdir: Path) -> None:
        self._folder = workdir / SCRATCH / "curve"
        self._copies = CheckpointCopies.of(self._folder)

    @property
    def is_in_store(self) -> bool:
        """Return whether the models are in the shared store."""
        return self._copies is not None

    def waiting(self) -> list[int]:
        """Return the steps of the models that wait, in order."""
        is_here = self._copies is None
        names = os.listdir(self._folder) if is_here and self._folder.is_dir() else []
        if self._copies is not None:
            names = self._copies.sealed()
        # Before its rename an export ends in `.tmp`, and so is not listed.
        found = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted(int(match[1]) for match in found)

    def fetch(self, step: int) -> Path:
        """Return the folder of a model that waits, on this node's disk."""
        folder = self._path(step)
        if self._copies is not None:
            self._copies.fetch(folder.name, folder)
        return folder

    def drop(self, step: int) -> None:
        """Delete a model that was scored, or whose step is trained again."""
        folder = self._path(step)
        if self._copies is not None:
            self._copies.drop(folder.name)
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, step: int, write: Callable[[Path], None]) -> None:
        """Call `write` to make a model's folder; `write` must give it its name only when it is complete."""
        folder = self._path(step)
        if self._copies is not None:
            # Write it elsewhere than to its final folder: the scorer fetches the copy to that folder, maybe on this
            # disk, before we are done.
            folder = self._folder / "exported" / folder.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(folder)
        if self._copies is not None:
            self._copies.send_whole(folder.name, folder)
            shutil.rmtree(folder)  # the copy is what the scorer fetches

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


class PointWriter:
    """Exports the models of the curve that are due; every rank must make the same calls in order."""

    def __init__(
        self, curve: CurveConfig | None, *, workdir: Path, source: Path, window: int | None, dtype: Dtype, world: World
    ) -> None:
        """`source` is the folder of config and tokenizer; without a `curve` no model is due."""
        self._curve = curve
        self._points = Points(workdir)
        self._source = source
        self._window = window
        self._dtype = dtype
        self._world = world
        self._lost: list[int] = []
        """Steps whose model could not be written."""

    def begin(self, policy: Policy, *, first: int, num_steps: int) -> None:
        """Delete the models of steps after `first`, from which training goes on, and export the model before step 1."""
        if self._curve is None:
            return
        # Without a barrier: rank 0 alone writes and deletes models.
        if self._world.rank == 0:
            self._forget_after(first)
        # A run that continues (first > 0) exported this model before its first checkpoint.
        if first == 0:
            self.offer(policy, step=0, num_steps=num_steps)

    def offer(self, policy: Policy, *, step: int, num_steps: int) -> None:
        """Export the model after `step` steps, if it is due (collective call).

        Call before the checkpoint of this step is saved: a resumed run then finds each model before its checkpoint
        exported, and makes the later ones again.
        """
        if self._curve is None or not self._curve.is_due(step, num_steps=num_steps):
            return
        weights = full_weights(policy, dtype=self._dtype)  # all ranks gather, though only rank 0 writes
        if self._world.rank > 0:
            return

        def write(folder: Path) -> None:
            export_model(weights, self._source, folder, max_position_embeddings=self._window)

        # A full disk or a lost store, each with its own errors, must not end training.
        try:
            self._points.add(step, write)
        except Exception as e:  # noqa: BLE001  # logged, and counted in the stage's notes
            self._lost.append(step)
            log.warning("the model after step %d is not scored: it could not be written: %s", step, e)

    def notes(self) -> tuple[str, ...]:
        """Return a note if some models could not be written."""
        if not self._lost:
            return ()
        return (f"the curve has no score after step {', '.join(map(str, self._lost))}: the model could not be written",)

    def _forget_after(self, first: int) -> None:
        try:
            for step in self._points.waiting():
                if step > first:
                    self._points.drop(step)
        except (OSError, KlearError) as e:
            log.warning("models that wait for their score could not be deleted: %s", e)
