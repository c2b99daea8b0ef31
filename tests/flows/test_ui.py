"""Where `klear ui` sends a person."""

import importlib
from pathlib import Path

import httpx
import pytest

from flows.servers import SURVIVES_RESTARTS, prefect_environment, runs_page
from tasks.mlflow_backend import VIEW_TAG


def mlflow(experiments: dict[str, str], *tags: str) -> httpx.MockTransport:
    """Answers as MLflow does when asked for an experiment by its name; without tags it leaves them out."""
    of_experiment = {"tags": [{"key": tag, "value": "{}"} for tag in tags]} if tags else {}

    def reply(request: httpx.Request) -> httpx.Response:
        name = request.url.params["experiment_name"]
        if name in experiments:
            found = {"experiment_id": experiments[name], "name": name} | of_experiment
            return httpx.Response(200, json={"experiment": found})
        return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST"})

    return httpx.MockTransport(reply)


def test_mlflow_is_opened_at_the_list_of_our_runs():
    page = runs_page("http://127.0.0.1:5000", mlflow({"Default": "0", "klear": "3"}))
    assert page == "http://127.0.0.1:5000/#/experiments/3/runs?workflowType=machine_learning"


def test_mlflow_is_opened_with_the_scores_as_columns_once_there_are_some():
    page = runs_page("http://127.0.0.1:5000", mlflow({"klear": "3"}, "mlflow.note.content", VIEW_TAG))
    assert page == "http://127.0.0.1:5000/#/experiments/3/runs?workflowType=machine_learning&viewStateShareKey=scores"


def test_mlflow_is_opened_at_its_front_page_where_nothing_was_tracked():
    assert runs_page("http://127.0.0.1:5000", mlflow({"Default": "0"})) == "http://127.0.0.1:5000"


def test_the_installed_mlflow_knows_that_page():
    import mlflow as package

    scripts = [f.read_text() for f in (Path(package.__file__).parent / "server/js/build/static/js").glob("*.js")]
    for part in ('"/experiments/:experimentId/runs"', '"workflowType"', 'MACHINE_LEARNING="machine_learning"'):
        assert any(part in script for script in scripts), part


def test_its_prefect_server_keeps_leases_over_a_restart_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    storage = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    monkeypatch.delenv(storage, raising=False)
    assert prefect_environment(4200) == SURVIVES_RESTARTS | {"PREFECT_SERVER_API_PORT": "4200"}
    assert hasattr(importlib.import_module(SURVIVES_RESTARTS[storage]), "ConcurrencyLeaseStorage")
    monkeypatch.setenv(storage, "mine")
    assert prefect_environment(4200)[storage] == "mine"
