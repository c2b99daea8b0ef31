"""Score the models of a curve with an engine on GPUs of the Ray cluster that the learner leaves free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from klear_core.artifacts.home import Home
from klear_core.cluster.engine_plan import EnginePlan
from klear_core.cluster.engine_pool import start_planned
from klear_core.cluster.judge_pool import build_cluster_judges
from klear_core.config.curve import CurveJob
from klear_core.config.evaluate import EnginesRuntime
from klear_core.errors import ResourceError
from klear_core.evaluate.checkpoints import open_exam, score_with, spec_of

_MAX_RESTARTS = 1  # of an engine while one model is scored; a score that fails is reported, and training continues


class RayScorer:
    """Starts an engine actor for each model, so that its GPUs are free in between; see `ModelScorer`."""

    def __init__(self, job: CurveJob, plan: EnginePlan, *, seed: int, home: Home | None, key: str) -> None:
        """`home` is that of the stage: nodes with other disks get the models from its store."""
        self._job = job
        self._seed = seed
        self._home = home
        self._start = partial(start_planned, plan=plan, runtime=EnginesRuntime(max_restarts=_MAX_RESTARTS), key=key)
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[dict[str, float]]] | None = None
        self._is_stopped = False

    def score(self, model: Path) -> dict[str, float]:
        """Return the point of a model. Raise ResourceError if no engine starts, or after `stop`."""
        try:
            return asyncio.run(self._score(model))
        except asyncio.CancelledError:
            raise ResourceError("the scorer was stopped") from None

    def stop(self) -> None:
        """Cancel the scoring that runs, and start no more."""
        with self._lock:
            self._is_stopped = True
            # Called on another thread than the event loop's, to which asyncio's objects belong.
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    async def _score(self, model: Path) -> dict[str, float]:
        spec = replace(spec_of(self._job, model, seed=self._seed), home=self._home, is_sent=True)
        with open_exam(self._job, build_cluster_judges, model, seed=self._seed) as exam:
            task = asyncio.ensure_future(score_with(exam, self._start, spec))
            with self._lock:
                if self._is_stopped:  # before there was a task to cancel
                    task.cancel()
                self._running = asyncio.get_running_loop(), task
            try:
                return await task
            finally:
                with self._lock:
                    self._running = None


@contextmanager
def ray_scorer(
    job: CurveJob, folder: Path, *, plan: EnginePlan, seed: int, home: Home | None, key: str
) -> Iterator[RayScorer]:
    """Yield a scorer of models with `folder`'s tokenizer; raise what `open_exam` raises, before training begins."""
    with open_exam(job, build_cluster_judges, folder, seed=seed):
        pass
    yield RayScorer(job, plan, seed=seed, home=home, key=key)
