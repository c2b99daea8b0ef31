"""A run is killed, interrupted, damaged and doubled; run again it ends with what it would have ended with."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from klear_command import FEW_PROBLEMS, Command, start
from processes import title

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # seconds on a quiet machine

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
GONE_IN_S = 30.0

Run = Callable[..., Command]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a run that nothing happened to."""
    root = tmp_path_factory.mktemp("straight")
    command = small_run(root, "--until", "rl")
    assert command.wait() == 0, command.output
    assert command.left_over(within_s=GONE_IN_S) == []
    return root / "ws"


@pytest.fixture
def run(fresh: Path, tmp_path: Path) -> Iterator[Run]:
    """Starts small runs in the test's workspace; whatever they leave behind ends with the test."""
    with ExitStack() as cleaning:

        def begin(*args: str, **environment: str) -> Command:
            command = small_run(tmp_path, *args, **environment)
            cleaning.callback(command.end)
            return command

        yield begin


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


@pytest.mark.timeout(1800)
def test_a_run_killed_interrupted_and_without_an_actor_goes_on_to_the_same_weights(
    run: Run, tmp_path: Path, straight: Path
):
    workspace = tmp_path / "ws"
    begin_with(straight, workspace, *BEFORE_SFT)
    kill_while_it_trains(run, workspace, "sft")
    interrupt_while_it_trains(run, workspace, "rl", signal.SIGTERM)
    assert_same(workspace, straight, "sft", attempts=2)
    lose_the_last_actor(run, workspace)
    kill_while_it_trains(run, workspace, "rl")

    again = run("--until", "rl")
    assert again.wait() == 0, again.output
    assert again.left_over(within_s=GONE_IN_S) == []
    assert stages(again.output, "=") == [*BEFORE_SFT, "sft"]
    assert stages(again.output, "✓") == ["rl"]
    assert_same(workspace, straight, "rl", attempts=4)
    assert not list((workspace / "artifacts" / ".building").iterdir())
    states = states_in_prefect(workspace, "flow_run")
    assert (len(states), states.count("COMPLETED"), "RUNNING" in states) == (5, 1, False)
    assert "RUNNING" not in states_in_prefect(workspace, "task_run")


def lose_the_last_actor(run: Run, workspace: Path) -> None:
    """With no replacement allowed, the loss of a rollout actor is one error that names it."""
    command = run("--until", "rl", "--set", "rl.runtime.max_restarts=0", "--set", "workspace.retries=0")
    until_it_trains(command, workspace, "rl")
    processes = psutil.Process(command.process.pid).children(recursive=True)
    next(p for p in processes if title(p).startswith("ray::RolloutActor")).kill()
    assert command.wait() not in (0, 130)
    output = command.output
    assert re.search(r"rollout actor \d was lost.*; runtime\.max_restarts = 0", output), output
    assert "(raylet)" not in output, output
    assert output.count("error:") == 1, output
    assert "Traceback" not in output, output
    assert command.left_over(within_s=GONE_IN_S) == []


def interrupt_while_it_trains(run: Run, workspace: Path, kind: str, number: signal.Signals) -> None:
    stopped = run("--until", kind)
    until_it_trains(stopped, workspace, kind)
    assert_ends_well_when_interrupted(stopped, number)
    assert not LocalStore(workspace / "artifacts").folders(kind)


def assert_ends_well_when_interrupted(stopped: Command, number: signal.Signals) -> None:
    assert stopped.interrupt(number) == 130, stopped.output
    assert "interrupted; the same command goes on from here" in stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.left_over(within_s=GONE_IN_S) == []


def kill_while_it_trains(run: Run, workspace: Path, kind: str) -> None:
    killed = run("--until", "rl")
    until_it_trains(killed, workspace, kind)
    killed.kill()
    assert killed.left_over(within_s=GONE_IN_S) == []
    assert not LocalStore(workspace / "artifacts").folders(kind)
    checkpoints = work(workspace, kind) / "scratch" / "checkpoints"
    assert any(checkpoints.iterdir())


