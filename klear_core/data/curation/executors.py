"""Run tasks by datatrove's executors: on this machine's cores, on Ray or on Slurm. The only module that imports it.

datatrove divides the tasks among workers, skips those that it has marked as complete, and submits jobs. Two things are
ours: a local pool that reports a killed worker (datatrove's waits for its result forever), and errors in files,
because datatrove only logs those of Ray and Slurm.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from threading import Thread
from typing import Any, Literal, assert_never

from datatrove.executor import RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from klear_core import errors
from klear_core.config.curate import ExecutorConfig, LocalExecutorConfig, RayExecutorConfig, SlurmExecutorConfig
from klear_core.data.curation.work_plan import Progress, Tasks
from klear_core.errors import ConfigError, KlearError, ResourceError
from klear_core.stopping import die_with_parent, sigterm_handler_kept

log = logging.getLogger(__name__)

# datatrove sends its log to the terminal. Also in workers, which import this module before their first task.
logger.disable("datatrove")

_POLL_S = 0.5
_SLURM_POLL_S = 10.0
_SLURM_ASK_S = 60.0
_SLURM_SILENCE_S = 1800.0
"""Seconds without an answer of Slurm's controller after which the stage stops; a restart of it takes minutes."""


class TaskStep(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Runs one of our tasks as a pipeline of one step; datatrove's rank is the task's number."""

    name = "curation"
    type = "klear"

    def __init__(self, tasks: Tasks, errors_folder: Path) -> None:
        super().__init__()
        self.tasks = tasks
        self.errors_folder = errors_folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:  # noqa: ARG002  datatrove's signature
        """Run the task; leave its error in a file, because the executors of clusters lose it."""
        try:
            self.tasks(rank)
        except Exception as e:
            error = {"type": type(e).__name__, "message": str(e), "trace": traceback.format_exc()}
            (self.errors_folder / f"{rank:05d}.json").write_text(json.dumps(error))
            raise


class LocalExecutor(LocalPipelineExecutor):  # type: ignore[misc]
    """Runs tasks in processes of this machine, which exit with this process even if it is killed."""

    on_done: Progress

    def run(self) -> None:
        """Run all tasks that are not complete. Raise the first error, or ResourceError if a worker died."""
        import multiprocessing

        from pebble import ProcessExpired, ProcessPool

        ranks = self.get_incomplete_ranks()
        done = self.tasks - len(ranks)
        context = multiprocessing.get_context("forkserver")
        on_done, self.on_done = self.on_done, _ignore  # `self` is pickled for the workers, which need no callback
        with ProcessPool(min(self.workers, len(ranks)), context=context, initializer=_start_worker) as pool:
            futures = [pool.schedule(self._run_for_rank, args=[rank]) for rank in ranks]
            try:
                for future in futures:
                    future.result()
                    done += 1
                    on_done(done)
            except (ProcessExpired, BrokenProcessPool) as e:
                pool.stop()
                raise ResourceError(
                    f"a process of the curation died ({e}); if memory ran out, set curate.runtime.executor.workers to "
                    "a smaller number, and run it again: what is done is kept"
                ) from e
            except BaseException:
                pool.stop()
                raise


class SlurmExecutor(SlurmPipelineExecutor):  # type: ignore[misc]
    """Submits tasks as a job array, without a job that merges statistics."""

    def launch_merge_stats(self) -> None:
        """Do nothing."""


def run_on_executor(
    name: str, tasks: Tasks, num_tasks: int, *, executor: ExecutorConfig, workers: int, folder: Path, on_done: Progress
) -> None:
    """Run tasks by an executor, and wait until all are done; raise the first task's error."""
    notes, errors_folder = folder / name, folder / name / "errors"
    shutil.rmtree(errors_folder, ignore_errors=True)
    errors_folder.mkdir(parents=True)
    pipeline = [TaskStep(tasks, errors_folder)]
    match executor:
        case LocalExecutorConfig():
            local = LocalExecutor(pipeline, tasks=num_tasks, workers=workers, logging_dir=str(notes))
            local.on_done = on_done
            local.run()
        case RayExecutorConfig():
            on_ray = RayPipelineExecutor(
                pipeline,
                tasks=num_tasks,
                workers=-1 if executor.workers is None else executor.workers,
                cpus_per_task=executor.cpus_per_task,
                mem_per_cpu_gb=executor.memory_gb_per_cpu,
                logging_dir=str(notes),
            )
            _run_on_ray(on_ray, executor, errors_folder, on_done)
        case SlurmExecutorConfig():
            _run_on_slurm(slurm_executor(pipeline, num_tasks, executor, notes), errors_folder, on_done)
        case _:
            assert_never(executor)
    lost = [task for task in range(num_tasks) if not tasks.is_done(task)]
    if lost:
        _raise_error_in(errors_folder)
        raise ResourceError(
            f"{name}: {len(lost)} of {num_tasks} tasks did not finish; their logs are in {notes / 'logs'}"
        )


def slurm_executor(pipeline: list[TaskStep], num_tasks: int, cfg: SlurmExecutorConfig, notes: Path) -> SlurmExecutor:
    """Return the executor that submits tasks to Slurm."""
    return SlurmExecutor(
        pipeline,
        tasks=num_tasks,
        time=cfg.time,
        partition=cfg.partition,
        workers=-1 if cfg.workers is None else cfg.workers,
        cpus_per_task=cfg.cpus_per_task,
        mem_per_cpu_gb=cfg.memory_gb_per_cpu,
        qos=cfg.qos,
        sbatch_args=dict(cfg.sbatch),
        env_command=cfg.setup or f"export PATH={Path(sys.executable).parent}:$PATH",
        job_name="klear-curate",
        logging_dir=str(notes),
    )


def _run_on_ray(executor: RayPipelineExecutor, cfg: RayExecutorConfig, errors_folder: Path, on_done: Progress) -> None:
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        address = cfg.address or os.environ.get("RAY_ADDRESS") or "local"
        # A cluster knows its own cores; a local one is limited to those that this process may use.
        num_cpus = cfg.workers if address == "local" else None
        with sigterm_handler_kept():
            ray.init(
                address=address, num_cpus=num_cpus, log_to_driver=False, include_dashboard=False, logging_level="error"
            )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            executor.run()
        except BaseException as e:  # noqa: BLE001  raised below, in the thread that waits
            failures.append(e)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            on_done(executor.tasks - len(executor.get_incomplete_ranks()))
            _raise_error_in(errors_folder)
    finally:
        if is_ours:
            with sigterm_handler_kept():
                ray.shutdown()
    for failure in failures:
        raise failure


def _run_on_slurm(executor: SlurmExecutor, errors_folder: Path, on_done: Progress) -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError("curate.runtime.executor.kind = 'slurm', but there is no command sbatch on this machine")
    executor.run()
    answered = time.monotonic()
    while incomplete := len(executor.get_incomplete_ranks()):
        on_done(executor.tasks - incomplete)
        _raise_error_in(errors_folder)
        queue = ask_queue(str(executor.job_id))
        if queue == "ended":
            return
        if queue == "queued":
            answered = time.monotonic()
        elif time.monotonic() - answered > _SLURM_SILENCE_S:
            raise ResourceError(
                f"Slurm has not answered for {_SLURM_SILENCE_S / 60:.0f} minutes; job {executor.job_id} may still run. "
                "Run this again when squeue answers: finished tasks are kept"
            )
        time.sleep(_SLURM_POLL_S)
    on_done(executor.tasks)


def ask_queue(job_id: str) -> Literal["queued", "ended", "no answer"]:
    """Return what Slurm says of a job. It forgets those that ended; a controller that is busy or away says nothing."""
    try:
        listed = subprocess.run(
            ["squeue", "--noheader", "--jobs", job_id],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SLURM_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        log.warning("squeue does not answer, so job %s is taken as queued: %s", job_id, e)
        return "no answer"
    if listed.stdout.strip():
        return "queued"
    if listed.returncode == 0 or "Invalid job id" in listed.stderr:
        return "ended"
    log.warning("squeue does not answer, so job %s is taken as queued: %s", job_id, listed.stderr.strip()[:300])
    return "no answer"


def _raise_error_in(folder: Path) -> None:
    """Raise the error of the first task that left one."""
    for file in sorted(folder.glob("*.json")):
        error = json.loads(file.read_text())
        kind = getattr(errors, error["type"], None)
        if isinstance(kind, type) and issubclass(kind, KlearError):
            raise kind(error["message"])
        raise ResourceError(f"a task of the curation failed: {error['type']}: {error['message']}\n{error['trace']}")


def _start_worker() -> None:
    """Make this process exit with its parent, even if that is killed, and ignore Ctrl-C, which the parent handles."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ignore(_done: int) -> None:
    pass
