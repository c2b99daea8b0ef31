"""What goes wrong outside the code ends in one message that names what was wrong and what to do, and loses nothing that was done."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from klear_command import ROOT, Command, start
from loopback import free_port

from klear_core.artifacts.store import LocalStore

SMOKE = ROOT / "configs" / "smoke"


def is_one_message(err: str) -> bool:
    """One error, and no traceback."""
    return err.count("error:") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sft.optim.lrr=1", r"sft\.optim\.lrr: unknown key; did you mean lr\?"),
        ("rl.loss.eps_hihg=0.3", r"rl\.loss\.eps_hihg: unknown key; did you mean eps_high\?"),
        ("sft.num_epochs=two", r"sft\.num_epochs = 'two': .*integer"),
        ("sft.num_epochs=0", r"sft\.num_epochs = 0: .*greater than or equal to 1"),
        ("rl.loss.kind=ppo", r"'ppo'.*'gppo', 'clip', 'cispo', 'gspo', 'dgpo', 'aspo', 'sapo', 'trm', 'm2po', 'dppo'"),
        ("seed", r"--set 'seed': expected key\.path=value, for example"),
        ("seed.x=1", r"--set 'seed\.x=1': seed is 0, not a table"),
        ("model.max_position_embeddings=32", r"sft\.max_tokens = 96 is more than model\.max_position_embeddings = 32"),
        ('curate.sources=["no/such.jsonl"]', r"curate\.sources: no/such\.jsonl: no such file"),
        ("workspace.root=/proc/klear", r"workspace\.root = '/proc/klear': .*not a folder that can be written to|/proc"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_fix(klear, tmp_path: Path, override: str, told: str):
    where = () if override.startswith("workspace") else ("--set", f"workspace.root={tmp_path / 'ws'}")
    ended = klear("run", SMOKE, *where, "--set", override)
    assert ended.status == 2
    assert re.search(told, ended.err), ended.err
    assert is_one_message(ended.err)
    assert not (tmp_path / "ws").exists()


def test_a_missing_profile_is_an_error_that_lists_those_that_are_there(klear, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    ended = klear("run", "configs/smokey")
    assert ended.status == 2
    assert "configs/smokey: no such profile folder; did you mean smoke?" in ended.err
    assert is_one_message(klear("run", "configs/zzzz").err)
    assert "configs/zzzz: no such profile folder; profiles in configs: desk, " in klear("run", "configs/zzzz").err
    assert is_one_message(ended.err)


def test_a_profile_of_no_name_is_an_error_that_lists_the_names(klear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ended = klear("run", "lapptop")
    assert ended.status == 2
    assert re.search(r"lapptop: no such profile folder; .*\blaptop\b", ended.err)
    assert "ablations" not in ended.err


def test_a_folder_of_grids_is_no_profile(klear):
    ended = klear("run", ROOT / "configs" / "ablations")
    assert ended.status == 2
    assert re.search(r"(\w+)\.toml: a grid of runs, not a profile; klear ablate \S+\1\.toml", ended.err), ended.err


def test_a_profile_that_is_no_toml_is_named_with_the_line(klear, tmp_path: Path):
    (tmp_path / "run.toml").write_text("seed = 0\nsft = {\n")
    ended = klear("plan", tmp_path)
    assert ended.status == 2
    assert f"{tmp_path / 'run.toml'}: not valid TOML" in ended.err
    assert "line 2" in ended.err


@pytest.mark.parametrize(
    "command",
    [
        ("show", "sft", "--root", "LOCKED/runs"),
        ("judge", "LOCKED/answers.jsonl"),
        ("plan", SMOKE, "--set", "workspace.root=LOCKED/runs"),
        ("plan", SMOKE, "--set", "given.sft.path=LOCKED/model"),
    ],
)
def test_a_folder_of_somebody_else_is_named(klear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command):
    locked, stat = str(tmp_path / "locked"), os.stat

    def refuse(path, *args, **kwargs):  # root, as which the tests may run, may look everywhere
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    ended = klear(*(str(word).replace("LOCKED", locked) for word in command))
    assert (ended.status, is_one_message(ended.err)) == (2, True)
    assert re.search(rf"error: {locked}/\S+: Permission denied", ended.err), ended.err


def test_an_unknown_stage_is_an_error_that_lists_the_stages(klear, tmp_path: Path):
    ended = klear("run", SMOKE, "--only", "train", "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    assert "'train'" in ended.err
    assert "distill" in ended.err
    assert is_one_message(ended.err)


def test_a_judge_that_gets_no_file_or_nothing_to_judge_says_so(klear, tmp_path: Path):
    ended = klear("judge", tmp_path / "none.jsonl")
    assert (ended.status, is_one_message(ended.err)) == (2, True)
    assert "none.jsonl: no such file" in ended.err
    (tmp_path / "odd.jsonl").write_text('{"id": "1"}\n')
    ended = klear("judge", tmp_path / "odd.jsonl")
    assert ended.status == 2
    assert "1 of its 1 rows do not fit and were not judged" in ended.err


# ---- errors in the middle of a run


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """What a test starts and puts here ends with it."""
    started: list[Command] = []
    yield started
    for command in started:
        command.end()


def run(root: Path, *overrides: str, until: str, log: Path) -> Command:
    settings = [part for o in (f"workspace.root={root}", *overrides) for part in ("--set", o)]
    return start("run", "configs/smoke", "--until", until, *settings, log=log)


SMALL = 'curate.sources=[{kind="procedural", split="train", modulus=6, num_operations=[2, 3], num_problems=96}]'


@pytest.mark.slow
def test_a_teacher_that_goes_away_is_named_and_what_was_done_stays(
    fresh: Path, tmp_path: Path, commands: list[Command]
):
    """It answers when the run begins, and is gone before the first problem is put to it."""
    store = LocalStore(fresh / "artifacts")

    def is_curating() -> bool:
        return any(f.parent.name == "benchmarks" for f in store.folders())

    with HTTPServer(("127.0.0.1", free_port()), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        teacher = f'distill.teacher={{kind="http", base_url="{url}", model="none", runtime={{max_attempts=1}}}}'
        commands.append(run(fresh, SMALL, teacher, "workspace.retries=1", until="distill", log=tmp_path / "log"))
        commands[0].until(is_curating)
        server.shutdown()
    assert commands[0].wait() not in (0, 130)
    output = commands[0].output
    assert f"at {url}/chat/completions cannot be reached" in output
    assert is_one_message(output), output
    assert re.search(r"✗ distill \(attempt 1 of 2\): .*cannot be reached.*; next attempt in about 5 s\n", output), (
        output
    )
    assert re.search(r"✗ distill \(attempt 2 of 2\): .*cannot be reached.*\n", output), output
    assert {f.parent.name for f in store.folders()} == {"benchmarks", "curate", "base"}
    (report,) = (fresh / "failed").glob("*/report.html")
    assert f"a report on this failed run: {report}" in output
    assert "This run failed in distill, with 3 of 4 stages done." in report.read_text()


@pytest.fixture
def small_disk(fresh: Path) -> Iterator[Path]:
    """A workspace whose artifacts lie on a disk of 400 kB: room for problems, none for a model of 480 kB."""
    disk = fresh / "artifacts"
    disk.mkdir()
    if mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)):
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def mount(*args: str) -> int:
    return subprocess.run(["mount", *args], capture_output=True, check=False).returncode


@pytest.mark.slow
def test_a_full_disk_is_said_with_the_place_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, small_disk: Path, commands: list[Command]
):
    commands.append(run(tmp_path / "ws", SMALL, "workspace.retries=0", until="base", log=tmp_path / "first"))
    assert commands[0].wait() == 2
    output = commands[0].output
    assert re.search(rf"{small_disk}.*(disk|space)|(disk|space).*{small_disk}", output), output
    assert is_one_message(output), output
    assert "✓ curate" in output

    assert mount("-o", "remount,size=50m", str(small_disk)) == 0
    commands.append(run(tmp_path / "ws", SMALL, until="base", log=tmp_path / "second"))
    assert commands[1].wait() == 0, commands[1].output
    assert "= curate" in commands[1].output
