"""Facts that hold for every artifact store: in a folder, on a shared folder and in fsspec's memory."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import manifest

from klear_core.artifacts.bucket import Bucket, LeaseTimes
from klear_core.artifacts.manifest import (
    MANIFEST_SUM,
    POINTER,
    ArtifactRef,
    FileRecord,
    GivenRecord,
    InputRecord,
    read_manifest,
)
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.remote_paths import (
    NODE_ROOT,
    fetch_results,
    remote_paths_of,
    send_results,
    share_given,
    store_of,
)
from klear_core.artifacts.shared import send_work
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError, ConfigError, ResourceError
from klear_core.metrics import heartbeat
from klear_core.report.run.lineage import ancestors
from klear_core.train.base_model import model_folder, wanted_window

QUICK = LeaseTimes(expiry_s=0.4, poll_s=0.02)
Node = Callable[[str], ObjectStore]


def build(store: LocalStore, *, content: bytes = b"0123456789", kind: str = "sft", **changes) -> ArtifactRef:
    with store.create(kind, "f1") as slot:
        if slot.ref is not None:
            return slot.ref
        (slot.workdir / "model").mkdir()
        (slot.workdir / "model" / "weights").write_bytes(content)
        (slot.workdir / "copy").write_bytes(content)
        (slot.workdir / "rows").write_bytes(b"rows")
        (slot.workdir / "scratch").mkdir()
        (slot.workdir / "scratch" / "checkpoint").write_bytes(content)
        return slot.publish(manifest(kind=kind, **changes))


@pytest.fixture(params=["file", "memory"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    """Open the shared store from a node with a disk of its own."""
    urls = {"file": (tmp_path / "shared").as_uri(), "memory": f"memory://{uuid.uuid4().hex}"}
    return lambda name: ObjectStore(tmp_path / name, urls[request.param], times=QUICK)


@pytest.fixture(params=["local", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    urls = {"file": (tmp_path / "shared").as_uri(), "memory": f"memory://{uuid.uuid4().hex}"}
    root = tmp_path / "node"
    return LocalStore(root) if request.param == "local" else ObjectStore(root, urls[request.param], times=QUICK)


# every store


def test_a_published_artifact_is_found_without_its_scratch(store: LocalStore):
    assert not store.exists("sft", "f1")
    ref = build(store)
    assert store.exists("sft", "f1")
    assert store.find("sft", "f1") == ref
    assert [f.path for f in read_manifest(ref.path).files] == ["copy", "model/weights", "rows"]
    assert store.folders() == [ref.path]
    store.verify(ref)


def fail_halfway(store: LocalStore) -> None:
    with store.create("sft", "f1") as slot:
        (slot.workdir / "half").write_text("half")
        raise RuntimeError


def test_a_build_that_fails_leaves_nothing_visible_and_its_work_to_the_next(store: LocalStore):
    with pytest.raises(RuntimeError):
        fail_halfway(store)
    assert store.find("sft", "f1") is None
    assert store.workdir("sft", "f1").is_dir()
    with store.create("sft", "f1") as slot:
        assert (slot.attempt, (slot.workdir / "half").read_text()) == (2, "half")


def test_an_artifact_that_was_set_aside_is_built_again(store: LocalStore):
    build(store)
    assert store.set_aside("sft", "f1", why="rerun") is not None
    assert store.find("sft", "f1") is None
    assert build(store, content=b"other").path.joinpath("copy").read_bytes() == b"other"


def test_an_altered_file_is_named(store: LocalStore):
    ref = build(store)
    (ref.path / "model" / "weights").write_bytes(b"9876543210")
    with pytest.raises(ArtifactError, match="model/weights: altered"):
        store.verify(ref)


# stores that nodes share


def test_another_node_finds_the_artifact_and_reads_plain_files_from_its_own_disk(node: Node):
    ref, other = build(node("a")), node("b").find("sft", "f1")
    assert other is not None
    assert other.path != ref.path
    assert (other.path / "model" / "weights").read_bytes() == b"0123456789"
    node("b").verify(other)
    # equal files are fetched once and linked: the cache, `copy` and `model/weights`
    assert (other.path / "copy").stat().st_nlink == 3


def test_only_the_manifest_is_fetched_of_what_an_artifact_was_made_from(node: Node):
    a = node("a")
    with a.create("base", "f1") as slot:
        (slot.workdir / POINTER).write_text('{"path": "/models/x"}')  # given: its files stay on their machine
        slot.publish(manifest(kind="base"))
    build(a, kind="curate", inputs=(InputRecord(role="file", kind="file", fingerprint="outside"),))
    build(a, inputs=(InputRecord(role="problems", kind="curate", fingerprint="f1"),))
    inputs = (
        InputRecord(role="model", kind="base", fingerprint="f1"),
        InputRecord(role="traces", kind="sft", fingerprint="f1"),
    )
    build(a, kind="rl", inputs=inputs)
    b = node("b")
    ref = b.find("rl", "f1")
    assert ref is not None
    assert [f.parent.name for f in b.folders()] == ["rl"]
    assert [one.manifest.kind for one in ancestors(ref.path)] == ["base", "curate", "sft", "rl"]
    assert not b.exists("base", "f1")
    # a command that is given only the folder fetches what it needs
    problems = store_of(ref.path).find("curate", "f1")
    assert problems is not None
    assert (problems.path / "rows").read_bytes() == b"rows"


def test_nothing_is_visible_before_the_seal_and_what_was_sent_is_not_sent_again(node: Node):
    a = node("a")
    ref = build(LocalStore(a.root))
    a._upload(read_manifest(ref.path), ref.path)
    assert len(a.bucket.keys("objects/")) == 3  # two different contents and the manifest
    assert node("b").find("sft", "f1") is None
    # what is there by its name and size is believed, so this content would stay if it were not sent again
    sha = read_manifest(ref.path).files[0].sha256
    a.bucket.write(f"objects/{sha[:2]}/{sha}", b"9876543210")
    a.seal(ref)
    assert a.bucket.read(f"objects/{sha[:2]}/{sha}") == b"9876543210"


def test_an_artifact_whose_upload_was_interrupted_is_uploaded_by_the_next_run(node: Node):
    a = node("a")
    ref = build(LocalStore(a.root))  # complete on disk, as after a kill between the rename and the seal
    assert a.find("sft", "f1") is None
    assert not node("b").exists("sft", "f1")
    with a.create("sft", "f1") as slot:
        assert slot.ref == ref
    assert node("b").find("sft", "f1") is not None


def test_an_object_that_was_cut_short_is_sent_again(node: Node):
    a = node("a")
    ref = build(LocalStore(a.root))
    sha = read_manifest(ref.path).files[0].sha256
    a.bucket.write(f"objects/{sha[:2]}/{sha}", b"012")
    a.seal(ref)
    assert node("b").find("sft", "f1") is not None


def test_a_corrupted_object_is_named_and_the_artifact_is_built_again(node: Node, caplog: pytest.LogCaptureFixture):
    ref = build(node("a"))
    sha = next(f.sha256 for f in read_manifest(ref.path).files if f.path == "rows")
    key = f"objects/{sha[:2]}/{sha}"
    node("a").bucket.write(key, b"swor")
    b = node("b")
    with pytest.raises(ArtifactError, match=rf"{key}: altered .* it was the content of rows"):
        b.find("sft", "f1")
    b.bucket.write(key, b"swor")
    assert build(b).path.joinpath("rows").read_bytes() == b"rows"
    assert "will be built again" in caplog.text
    assert node("c").find("sft", "f1") is not None


def test_an_altered_object_is_kept_as_evidence(node: Node):
    a = node("a")
    sha = next(f.sha256 for f in read_manifest(build(a).path).files if f.path == "rows")
    a.bucket.write(f"objects/{sha[:2]}/{sha}", b"swor")
    with pytest.raises(ArtifactError, match=rf"so it was moved to aside/objects/{sha}-\d+;"):
        node("b").find("sft", "f1")
    (kept,) = a.bucket.keys("aside/objects/")
    assert a.bucket.read(kept) == b"swor"
    assert a.bucket.read(f"objects/{sha[:2]}/{sha}") is None


def test_an_altered_manifest_is_kept_as_evidence(node: Node):
    a = node("a")
    seal = build(a).path.joinpath(MANIFEST_SUM).read_text().split()[0]
    a.bucket.write(f"objects/{seal[:2]}/{seal}", b"{}")
    with pytest.raises(ArtifactError, match=rf"so it was moved to aside/objects/{seal}-\d+; it was the manifest"):
        node("b").find("sft", "f1")
    assert [a.bucket.read(key) for key in a.bucket.keys("aside/objects/")] == [b"{}"]


def test_a_rerun_is_not_undone_by_another_nodes_copy_of_the_old_artifact(node: Node):
    a, b = node("a"), node("b")
    build(a, content=b"old")
    assert b.find("sft", "f1") is not None
    a.set_aside("sft", "f1", why="rerun")
    assert b.find_intact("sft", "f1") is None  # before the new one is made
    assert not a.exists("sft", "f1")
    assert build(a, content=b"new").path.joinpath("copy").read_bytes() == b"new"
    assert build(b, content=b"never built").path.joinpath("copy").read_bytes() == b"new"


def test_an_artifact_that_another_node_made_again_is_no_longer_valid_here(node: Node):
    a, b = node("a"), node("b")
    build(a, content=b"old")
    old = b.find("sft", "f1")
    assert old is not None
    b.verify(old)
    a.set_aside("sft", "f1", why="rerun")
    build(a, content=b"new")
    with pytest.raises(ArtifactError, match="no longer the artifact that is sealed"):
        b.verify(old)
    found = b.find_intact("sft", "f1")
    assert found is not None
    assert found.path.joinpath("copy").read_bytes() == b"new"


def test_a_corrupted_object_is_replaced_by_the_intact_copy_of_a_node(node: Node):
    a, b = node("a"), node("b")
    sha = read_manifest(build(a).path).files[0].sha256
    a.bucket.write(f"objects/{sha[:2]}/{sha}", b"9876543210")
    assert b.find_intact("sft", "f1") is None
    assert build(a, content=b"never built").path.joinpath("copy").read_bytes() == b"0123456789"
    assert b.find_intact("sft", "f1") is not None


def test_a_damaged_copy_on_a_node_is_fetched_again(node: Node):
    build(node("a"))
    b = node("b")
    ref = b.find("sft", "f1")
    assert ref is not None
    (ref.path / "copy").write_bytes(b"9876543210")  # also alters the cache, through its link
    with b.create("sft", "f1") as slot:
        assert slot.ref == ref
    assert (ref.path / "copy").read_bytes() == b"0123456789"


def test_two_writers_at_once_leave_one_artifact_that_both_use(node: Node):
    a, b = node("a"), node("b")
    # neither waits for the other: as after a lease that ran out while its holder was stopped
    first, second = build(LocalStore(a.root), content=b"aaa"), build(LocalStore(b.root), content=b"bbb")
    sealed = [a.seal(first), b.seal(second)]
    assert [(ref.path / "copy").read_bytes() for ref in sealed] == [b"aaa", b"aaa"]
    assert [p.name.split("-")[0] for p in (b.root / ".aside").iterdir()] == ["replaced"]


def test_of_two_nodes_one_builds_and_the_other_waits_and_takes_it(node: Node, caplog: pytest.LogCaptureFixture):
    built: list[str] = []

    def run(name: str) -> None:
        with node(name).create("sft", "f1") as slot:
            if slot.ref is None:
                time.sleep(1)  # longer than the lease without heartbeats
                built.append(name)
                slot.publish(manifest())

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert "sft f1 is being built by process" in caplog.text


def test_a_lease_without_heartbeat_is_taken_over(node: Node):
    a = node("a")
    a.bucket.create("leases/sft-f1/000000001", json.dumps({"holder": "a killed one", "at": "then"}).encode())
    with a.create("sft", "f1") as slot:
        assert slot.ref is None
        assert a.bucket.keys("leases/")[-1].endswith("000000002")


def begin(store: ObjectStore, files: dict[str, str]) -> int:
    """Write files in a stage that is then killed, as far as its store can tell: nothing is sent at its end."""
    with store.create("sft", "f1") as slot:
        for name, text in files.items():
            file = slot.workdir / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        time.sleep(0.02)  # a pass leaves files of its own moment to the next
        return slot.attempt


def found_by(store: ObjectStore) -> dict[str, str]:
    with store.create("sft", "f1") as slot:
        files = sorted(path for path in slot.workdir.rglob("*") if path.is_file())
        return {path.relative_to(slot.workdir).as_posix(): path.read_text() for path in files}


def test_another_node_goes_on_with_unfinished_work(node: Node):
    begin(node("a"), {"traces/0.parquet": "0", "metrics.jsonl": "1\n", "scratch/shown/1": "s", "scratch/tokens": "t"})
    assert found_by(node("b")) == {"traces/0.parquet": "0", "metrics.jsonl": "1\n", "scratch/shown/1": "s"}
    assert begin(node("b"), {"traces/1.parquet": "1", "metrics.jsonl": "1\n2\n"}) == 3
    # its first node has older work by now
    assert found_by(node("a")) == {
        "traces/0.parquet": "0",
        "traces/1.parquet": "1",
        "metrics.jsonl": "1\n2\n",
        "scratch/shown/1": "s",
    }


def test_unfinished_work_is_sent_while_the_stage_runs_and_no_file_before_those_that_it_follows(node: Node):
    a = node("a")
    a._share_work_s = 0.01
    bucket = a.bucket
    with a.create("sft", "f1") as slot:
        for i in range(20):
            (slot.workdir / f"b{i}").write_text("first")
            (slot.workdir / f"a{i}").write_text("second")
            content = bucket.read("work/sft-f1/index")
            names = json.loads(content)["files"] if content else {}
            assert all(f"b{name[1:]}" in names for name in names)
            time.sleep(0.01)
        deadline = time.monotonic() + 60
        while bucket.read("work/sft-f1/index") is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_a_checkpoint_counts_is_in_the_store_before_it(node: Node):
    """Also what was written a moment ago, and whatever the timer does."""
    a = node("a")
    with a.create("sft", "f1") as slot:
        for step in range(30):
            with (slot.workdir / "metrics.jsonl").open("a") as rows:
                rows.write(f"{step}\n")
            send_work(slot.workdir)
            index = json.loads(a.bucket.read("work/sft-f1/index") or b"{}")
            _, sha = index["files"]["metrics.jsonl"]
            assert (a.bucket.read(f"work/sft-f1/files/{sha}") or b"").split()[-1] == str(step).encode()
    send_work(slot.workdir)  # of a stage that runs no more: nothing


def test_a_short_stage_is_published_in_the_middle_of_a_pass_without_a_warning(
    node: Node, caplog: pytest.LogCaptureFixture
):
    a = node("a")
    a._share_work_s = 0.0005
    for i in range(30):
        with a.create("sft", f"f{i}") as slot:
            for n in range(5):
                folder = slot.workdir / f"part{n}"
                folder.mkdir()
                (folder / "rows").write_text("r")
                shutil.rmtree(folder)  # stages delete folders of their own as well
            (slot.workdir / "rows").write_text("r")
            slot.publish(manifest("sft", f"f{i}"))
    assert "could not be copied" not in caplog.text
    assert a.bucket.keys("work/") == []


def test_what_changed_is_replaced_in_the_copy_and_a_finished_artifact_leaves_none(node: Node):
    a = node("a")
    begin(a, {"metrics.jsonl": "1\n", "traces/0": "0"})
    begin(a, {"metrics.jsonl": "1\n2\n"})
    assert found_by(node("b"))["metrics.jsonl"] == "1\n2\n"
    build(a)
    assert a.bucket.keys("work/") == []


def test_a_rerun_does_not_go_on_with_work_that_was_given_up_on_another_node(node: Node):
    begin(node("a"), {"traces/0.parquet": "0"})
    node("b").set_aside("sft", "f1", why="rerun")
    assert found_by(node("a")) == {}


def test_a_workspace_that_gets_another_store_goes_on_with_its_unfinished_work(tmp_path: Path):
    """There is no copy of the work in the new store, and nobody has discarded it."""
    stores = [ObjectStore(tmp_path / "node", (tmp_path / name).as_uri()) for name in ("old", "new")]
    begin(stores[0], {"scratch/checkpoints/00000500/weights": "w", "metrics.jsonl": "1\n"})
    with stores[1].create("sft", "f1") as slot:
        assert (slot.workdir / "scratch/checkpoints/00000500/weights").read_text() == "w"
        assert (slot.workdir / "metrics.jsonl").exists()


def test_altered_unfinished_work_is_begun_anew(node: Node, caplog: pytest.LogCaptureFixture):
    a = node("a")
    begin(a, {"traces/0.parquet": "0", "traces/1.parquet": "1"})
    a.bucket.write(a.bucket.keys("work/sft-f1/files/")[0], b"x")
    assert found_by(node("b")) == {}
    assert "altered" in caplog.text


def test_the_next_run_of_a_node_does_not_wait_for_the_lease_of_its_killed_one(node: Node):
    a = node("a")
    with a.create("sft", "f1"):
        left = a.bucket.read(a.bucket.keys("leases/")[0])
        assert left is not None
    a.bucket.create("leases/sft-f1/000000002", left)
    a._times = LeaseTimes(expiry_s=1e6)
    with a.create("sft", "f1") as slot:
        assert slot.ref is None


def test_a_store_that_is_away_when_a_lease_ends_fails_no_finished_stage(node: Node, caplog: pytest.LogCaptureFixture):
    class AwayAtTheEnd(Bucket):
        def write(self, key: str, content: bytes) -> None:
            if content == b"released":
                raise ResourceError("the store is away")
            super().write(key, content)

    a = node("a")
    a.bucket = AwayAtTheEnd(a.bucket.url)
    ref = build(a)
    assert "could not be given back" in caplog.text
    assert build(node("b"), content=b"never built").path.name == ref.path.name
    with pytest.raises(KeyError, match="the stage's own error"), a.create("sft", "f2"):
        raise KeyError("the stage's own error")


def test_a_pointer_to_files_of_this_machine_stays_on_it(node: Node):
    a = node("a")
    with a.create("base", "f1") as slot:
        (slot.workdir / POINTER).write_text('{"path": "/models/x"}')
        ref = slot.publish(manifest(kind="base"))
    assert a.find("base", "f1") == ref
    assert node("b").find("base", "f1") is None


def test_a_process_on_another_node_gets_its_own_copy_of_an_artifact_and_its_own_working_folder(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    a = node("a")
    ref = build(a)
    monkeypatch.setenv(NODE_ROOT, str(node("b").root))
    with a.create("rl", "f1") as slot:
        remote = remote_paths_of(slot.workdir)
        assert remote is not None
        assert remote == remote_paths_of(ref.path / "rows")
        assert remote.local_path(ref.path / "rows").read_bytes() == b"rows"
        assert remote.local_path(ref.path / "rows").is_relative_to(node("b").root)
        own = remote.local_path(slot.workdir)
        (own / "model").mkdir()
        (own / "model" / "weights").write_bytes(b"trained")
        fetch_results(remote, send_results(remote, own, ["model", "adapter"]), slot.workdir)
        assert (slot.workdir / "model" / "weights").read_bytes() == b"trained"
    with pytest.raises(ArtifactError, match="sft/f2: not in "):
        remote.local_path(ref.path.with_name("f2"))
    assert remote.local_path(Path("/elsewhere")) == Path("/elsewhere")


def test_every_file_that_a_process_on_another_node_sends_or_fetches_is_progress(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """Else a learner that sends a large model over a slow line would count as stuck."""
    a = node("a")
    ref = build(a)
    monkeypatch.setenv(NODE_ROOT, str(node("b").root))
    with a.create("rl", "f1") as slot:
        remote = remote_paths_of(slot.workdir)
        assert remote is not None
        before = heartbeat().count
        remote.local_path(ref.path)
        assert heartbeat().count > before
        assert heartbeat().latest.startswith("download of ")
        own = remote.local_path(slot.workdir)
        (own / "model").mkdir()
        for i in range(3):
            (own / "model" / f"part-{i}").write_bytes(bytes([i]))
        before = heartbeat().count
        send_results(remote, own, ["model"])
        assert heartbeat().count >= before + 2 * 3  # a checksum and an upload each


def test_a_given_model_reaches_processes_on_other_nodes(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a, model = node("a"), tmp_path / "given"
    model.mkdir()
    (model / "config.json").write_text("{}")
    files = (FileRecord(path="config.json", size=2, sha256=hashlib.sha256(b"{}").hexdigest()),)
    given = GivenRecord(origin=str(model), licence="none", files=files)
    with a.create("base", "f1") as slot:
        pointed = {"path": str(model), "max_position_embeddings": 64, "weights": {}}
        (slot.workdir / POINTER).write_text(json.dumps(pointed))
        ref = slot.publish(manifest(kind="base", given=given))
    remote = remote_paths_of(ref.path)
    assert remote is not None
    assert model_folder(remote.local_path(ref.path)) == model
    share_given(ref.path)
    monkeypatch.setenv(NODE_ROOT, str(node("b").root))
    model.rename(tmp_path / "gone")
    there = remote.local_path(ref.path)
    assert (model_folder(there) / "config.json").read_text() == "{}"
    assert wanted_window(there) == 64


FETCH = """
import sys
from pathlib import Path
from klear_core.artifacts.object_store import ObjectStore
store = ObjectStore(Path(sys.argv[1]), sys.argv[2])
for kind in sys.argv[3:]:
    print(store.find(kind, "f1").path)
