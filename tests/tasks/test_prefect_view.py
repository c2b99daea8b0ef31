"""A stage's summary waits for a server that is away, and holds up nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import uuid4

import pytest
from prefect.client.schemas.actions import ArtifactCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import progress
from tasks.progress import deliver_summaries

AWAY = "http://127.0.0.1:1/api"


@contextmanager
def prefect(*, refuses: str = "") -> Iterator[list[str]]:
    """A server that takes artifacts, but for those with one key; yields the keys that it has taken."""
    taken: list[str] = []

    class Reply(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/artifacts/" and wanted["key"] != refuses:
                taken.append(wanted["key"])
            self.reply(422 if wanted.get("key") == refuses else 201, wanted | {"id": str(uuid4())})

        def do_GET(self) -> None:
            self.reply(404, {})  # no token against request forgery is needed here

        def reply(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Reply) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
            yield taken
        server.shutdown()


@pytest.fixture
def waiting() -> Iterator[list[ArtifactCreate]]:
    """The summaries of two stages, which no server has taken yet."""
    progress._undelivered.extend(
        ArtifactCreate(key=key, type="markdown", data="# x") for key in ("klear-sft", "klear-rl")
    )
    yield progress._undelivered
    progress._undelivered.clear()


def test_what_a_server_that_is_away_cannot_take_is_sent_in_order_once_it_is_back(waiting: list[ArtifactCreate]):
    with temporary_settings({PREFECT_API_URL: AWAY}):
        deliver_summaries()
    assert len(waiting) == 2
    with prefect() as taken:
        deliver_summaries()
    assert taken == ["klear-sft", "klear-rl"]
    assert waiting == []


def test_a_summary_that_prefect_refuses_is_told_and_does_not_hold_up_the_others(
    waiting: list[ArtifactCreate], caplog: pytest.LogCaptureFixture
):
    with prefect(refuses="klear-sft") as taken:
        deliver_summaries()
        deliver_summaries()
    assert taken == ["klear-rl"]
    assert waiting == []
    assert "refuses the summary klear-sft" in caplog.text
