"""What happens to a run from outside while it works: garbage is collected, it is cancelled, Ray dies, the store is away."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from klear_command import ROOT, Command, start
from object_server import object_server
from processes import title
from small_runs import BEFORE_SFT, GONE_IN_S, Run, assert_same, begin_with, made, until_it_trains, weights, work

from flows.runs import cancel
from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import write_whole
from klear_core.artifacts.manifest import read_manifest, write_manifest
from klear_core.artifacts.run_history import RunHistory

pytestmark = pytest.mark.timeout(1800)  # seconds on a quiet machine


def klear(*args: str | Path) -> str:
    """Run a command to its end, which must be good; returns its output."""
    command = [sys.executable, "-c", "from flows.cli import main; main()", *map(str, args)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# ---- garbage ----


def make_old(workspace: Path, *kinds: str) -> None:
    """Let artifacts be as old as those that a collection takes."""
    for kind in kinds:
        folder = made(workspace, kind)
        at = datetime.now(UTC) - timedelta(days=40)
        write_manifest(folder, read_manifest(folder).model_copy(update={"created_at": at}))


@pytest.mark.slow
def test_garbage_is_collected_again_and_again_under_a_run_which_loses_nothing(run: Run, tmp_path: Path, straight: Path):
    workspace = tmp_path / "ws"
    begin_with(straight, workspace, *BEFORE_SFT)
    make_old(workspace, *BEFORE_SFT)
    collect = ("gc", "--root", workspace, "--last", "0", "--yes")
    assert "goes: 4 artifact" in klear(*collect)  # all that the run would reuse is in the trash when it begins
    command = run("--until", "rl")
    num_under_it = 0
    while command.process.poll() is None:
        num_under_it += "is running" in klear(*collect)
        time.sleep(6.0)  # a collection is a process, on the cores that the run needs
    assert command.wait() == 0, command.output
    assert num_under_it >= 1
    assert [line for line in command.output.splitlines() if "✓" in line and any(k in line for k in BEFORE_SFT)] == []
    assert weights(workspace, "rl") == weights(straight, "rl")
    assert "goes: nothing" in klear(*collect)  # its command may have been about to show the result
    history = RunHistory.of(workspace)
    for each in history.records():
        history.write(each.model_copy(update={"updated_at": datetime.now(UTC) - timedelta(hours=2)}))
    assert "goes: 4 artifact" in klear(*collect)  # what the run has made is young


# ---- cancelled, and without Ray ----


@pytest.mark.bench
def test_a_run_cancelled_and_left_by_raylet_and_head_of_its_ray_goes_on_to_the_same_weights(
    run: Run, tmp_path: Path, straight: Path
):
    workspace = tmp_path / "ws"
    begin_with(straight, workspace, *BEFORE_SFT)
    for kind in ("sft", "rl"):
        cancel_while_it_trains(run, workspace, kind)
    killed = lose_the_raylet(run, workspace)
    retry_without_the_head(killed, tmp_path)
    assert weights(workspace, "rl") == weights(straight, "rl")
    assert read_manifest(made(workspace, "rl")).attempts == 3


STAGES = (*BEFORE_SFT, "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl")


@pytest.mark.bench
def test_a_run_cancelled_in_each_stage_is_gone_in_seconds_and_goes_on_to_the_same_weights(
    run: Run, tmp_path: Path, straight: Path
):
    workspace = tmp_path / "ws"
    for stage in STAGES:
        command = run()
        command.until(lambda stage=stage, command=command: f"… {stage}\n" in command.output)
        newest = RunHistory.of(workspace).records()[0]
        began = time.monotonic()
        cancel(newest.run_id, workspace)
        assert command.wait() == 130, command.output
        print(f"{stage}: ended after {time.monotonic() - began:.1f} s")
        assert RunHistory.of(workspace).find(newest.run_id).state == "cancelled"
        assert command.left_over(within_s=5.0) == []
    last = run()
    assert last.wait() == 0, last.output
    for kind in ("sft", "rl"):
        assert weights(workspace, kind) == weights(straight, kind)


def cancel_while_it_trains(run: Run, workspace: Path, kind: str) -> None:
    """A cancelled run is gone in seconds."""
    command = run("--until", "rl")
    until_it_trains(command, workspace, kind)
    newest = RunHistory.of(workspace).records()[0]
    assert (newest.state, newest.stage) == ("running", kind)
    cancel(newest.run_id, workspace)  # not as a command, whose start may outlast the run on a busy machine
    assert RunHistory.of(workspace).find(newest.run_id).state == "cancelled"
    assert command.wait() == 130, command.output
    assert command.left_over(within_s=5.0) == []
    assert work(workspace, kind).is_dir()


def lose_the_raylet(run: Run, workspace: Path) -> str:
    """Ray ends a driver whose raylet dies, without a word to Python. Under a worker, the sweeper starts it again."""
    command = run("--until", "rl")
    until_it_trains(command, workspace, "rl")
    kill_of_ray(command, "raylet")
    assert command.wait() != 0
    assert command.left_over(within_s=GONE_IN_S) == []
    killed = RunHistory.of(workspace).records()[0]
    assert (killed.state, killed.stage) == ("killed", "rl")
    return killed.run_id


def retry_without_the_head(run_id: str, folder: Path) -> None:
    """Actors and driver know each other's addresses by then; Ray waits a minute for its head."""
    command = start("runs", "retry", run_id, "--root", folder / "ws", log=folder / "retry.log")
    try:
        until_it_trains(command, folder / "ws", "rl")
        kill_of_ray(command, "gcs_server")
        assert command.wait() == 0, command.output
        assert command.left_over(within_s=GONE_IN_S) == []
    finally:
        command.end()


