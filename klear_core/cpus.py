"""Count the CPUs that this process may use, which in a container or a batch job are fewer than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the CPUs of this process, at least 1: those of its affinity, at most the quota of its control groups."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = cgroup_quota()
    # Rounded down: threads beyond the quota would all be stopped for a part of the time.
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(*, cgroups: Path = _CGROUPS, own_groups: Path = _OWN_GROUPS) -> float | None:
    """Return the CPUs that the process's control groups allow, a fraction perhaps; None if they set no limit.

    Every group on the way to the root limits it, so that the smallest quota counts. Version 2 is read from `cpu.max`,
    version 1 from `cpu.cfs_quota_us`.
    """
    quotas = []
    for folder in _folders(cgroups, own_groups):
        quota = _quota_of(folder)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def _folders(cgroups: Path, own_groups: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups and of their parents. A container sees its own group as the root."""
    yield from (cgroups, cgroups / "cpu", cgroups / "cpu,cpuacct")
    if not own_groups.is_file():
        return
    for line in own_groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = cgroups / controllers / path.strip("/")
        while folder != cgroups:
            yield folder
            folder = folder.parent


def _quota_of(folder: Path) -> float | None:
    version_2, version_1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if version_2.is_file():
        quota, period = version_2.read_text().split()
    elif version_1.is_file():
        quota, period = version_1.read_text(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)