"""


def test_an_artifact_that_no_process_uses_is_evicted_above_the_limit_and_fetched_again(tmp_path: Path):
    url = (tmp_path / "shared").as_uri()
    build(ObjectStore(tmp_path / "a", url))
    # fetched by a process that has ended
    command = [sys.executable, "-c", FETCH, str(tmp_path / "b"), url, "sft"]
    folder = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    b = ObjectStore(tmp_path / "b", url, cache_gb=1e-9)
    assert folder.is_dir()
    b.cache.evict()
    assert not folder.exists()
    assert not list((b.root / ".objects").glob("*/*"))
    assert b.find("sft", "f1") is not None
    b.cache.evict()
    assert folder.is_dir()  # in use by this process


def test_a_full_disk_is_named_when_an_artifact_is_fetched_and_nothing_half_fetched_is_left(node: Node):
    a, b = node("a"), node("b")
    ref = build(a)
    for file in read_manifest(ref.path).files:
        partial = b.root / ".objects" / file.sha256[:2] / f"{file.sha256}.part"
        partial.parent.mkdir(parents=True, exist_ok=True)
        if not partial.is_symlink():
            partial.symlink_to("/dev/full")  # a file on a disk without room
    with pytest.raises(ResourceError, match=r"no space left on the disk .* point workspace\.root at a bigger disk"):
        b.find("sft", "f1")
    while list((b.root / ".objects").glob("*/*.part")):  # each failure cleans up after itself
        with pytest.raises(ResourceError):
            b.find("sft", "f1")
    assert (b.find("sft", "f1").path / "rows").read_bytes() == b"rows"


class EvictsToo(logging.Handler):
    """Another process of the node: it evicts one artifact as soon as this one has evicted another."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def emit(self, _record: logging.LogRecord) -> None:
        (self._root / ".fetched" / "kind1-f1").unlink(missing_ok=True)
        shutil.rmtree(self._root / "kind1" / "f1", ignore_errors=True)


