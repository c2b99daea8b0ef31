"""Compute the limits of a test from those of its problem and of the settings."""

from __future__ import annotations

from klear_core.code_tests import CodeReference
from klear_core.config.verify import VerifyConfig
from klear_core.verify.sandbox.jail import TestLimits

_TESTER_CPU_S = 20.0
_TESTER_RECURSION_LIMIT = 50_000  # our helpers compare trees and encode linked lists by recursion
_MIN_MEMORY_MB = 256  # the interpreter itself needs this much; problems' limits are meant for C++


def limits_for(reference: CodeReference, cfg: VerifyConfig) -> TestLimits:
    """Return a test's limits: those of the problem, adapted to Python, or else those of the settings."""
    cpu_s, memory_mb = cfg.code.cpu_s, cfg.code.memory_mb
    if reference.time_limit_s is not None:
        cpu_s = reference.time_limit_s * cfg.code.time_limit_scale
    if reference.memory_limit_mb is not None:
        memory_mb = max(reference.memory_limit_mb, _MIN_MEMORY_MB)
    return TestLimits(
        cpu_s=cpu_s,
        wall_s=cpu_s * cfg.code.wall_factor + 2.0,
        memory_mb=memory_mb,
        output_bytes=cfg.limits.output_mb << 20,
        recursion_limit=cfg.code.recursion_limit,
    )


def limits_of_tester(cfg: VerifyConfig, program: TestLimits | None) -> TestLimits:
    """Return the limits of the tests' process. Its wall-clock limit includes the program's, for which it waits."""
    wall_s = _TESTER_CPU_S * cfg.code.wall_factor
    if program is not None:
        wall_s += program.wall_s
    return TestLimits(
        cpu_s=_TESTER_CPU_S,
        wall_s=wall_s,
        memory_mb=cfg.code.memory_mb,
        output_bytes=cfg.limits.output_mb << 20,
        recursion_limit=_TESTER_RECURSION_LIMIT,
    )
