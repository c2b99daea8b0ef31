"""All artifacts of a workspace or store are listed from one index; what it lacks is read once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest
from object_server import object_server
from opened import Opened

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.index import catalog
from klear_core.artifacts.manifest import InputRecord
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.store import LocalStore


def publish(store: LocalStore, kind: str, number: int, *inputs: tuple[str, int], text: str = "content") -> None:
    records = tuple(InputRecord(kind=k, fingerprint=f"f{n}", role=f"{k}{n}") for k, n in inputs)
    with store.create(kind, f"f{number}") as slot:
        if slot.ref is None:
            (slot.workdir / "file").write_text(text)
            slot.publish(manifest(kind, f"f{number}", inputs=records))


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened("manifest.json")


def test_each_manifest_is_opened_once_and_never_again(tmp_path: Path, opened: Opened):
    store = LocalStore(tmp_path)
    for number in range(40):
        publish(store, "sft", number)
    with opened.counted():
        assert len(catalog(store)) == 40
    assert opened.num == 40
    with opened.counted():
        assert len(catalog(store)) == 40
    assert opened.num == 0
    publish(store, "rl", 40, ("sft", 3))
    with opened.counted():
        found = catalog(store)
    assert opened.num == 1
    assert found["rl/f40"].inputs == ("sft/f3",)
    assert found["rl/f40"].size == len("content")


def test_an_artifact_that_was_made_again_or_is_gone_is_not_listed_as_it_was(tmp_path: Path):
    store = LocalStore(tmp_path)
    for number in range(20):
        publish(store, "sft", number)
    assert catalog(store)["sft/f3"].size == 7
    store.set_aside("sft", "f3", why="rerun")
    publish(store, "sft", 3, text="longer content")
    shutil.rmtree(store.folder("sft", "f4"))
    found = catalog(store)
    assert found["sft/f3"].size == 14
    assert "sft/f4" not in found


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 0, "entries": {}}', b'{"version": 1}'])
def test_a_damaged_index_costs_time_only(tmp_path: Path, content: bytes):
    store = LocalStore(tmp_path)
    for number in range(20):
        publish(store, "sft", number)
    before = catalog(store)
    (tmp_path / ".index.json").write_bytes(content)
    assert catalog(store) == before


def test_a_damaged_manifest_is_left_out(tmp_path: Path):
    store = LocalStore(tmp_path)
    publish(store, "sft", 1)
    publish(store, "sft", 2)
    (store.folder("sft", "f1") / "manifest.json").write_text("{}")
    assert list(catalog(store)) == ["sft/f2"]


class CountingBucket(Bucket):
    """Counts the objects that were read."""

    num_read = 0

    def read(self, key: str) -> bytes | None:
        self.num_read += 1
        return super().read(key)


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield (tmp_path / "store").as_uri()
        return
    with object_server("index"):
        yield "s3://index/prefix"


@pytest.mark.slow
def test_a_shared_store_is_listed_by_its_index_from_any_node(tmp_path: Path, url: str):
    store = ObjectStore(tmp_path / "node", url)
    for number in range(30):
        publish(store, "sft", number)
    first, later = CountingBucket(url), CountingBucket(url)
    before = catalog(first)
    assert len(before) == 30
    assert catalog(later) == before
    assert later.num_read == 1
    store.set_aside("sft", "f3", why="rerun")
    publish(store, "sft", 3, text="longer content")
    again = CountingBucket(url)
    assert catalog(again)["sft/f3"].size == 14
    assert again.num_read == 1 + 2  # the index; the seal and the manifest of the one that is new
    assert len(before["sft/f5"].files) == 2  # its file and its manifest
