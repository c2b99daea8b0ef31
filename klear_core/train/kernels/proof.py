"""Compare one fast path with plain operations: its results and gradients, and its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from klear_core.train.kernels import paths
from klear_core.train.kernels.cases import PARTS, ModelSizes, Outputs, Trial, compiler_failure, is_used, why_missing

Verdict = Literal["agrees", "disagrees", "crashed", "missing"]
_TOLERANCES: dict[tuple[torch.dtype, torch.dtype], tuple[float, float]] = {
    (torch.float32, torch.float32): (2e-5, 1e-4),
    (torch.bfloat16, torch.float32): (2e-4, 1e-3),
    (torch.bfloat16, torch.bfloat16): (1.5e-2, 6e-2),
}
"""Relative errors allowed, by dtype of input and result, of a complete tensor and of any one of its rows (2-norms, the
mean row's added to a row's own). Float32 has 24 bits, and sums of a thousand terms lose a few. Bfloat16 has 8: each
rounding is up to 2^-9 = 0.002, and a gradient of attention takes several; plain operations of that dtype have a fifth
of these errors on a CPU. A float32 result of bfloat16 inputs must not have been rounded to bfloat16 on the way."""
_REPEATS = 10  # of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The comparison of one fast path with plain operations."""

    name: str
    verdict: Verdict
    error: float = math.nan
    """Largest error of a result or gradient, as a share of the tolerance: above 1 it disagrees."""
    reason: str = ""
    """Why the path cannot be used, in words for the user."""
    time_ratio: float = math.nan
    """Time of the fast path over that of plain operations, forward and backward; NaN if it was not measured."""

    @property
    def what(self) -> str:
        """Return the part of the model that the path computes."""
        return PARTS[self.name.split("/")[0]].what


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Device, dtype and model sizes of a stage, for which its paths are tried."""

    device: torch.device
    dtype: torch.dtype
    sizes: ModelSizes

    def names(self) -> list[str]:
        """Return the fast paths that a stage would use, in the order of their trials."""
        used = [name for name in paths.provided() if is_used(name, self.sizes, self.device, self.dtype)]
        order = list(PARTS)
        return sorted(used, key=lambda name: order.index(name.split("/")[0]))


def prove(conditions: Conditions, names: Sequence[str] | None = None, *, is_timed: bool = False) -> Iterator[Proof]:
    """Yield the proof of each path (all by default), tried in this process; a path that fails is left out at once."""
    for name in conditions.names() if names is None else names:
        proof = _prove_one(name, conditions, is_timed=is_timed)
        # Leave it out at once, because the head's trial uses the products if they are in use.
        if proof.verdict != "agrees":
            paths.leave_out(name, proof.reason)
        yield proof


def _prove_one(name: str, conditions: Conditions, *, is_timed: bool) -> Proof:
    sizes, device, dtype = conditions.sizes, conditions.device, conditions.dtype
    missing = why_missing(name, sizes)
    if missing:
        return Proof(name=name, verdict="missing", reason=missing)
    run, part = paths.provided()[name], PARTS[name.split("/", maxsplit=1)[0]]
    errors, ratios = [], []
    try:
        for trial in part.trials(run, sizes, device, dtype):
            errors.append(_error(trial, dtype))
            if is_timed:
                ratios.append(
                    _time(partial(_results, trial.fast, trial)) / _time(partial(_results, trial.plain, trial))
                )
    except Exception as e:  # noqa: BLE001  # a broken kernel can raise anything; the verdict reports it
        return Proof(name=name, verdict="crashed", reason=first_line(f"it raised {type(e).__name__}: {e}"))
    # After the trials: compilation fails only when a kernel is first called, and plain operations then took its place.
    failure = compiler_failure(name)
    if failure:
        return Proof(name=name, verdict="missing", reason=first_line(f"torch.compile failed with {failure}"))
    error = max(errors)
    if error > 1:
        reason = f"it differs from plain operations by {error:.3g} times the tolerance"
        return Proof(name=name, verdict="disagrees", error=error, reason=reason)
    # The slowest of the trials counts.
    return Proof(name=name, verdict="agrees", error=error, time_ratio=max(ratios, default=math.nan))


def _error(trial: Trial, dtype: torch.dtype) -> float:
    """Return the largest error of a result or gradient as a share of its tolerance; infinite for NaN."""
    found = _results(trial.fast, trial)
    exact = _results(trial.plain, trial, dtype=torch.float64)
    errors = []
    for mine, wanted in zip(found, exact, strict=True):
        of_tensor, of_row = _TOLERANCES[dtype, mine.dtype]
        difference = mine.double() - wanted
        if not bool(difference.isfinite().all()):
            return math.inf
        # Norms and not the largest number, because single numbers can cancel to almost nothing.
        errors.append(float(difference.norm() / wanted.norm().clamp_min(1e-30)) / of_tensor)
        if wanted.dim() > 1:
            rows, wanted_rows = (x.flatten(0, -2).norm(dim=-1) for x in (difference, wanted))
            # The mean row is added, because a row's own numbers can cancel to almost nothing.
            errors.append(float((rows / (wanted_rows + wanted_rows.square().mean().sqrt())).max()) / of_row)
    return max(errors)


def _results(function: Callable[..., Outputs], trial: Trial, *, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return a function's outputs and the gradients of a weighted sum of them, computed in another dtype if given."""
    with torch.enable_grad():
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_(trial.has_gradient) for x in trial.leaves]
        outputs = function(*leaves)
        if not trial.has_gradient:
            return list(outputs)
        g = torch.Generator().manual_seed(1)
        # Random, so that errors do not cancel in the sum. Rounded to the stage's dtype first: both forms get the same.
        weights = [torch.randn(out.shape, generator=g).to(trial.leaves[0].dtype).to(out) for out in outputs]
        gradients = torch.autograd.grad(outputs, leaves, weights)
    return [*(out.detach() for out in outputs), *gradients]


def _time(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs."""
    seconds = []
    for _ in range(_REPEATS):
        wait_for_gpu()  # a call only queues work; here that of the run before
        started = time.perf_counter()
        work()
        wait_for_gpu()
        seconds.append(time.perf_counter() - started)
    return min(seconds)  # other work on the machine only adds time; the first run may also compile


def wait_for_gpu() -> None:
    """Wait until the GPU, if there is one, has done all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_line(text: str) -> str:
    """Return the first line of an error's text, shortened for a note."""
    return text.strip().partition("\n")[0][:300]
