"""The shared store on a real server of the S3 protocol; nodes are folders and processes that share nothing else."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from manifests import manifest
from object_server import SECRET, object_server

from flows.doctor import check_store
from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError, ConfigError, ResourceError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server with the bucket `klear`; returns its address."""
    with object_server("klear") as address:
        yield address


def build(store: LocalStore, content: bytes = b"0123456789") -> ArtifactRef:
    with store.create("sft", "f1") as slot:
        if slot.ref is not None:
            return slot.ref
        (slot.workdir / "model").mkdir()
        (slot.workdir / "model" / "weights").write_bytes(content)
        return slot.publish(manifest())


def test_an_artifact_goes_from_node_to_node(server: str, tmp_path: Path):
    url = "s3://klear/both"
    ref = build(ObjectStore(tmp_path / "a", url), b"x" * (12 << 20))  # more than one part
    other = build(ObjectStore(tmp_path / "b", url), b"never built")
    assert other.path != ref.path
    assert (other.path / "model" / "weights").read_bytes() == b"x" * (12 << 20)


def test_of_many_writers_of_one_object_exactly_one_wins(server: str):
    bucket, wins = Bucket("s3://klear/race"), []
    threads = [
        threading.Thread(target=lambda i=i: bucket.create("seal", b"%d" % i) and wins.append(i)) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert bucket.read("seal") == b"%d" % wins[0]


def test_doctor_tells_that_the_server_has_conditional_writes(server: str):
    check = check_store("s3://klear/doctor")
    assert check.is_good, check.found
    assert "conditional writes" in check.found
    assert Bucket("s3://klear/doctor").keys("probe/") == []


def test_a_corrupted_object_is_named(server: str, tmp_path: Path):
    a = ObjectStore(tmp_path / "a", "s3://klear/corrupt")
    sha = read_manifest(build(a).path).files[0].sha256
    a.bucket.write(f"objects/{sha[:2]}/{sha}", b"9876543210")
    with pytest.raises(ArtifactError, match=rf"s3://klear/corrupt/objects/{sha[:2]}/{sha}: altered .* model/weights"):
        ObjectStore(tmp_path / "b", "s3://klear/corrupt").find("sft", "f1")


class Failing(BaseHTTPRequestHandler):
    """Passes requests on to the server, or fails so many."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    num_to_fail = 0

    def log_message(self, *_args: object) -> None: ...

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if Failing.num_to_fail:
            Failing.num_to_fail -= 1
            self.answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        reply = httpx.request(self.command, self.upstream + self.path, headers=headers, content=body)
        kept = {
            name: value for name, value in reply.headers.items() if name in ("etag", "content-type", "last-modified")
        }
        self.answer(reply.status_code, kept, reply.content, size=reply.headers.get("content-length"))

    def answer(self, status: int, headers: dict[str, str], content: bytes, size: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("content-length", size if is_head and size else str(len(content)))
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on  # the names are those of http.server


def test_a_server_that_fails_for_a_while_is_waited_for_once_it_has_answered(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import s3fs

    Failing.upstream = f"http://{server}"
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        bucket = Bucket("s3://klear/failing")
        bucket.write("first", b"1")
        Failing.num_to_fail = 4  # a server that never answered is given up after three
        bucket.write("second", b"2")
        assert Failing.num_to_fail == 0
        assert bucket.read("second") == b"2"
    finally:
        proxy.shutdown()
        proxy.server_close()
        s3fs.S3FileSystem.clear_instance_cache()


class Holding(BaseHTTPRequestHandler):
    """A server that has every object, and whose refusal does not repeat the condition (MinIO's and Versity's do not)."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None: ...

    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        told = b"At least one of the pre-conditions you specified did not hold"
        content = b"<Error><Code>PreconditionFailed</Code><Message>" + told + b"</Message></Error>"
        self.send_response(412)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = refuse  # the name is that of http.server


def test_a_server_need_not_say_which_condition_a_write_failed(monkeypatch: pytest.MonkeyPatch):
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra `s3`")
    holding = ThreadingHTTPServer(("127.0.0.1", 0), Holding)
    threading.Thread(target=holding.serve_forever, daemon=True).start()
    settings = {"ENDPOINT_URL": f"http://127.0.0.1:{holding.server_address[1]}", "DEFAULT_REGION": "us-east-1"}
    for name, value in (settings | {"ACCESS_KEY_ID": "klear", "SECRET_ACCESS_KEY": SECRET}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        assert not Bucket("s3://klear/held").create("first", b"second writer")
    finally:
        holding.shutdown()
        holding.server_close()
        s3fs.S3FileSystem.clear_instance_cache()


BUILDER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from manifests import manifest
from object_server import SECRET, object_server
from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.object_store import ObjectStore

class Killed(Bucket):
    def upload(self, file, key):
        if len(self.keys("objects/")) >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().upload(file, key)

store = ObjectStore(Path(sys.argv[1]), sys.argv[2])
store.bucket = Killed(sys.argv[2])
with store.create("sft", "f1") as slot:
    for i in range(16):
        (slot.workdir / str(i)).write_text(f"file {{i}}")
    slot.publish(manifest())
"""


def test_a_node_that_is_killed_in_mid_upload_leaves_nothing_visible_and_its_objects_to_the_next(
    server: str, tmp_path: Path
):
    url, code = "s3://klear/killed", BUILDER.format(here=str(Path(__file__).parents[1]))
    a, b = ObjectStore(tmp_path / "a", url), ObjectStore(tmp_path / "b", url)
    builder = subprocess.run([sys.executable, "-c", code, str(a.root), url], check=False)
    assert builder.returncode == -signal.SIGKILL
    sent = a.bucket.keys("objects/")
    assert 2 <= len(sent) < 16
    assert b.find("sft", "f1") is None
    with a.create("sft", "f1") as slot:  # its own next run goes on with the upload
        assert slot.ref is not None
    assert set(sent) <= set(a.bucket.keys("objects/"))
    found = b.find("sft", "f1")
    assert found is not None
    assert (found.path / "15").read_text() == "file 15"


@pytest.mark.parametrize(
    ("url", "changes", "error", "says"),
    [
        ("s3://nosuch/x", {}, ConfigError, "no such bucket"),
        ("s3://klear/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ResourceError, "127.0.0.1:9.*cannot be reached"),
        ("s3://klear/x", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ConfigError, "no credentials"),
    ],
)
def test_an_unusable_server_is_named_at_the_first_request_and_no_key_is_shown(
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    changes: dict[str, str],
    error: type[Exception],
    says: str,
):
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    # no shared credentials of the machine, and no metadata service to ask
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(error, match=says) as raised:
        ObjectStore(tmp_path, url).exists("sft", "f1")
    assert SECRET not in str(raised.value)
    s3fs.S3FileSystem.clear_instance_cache()
