"""Progress reaches Prefect from a thread of its own, and no step of a stage waits for the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import httpx
import pytest

from tasks.progress import (
    CLOSE_S,
    Latest,
    Pace,
    PrefectProgress,
    ProgressArtifact,
    ProgressLines,
    Shown,
    artifact_of_current_run,
)

SOON_S = 60.0
"""Of what takes no time, on any machine."""


class Server:
    """Takes values, once it is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.got: list[object] = []
        self.opened, self.changed = threading.Event(), threading.Condition()
        if is_open:
            self.opened.set()

    def __call__(self, value: object) -> None:
        assert self.opened.wait(SOON_S)
        with self.changed:
            self.got.append(value)
            self.changed.notify_all()

    def wait_for(self, value: object) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: value in self.got, timeout=SOON_S), self.got


@contextmanager
def hanging_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def test_what_is_left_last_is_delivered_at_the_end():
    server = Server()
    latest = Latest(server, every_s=SOON_S)
    for value in range(100):
        latest.put(value)
    latest.close(wait_s=SOON_S)
    assert server.got[-1] == 99


def test_what_waits_is_replaced_by_what_is_newer():
    server = Server(is_open=False)
    latest = Latest(server, every_s=0.0)
    for value in range(100):
        latest.put(value)
    server.opened.set()
    latest.close(wait_s=SOON_S)
    assert server.got[-1] == 99
    assert len(server.got) <= 2  # the one on its way when the others came, and the last


def test_a_failed_delivery_is_tried_again_without_anything_new():
    server, tries = Server(), []

    def second_time(value: object) -> None:
        tries.append(value)
        if len(tries) < 2:
            raise ConnectionError("away")
        server(value)

    latest = Latest(second_time, every_s=0.0)
    latest.put("step 7")
    server.wait_for("step 7")
    latest.close(wait_s=SOON_S)
    assert tries == ["step 7", "step 7"]


def test_closing_waits_no_longer_than_it_was_told_to():
    server = Server(is_open=False)
    latest = Latest(server, every_s=0.0)
    latest.put("step 7")
    before = time.monotonic()
    latest.close(wait_s=0.1)
    assert time.monotonic() - before < SOON_S / 2
    assert server.got == []
    server.opened.set()


class FakeArtifact(ProgressArtifact):
    """Keeps what it is told to show."""

    def __init__(self) -> None:
        super().__init__(key="rl-progress", flow_run_id=None, task_run_id=uuid4())
        self.shown = Server()

    def show(self, shown: Shown) -> None:
        self.shown(shown)


@pytest.mark.parametrize(
    ("is_done", "last"),
    [(True, Shown(percent=100.0, text="rl: done")), (False, Shown(percent=12.5, text="rl: ended at 1 of 8"))],
)
def test_at_its_end_a_stage_shows_how_it_ended(is_done: bool, last: Shown):
    artifact = FakeArtifact()
    progress = PrefectProgress("rl", artifact, first_after_s=0.0)
    progress.update(1, 8, "reward 0.5")
    artifact.shown.wait_for(Shown(percent=12.5, text="rl: 1 of 8 reward 0.5"))
    progress.close(is_done=is_done)
    assert artifact.shown.got[-1] == last


def test_a_stage_that_is_over_in_a_moment_shows_nothing():
    artifact = FakeArtifact()
    progress = PrefectProgress("base", artifact, first_after_s=SOON_S)
    progress.update(1, 1, "")
    progress.close(is_done=True)
    assert artifact.shown.got == []


def test_outside_of_prefect_nothing_is_shown_and_nothing_fails():
    progress = PrefectProgress("rl", artifact_of_current_run("rl"), first_after_s=0.0)
    progress.update(1, 8, "")
    progress.close(is_done=True)


