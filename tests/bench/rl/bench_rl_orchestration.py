"""What Ray, the loop and tracking cost: RL steps on Ray actors that sample one token an answer and find nothing to learn.

256 requests a step go to two actors and come back, are judged by a function, filtered, booked and logged to a file and to MLflow
(SQLite), and the weights go round; what is left of sampling is a prefill. 3 % of a step of ten seconds is 0.3 s.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.rl import RlConfig
from klear_core.config.stage import RlJob
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.rl.interfaces import RlSetup
from klear_core.rl.loop import run_rl
from klear_core.train.base_model import prepare_base
from klear_core.types import Difficulty, Domain, MathReference, Outcome, Problem, Verdict
from tasks import tracking
from tasks.stage import StageTelemetry
from tasks.tracking import RunInfo

STEPS, TARGET_S = 20, 0.3


class _Clock:
    """Wall time and the driver's CPU time at the end of each step, its records written."""

    def __init__(self, tracked: Telemetry) -> None:
        self._tracked = tracked
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.sync_s: list[float] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._tracked.log(metrics, step=step)
        self.wall.append(time.monotonic())
        self.cpu.append(time.process_time())
        self.sync_s.append(metrics["rl/time/sync_s"])

    def progress(self, done: int, total: int, note: str = "") -> None:
        self._tracked.progress(done, total, note)


@contextmanager
def _tracked(cfg: RlConfig, folder: Path) -> Iterator[Telemetry]:
    """As a stage's numbers go to its file and to MLflow."""
    workspace = WorkspaceConfig(root=str(folder / "workspace"))
    info = RunInfo(workspace=workspace, run_id="bench", run_name="bench", stage="rl", started_at=datetime.now(UTC))
    metrics_file = folder / "metrics.jsonl"
    with tracking.stage_run(info, RlJob(seed=0, rl=cfg, verify=VerifyConfig()), "bench", [], metrics_file) as run:
        yield StageTelemetry("rl", metrics_file, run)
        run.flush()
        assert not run.trouble, run.trouble


async def _all_wrong(_problem: Problem, _response: str) -> Verdict:
    return Verdict(outcome=Outcome.SCORED, score=0.0)


def measure() -> list[dict[str, object]]:
    """Means over the steps, without the first: MLflow is written to once a second, not at every step."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray

    from klear_core.cluster.rl_workers import RayWorkers

    rollout = {"groups_per_step": 32, "samples_per_group": 8, "sampling": {"max_new_tokens": 1}}
    cfg = RlConfig.model_validate(
        {"num_steps": STEPS, "rollout": rollout, "dtype": "float32", "runtime": {"device": "cpu"}}
    )
    reference = MathReference(answers=("0",))
    problems = [
        Problem(
            problem_id=str(i),
            source="s",
            domain=Domain.MATH,
            question=str(i),
            reference=reference,
            difficulty=Difficulty.EASY,
        )
        for i in range(64)
    ]
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=200 << 20
    )
    with tempfile.TemporaryDirectory() as folder, _tracked(cfg, Path(folder)) as tracked:
        clock = _Clock(tracked)
        base = Path(folder) / "base"
        base.mkdir()
        prepare_base(TinyModelConfig(), seed=0, workdir=base, telemetry=NullTelemetry())
        job = RlSetup(cfg=cfg, model=base, seed=0, workdir=Path(folder) / "rl")
        asyncio.run(run_rl(job, problems, _all_wrong, clock, RayWorkers()))
    ray.shutdown()
    step_s = (clock.wall[-1] - clock.wall[0]) / (STEPS - 1)
    cpu_s = (clock.cpu[-1] - clock.cpu[0]) / (STEPS - 1)
    sync_s = statistics.fmean(clock.sync_s[1:])
    entries = [
        ("rl_orchestration/step/wall_s", step_s, f"<= {TARGET_S}", step_s <= TARGET_S),
        ("rl_orchestration/driver/cpu_s", cpu_s, f"<= {TARGET_S}", cpu_s <= TARGET_S),
        ("rl_orchestration/sync/wall_s", sync_s, "-", True),
    ]
    versions = {"ray": ray.__version__, "torch": torch.__version__, "rollouts": 256, "actors": 2}
    return [
        {"name": n, "value": v, "unit": "s a step", "target": t, "ok": ok, "versions": versions}
        for n, v, t, ok in entries
    ]
