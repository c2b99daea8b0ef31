"""Keep the fast paths of this process: functions that take the place of plain torch operations, by name.

A name is `part/device`, or `part/device/library` where several libraries have the part. `klear_core.train.proofs`
compares each with the plain operations at the start of a stage, and leaves out those that disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Run = Callable[..., Any]

# Module state, because kernels are looked up inside a model's layers, where no argument could bring them.
_runs: dict[str, Run] = {}
_left_out: dict[str, str] = {}


def provide(name: str, run: Run) -> None:
    """Make `run` the fast path of this name; its callers must be able to do without it."""
    _runs[name] = run


def in_use(name: str) -> Run | None:
    """Return the fast path; None if there is none or it was left out, for the caller to use plain operations."""
    return None if name in _left_out else _runs.get(name)


def on_device(part: str, x: Tensor) -> Run | None:
    """Return the fast path of a part of the model on the device of `x`."""
    return in_use(f"{part}/{'cuda' if x.is_cuda else 'cpu'}")


def leave_out(name: str, reason: str) -> None:
    """Use plain operations in place of this fast path until this process ends."""
    _left_out[name] = reason


def left_out() -> Mapping[str, str]:
    """Return the names of the paths that were left out, with the reasons."""
    return dict(_left_out)


def provided() -> Mapping[str, Run]:
    """Return all fast paths, those left out too."""
    return dict(_runs)


@contextmanager
def replaced(runs: Mapping[str, Run]) -> Iterator[None]:
    """Use other functions under these names for the length of the block, with nothing left out at its start."""
    before, before_left_out = dict(_runs), dict(_left_out)
    _runs.update(runs)
    _left_out.clear()
    try:
        yield
    finally:
        _runs.clear()
        _runs.update(before)
        _left_out.clear()
        _left_out.update(before_left_out)
