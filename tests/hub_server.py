"""A Hub of our own: the few requests that huggingface_hub sends, answered from memory."""

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".parquet")
"""Files that the Hub stores by their SHA-256."""


def etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else hashlib.sha1(content).hexdigest()


def described(name: str, content: bytes) -> dict:
    file = {"size": len(content), "oid": "0" * 40}
    if name.endswith(LARGE):
        sha256 = etag(name, content)
        file["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
    return file


@contextmanager
def hub(
    repo: str,
    files: Mapping[str, bytes],
    *,
    repo_type: str = "dataset",
    sent: Mapping[str, bytes] | None = None,
    licence: str = "",
):
    """Yield the server's address and the list of the files that were fetched from it.

    `sent` are contents that are sent instead of those that are described.
    """
    fetched: list[str] = []
    prefix = "/datasets" if repo_type == "dataset" else ""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body):
            path = self.path.split("?")[0]
            file = path.removeprefix(f"{prefix}/{repo}/resolve/{REVISION}/")
            if file in files:
                if with_body:
                    fetched.append(file)
                tag = etag(file, files[file])
                content = (sent or {}).get(file, files[file])
                self.send(content, {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION}, with_body)
            elif path in (f"/api/{repo_type}s/{repo}/revision/{r}" for r in (REVISION, "main")):
                siblings = [{"rfilename": name, **described(name, c)} for name, c in files.items()]
                info = {
                    "id": repo,
                    "sha": REVISION,
                    "siblings": siblings,
                    "tags": [f"license:{licence}"] if licence else [],
                }
                self.send(json.dumps(info).encode(), {}, with_body)
            elif path == f"/api/{repo_type}s/{repo}/tree/{REVISION}":
                tree = [{"type": "file", "path": name, **described(name, c)} for name, c in files.items()]
                self.send(json.dumps(tree).encode(), {}, with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound" if repo not in path else "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, content, headers, with_body):
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()
