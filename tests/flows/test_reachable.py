"""A server that does not answer is told at once, in one line that names its host and nothing secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows.servers import check_endpoint, check_port, check_prefect, check_ray, check_tracking
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.errors import ConfigError

SECRET = "hunter2"


@contextmanager
def replying(status: int, kind: str = "application/json", body: bytes = b"true") -> Iterator[str]:
    """The address of a server that gives this reply to every request."""

    class Reply(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            asked.append((self.path, self.headers.get("Authorization")))

        def log_message(self, *args: object) -> None:
            """Nothing."""

    asked: list[tuple[str, str | None]] = []
    with HTTPServer(("127.0.0.1", 0), Reply) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://user:{SECRET}@127.0.0.1:{server.server_port}/api/"
        server.shutdown()
    assert all(seen == ("/api/health", None) for seen in asked), asked


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port on which connections are refused: taken, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def refusal(monkeypatch: pytest.MonkeyPatch, url: str) -> str:
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(ConfigError) as refused:
        check_prefect()
    message = str(refused.value)
    assert message.startswith("PREFECT_API_URL")
    assert SECRET not in message
    assert "\n" not in message
    return message


def test_an_api_that_answers_is_taken_and_no_password_is_sent_to_it(monkeypatch: pytest.MonkeyPatch):
    for status in (200, 302, 401, 403):
        with replying(status) as url:
            monkeypatch.setenv("PREFECT_API_URL", url)
            check_prefect()


def test_without_an_address_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    for unset in ("", None):
        monkeypatch.setenv("PREFECT_API_URL", unset) if unset is not None else monkeypatch.delenv("PREFECT_API_URL")
        check_prefect()


@pytest.mark.parametrize("status", [404, 500, 503])
def test_another_service_or_a_broken_one_is_told_with_its_status(monkeypatch: pytest.MonkeyPatch, status: int):
    with replying(status) as url:
        assert f"answers {status}" in refusal(monkeypatch, url)


def test_a_forgotten_api_at_the_end_of_the_address_is_told(monkeypatch: pytest.MonkeyPatch):
    with replying(200, kind="text/html; charset=utf-8", body=b"<html>") as url:
        assert "/api" in refusal(monkeypatch, url)


def test_a_refused_connection_is_told_with_the_host(monkeypatch: pytest.MonkeyPatch, nobody: int):
    assert f"127.0.0.1:{nobody} does not answer" in refusal(monkeypatch, f"http://user:{SECRET}@127.0.0.1:{nobody}/api")


def test_a_server_that_hangs_is_told_first_as_slow_and_then_as_silent(
    monkeypatch: pytest.MonkeyPatch, silent: int, capsys: pytest.CaptureFixture[str]
):
    message = refusal(monkeypatch, f"http://user:{SECRET}@127.0.0.1:{silent}/api")
    assert f"127.0.0.1:{silent} does not answer" in message
    shown = capsys.readouterr().err
    assert shown.startswith(f"PREFECT_API_URL: 127.0.0.1:{silent} has not answered yet")
    assert SECRET not in shown


@pytest.mark.parametrize(
    "url",
    [
        f"127.0.0.1:4200/{SECRET}",
        f"ftp://{SECRET}@example.org/api",
        f"http://u:{SECRET}@/api",
        f"http://a:{SECRET}/api",
        SECRET,
    ],
)
def test_what_is_no_address_is_told_without_repeating_it(monkeypatch: pytest.MonkeyPatch, url: str):
    assert "address" in refusal(monkeypatch, url)


def test_an_unknown_host_is_told(monkeypatch: pytest.MonkeyPatch):
    assert "no-such-host.invalid does not answer" in refusal(monkeypatch, "http://no-such-host.invalid/api")


def test_a_port_is_checked_likewise(nobody: int):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        check_port("127.0.0.1", listening.getsockname()[1], "RAY_ADDRESS", remedy="start Ray")
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS: 127\.0\.0\.1:{nobody} does not answer .*; start Ray"):
        check_port("127.0.0.1", nobody, "RAY_ADDRESS", remedy="start Ray")


def test_any_server_can_be_checked_by_its_own_name(nobody: int):
    with pytest.raises(
        ConfigError, match=rf"MLFLOW_TRACKING_URI: 127\.0\.0\.1:{nobody} does not answer .*; start MLflow"
    ):
        check_endpoint(f"http://127.0.0.1:{nobody}", "MLFLOW_TRACKING_URI", path="/health", remedy="start MLflow")


def test_klear_run_says_it_in_one_line_before_anything_is_made(
    klear, monkeypatch: pytest.MonkeyPatch, nobody: int, tmp_path
):
    monkeypatch.setenv("PREFECT_API_URL", f"http://user:{SECRET}@127.0.0.1:{nobody}/api")
    ended = klear("run", "smoke", "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: PREFECT_API_URL: 127.0.0.1:{nobody} does not answer")
    assert SECRET not in line
    assert not (tmp_path / "ws" / "prefect").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}"])
def test_a_ray_cluster_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, nobody: int, silent: int, address: str
):
    monkeypatch.setenv("RAY_ADDRESS", address.format(port=nobody))
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS: 127.0.0.1:{nobody} does not answer .*unset RAY_ADDRESS"):
        check_ray()
    monkeypatch.setenv("RAY_ADDRESS", address.format(port=silent))
    check_ray()


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_a_ray_address_without_a_port_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_ray()


def test_a_tracking_server_that_is_not_there_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, nobody: int
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{SECRET}@127.0.0.1:{nobody}")
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI: 127.0.0.1:{nobody} does not answer") as refused:
        check_tracking(WorkspaceConfig(root="none"))
    assert SECRET not in str(refused.value)


def test_without_a_tracking_server_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    check_tracking(WorkspaceConfig(root="none"))


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "RAY_ADDRESS"])
def test_a_run_that_names_a_server_that_is_not_there_ends_before_it_makes_anything(
    klear, monkeypatch, nobody: int, tmp_path, name: str
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv(name, f"http://127.0.0.1:{nobody}" if name.startswith("MLFLOW") else f"127.0.0.1:{nobody}")
    ended = klear("run", "smoke", "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    assert f"{name}: 127.0.0.1:{nobody} does not answer" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "ws").exists()


TRACKING_URIS = [
    f"ftp://user:{SECRET}@example.org/runs",
    f"no-such-database://user:{SECRET}@example.org/runs?password={SECRET}",
    "databricks://nobody",
    "sqlite:////proc/no/folder/mlflow.db",
    "sqlite:////dev/null/mlflow.db",
    "mlruns",
]


@pytest.mark.parametrize("uri", TRACKING_URIS)
def test_a_tracking_uri_that_mlflow_cannot_use_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, uri: str):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI = .*: cannot be used: ") as refused:
        check_tracking(WorkspaceConfig(root="none"))
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_database_that_accepts_and_never_answers_is_told(monkeypatch: pytest.MonkeyPatch, silent: int):
    """MLflow itself would try it for hours."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"mysql+pymysql://u:{SECRET}@127.0.0.1:{silent}/runs")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI") as refused:
        check_tracking(WorkspaceConfig(root="none"))
    assert SECRET not in str(refused.value)


STORES = ["ftp-no-such://example.org/runs", "file:///proc/no/folder", "file:///dev/null/store", "s3:///x", "runs"]


@pytest.mark.parametrize("store", STORES)
def test_a_store_that_cannot_be_used_is_told_in_one_line_before_anything_is_made(klear, tmp_path, store: str):
    ended = klear("run", "smoke", "--set", f"workspace.root={tmp_path / 'ws'}", "--set", f"workspace.store={store}")
    assert ended.status in (1, 2)
    assert "workspace.store" in ended.err
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) == 1
