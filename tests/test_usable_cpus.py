from __future__ import annotations

import os
from pathlib import Path

from klear_core.cpus import cgroup_quota, usable_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def quota_of(root: Path, files: dict[str, str], own: str = "") -> float | None:
    write(root, files | {"own": own})
    return cgroup_quota(cgroups=root, own_groups=root / "own")


def test_a_container_sees_its_quota_at_the_root(tmp_path: Path) -> None:
    assert quota_of(tmp_path, {"cpu.max": "150000 100000\n"}) == 1.5


def test_without_a_limit_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_of(tmp_path, {}) is None
    assert quota_of(tmp_path, {"cpu.max": "max 100000\n"}) is None


def test_the_smallest_quota_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    """A batch job's limit is often on its parent, and a step in it has none of its own."""
    files = {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000", "other/cpu.max": "100000 100000"}
    assert quota_of(tmp_path, files, own="0::/job/step\n") == 4


def test_version_1_is_read_too(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert quota_of(tmp_path / "none", files) is None
    limited = {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}
    assert quota_of(tmp_path, limited, own="5:memory:/job\n3:cpu,cpuacct:/job\n") == 2.5


def test_never_more_than_the_affinity_and_never_less_than_one() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
