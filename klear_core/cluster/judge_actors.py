"""Define the Ray actor that judges on one node; imports no Ray."""

from __future__ import annotations

import asyncio

from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.types import Verdict
from klear_core.verify.client import JudgeClient
from klear_core.verify.work import Fault, Task


class JudgeActor:
    """Run a judging process with all of its workers, like that of a stage on one machine."""

    def __init__(self, cfg: VerifyConfig, ray_cpus: float) -> None:
        """Use the CPUs that both this process and Ray have on the node, where the settings name no number."""
        cpus = max(1, min(usable_cpus(), int(ray_cpus)))
        workers = {
            "math_workers": cfg.runtime.math_workers or cpus,
            "code_workers": cfg.runtime.code_workers or 2 * cpus,
            "reward_workers": cfg.runtime.reward_workers or cpus,
        }
        runtime = cfg.runtime.model_copy(update=workers)
        self._num_workers = runtime.code_workers
        self._client = JudgeClient(cfg.model_copy(update={"runtime": runtime}))

    async def num_workers(self) -> int:
        """Return the number of programs that run at a time."""
        return self._num_workers

    async def judge(self, task: Task) -> Verdict | Fault:
        """Return the verdict, or the fault that left the task without one."""
        return await asyncio.wrap_future(self._client.submit(task))

    async def close(self) -> None:
        """End the judging process with everything that it started."""
        await asyncio.to_thread(self._client.close)
