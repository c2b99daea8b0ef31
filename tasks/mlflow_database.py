"""Create MLflow's SQLite file under another name and rename it, so that a killed run leaves no incomplete database."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from klear_core.artifacts.files import file_lock
from klear_core.errors import ConfigError

log = logging.getLogger(__name__)

_SQLITE = "sqlite:///"


def database_file(tracking_uri: str) -> Path | None:
    """Return the SQLite file that a tracking URI names; None for a server, another database, or one in memory."""
    name = tracking_uri.removeprefix(_SQLITE).partition("?")[0]
    if not tracking_uri.startswith(_SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


def ensure_database(path: Path) -> None:
    """Return once there is a usable database at `path`; an unusable one without runs is renamed, with a warning.

    One process creates it while others wait. ConfigError if a database that MLflow cannot use holds runs.
    """
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, on_wait=lambda who: log.info("waiting for MLflow's database: %s is making it", who)):
        trouble = _trouble_of(path)
        if not trouble:
            return
        refuse_broken_with_runs(path, trouble)
        if path.exists() and path.stat().st_size > 0:
            kept = path.with_name(f"{path.name}.broken-{time.time_ns()}")
            path.rename(kept)
            log.warning(
                "MLflow's database %s holds no runs and is made again: %s; the old file is now %s",
                path,
                trouble,
                kept.name,
            )
        _remove_journals(path)  # SQLite would apply the journals of the renamed file to the new one
        _make(path)


def refuse_broken_with_runs(path: Path, trouble: str | None = None) -> None:
    """Raise ConfigError if a migration of the database was interrupted and it holds runs. Imports no heavy library."""
    trouble = _interrupted_migration(path) if trouble is None else trouble
    num_runs = _num_runs(path) if trouble else 0
    if num_runs:
        raise ConfigError(
            f"MLflow's database {path} holds {num_runs} runs, but {trouble}. Make a copy of it; then restore a "
            f"backup, or, if only the version is another one, run: mlflow db upgrade {_SQLITE}{path}. Or move it away: "
            "a new one is made, and all results and their metrics stay, for they do not depend on it"
        )


def _trouble_of(path: Path) -> str:
    """Return why MLflow cannot use the file; empty if it can."""
    trouble = _interrupted_migration(path)
    if trouble:
        return trouble
    found, wanted = _versions_in(path), _newest_version()
    return "" if found == [wanted] else f"its tables have version {found[0]}, where this MLflow has {wanted}"


def _interrupted_migration(path: Path) -> str:
    """Return the sign that a migration began and did not finish; empty if there is none."""
    if not path.exists() or path.stat().st_size == 0:
        return "there is no database yet"
    leftover = [table for table in _tables(path) if table.startswith("_alembic_tmp_")]
    if leftover:
        return f"a migration was interrupted (it left the table {leftover[0]})"
    return "" if len(_versions_in(path)) == 1 else "its first migration was interrupted (it says no version)"


def _make(path: Path) -> None:
    """Migrate an empty file under another name, then rename it to `path`."""
    import mlflow.store.tracking.sqlalchemy_store as stores

    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    _remove_journals(temporary)
    store = stores.SqlAlchemyStore(f"{_SQLITE}{temporary}", (path.parent / "artifacts").as_uri())
    store.engine.dispose()  # no connection may stay open across the rename
    temporary.rename(path)


def _newest_version() -> str:
    """Return the schema version that the installed MLflow migrates to."""
    import mlflow
    from alembic.script import ScriptDirectory

    migrations = Path(mlflow.__file__).parent / "store" / "db_migrations"
    return str(ScriptDirectory(str(migrations)).get_current_head())


def _tables(path: Path) -> list[str]:
    return [str(name) for (name,) in _rows(path, "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]


def _versions_in(path: Path) -> list[str]:
    if "alembic_version" not in _tables(path):
        return []
    return [str(version) for (version,) in _rows(path, "SELECT version_num FROM alembic_version")]


def _num_runs(path: Path) -> int:
    """Return the number of runs in the database, or in the copy of the table that a migration was making if larger."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    counts = {"runs": "SELECT count(*) FROM runs", "_alembic_tmp_runs": "SELECT count(*) FROM _alembic_tmp_runs"}
    tables = _tables(path)
    found = [_rows(path, query)[0][0] for table, query in counts.items() if table in tables]
    return max((int(str(count)) for count in found), default=0)


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    try:
        with closing(sqlite3.connect(path, timeout=20)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.DatabaseError as e:
        raise ConfigError(f"MLflow's database {path} cannot be read: {e}. Move it away, and a new one is made") from e


def _remove_journals(path: Path) -> None:
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
