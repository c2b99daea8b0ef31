"""A local receiver of webhooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Keeps what it is sent, and refuses the next `num_refused` requests; `secret` is the path of its address."""

    def __init__(self, secret: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/{secret}"
        self.got: list[dict[str, Any]] = []
        self.num_refused = 0


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_refused = self.server.num_refused > 0
        self.server.num_refused -= is_refused
        if not is_refused:
            self.server.got.append(json.loads(body))
        self.send_response(503 if is_refused else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def receiving(secret: str) -> Iterator[Receiver]:
    with Receiver(secret) as receiver:
        Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.shutdown()
