"""A chat endpoint on loopback that answers by script."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GOOD = json.dumps(
    {
        "choices": [{"message": {"content": "4", "reasoning_content": "2+2=4"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 9},
    }
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int = 200
    body: str = GOOD
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hangs_up: bool = False


class ScriptedServer:
    """Gives the script's answers in turn and its last one for ever; remembers what it was asked."""

    def __init__(self) -> None:
        self.script: list[Answer] = [Answer()]
        self.requests: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            assert path == "/v1/chat/completions", path
            self.requests.append(json.loads(body))
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def _leave(self) -> None:
        with self._lock:
            self._at_once -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = server._take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                time.sleep(answer.delay_s)
                server._leave()
                if answer.hangs_up:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        return Handler
