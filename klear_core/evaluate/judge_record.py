"""Record the judge of a score with its machine, because time limits depend on the processor and on the concurrency."""

from __future__ import annotations

import platform
from pathlib import Path

from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.scores import JudgeRecord
from klear_core.verify.concurrency import code_workers, math_workers


def judge_record(verify: VerifyConfig) -> JudgeRecord:
    """Return the judge's settings with this machine's processor and the numbers of workers."""
    return JudgeRecord(
        settings=verify,
        cpu=_processor(),
        num_cores=usable_cpus(),
        math_workers=math_workers(verify.runtime),
        code_workers=code_workers(verify.runtime),
    )


def _processor() -> str:
    """Return the processor's name: on Linux as the kernel gives it, elsewhere as Python does."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