def test_two_processes_of_a_node_may_evict_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    url = (tmp_path / "shared").as_uri()
    for i in range(3):
        build(ObjectStore(tmp_path / "a", url), kind=f"kind{i}", content=bytes([i]))
    command = [sys.executable, "-c", FETCH, str(tmp_path / "b"), url, "kind0", "kind1", "kind2"]
    subprocess.run(command, check=True, capture_output=True)
    b = ObjectStore(tmp_path / "b", url, cache_gb=1e-9)
    logger, other = logging.getLogger("klear_core.artifacts.object_cache"), EvictsToo(b.root)
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(other)
    try:
        b.cache.evict()
    finally:
        logger.removeHandler(other)
    assert not list((b.root / ".objects").glob("*/*"))
    assert b.find("kind1", "f1") is not None


def test_what_a_node_built_itself_is_never_evicted(node: Node):
    a = node("a")
    a.cache.max_gb = 1e-9
    ref = build(a)
    a.cache.evict()
    assert ref.path.is_dir()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://AKIA123:secret@bucket/x", "credentials in it"),
        ("bucket/x", "not a URL"),
        ("nosuch://bucket/x", "fsspec knows no nosuch://"),
        # a relative folder would be another one for every process
        ("file://shared/klear", r"no absolute path: file:///shared/klear$"),
        ("local://shared/klear", r"no absolute path: file:///shared/klear$"),
        ("s3://bucket//x", r"an empty part in its path: s3://bucket/x$"),
    ],
)
def test_an_unusable_url_is_refused_without_repeating_a_key(url: str, says: str):
    with pytest.raises(ConfigError, match=says) as error:
        Bucket(url)
    assert "secret" not in str(error.value)
