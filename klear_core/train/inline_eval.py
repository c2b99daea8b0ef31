"""Score the models of some steps while training runs, in a thread of the driver, and log the scores."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from klear_core.artifacts.store import SCRATCH
from klear_core.config.evaluate import InlineEvalConfig
from klear_core.errors import KlearError
from klear_core.metrics import METRICS_FILE, Telemetry, read_metrics
from klear_core.train.checkpoint_files import CheckpointCopies
from klear_core.train.distributed import World, full_weights
from klear_core.train.model import Dtype, Policy, export_model

log = logging.getLogger(__name__)

_POLL_S = 0.5  # between two looks for the next model
_STORE_POLL_S = 10.0  # the same in a shared store, which charges for them

SCORES = (
    "avg",
    "avg_low",
    "avg_high",
    "avg_rerun_low",
    "avg_rerun_high",
    "truncated_frac",
    "unscored_frac",
    "tokens_mean",
)
"""Last parts of the metrics of an inline evaluation, `sft/eval/avg` and so on; the last three are always there."""


def inline_eval_metrics(stage: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a step under the names of its metrics."""
    unknown = scores.keys() - set(SCORES)
    assert not unknown, unknown
    return {f"{stage}/eval/{name}": value for name, value in scores.items()}


def scored_steps(metrics_file: Path, stage: str) -> set[int]:
    """Return the steps whose scores are in the stage's metrics file."""
    name = f"{stage}/eval/tokens_mean"
    return {int(row["step"] or 0) for row in read_metrics(metrics_file) if name in row}


class ModelScorer(Protocol):
    """Scores models on a fixed set of problems, outside of the process or thread that trains."""

    def score(self, model: Path) -> dict[str, float]:
        """Return the scores, by the names in `SCORES`, of the model in a Hugging Face folder."""
        ...

    def stop(self) -> None:
        """End the scoring that runs, and refuse others; any thread may call it."""
        ...


OpenScorer = Callable[[Path], AbstractContextManager[ModelScorer | None]]
"""Returns a context of the scorer for models with the tokenizer of a folder; of None if no scores are to be taken."""


def no_scorer(_folder: Path) -> AbstractContextManager[ModelScorer | None]:
    """Return a context of None."""
    return nullcontext()


