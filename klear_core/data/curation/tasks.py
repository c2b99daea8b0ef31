"""Run numbered tasks: in this process if there is little to do, else by the executor that the settings name."""

from __future__ import annotations

from pathlib import Path

from klear_core.config.curate import ExecutorConfig, LocalExecutorConfig
from klear_core.cpus import usable_cpus
from klear_core.data.curation.protocol import Progress, Tasks


def run_tasks(
    name: str,
    tasks: Tasks,
    num_tasks: int,
    *,
    executor: ExecutorConfig,
    folder: Path,
    is_small: bool,
    on_done: Progress,
) -> None:
    """Run the tasks 0 to `num_tasks - 1`, except those that are done. The executor keeps its notes under `folder`.

    Raise the KlearError of a task that failed; ResourceError if its process died.
    """
    missing = [task for task in range(num_tasks) if not tasks.is_done(task)]
    on_done(num_tasks - len(missing))
    if not missing:
        return
    workers = num_workers(executor) if isinstance(executor, LocalExecutorConfig) else 0
    if isinstance(executor, LocalExecutorConfig) and (is_small or min(workers, len(missing)) == 1):
        for number, task in enumerate(missing, 1):
            tasks(task)
            on_done(num_tasks - len(missing) + number)
        return
    from klear_core.data.curation.executors import run_on_executor

    run_on_executor(name, tasks, num_tasks, executor=executor, workers=workers, folder=folder, on_done=on_done)


def num_workers(executor: LocalExecutorConfig) -> int:
    """Return the number of processes: as configured, or one for each core that this process may use."""
    if executor.workers is not None:
        return executor.workers
    return usable_cpus()
