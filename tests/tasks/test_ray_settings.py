"""Ray reads the settings that we give it: it ignores a name that it does not know."""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from klear_core.errors import ResourceError
from tasks.resources import LOCAL_SETTINGS, Needs, ray_session, store_bytes


@pytest.mark.parametrize("name", sorted(LOCAL_SETTINGS))
def test_the_installed_ray_knows_our_setting(name: str):
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "_raylet.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(f"{name}\0".encode()) >= 0


@pytest.mark.parametrize(
    ("visible", "count"), [("-1", 0), ("", 0), ("0,-1,1", 1), ("1", 1), ("GPU-4f,MIG-9a", 2), (None, 2)]
)
def test_ray_has_the_gpus_that_the_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
):
    """Of two. Ray by itself takes the -1 for one of them, and the learner would be placed on it."""
    ray = pytest.importorskip("ray")
    lister = tmp_path / "nvidia-smi"
    lister.write_text("#!/bin/sh\necho GPU 0: one\necho GPU 1: two\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def init(**settings: object) -> None:
        raise RuntimeError(f"asked for {settings.get('num_gpus')} GPUs")

    monkeypatch.setattr(ray, "init", init)
    session = ray_session(Needs(num_cpus=1, object_store_bytes=100 << 20))
    with pytest.raises(ResourceError, match=f"asked for {count} GPUs"), session:
        pass


GIB = 1 << 30


@pytest.mark.parametrize("shm_free", [64 << 20, 2 * GIB, 16 * GIB - 4096, 32 * GIB], ids=lambda n: f"{n / GIB:.2f}")
@pytest.mark.parametrize("weights", [300_000_000, 3_440_000_000, 16_400_000_000])
def test_ray_starts_with_the_store_that_we_ask_for(monkeypatch: pytest.MonkeyPatch, weights: int, shm_free: int):
    """/dev/shm of Docker, of our compose file, of a desktop of 32 GiB, and as the doctor advises for containers."""
    services = pytest.importorskip("ray._private.services")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=256 * GIB, available=200 * GIB))
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: 256 * GIB)
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: shm_free)
    asked = store_bytes(weights, shm_free=shm_free)
    assert services.determine_plasma_store_config(asked, "/tmp")[2] == asked
    assert asked >= min(128 << 20, weights)
