"""A node deletes the working folders of stages that are complete, when its next stage begins; it keeps all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest
from object_server import object_server

from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.remote_paths import NODE_ROOT, RemotePaths

URL = "s3://klear/node-work"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    with object_server("klear"):
        yield ObjectStore(tmp_path / "driver", URL)


def test_folders_of_complete_stages_go_when_the_next_stage_begins(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_ROOT, str(tmp_path / "node"))
    remote = RemotePaths(root=store.root, url=URL)
    with store.create("sft", "f1") as slot:
        own = remote.local_path(slot.workdir / "scratch")
        (own / "step-6").write_text("98 GB of an 8B model")
        slot.publish(manifest(kind="sft"))
    with store.create("rl", "f2") as unfinished:
        going_on = remote.local_path(unfinished.workdir)
        assert not own.exists(), "nobody needs what the ranks of a complete stage wrote on this node"
    with store.create("rl", "f3") as slot:
        assert remote.local_path(slot.workdir).is_dir()
    assert going_on.is_dir(), "this stage was only interrupted"


def test_the_drivers_own_folders_are_left_to_the_driver(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NODE_ROOT, raising=False)
    remote = RemotePaths(root=store.root, url=URL)
    with store.create("sft", "f1") as slot:
        slot.publish(manifest(kind="sft"))
    left = store.root / ".building" / "sft-f1" / "work"
    left.mkdir(parents=True)
    with store.create("rl", "f2") as slot:
        remote.local_path(slot.workdir)
    assert left.is_dir()
