"""Small runs of the smoke profile for drills: how they are started, and what they leave."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from klear_command import FEW_PROBLEMS, Command, start

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.metrics import read_metrics

SMALL = (
    *FEW_PROBLEMS,
    "sft.rows_per_step=16",
    "sft.max_steps=80",
    "sft.runtime.checkpoint.every_steps=10",
    "rl.num_steps=8",
    "rl.rollout.groups_per_step=6",
    "rl.runtime.checkpoint.every_steps=1",
)
CHECKPOINT_EVERY = {"sft": 10, "rl": 1}
BEFORE_SFT = ("benchmarks", "curate", "base", "distill")
GONE_IN_S = 90.0
IN_TIME_S = 1800.0
"""Time of a whole run on a busy machine; a minute on one that is not."""

Run = Callable[..., Command]
"""Starts a small run with more arguments and environment variables."""


def small_run(root: Path, *args: str, **environment: str) -> Command:
    settings = [part for setting in (*SMALL, f"workspace.root={root / 'ws'}") for part in ("--set", setting)]
    log = root / f"{len(list(root.glob('*.log')))}.log"
    return start("run", "configs/smoke", *settings, *args, log=log, **environment)


def begin_with(straight: Path, workspace: Path, *kinds: str) -> None:
    """Put the straight run's artifacts of these kinds into another workspace."""
    for kind in kinds:
        shutil.copytree(straight / "artifacts" / kind, workspace / "artifacts" / kind)


def work(workspace: Path, kind: str) -> Path:
    """The folder in which a stage is being built; one that does not exist before it is."""
    return next((workspace / "artifacts" / ".building").glob(f"{kind}-*/work"), workspace / "none")


def steps_in(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(folder / "metrics.jsonl")]


def made(workspace: Path, kind: str) -> Path:
    (folder,) = LocalStore(workspace / "artifacts").folders(kind)
    return folder


def weights(workspace: Path, kind: str) -> bytes:
    return (made(workspace, kind) / "model" / "model.safetensors").read_bytes()


def stages(output: str, mark: str) -> list[str]:
    """Those that the console marks as reused (`=`) or made (`✓`)."""
    return re.findall(rf"^ +{mark} (\w+)", output, re.MULTILINE)


def until_it_trains(command: Command, workspace: Path, kind: str) -> None:
    """Wait for a step that no earlier attempt has made, and a checkpoint."""
    seen = max([*steps_in(work(workspace, kind)), CHECKPOINT_EVERY[kind]])
    command.until(lambda: max(steps_in(work(workspace, kind)), default=0) > seen)


def assert_same(workspace: Path, straight: Path, kind: str, *, attempts: int) -> None:
    """Check a stage that was ended early against one that was not: the same steps and weights, after so many attempts."""
    assert read_manifest(made(workspace, kind)).attempts == attempts
    assert steps_in(made(workspace, kind)) == steps_in(made(straight, kind))
    assert weights(workspace, kind) == weights(straight, kind)
