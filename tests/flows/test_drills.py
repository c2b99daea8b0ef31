"""A run is killed, interrupted, damaged and doubled; run again it ends with what it would have ended with."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from klear_command import FEW_PROBLEMS, Command, start

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # seconds on a quiet machine

SMALL = (
    *FEW_PROBLEMS,
    "sft.rows_per_step=16",
    "sft.max_steps=80",
    "sft.runtime.checkpoint.every_steps=10",
    "rl.num_steps=4",
    "rl.rollout.groups_per_step=6",
    "rl.runtime.checkpoint.every_steps=2",
)
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


@pytest.mark.parametrize(("kind", "num_steps", "kill_at"), [("sft", 80, 25), ("rl", 4, 3)])
def test_a_run_killed_while_it_trains_goes_on_from_its_checkpoint_to_the_same_weights(
    run: Run, tmp_path: Path, straight: Path, kind: str, num_steps: int, kill_at: int
):
    before = (*BEFORE_SFT, "sft") if kind == "rl" else BEFORE_SFT
    begin_with(straight, tmp_path / "ws", *before)
    killed = run("--until", kind)
    killed.until(lambda: len(steps_in(work(tmp_path / "ws", kind))) >= kill_at)
    killed.kill()
    assert killed.left_over(within_s=GONE_IN_S) == []
    assert not LocalStore(tmp_path / "ws" / "artifacts").folders(kind)
    checkpoint = work(tmp_path / "ws", kind) / "scratch" / "checkpoints"
    assert any(checkpoint.iterdir())

    again = run("--until", kind)
    assert again.wait() == 0, again.output
    assert stages(again.output, "=") == list(before)
    assert stages(again.output, "✓") == [kind]
    assert read_manifest(made(tmp_path / "ws", kind)).attempts == 2
    assert steps_in(made(tmp_path / "ws", kind)) == list(range(1, num_steps + 1))
    assert weights(tmp_path / "ws", kind) == weights(straight, kind)
    assert not list((tmp_path / "ws" / "artifacts" / ".building").iterdir())
    assert states_in_prefect(tmp_path / "ws", "flow_run") == ["COMPLETED", "CRASHED"]
    assert "RUNNING" not in states_in_prefect(tmp_path / "ws", "task_run")


def states_in_prefect(workspace: Path, table: str) -> list[str]:
    """The states of all runs in the workspace's own database."""
    with closing(sqlite3.connect(workspace / "prefect" / "prefect.db")) as database:
        return sorted(state for (state,) in database.execute(f"SELECT state_type FROM {table}"))


@pytest.mark.parametrize(
    ("kind", "number"), [("distill", signal.SIGINT), ("sft", signal.SIGTERM), ("rl", signal.SIGINT)]
)
def test_an_interrupted_run_ends_soon_says_how_to_go_on_and_goes_on(
    run: Run, tmp_path: Path, straight: Path, kind: str, number: signal.Signals
):
    before = ("benchmarks", "curate", "base", "distill", "sft")[: {"distill": 3, "sft": 4, "rl": 5}[kind]]
    begin_with(straight, tmp_path / "ws", *before)
    chosen = (
        "--until",
        kind,
        *(("--set", "distill.samples_per_problem=64") if kind == "distill" else ()),
    )  # seconds, to be hit in
    stopped = run(*chosen)
    has_begun = {"distill": lambda: f"… {kind}" in stopped.output}.get(
        kind, lambda: bool(steps_in(work(tmp_path / "ws", kind)))
    )
    stopped.until(has_begun)
    assert stopped.interrupt(number) == 130, stopped.output
    assert "interrupted; the same command goes on from here" in stopped.output
    assert "Traceback" not in stopped.output
    assert stopped.left_over(within_s=GONE_IN_S) == []
    assert not LocalStore(tmp_path / "ws" / "artifacts").folders(kind)

    again = run(*chosen)
    assert again.wait() == 0, again.output
    assert stages(again.output, "=") == list(before)
    assert again.left_over(within_s=GONE_IN_S) == []


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


@pytest.mark.parametrize(("kind", "damage"), [("base", flip_a_byte), ("distill", lose_a_shard)])
def test_a_damaged_artifact_is_named_kept_and_made_again(
    run: Run, tmp_path: Path, straight: Path, kind: str, damage: Callable[[Path], Path]
):
    before = ("benchmarks", "curate", "base", "distill")
    begin_with(straight, tmp_path / "ws", *before)
    intact = read_manifest(made(tmp_path / "ws", kind)).files
    damaged = damage(made(tmp_path / "ws", kind))
    again = run("--until", "distill")
    assert again.wait() == 0, again.output
    assert stages(again.output, "✓") == [kind]
    assert str(damaged) in again.output
    assert "will be built again" in again.output
    assert [f.name.split("-")[:2] for f in (tmp_path / "ws" / "artifacts" / ".aside").iterdir()] == [["corrupt", kind]]
    same = {f.path: f.sha256 for f in intact if f.path != "metrics.jsonl"}
    assert {
        f.path: f.sha256 for f in read_manifest(made(tmp_path / "ws", kind)).files if f.path != "metrics.jsonl"
    } == same


def test_of_two_runs_at_once_one_builds_and_the_other_waits_and_reuses(run: Run, fresh: Path, tmp_path: Path):
    shutil.rmtree(fresh)  # from nothing: the databases too are made once
    both = [run("--until", "sft"), run("--until", "sft")]
    assert [command.wait() for command in both] == [0, 0], "\n".join(c.output for c in both)
    for stage in (*BEFORE_SFT, "sft"):
        assert sorted(mark for c in both for mark in "=✓" if stage in stages(c.output, mark)) == ["=", "✓"]
    for kind in (*BEFORE_SFT, "sft"):
        assert read_manifest(made(tmp_path / "ws", kind)).attempts == 1
    assert json.loads((made(tmp_path / "ws", "sft") / "manifest.json").read_text())["counts"]["steps"] == 80
