"""Define the Ray actor that judges on one node; imports no Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

from klear_core.artifacts.home import Home, home_of
from klear_core.artifacts.store import BUILDING
from klear_core.code_tests import StoredTests
from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.types import Verdict
from klear_core.verify.client import JudgeClient
from klear_core.verify.work import CodeTask, Fault, Task


class JudgeActor:
    """Run a judging process with all of its workers, like that of a stage on one machine."""

    def __init__(self, cfg: VerifyConfig, ray_cpus: float) -> None:
        """Use the CPUs that both this process and Ray have on the node, where the settings name no number."""
        cpus = max(1, min(usable_cpus(), int(ray_cpus)))
        workers = {
            "math_workers": cfg.runtime.math_workers or cpus,
            # Twice as many, because half of the wall time of a short program is the start of its jail, asleep.
            "code_workers": cfg.runtime.code_workers or 2 * cpus,
            "reward_workers": cfg.runtime.reward_workers or cpus,
        }
        runtime = cfg.runtime.model_copy(update=workers)
        self._num_workers = runtime.code_workers
        self._client = JudgeClient(cfg.model_copy(update={"runtime": runtime}))

    async def num_workers(self) -> int:
        """Return the number of programs that run at a time."""
        return self._num_workers

    async def judge(self, task: Task, home: Home | None = None) -> Verdict | Fault:
        """Return the verdict, or the fault that left the task without one; `home` tells where stored tests are."""
        # In a thread: the first task of a file fetches it from the store.
        if home is not None:
            task = await asyncio.to_thread(_with_tests_here, task, home)
        return await asyncio.wrap_future(self._client.submit(task))

    async def close(self) -> None:
        """End the judging process with everything that it started."""
        await asyncio.to_thread(self._client.close)


def home_of_tests(task: Task) -> Home | None:
    """Return where another node gets the tests of a task from; None if it holds them, or without a shared store."""
    if isinstance(task, CodeTask) and isinstance(task.reference.tests, StoredTests):
        return _home_of(str(Path(task.reference.tests.path).parent))
    return None


@cache
def _home_of(folder: str) -> Home | None:
    # Artifacts alone are in the store: tests in a working folder are the driver's.
    return None if BUILDING in Path(folder).parts else home_of(Path(folder))


def _with_tests_here(task: Task, home: Home) -> Task:
    """Return the task with the path that its stored tests have on this node."""
    if not isinstance(task, CodeTask) or not isinstance(task.reference.tests, StoredTests):
        return task
    tests = replace(task.reference.tests, path=_file_here(task.reference.tests.path, home))
    return replace(task, reference=replace(task.reference, tests=tests))


@cache
def _file_here(path: str, home: Home) -> str:
    return str(home.here(Path(path)))
