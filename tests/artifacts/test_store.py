import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from manifests import manifest

from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ArtifactError, ResourceError


def build(store: LocalStore, *, content: bytes = b"0123456789") -> ArtifactRef:
    with store.create("sft", "f1") as slot:
        (slot.workdir / "model").mkdir()
        (slot.workdir / "model" / "weights").write_bytes(content)
        (slot.workdir / "data.parquet").write_bytes(content)
        (slot.workdir / "scratch").mkdir()
        (slot.workdir / "scratch" / "checkpoint").write_bytes(content)
        return slot.publish(manifest())


def test_what_was_published_is_found_with_its_ledger_and_without_its_scratch(tmp_path: Path):
    store = LocalStore(tmp_path)
    ref = build(store)
    assert store.find("sft", "f1") == ref
    assert [f.path for f in read_manifest(ref.path).files] == ["data.parquet", "model/weights"]
    assert read_manifest(ref.path).ledger[0].dropped == {"same_text": 1}
    assert not (ref.path / "scratch").exists()
    assert ref.counts == {"rows": 2}
    assert store.folders() == [ref.path]


def fail_halfway(store: LocalStore) -> None:
    with store.create("sft", "f1") as slot:
        (slot.workdir / "half").write_text("half")
        raise RuntimeError


def test_nothing_is_visible_of_a_build_that_fails_and_the_next_one_goes_on_from_it(tmp_path: Path):
    store = LocalStore(tmp_path)
    with pytest.raises(RuntimeError):
        fail_halfway(store)
    assert store.find("sft", "f1") is None
    assert store.folders() == []
    assert store.workdir("sft", "f1").is_dir()
    with store.create("sft", "f1") as slot:
        assert slot.attempt == 2
        assert (slot.workdir / "half").read_text() == "half"


def test_any_flipped_bit_of_any_file_is_found_and_the_file_is_named(tmp_path: Path):
    store = LocalStore(tmp_path)
    ref = build(store)
    rng = random.Random(0)
    for path in sorted(p for p in ref.path.rglob("*") if p.is_file() and not p.name.endswith(".sha256")):
        good = path.read_bytes()
        for _ in range(10):
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(ArtifactError, match=path.name):
                store.verify(ref)
        path.write_bytes(good)
    store.verify(ref)


def test_a_missing_a_cut_and_an_extra_file_are_each_named(tmp_path: Path):
    store = LocalStore(tmp_path)
    ref = build(store)
    weights = ref.path / "model" / "weights"
    weights.write_bytes(b"012345678")
    with pytest.raises(ArtifactError, match=r"model/weights: has 9 bytes, the manifest says 10"):
        store.verify(ref)
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"model/weights: missing"):
        store.verify(ref)
    weights.write_bytes(b"0123456789")
    (ref.path / "extra.parquet").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"extra\.parquet: not in the manifest"):
        store.verify(ref)


def test_a_damaged_artifact_is_set_aside_and_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = LocalStore(tmp_path)
    ref = build(store)
    (ref.path / "data.parquet").write_bytes(b"x")
    with store.create("sft", "f1") as slot:
        assert slot.ref is None
    assert "data.parquet: has 1 bytes" in caplog.text
    assert [p.name.split("-")[0] for p in (tmp_path / ".aside").iterdir()] == ["corrupt"]


def test_checking_by_size_does_not_read_contents(tmp_path: Path):
    ref = build(LocalStore(tmp_path))
    (ref.path / "data.parquet").write_bytes(b"9876543210")
    LocalStore(tmp_path, checked_by="size").verify(ref)


def test_an_artifact_in_another_ones_place_is_refused(tmp_path: Path):
    store = LocalStore(tmp_path)
    ref = build(store)
    ref.path.rename(ref.path.with_name("f2"))
    with pytest.raises(ArtifactError, match="describes sft f1, not sft f2"):
        store.find("sft", "f2")


def test_links_are_not_published(tmp_path: Path):
    store = LocalStore(tmp_path)
    with store.create("sft", "f1") as slot:
        (slot.workdir / "model").symlink_to(tmp_path)
        with pytest.raises(ArtifactError, match="link"):
            slot.publish(manifest())
    assert store.find("sft", "f1") is None


def test_a_full_disk_is_a_resource_error_that_says_how_much_is_free(tmp_path: Path):
    store = LocalStore(tmp_path)
    with pytest.raises(ResourceError, match=r"no space left.*MB free of.*workspace\.root"), store.create("sft", "f1"):
        Path("/dev/full").write_text("x" * 10)
    with pytest.raises(ResourceError), store.create("sft", "f1"):  # as torch and safetensors put it
        raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")


def test_other_errors_pass_the_store_unchanged(tmp_path: Path):
    with pytest.raises(PermissionError), LocalStore(tmp_path).create("sft", "f1"):
        raise PermissionError(errno.EACCES, "no")


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from manifests import manifest
from klear_core.artifacts.store import LocalStore

root, log = Path(sys.argv[1]), Path(sys.argv[2])
with LocalStore(root).create("sft", "f1") as slot:
    if slot.ref:
        with log.open("a") as f: f.write("reused\\n")
    else:
        (slot.workdir / f"begun").write_text("half of it")
        with log.open("a") as f: f.write("built\\n")
        while not (root / "go").exists(): time.sleep(0.02)
        slot.publish(manifest())
"""


def start_builder(root: Path) -> subprocess.Popen[bytes]:
    code = BUILDER.format(here=str(Path(__file__).parents[1]))
    return subprocess.Popen([sys.executable, "-c", code, str(root), str(root / "log")])


def wait_for(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def log_of(root: Path) -> list[str]:
    return (root / "log").read_text().split() if (root / "log").exists() else []


def test_a_builder_that_is_killed_leaves_nothing_visible_and_its_work_to_the_next(tmp_path: Path):
    builder = start_builder(tmp_path)
    wait_for(lambda: log_of(tmp_path) == ["built"])
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    store = LocalStore(tmp_path)
    assert store.find("sft", "f1") is None
    with store.create("sft", "f1") as slot:  # the lock died with its holder
        assert (slot.workdir / "begun").read_text() == "half of it"
        assert slot.attempt == 2


def test_of_two_processes_that_want_the_same_artifact_one_builds_and_the_other_reuses(tmp_path: Path):
    builders = [start_builder(tmp_path), start_builder(tmp_path)]
    wait_for(lambda: log_of(tmp_path) == ["built"])
    (tmp_path / "go").touch()
    assert [b.wait(120) for b in builders] == [0, 0]
    assert sorted(log_of(tmp_path)) == ["built", "reused"]


def test_a_builder_that_waits_says_for_whom_and_since_when_and_that_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    builder = start_builder(tmp_path)
    wait_for(lambda: log_of(tmp_path) == ["built"])

    def let_it_go_on() -> None:
        wait_for(lambda: caplog.records)
        (tmp_path / "go").touch()

    threading.Thread(target=let_it_go_on, daemon=True).start()
    with LocalStore(tmp_path).create("sft", "f1") as slot:
        assert slot.ref is not None
    assert builder.wait(120) == 0
    holder = rf"process {builder.pid} on {os.uname().nodename}, since {datetime.now().year}-\d\d-\d\d \d\d:\d\d:\d\d"
    waiting, going_on = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert re.fullmatch(f"sft f1 is being built by {holder}: waiting for it", waiting)
    assert re.fullmatch(f"sft f1: no longer held by {holder}", going_on)


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path):
    store = LocalStore(tmp_path)
    with store.create("sft", "f1"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with store.create("sft", "f1") as slot:
            assert slot.attempt == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