def test_no_step_waits_for_a_server_that_hangs_and_the_stage_ends_soon():
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with hanging_server() as url, temporary_settings({PREFECT_API_URL: url}):
        artifact = ProgressArtifact(key="rl-progress", flow_run_id=uuid4(), task_run_id=uuid4())
        progress = PrefectProgress("rl", artifact, first_after_s=0.0)
        progress.update(0, 1000, "")
        time.sleep(0.5)  # the first request is on its way
        before = time.monotonic()
        for step in range(1000):
            progress.update(step, 1000, "reward 0.5")
        steps_s = time.monotonic() - before
        progress.close(is_done=True)
        all_s = time.monotonic() - before
    assert steps_s < SOON_S / 2  # a thousand times the request's timeout would be more than half an hour
    assert all_s < CLOSE_S + SOON_S


def test_an_artifact_whose_answer_was_lost_is_found_again_instead_of_made_twice():
    from prefect.settings import PREFECT_API_URL, temporary_settings

    made: dict[str, dict[str, object]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/filter"):
                self.reply(list(made.values()))
                return
            now = "2026-01-01T00:00:00Z"
            row = {**body, "id": str(uuid4()), "created": now, "updated": now}
            made[row["id"]] = row
            if len(made) == 1:
                self.close_connection = True  # the server dies before it answers
            else:
                self.reply(row)

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made[self.path.rsplit("/", 1)[1]].update(body)
            self.reply({})

        def do_GET(self) -> None:
            self.send_error(404)  # it wants no tokens

        def reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    artifact = ProgressArtifact(key="rl-progress", flow_run_id=uuid4(), task_run_id=uuid4())
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
        with pytest.raises(httpx.HTTPError):
            artifact.show(Shown(percent=99, text="rl: 99 of 100"))
        artifact.show(Shown(percent=100, text="rl: done"))
    server.shutdown()
    assert [(row["data"], row["description"]) for row in made.values()] == [(100, "rl: done")]


def test_a_line_has_what_is_done_the_rate_and_the_time_left():
    pace = Pace(stage="rl", started_s=0.0)
    assert pace.line(60.0) == "rl: working for 60 s"
    pace.update(10, 80, "pass rate 0.50", now_s=100.0)  # an earlier attempt did ten: they have no rate
    assert pace.line(100.0) == "rl: 10 of 80, pass rate 0.50"
    pace.update(20, 80, "pass rate 0.60", now_s=300.0)
    assert pace.line(301.0) == "rl: 20 of 80, 3.0 a minute, about 20 min left, pass rate 0.60"
    assert pace.line(420.0).endswith(", nothing new for 2 min")
    pace.update(80, 80, "", now_s=1500.0)
    assert pace.line(1500.0) == "rl: 80 of 80, 3.0 a minute"


def test_other_units_begin_a_rate_of_their_own():
    pace = Pace(stage="curate", started_s=0.0)
    pace.update(0, 10, "reading", now_s=0.0)
    pace.update(10, 10, "reading", now_s=100.0)
    pace.update(0, 3000, "writing", now_s=100.0)
    pace.update(1500, 3000, "writing", now_s=130.0)
    assert pace.line(130.0) == "curate: 1,500 of 3,000, 50.0 a second, about 30 s left, writing"


def test_a_burst_of_reports_has_no_rate():
    """A pool's first answers come together: a hundred in a hundredth of a second is no speed."""
    pace = Pace(stage="judge", started_s=0.0)
    pace.update(0, 1000, "", now_s=1.0)
    pace.update(100, 1000, "", now_s=1.01)
    assert pace.line(60.0) == "judge: 100 of 1,000"
    assert pace.left_s is None


def test_lines_come_while_a_step_reports_nothing_and_end_with_the_stage():
    said = Server()
    lines = ProgressLines("sft", said, every_s=0.01)
    said.wait_for("sft: working for 0 s")
    lines.close()
    num_said = len(said.got)
    time.sleep(0.05)
    assert len(said.got) == num_said


def test_a_line_that_cannot_be_said_ends_nothing():
    tries = threading.Semaphore(0)

    def full(_line: str) -> None:
        tries.release()
        raise OSError("No space left on device")

    lines = ProgressLines("sft", full, every_s=0.01)
    assert tries.acquire(timeout=SOON_S)
    assert tries.acquire(timeout=SOON_S)
    lines.close()