def until_it_trains(command: Command, workspace: Path, kind: str) -> None:
    """Wait for a step that no earlier attempt has made, and a checkpoint."""
    seen = max([*steps_in(work(workspace, kind)), CHECKPOINT_EVERY[kind]])
    command.until(lambda: max(steps_in(work(workspace, kind)), default=0) > seen)


def assert_same(workspace: Path, straight: Path, kind: str, *, attempts: int) -> None:
    """Check a stage that was ended early against one that was not: the same steps and weights, after so many attempts."""
    assert read_manifest(made(workspace, kind)).attempts == attempts
    assert steps_in(made(workspace, kind)) == steps_in(made(straight, kind))
    assert weights(workspace, kind) == weights(straight, kind)


def states_in_prefect(workspace: Path, table: str) -> list[str]:
    """The states of all runs in the workspace's own database."""
    with closing(sqlite3.connect(workspace / "prefect" / "prefect.db")) as database:
        return sorted(state for (state,) in database.execute(f"SELECT state_type FROM {table}"))


def test_an_interrupted_distillation_ends_soon_says_how_to_go_on_and_goes_on(run: Run, tmp_path: Path, straight: Path):
    before = ("benchmarks", "curate", "base")
    begin_with(straight, tmp_path / "ws", *before)
    chosen = ("--until", "distill", "--set", "distill.samples_per_problem=64")  # seconds, to be hit in
    stopped = run(*chosen)
    stopped.until(lambda: "… distill" in stopped.output)
    assert_ends_well_when_interrupted(stopped, signal.SIGINT)
    assert not LocalStore(tmp_path / "ws" / "artifacts").folders("distill")

    again = run(*chosen)
    assert again.wait() == 0, again.output
    assert stages(again.output, "=") == list(before)


def flip_a_byte(folder: Path) -> Path:
    file = folder / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def lose_a_shard(folder: Path) -> Path:
    file = sorted((folder / "traces").glob("*.parquet"))[0]
    file.unlink()
    return file


def test_damaged_artifacts_are_named_kept_and_made_again(run: Run, tmp_path: Path, straight: Path):
    workspace = tmp_path / "ws"
    begin_with(straight, workspace, *BEFORE_SFT)
    intact = {kind: checksums(made(workspace, kind)) for kind in ("base", "distill")}
    damaged = [flip_a_byte(made(workspace, "base")), lose_a_shard(made(workspace, "distill"))]
    again = run("--until", "distill")
    assert again.wait() == 0, again.output
    assert stages(again.output, "✓") == ["base", "distill"]
    assert all(str(file) in again.output for file in damaged)
    assert again.output.count("will be built again") == 2
    aside = (workspace / "artifacts" / ".aside").iterdir()
    assert sorted(f.name.split("-")[:2] for f in aside) == [["corrupt", "base"], ["corrupt", "distill"]]
    assert {kind: checksums(made(workspace, kind)) for kind in intact} == intact


def checksums(folder: Path) -> dict[str, str]:
    """Those of the files that have no times in them."""
    return {f.path: f.sha256 for f in read_manifest(folder).files if f.path != "metrics.jsonl"}


def test_of_two_runs_at_once_one_builds_and_the_other_waits_and_reuses(run: Run, fresh: Path, tmp_path: Path):
    shutil.rmtree(fresh)  # from nothing: the databases too are made once
    both = [run("--until", "distill"), run("--until", "distill")]
    assert [command.wait() for command in both] == [0, 0], "\n".join(c.output for c in both)
    for stage in BEFORE_SFT:
        assert sorted(mark for c in both for mark in "=✓" if stage in stages(c.output, mark)) == ["=", "✓"]
    for kind in BEFORE_SFT:
        assert read_manifest(made(tmp_path / "ws", kind)).attempts == 1
