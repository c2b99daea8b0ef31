"""Where `klear ui` sends a person, and what becomes of its servers when one of them or it dies."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from loopback import free_port
from processes import alive

from flows.process import Supervised, refuse_taken_port
from flows.servers import SURVIVES_RESTARTS, prefect_environment, runs_page
from klear_core.errors import ConfigError
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


SERVER = """
import socket, subprocess, sys, time
if len(sys.argv) == 2:  # as MLflow does: another process has the port, and ignores that its parent is dead
    subprocess.Popen([sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], sys.argv[1], "child"])
    time.sleep(600)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
time.sleep(600)
"""


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(is_true: Callable[[], bool], *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Supervised]:
    running = Supervised("MLflow", [sys.executable, "-c", SERVER, str(port)], {}, tmp_path / "log")
    until(lambda: answers(port))
    yield running
    running.stop()


def leader_of(port: int) -> psutil.Process:
    listening = next(c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port)
    parent = psutil.Process(listening.pid).parent()
    assert parent is not None
    return parent


def test_a_server_that_dies_is_named_and_started_again_on_its_port(
    server: Supervised, port: int, capsys: pytest.CaptureFixture[str]
):
    server.restart_if_ended()
    assert capsys.readouterr().err == ""
    leader = leader_of(port)
    leader.kill()
    until(lambda: server.has_ended)
    server.restart_if_ended()
    assert not answers(port)  # what was left of it is gone
    assert "MLflow ended (status -9); next start in 2 s; see" in capsys.readouterr().err

    def restarted() -> bool:
        server.restart_if_ended()
        return answers(port)

    until(restarted)
    assert leader_of(port).pid != leader.pid


def test_stopping_a_server_whose_leader_is_dead_frees_its_port(server: Supervised, port: int):
    leader_of(port).kill()
    until(lambda: server.has_ended)
    assert answers(port)
    server.stop()
    assert not answers(port)
    refuse_taken_port("127.0.0.1", port, "--mlflow-port")


def test_a_taken_port_is_told_with_the_process_that_has_it(server: Supervised, port: int):
    (child,) = leader_of(port).children()
    with pytest.raises(ConfigError, match=rf"--mlflow-port {port}: the port is taken by process {child.pid} \(.*-c"):
        refuse_taken_port("127.0.0.1", port, "--mlflow-port")


def test_an_address_of_another_machine_is_told(port: int):
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: not an address of this machine"):
        refuse_taken_port("192.0.2.1", port, "--mlflow-port")


def test_a_browser_elsewhere_is_given_an_address_that_it_can_use():
    assert (
        prefect_environment(4200, "0.0.0.0")["PREFECT_SERVER_UI_API_URL"] == f"http://{socket.gethostname()}:4200/api"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_klear_ui_starts_without_a_workspace_keeps_its_servers_up_and_leaves_none_when_killed(tmp_path: Path):
    ports = [free_port(), free_port(), free_port()]
    options = ("--prefect-port", "--mlflow-port", "--runs-port")
    where = [
        "--root",
        str(tmp_path / "ws"),
        *(part for pair in zip(options, map(str, ports), strict=True) for part in pair),
    ]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "ui", *where]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own) as ui:
        assert ui.stdout is not None
        lines = [ui.stdout.readline() for _ in range(5)]
        assert "nothing has run there yet" in lines[0], lines
        assert all(answers(port) for port in ports), lines
        assert f"Runs     http://127.0.0.1:{ports[2]}" in lines[1]
        assert "<h1>Runs" in httpx.get(f"http://127.0.0.1:{ports[2]}/").text
        leader_of(ports[1]).send_signal(signal.SIGKILL)
        assert "MLflow ended" in ui.stdout.readline()
        assert answers(ports[0])
        until(lambda: answers(ports[1]), within_s=120)
        time.sleep(2)  # the watcher looks every second
        family = psutil.Process(ui.pid).children(recursive=True)
        ui.kill()
    until(lambda: alive(family) == [])
    assert not any(answers(port) for port in ports)