def kill_of_ray(command: Command, server: str) -> None:
    children = psutil.Process(command.process.pid).children(recursive=True)
    victims = [p for p in children if Path((title(p).split() or [""])[0]).name == server]
    assert len(victims) == 1, [title(p)[:80] for p in children]
    victims[0].kill()


# ---- the clock ----


@pytest.mark.bench
def test_a_clock_that_is_set_back_and_forth_changes_nothing(run: Run, tmp_path: Path, straight: Path):
    """Needs gcc. Monotonic time goes on, as when somebody sets the clock of a machine."""
    workspace, library, clock = tmp_path / "ws", tmp_path / "clock.so", tmp_path / "offset"
    source = Path(__file__).parent / "clock.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    write_whole(clock, b"0")
    begin_with(straight, workspace, *BEFORE_SFT)
    command = run("--until", "sft", LD_PRELOAD=str(library), CLOCK_OFFSET=str(clock))
    for offset in (b"-7200", b"7200"):
        until_it_trains(command, workspace, "sft")
        write_whole(clock, offset)
    assert command.wait() == 0, command.output
    assert command.left_over(within_s=GONE_IN_S) == []
    assert_same(workspace, straight, "sft", attempts=1)


# ---- the store ----


class Cable:
    """A TCP proxy on this machine that can be cut: connections end, and new ones are refused."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cut the cable for the block."""
        port = self._listener.getsockname()[1]
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self._listener = socket.create_server(("127.0.0.1", port))
            threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        listener = self._listener
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                sink.sendall(content)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cable() -> Iterator[Cable]:
    with object_server("drill") as address:
        yield Cable(address)


@pytest.mark.bench
def test_a_run_outlives_a_store_that_is_away_for_a_minute(
    run: Run, tmp_path: Path, straight: Path, cable: Cable, monkeypatch: pytest.MonkeyPatch
):
    store = ("--set", "workspace.store=s3://drill/klear")
    command: Command = run("--until", "sft", *store, AWS_ENDPOINT_URL=f"http://{cable.address}")
    until_it_trains(command, tmp_path / "ws", "sft")
    with cable.cut():
        time.sleep(60)
    assert command.wait() == 0, command.output
    assert weights(tmp_path / "ws", "sft") == weights(straight, "sft")
    kinds = {key.split("/")[1] for key in Bucket("s3://drill/klear").keys("artifacts/")}
    assert kinds == {*BEFORE_SFT, "sft"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{cable.address}")
    (found,) = RunHistory.of(tmp_path / "elsewhere", store="s3://drill/klear").records()
    assert found.state == "done"
