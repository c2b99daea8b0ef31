"""Define where a stage's engines and judges run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from klear_core.config.verify import VerifyConfig
from klear_core.generate.factory import StartSampler, start_here
from klear_core.verify import JudgePool, build_judge_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Start a stage's engines and judges: by default one engine in this process, and judges on this machine."""

    section: str
    """Section of the stage's settings, for messages."""
    start_sampler: StartSampler = start_here
    build_judges: Callable[[VerifyConfig], JudgePool] = build_judge_pool
