"""Implement the method, without Prefect or MLflow.

The names in `__all__` are the public interface; docs/recipes shows them in use. Importing this loads nothing heavy: a
name loads its module when it is first used.
"""

import os
from importlib import import_module
from typing import Any

# With this setting a row of a matrix product has the same bits in every batch, so that a resumed run can equal an
# uninterrupted one; without it, MKL's kernels for few rows sum in another order. MKL reads it at its first call. On AMD
# processors it holds from 4 rows on, which the sampler always has (`MIN_ROWS`). It costs nothing measurable.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

_PUBLIC = {
    "Benchmark": "evaluate.sample",
    "BenchmarkConfig": "config.data",
    "CurateConfig": "config.curate",
    "EvaluateConfig": "config.evaluate",
    "FileSource": "config.data",
    "RlConfig": "config.rl",
    "RlSetup": "rl.interfaces",
    "SftConfig": "config.train",
    "VerifyConfig": "config.verify",
    "curate": "data.curation.curate",
    "evaluate_model": "evaluate.run",
    "judge_file": "evaluate.answers.judge_file",
    "load_benchmark": "data.benchmarks",
    "read_reports": "scores",
    "take_traces": "distill.given_traces",
    "train_rl": "rl.loop",
    "train_sft": "sft.loop",
}
"""The module of each public name."""

__all__ = [*_PUBLIC]  # noqa: PLE0604  the keys are text


def __getattr__(name: str) -> Any:
    """Return a public name, and load its module if nobody has."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
