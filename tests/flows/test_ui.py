"""Where `klear ui` sends a person."""

from pathlib import Path

import httpx

from flows.ui import runs_page


def mlflow(experiments: dict[str, str]) -> httpx.MockTransport:
    """Answers as MLflow does when asked for an experiment by its name."""

    def reply(request: httpx.Request) -> httpx.Response:
        name = request.url.params["experiment_name"]
        if name in experiments:
            return httpx.Response(200, json={"experiment": {"experiment_id": experiments[name], "name": name}})
        return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST"})

    return httpx.MockTransport(reply)


def test_mlflow_is_opened_at_the_list_of_our_runs():
    page = runs_page("http://127.0.0.1:5000", mlflow({"Default": "0", "klear": "3"}))
    assert page == "http://127.0.0.1:5000/#/experiments/3/runs?workflowType=machine_learning"


def test_mlflow_is_opened_at_its_front_page_where_nothing_was_tracked():
    assert runs_page("http://127.0.0.1:5000", mlflow({"Default": "0"})) == "http://127.0.0.1:5000"


def test_the_installed_mlflow_knows_that_page():
    import mlflow as package

    scripts = [f.read_text() for f in (Path(package.__file__).parent / "server/js/build/static/js").glob("*.js")]
    for part in ('"/experiments/:experimentId/runs"', '"workflowType"', 'MACHINE_LEARNING="machine_learning"'):
        assert any(part in script for script in scripts), part
