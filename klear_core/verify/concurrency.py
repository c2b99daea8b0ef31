"""Compute how many answers are judged at a time."""

from __future__ import annotations

from klear_core.config.verify import VerifyRuntime
from klear_core.cpus import usable_cpus


def math_workers(runtime: VerifyRuntime) -> int:
    """Return the number of processes that compare math answers."""
    return runtime.math_workers or usable_cpus()


def code_workers(runtime: VerifyRuntime) -> int:
    """Return the number of programs that run at a time: two a core, because half of a jail's start is waiting."""
    return runtime.code_workers or 2 * usable_cpus()
