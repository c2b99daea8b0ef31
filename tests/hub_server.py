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


def listed(files: Mapping[str, bytes], folder: str, *, is_deep: bool) -> list[dict]:
    """The files in a folder; those of its own folders are listed, too, if it `is_deep`, else these folders."""
    found = {}
    for name, content in files.items():
        if folder and not name.startswith(f"{folder}/"):
            continue
        below, _, deeper = name.removeprefix(f"{folder}/" if folder else "").partition("/")
        if deeper and not is_deep:
            path = f"{folder}/{below}".lstrip("/")
            found[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        else:
            found[name] = {"type": "file", "path": name, **described(name, content)}
    return list(found.values())


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

        def do_POST(self):
            """The description of single files and folders."""
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
            found = [one for one in listed(files, "", is_deep=True) if one["path"] in asked]
            folders = [name for name in asked if any(file.startswith(f"{name}/") for file in files)]
            found += [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
            self.send(json.dumps(found).encode(), {}, True)

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
            elif f"{path}/".startswith(f"/api/{repo_type}s/{repo}/tree/{REVISION}/"):
                folder = path.partition(REVISION)[2].strip("/")
                is_deep = "recursive=false" not in self.path.lower()
                self.send(json.dumps(listed(files, folder, is_deep=is_deep)).encode(), {}, with_body)
            else:
                self.send_response(404)
                is_file = path.startswith(f"{prefix}/{repo}/resolve/{REVISION}/")
                missing = "EntryNotFound" if is_file else "RevisionNotFound"
                self.send_header("X-Error-Code", "RepoNotFound" if repo not in path else missing)
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
