"""Score models on the fixed set of a curve, each in a process of its own beside the training.

Scoring therefore cannot affect the training process: not its threads, nor its random numbers, nor by an engine's crash.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from klear_core.config.curve import CurveJob
from klear_core.config.settings import Settings
from klear_core.errors import ResourceError
from klear_core.evaluate.checkpoints import open_exam, score_with, spec_of
from klear_core.generate.factory import start_here
from klear_core.verify import build_judge_pool

_PR_SET_PDEATHSIG = 1


class ScoreRequest(Settings):
    """The input of the process, as JSON."""

    job: CurveJob
    model: Path
    """Hugging Face folder."""
    seed: int


class ProcessScorer:
    """Starts a process for each model; see `ModelScorer`."""

    def __init__(self, job: CurveJob, *, seed: int, hides_gpus: bool = False) -> None:
        """`hides_gpus` keeps the engine off GPUs, all of which have other work."""
        self._job = job
        self._seed = seed
        self._hides_gpus = hides_gpus
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def score(self, model: Path) -> dict[str, float]:
        """Return the point of a model. Raise ResourceError if the process fails, with the last line that it wrote."""
        request = ScoreRequest(job=self._job, model=model, seed=self._seed)
        process = self._start()
        # Thread and process end together: the kernel kills the process if this thread is gone; see `main`.
        written, complaints = process.communicate(request.model_dump_json().encode())
        with self._lock:
            self._process = None
        if process.returncode != 0:
            last = complaints.decode(errors="replace").strip().rpartition("\n")[2]
            raise ResourceError(f"the scoring process ended with exit status {process.returncode}: {last}")
        # Libraries may print before.
        point: dict[str, float] = json.loads(written.decode().strip().rpartition("\n")[2])
        return point

    def stop(self) -> None:
        """Kill the process that runs, with those of its engine, and start no more."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._hides_gpus else {}
        with self._lock:
            if self._is_stopped:
                raise ResourceError("the scorer was stopped")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "klear_core.evaluate.model_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the run, which then stops the scorer
                env=os.environ | hidden,
            )
            return self._process


@contextmanager
def process_scorer(job: CurveJob, folder: Path, *, seed: int, hides_gpus: bool = False) -> Iterator[ProcessScorer]:
    """Yield a scorer of models with the tokenizer of `folder`; raise what `open_exam` raises, before anything is spent.

    Judges are on this machine, in the scorer's processes.
    """
    # Opened and closed again only to raise now what every scoring process would raise after training has begun.
    with open_exam(job, build_judge_pool, folder, seed=seed):
        pass
    yield ProcessScorer(job, seed=seed, hides_gpus=hides_gpus)


def main() -> None:
    """Read a request from standard input, and write the point as the last line of standard output."""
    # A run that is killed cannot end this process itself.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = ScoreRequest.model_validate_json(sys.stdin.buffer.read())
    job, seed = request.job, request.seed
    with open_exam(job, build_judge_pool, request.model, seed=seed) as exam:
        point = asyncio.run(score_with(exam, start_here, spec_of(job, request.model, seed=seed)))
    sys.stdout.write(json.dumps(point, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
