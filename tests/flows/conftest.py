from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli import main
from flows.environment import prefect_home
from klear_core.config.pipeline import WorkspaceConfig

MAKE_DATABASE = """
import asyncio
from prefect.server.database import provide_database_interface

asyncio.run(provide_database_interface().create_db())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


Klear = Callable[..., Ended]


@pytest.fixture
def klear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Klear]:
    """The `klear` command in this process; for what ends before Prefect is needed."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["klear", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return Ended(status=int(end.value.code or 0), out=shown.out, err=shown.err)

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefect's folder of a workspace in which nothing has run; its migrations take longer than a small stage."""
    workspace = WorkspaceConfig(root=str(tmp_path_factory.mktemp("prefect")))
    prefect_home(workspace).mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment = kept | {"PREFECT_HOME": str(prefect_home(workspace)), "DO_NOT_TRACK": "1"}
    subprocess.run([sys.executable, "-c", MAKE_DATABASE], env=environment, check=True, timeout=600)
    return prefect_home(workspace)


@pytest.fixture
def fresh(tracked: Path, prefect_database: Path) -> Path:
    """A workspace in which nothing has run, with MLflow's and Prefect's databases, `ws` in the test's folder."""
    shutil.copytree(prefect_database, tracked / prefect_database.name)
    return tracked
