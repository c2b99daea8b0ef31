"""The environment of a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx
import pytest
from klear_command import ROOT

from flows.process import bypass_proxies_for_loopback

NOBODY = "http://127.0.0.1:1"
"""A proxy that does not answer."""


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server on this machine."""
    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_servers_on_this_machine_are_not_sought_behind_a_proxy(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv("http_proxy", NOBODY)
    monkeypatch.setenv("no_proxy", "intranet.example")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    bypass_proxies_for_loopback()
    assert httpx.get(url).is_success


def test_what_else_has_no_proxy_still_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    bypass_proxies_for_loopback()
    bypass_proxies_for_loopback()
    assert getproxies()["no"] == "intranet.example,127.0.0.1,localhost"


def test_a_proxy_that_is_switched_off_stays_off(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"http_proxy": NOBODY, "no_proxy": "*", "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    bypass_proxies_for_loopback()
    assert proxy_bypass("example.org")


def test_a_command_knows_it_before_it_asks_anything_of_a_server(
    monkeypatch: pytest.MonkeyPatch, klear, url: str, tmp_path: Path
):
    """A teacher on this machine is asked for its models before a run begins."""
    monkeypatch.setenv("http_proxy", NOBODY)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    teacher = f'distill.teacher={{kind="http", base_url="{url}/v1", model="none", runtime={{max_attempts=1}}}}'
    wrong = 'curate.sources=["no/such.jsonl"]'
    ended = klear("run", "smoke", "--set", f"workspace.root={tmp_path}", "--set", teacher, "--set", wrong)
    assert "no/such.jsonl" in ended.err
    assert "teacher" not in ended.err, ended.err


OUTSIDE_OF_A_FLOW = """
import logging, sys
from flows.environment import prepare_environment
from klear_core.config.pipeline import WorkspaceConfig

prepare_environment(WorkspaceConfig(root=sys.argv[1]))
import flows.pipeline
logging.getLogger("flows.outages").info("a run was killed")
"""


def test_what_is_logged_before_a_run_begins_prints_nothing(tmp_path: Path):
    command = [sys.executable, "-c", OUTSIDE_OF_A_FLOW, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
