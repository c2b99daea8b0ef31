"""A run is killed, interrupted, damaged and doubled; run again it ends with what it would have ended with."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from klear_command import Command
from processes import title
from small_runs import (
    BEFORE_SFT,
    GONE_IN_S,
    Run,
    assert_same,
    begin_with,
    made,
    stages,
    steps_in,
    until_it_trains,
    work,
)

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.store import LocalStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # seconds on a quiet machine


@pytest.mark.timeout(1800)
def test_a_run_killed_interrupted_moved_and_without_an_actor_goes_on_to_the_same_weights(
    run: Run, tmp_path: Path, straight: Path
):
    workspace = tmp_path / "ws"
    begin_with(straight, workspace, *BEFORE_SFT)
    kill_while_it_trains(run, workspace, "sft")
    interrupt_while_it_trains(run, workspace, "rl", signal.SIGTERM)
    assert_same(workspace, straight, "sft", attempts=2)
    lose_the_last_actor(run, workspace)
    move_while_it_trains(run, workspace, "rl")

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


def move_while_it_trains(run: Run, workspace: Path, kind: str) -> None:
    """SIGUSR1 to the whole group, as schedulers send it: the run saves its last step, and says that it is to go on."""
    moved = run("--until", kind, "--set", f"{kind}.runtime.checkpoint.every_steps=1000")
    until_it_trains(moved, workspace, kind)
    assert moved.interrupt(signal.SIGUSR1) == 75, moved.output
    assert "interrupted; the same command goes on from here" in moved.output
    assert "Traceback" not in moved.output
    assert moved.left_over(within_s=GONE_IN_S) == []
    checkpoints = sorted((work(workspace, kind) / "scratch" / "checkpoints").glob("step-*"))
    assert int(checkpoints[-1].name.removeprefix("step-")) == max(steps_in(work(workspace, kind)))


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
