"""A Hub of our own that takes uploads: the requests of `create_repo` and `upload_folder`, kept in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Uploads:
    """What was sent to the Hub."""

    address: str = ""
    created: list[dict[str, object]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@contextmanager
def upload_hub(*, refuses: bool = False) -> Iterator[Uploads]:
    """Yield what is uploaded to a Hub that is there meanwhile; `refuses`: no token may write."""
    uploads = Uploads()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refuses:
                self.send({"error": "no such repository"}, status=404)
            else:
                self.send({"id": "me/model", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if refuses:
                self.send({"error": "no right to write"}, status=403)
            elif self.path == "/api/repos/create":
                uploads.created.append(json.loads(body))
                self.send({"url": f"{uploads.address}/me/model"})
            elif "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                self.send({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
            elif "/commit/" in self.path:
                self.take([json.loads(line) for line in body.splitlines()])
            else:
                self.send({"errors": [], "warnings": []})  # the check of the card's header

        def take(self, lines: list[dict]) -> None:
            for line in lines:
                if line["key"] == "header":
                    uploads.messages.append(line["value"]["summary"])
                elif line["key"] == "file":
                    uploads.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.send({"commitUrl": f"{uploads.address}/me/model/commit/{'1' * 40}", "commitOid": "1" * 40})

        def send(self, value: object, status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    uploads.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield uploads
    finally:
        server.shutdown()
        server.server_close()
