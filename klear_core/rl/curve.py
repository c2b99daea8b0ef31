"""Score the policy on a fixed set every few steps, by the engines that sample, while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from klear_core.config.rl import RlConfig
from klear_core.generate.engine import InferenceEngine
from klear_core.metrics import METRICS_FILE, Telemetry
from klear_core.train.curve import logged_points, point_metrics


class Exam(Protocol):
    """Answers and judges a fixed set of problems with the weights that an engine has."""

    async def score(self, engine: InferenceEngine) -> dict[str, float]:
        """Return the score with its intervals and shares, by the names in `POINT`."""
        ...


OpenExam = Callable[[Path], AbstractContextManager[Exam | None]]
"""Returns a context of the exam, with its judges, for the model in a folder; of None if no scores are to be taken."""


def no_exam(_folder: Path) -> AbstractContextManager[Exam | None]:
    """Return a context of None."""
    return nullcontext()


class Curve:
    """Make the points of the curve, one at a time; leaving the context cancels the one that is being made.

    A point belongs to one version of the weights: its requests are sent once the engines have loaded that version, run
    beside the next rollouts and the learner's update, and are awaited before the engines load the next version.
    """

    def __init__(self, exam: Exam | None, telemetry: Telemetry, cfg: RlConfig, *, workdir: Path) -> None:
        self._exam = exam
        self._metrics_file = workdir / METRICS_FILE
        self._telemetry = telemetry
        self._curve = cfg.runtime.curve
        self._num_steps = cfg.num_steps
        self._running: tuple[int, asyncio.Task[dict[str, float]]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            _, task = self._running
            self._running = None
            task.cancel()
            # Wait for it and retrieve its error: the loop is already ending for another reason.
            await asyncio.gather(task, return_exceptions=True)

    def resume(self, engine: InferenceEngine, *, step: int) -> None:
        """Start the point of the weights that training resumes from, unless an earlier attempt has logged it."""
        # Only this step is looked up: rows of later steps, which are trained again, stay in the metrics file until the
        # next step is logged.
        logged = logged_points(self._metrics_file, "rl")
        if step not in logged:
            self.start(engine, step=step)

    def start(self, engine: InferenceEngine, *, step: int) -> None:
        """Start the point of the weights after `step` steps, if one is due."""
        if self._exam is None or self._curve is None:
            return
        if self._curve.is_due(step, num_steps=self._num_steps):
            assert self._running is None, step  # the loop calls `finish` before the engines load new weights
            # Not awaited here: `finish` collects the result, while rollouts and update go on.
            self._running = (step, asyncio.create_task(self._exam.score(engine)))

    async def finish(self) -> None:
        """Wait for the point that is being made, if there is one, and log it."""
        if self._running is None:
            return
        step, task = self._running
        metrics = await task
        self._running = None  # only now: if the wait fails or is cancelled, `__aexit__` still has the task
        # `add`, because `log` would replace the rows of that step and of later ones.
        self._telemetry.add(point_metrics("rl", metrics), step=step)