class InlineEvalThread:
    """Scores the models that the learner exports to `workdir`, one at a time and in order, and logs the scores.

    Models that are exported meanwhile wait in their folders. A step with a score in the metrics file is not
    scored again.
    """

    def __init__(self, scorer: ModelScorer, telemetry: Telemetry, *, stage: str, workdir: Path) -> None:
        self._scorer = scorer
        self._telemetry = telemetry
        self._stage = stage
        self._exported = ExportedCheckpoints(workdir)
        self._metrics_file = workdir / METRICS_FILE
        self._poll_s = _STORE_POLL_S if self._exported.is_in_store else _POLL_S
        self._is_ending = threading.Event()
        self._is_stopped = False
        self._failures: dict[int, str] = {}
        """Reasons for missing scores, by step."""
        self._trouble = ""
        """Reason why no model can be scored at present; empty if models can be."""
        self._thread = threading.Thread(target=self._run, name="klear-inline-eval", daemon=True)

    def start(self) -> None:
        """Begin with the models that an earlier attempt has left."""
        # A run killed between the two steps of `_score`, logging and deleting, has left these.
        logged = scored_steps(self._metrics_file, self._stage)
        for step in self._exported.waiting():
            if step in logged:
                self._exported.drop(step)
        self._thread.start()

    def finish(self) -> tuple[str, ...]:
        """Wait until all models are scored; return notes if some could not be."""
        log.info("%s: training is done; the last models of the curve are being scored", self._stage)
        self._is_ending.set()
        self._thread.join()
        notes = [f"the curve may lack its last scores: {self._trouble}"] if self._trouble else []
        for step, trouble in self._failures.items():
            notes.append(f"the curve has no score after step {step}: {trouble}")
        return tuple(notes)

    def stop(self) -> None:
        """Give up all models that are not scored yet."""
        self._is_stopped = True
        self._is_ending.set()  # also wakes the thread from its wait between two looks
        self._scorer.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            is_ending = self._is_ending.is_set()  # asked before the look: what is exported in between would be missed
            try:
                waiting = self._exported.waiting()
                if waiting:
                    self._score(waiting[0])
                    continue
                self._trouble = ""
            except Exception as e:  # noqa: BLE001  # disk, shared store, trackers: training goes on without scores
                if str(e) != self._trouble:  # once, not at each look
                    log.warning("%s: the models of the curve cannot be scored for now: %s", self._stage, e)
                self._trouble = str(e)
            if is_ending:
                return
            self._is_ending.wait(self._poll_s)

    def _score(self, step: int) -> None:
        # The base is exported again by a run that was killed before its first checkpoint. No other row can be trusted
        # here: those of steps that are trained again are deleted only when the first of these is logged.
        if step == 0 and 0 in scored_steps(self._metrics_file, self._stage):
            self._exported.drop(step)
            return
        trouble = ""
        try:
            scores = self._scorer.score(self._exported.fetch(step))
        except Exception as e:  # noqa: BLE001  # whatever an engine or judge raises: training goes on without a score
            trouble = " ".join(str(e).split()) or type(e).__name__
        if self._is_stopped or step not in self._exported.waiting():
            return  # the learner went back to an earlier checkpoint, and will export this step again
        if trouble:
            log.warning("%s: the model after step %d could not be scored: %s", self._stage, step, trouble)
            self._failures[step] = trouble
        else:
            # `add`, because training may have logged later steps in the meantime.
            self._telemetry.add(inline_eval_metrics(self._stage, scores), step=step)
            self._failures.pop(step, None)
        self._exported.drop(step)


@contextmanager
def scoring(
    scorer: ModelScorer | None, telemetry: Telemetry, *, stage: str, workdir: Path
) -> Iterator[InlineEvalThread | None]:
    """Yield the running thread, or None without a scorer; an exception in the block stops it."""
    if scorer is None:
        yield None
        return
    thread = InlineEvalThread(scorer, telemetry, stage=stage, workdir=workdir)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()  # after `finish` nothing is left to stop


# ---- exported checkpoints ----
# Export the weights of some steps while training goes on, each to a folder that waits for its score.


_NAME = re.compile(r"step-(\d{8})")


class ExportedCheckpoints:
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


class CheckpointExporter:
    """Exports the models whose inline evaluation is due; every rank must make the same calls in order."""

    def __init__(
        self,
        cfg: InlineEvalConfig | None,
        *,
        workdir: Path,
        source: Path,
        window: int | None,
        dtype: Dtype,
        world: World,
    ) -> None:
        """`source` is the folder of config and tokenizer; without `cfg` no model is due."""
        self._cfg = cfg
        self._exported = ExportedCheckpoints(workdir)
        self._source = source
        self._window = window
        self._dtype = dtype
        self._world = world
        self._lost: list[int] = []
        """Steps whose model could not be written."""

    def begin(self, policy: Policy, *, first: int, num_steps: int) -> None:
        """Delete the models of steps after `first`, from which training goes on, and export the model before step 1."""
        if self._cfg is None:
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
        if self._cfg is None or not self._cfg.is_due(step, num_steps=num_steps):
            return
        weights = full_weights(policy, dtype=self._dtype)  # all ranks gather, though only rank 0 writes
        if self._world.rank > 0:
            return

        def write(folder: Path) -> None:
            export_model(weights, self._source, folder, max_position_embeddings=self._window)

        # A full disk or a lost store, each with its own errors, must not end training.
        try:
            self._exported.add(step, write)
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
            for step in self._exported.waiting():
                if step > first:
                    self._exported.drop(step)
        except (OSError, KlearError) as e:
            log.warning("models that wait for their score could not be deleted: %s", e)
