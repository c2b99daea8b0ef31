"""Small runs, and one that nothing happened to, for all drills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from klear_command import Command
from small_runs import GONE_IN_S, IN_TIME_S, Run, small_run


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a run that nothing happened to."""
    root = tmp_path_factory.mktemp("straight")
    command = small_run(root, "--until", "rl")
    assert command.process.wait(IN_TIME_S) == 0, command.output
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
