"""A teacher's key in a Secret block of a real Prefect database reaches the teacher, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from klear_command import FEW_PROBLEMS, ROOT, Command, start

pytestmark = pytest.mark.slow

KEY = "sk-very-secret-0123456789"
HOOK = "hook-very-secret-0123456789"
"""The part of a webhook's address that lets anybody post there."""
SAVE = "import sys; from prefect.blocks.system import Secret; Secret(value=sys.argv[2]).save(sys.argv[1])"
REPLY = {
    "choices": [{"message": {"content": "\\boxed{4}", "reasoning_content": "2+2=4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 9},
}


class Teacher(ThreadingHTTPServer):
    """Answers like an OpenAI-compatible server, and remembers the keys that it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        self.keys: list[str] = []
        self.told: list[bytes] = []
        """Notifications."""


class Handler(BaseHTTPRequestHandler):
    server: Teacher

    def do_GET(self) -> None:
        self._send({"data": []})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == f"/{HOOK}":
            self.server.told.append(content)
        else:
            self.server.keys.append(self.headers.get("Authorization", ""))
        self._send(REPLY | {"echo": self.headers.get("Authorization")})

    def _send(self, reply: dict[str, object]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    with Teacher() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def distill(teacher: Teacher, workspace: Path, log: Path) -> Command:
    """Run up to `distill` with a key in the block `teacher-key` of the workspace's own Prefect."""
    asked = f'{{kind="http", base_url="{teacher.base_url}", model="r1", api_key_block="teacher-key"}}'
    settings = (*FEW_PROBLEMS, f"distill.teacher={asked}", "distill.max_problems=8", f"workspace.root={workspace}")
    told = ('workspace.notify={webhook_env="OPS_HOOK", disk_above=1e-9}',)  # always too full
    options = (part for setting in (*settings, *told) for part in ("--set", setting))
    hook = f"http://127.0.0.1:{teacher.server_port}/{HOOK}"
    return start("run", "configs/smoke", "--until", "distill", *options, log=log, OPS_HOOK=hook)


def test_the_key_in_a_block_and_the_address_of_a_webhook_reach_their_servers_and_no_file(
    fresh: Path, tmp_path: Path, teacher: Teacher
):
    without = distill(teacher, fresh, tmp_path / "without.log")
    assert without.wait() == 2, without.output
    assert "distill.teacher.api_key_block = 'teacher-key': Prefect has no such block; make a block" in without.output
    assert without.output.count("error:") == 1
    assert "Traceback" not in without.output
    assert "✓" not in without.output  # no stage has begun
    assert not teacher.keys

    in_workspace = {"PREFECT_HOME": str(fresh / "prefect"), "PATH": "/usr/bin:/bin", "DO_NOT_TRACK": "1"}
    subprocess.run([sys.executable, "-c", SAVE, "teacher-key", KEY], env=in_workspace, cwd=ROOT, check=True)
    with_key = distill(teacher, fresh, tmp_path / "with.log")
    assert with_key.wait() == 0, with_key.output
    assert "✓ distill" in with_key.output
    assert set(teacher.keys) == {f"Bearer {KEY}"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 30
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in (KEY, HOOK))] == []
    refused, too_full = teacher.told
    assert b"Prefect has no such block" in refused
    assert b"klear gc" in too_full
    assert not any(secret.encode() in told for told in teacher.told for secret in (KEY, HOOK))
