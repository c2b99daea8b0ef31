"""What holds for all tests."""

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from snapshot import Snapshots

# Whoever starts the tests in the background may have had them ignore Ctrl-C; what they start and interrupt must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails because the machine is slow. vLLM's environment has no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


_HAS_SLOW_TESTS = re.compile(r"mark\.slow|vllm_marks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m slow` leave out the files without slow tests, four of five, whose imports take most of the collection."""
    if config.option.markexpr != "slow" or not collection_path.match("test_*.py"):
        return None
    return True if _HAS_SLOW_TESTS.search(collection_path.read_text()) is None else None


def pytest_collection_finish() -> None:
    freeze_what_is_imported()


def freeze_what_is_imported() -> None:
    """Leave all that is there out of later garbage collections: each stage ends with one, which looked at every module again."""
    gc.collect()
    gc.freeze()


MAKE_DATABASE = """
import asyncio
from prefect.server.database import provide_database_interface

asyncio.run(provide_database_interface().create_db())
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="write the compared texts to tests/snapshots instead of comparing",
    )


@pytest.fixture
def snapshot(pytestconfig: pytest.Config) -> Snapshots:
    """`snapshot("plan_smoke", text)` compares a text with tests/snapshots/plan_smoke.txt."""
    return Snapshots(folder=Path(__file__).parent / "snapshots", updates=pytestconfig.getoption("update_snapshots"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub cannot be reached, which is known at once and not after five tries."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def mlflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `mlflow` of a workspace without runs. Tests copy it, for its database takes seconds to make."""
    from tasks.mlflow_backend import ensure_database

    folder = tmp_path_factory.mktemp("mlflow")
    ensure_database(folder / "mlflow.db")
    freeze_what_is_imported()  # MLflow and SQLAlchemy
    return folder


@pytest.fixture
def tracked(mlflow_folder: Path, tmp_path: Path) -> Path:
    """A workspace with an MLflow database, `ws` in the test's folder."""
    shutil.copytree(mlflow_folder, tmp_path / "ws" / "mlflow")
    return tmp_path / "ws"


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefect's folder of a workspace in which nothing has run; its migrations take longer than a small stage."""
    from flows.environment import prefect_home
    from klear_core.config.pipeline import WorkspaceConfig

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
