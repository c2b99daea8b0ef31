"""The registry of tasks, by the kind of artifact that they make."""

from __future__ import annotations

from tasks.base import base
from tasks.benchmarks import benchmarks
from tasks.curate import curate
from tasks.distill import distill
from tasks.evaluate import evaluate
from tasks.report import report
from tasks.rl import rl
from tasks.sft import sft
from tasks.task import StageTask

TASKS: dict[str, StageTask] = {
    "benchmarks": benchmarks,
    "curate": curate,
    "base": base,
    "distill": distill,
    "sft": sft,
    "rl": rl,
    "evaluate": evaluate,
    "report": report,
}
