"""MLflow's SQLite file is whole or not there, and one that is half made is recognised."""

from __future__ import annotations

import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from klear_core.errors import ConfigError
from tasks.mlflow_backend import TrackedRun, mlflow_backend
from tasks.mlflow_database import database_file, ensure_database, refuse_broken_with_runs

MAKE = "import sys; from pathlib import Path; from tasks.mlflow_database import ensure_database; ensure_database(Path(sys.argv[1]))"


@pytest.fixture
def database(mlflow_folder: Path, tmp_path: Path) -> Path:
    return shutil.copy(mlflow_folder / "mlflow.db", tmp_path / "mlflow.db")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def is_usable(path: Path) -> bool:
    from mlflow import MlflowClient

    # Under a name of its own: MLflow keeps connections open by address
    copy = shutil.copy(path, path.with_name(f"looked-at-{time.time_ns()}.db"))
    client = MlflowClient(tracking_uri=f"sqlite:///{copy}")
    return client.get_run(client.create_run(client.create_experiment("try")).info.run_id).info.status == "RUNNING"


def half_copied_table(path: Path) -> None:
    change(
        path,
        "CREATE TABLE _alembic_tmp_latest_metrics (key TEXT)",
        "UPDATE alembic_version SET version_num = '451aebb31d03'",
    )


def no_version(path: Path) -> None:
    change(path, "DELETE FROM alembic_version")


def no_version_table(path: Path) -> None:
    change(path, "DROP TABLE alembic_version")


def version_on_the_way(path: Path) -> None:
    change(path, "UPDATE alembic_version SET version_num = '451aebb31d03'")


BREAKS = [half_copied_table, no_version, no_version_table, version_on_the_way]
"""The states in which a kill between two steps of MLflow's migration leaves the file."""


def add_a_run(path: Path) -> None:
    change(path, "INSERT INTO runs (run_uuid, experiment_id, lifecycle_stage) VALUES ('r', 0, 'active')")


@pytest.mark.parametrize("break_it", [half_copied_table, version_on_the_way])  # two of four, for each makes a database
def test_a_half_made_database_without_runs_is_set_aside_and_made_again(
    database: Path, break_it: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    break_it(database)
    with caplog.at_level(logging.WARNING):
        ensure_database(database)
    (kept,) = database.parent.glob("mlflow.db.broken-*")
    assert kept.name in caplog.text
    assert is_usable(database)


@pytest.mark.parametrize("break_it", BREAKS)
def test_a_half_made_database_with_runs_is_left_alone_and_it_is_said_what_to_do(
    database: Path, break_it: Callable[[Path], None]
):
    add_a_run(database)
    break_it(database)
    before = database.read_bytes()
    with pytest.raises(ConfigError, match=r"holds 1 runs, but .*(restore a backup|move it away)"):
        ensure_database(database)
    assert database.read_bytes() == before


def test_an_interrupted_migration_of_runs_is_known_before_anything_heavy_is_imported(database: Path):
    add_a_run(database)
    refuse_broken_with_runs(database)
    half_copied_table(database)
    with pytest.raises(ConfigError, match="_alembic_tmp_latest_metrics"):
        refuse_broken_with_runs(database)


def test_a_whole_database_is_left_as_it_is(database: Path):
    add_a_run(database)
    before = database.read_bytes()
    ensure_database(database)
    assert database.read_bytes() == before


def test_an_empty_file_and_what_a_killed_process_left_beside_are_replaced_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "mlflow.db"
    path.touch()
    (tmp_path / ".mlflow.db.new").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        ensure_database(path)
    assert "mlflow.db" not in caplog.text
    assert is_usable(path)
    assert not (tmp_path / ".mlflow.db.new").exists()


def test_a_file_that_is_no_database_is_named(tmp_path: Path):
    path = tmp_path / "mlflow.db"
    path.write_text(
        "no database at all, but some words that are longer than a header of a hundred bytes would be. " * 3
    )
    with pytest.raises(ConfigError, match=r"mlflow\.db cannot be read.*Move it away"):
        ensure_database(path)


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////data/mlflow.db", Path("/data/mlflow.db")),
        ("sqlite:///mlflow.db", Path("mlflow.db").absolute()),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("http://127.0.0.1:5000", None),
        ("postgresql://user@host/db", None),
    ],
)
def test_only_sqlite_addresses_name_a_file(uri: str, file: Path | None):
    assert database_file(uri) == file


@pytest.mark.slow
def test_two_processes_that_need_a_database_at_once_both_get_it(tmp_path: Path):
    path = tmp_path / "mlflow.db"
    makers = [subprocess.Popen([sys.executable, "-c", MAKE, str(path)]) for _ in range(2)]
    assert [maker.wait(300) for maker in makers] == [0, 0]
    assert is_usable(path)
    assert not list(tmp_path.glob("*.broken-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "how"), [(0, signal.SIGINT), (100_000, signal.SIGKILL), (400_000, signal.SIGKILL)])
def test_a_process_killed_while_it_makes_the_database_leaves_none(tmp_path: Path, size: int, how: signal.Signals):
    path, beside = tmp_path / "mlflow.db", tmp_path / ".mlflow.db.new"
    maker = subprocess.Popen([sys.executable, "-c", MAKE, str(path)], stderr=subprocess.DEVNULL)
    while not (beside.exists() and beside.stat().st_size >= size):
        assert maker.poll() is None
        time.sleep(0.002)
    maker.send_signal(how)
    maker.wait(60)
    assert not path.exists()
    ensure_database(path)
    assert is_usable(path)


def test_a_run_that_is_stopped_while_it_writes_leaves_the_file_free(mlflow_folder: Path, tmp_path: Path):
    """At every tenth statement of a request: SQLite's lock would last until the process ends, and 20 s per request."""
    from sqlalchemy import Engine, event

    workspace = tmp_path / "ws"
    shutil.copytree(mlflow_folder, workspace / "mlflow")
    database = workspace / "mlflow" / "mlflow.db"
    backend = mlflow_backend(f"sqlite:///{database}", workspace)
    statements = 0

    def stop(*_: object) -> None:
        nonlocal statements
        statements += 1
        if statements % 10 == 0:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a command that ran in this process has its own
    event.listen(Engine, "before_cursor_execute", stop)
    try:
        for number in range(5):
            with pytest.raises(KeyboardInterrupt):
                backend.open(a_run(number))
            with closing(sqlite3.connect(database, timeout=0)) as other:
                other.execute("BEGIN IMMEDIATE")
    finally:
        event.remove(Engine, "before_cursor_execute", stop)
        signal.signal(signal.SIGINT, before)
    assert statements > 50


def a_run(number: int) -> TrackedRun:
    return TrackedRun(
        server="", run_id=f"r{number}", run_name=f"run {number}", stage="sft", kind="sft", params={"seed": "1"}
    )
