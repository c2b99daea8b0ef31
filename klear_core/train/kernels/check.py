"""Compare every fast path with plain operations at the start of a stage, and leave out those that disagree.

A path passes if its results and gradients, for a small input in the dtype and on the device of the stage, are those of
torch's or transformers' own operations in float64. It takes seconds on a GPU and a fraction of one on a CPU.

On CUDA the paths are tried in a process of their own: after an illegal memory access no call of the same process works
any more. A path whose process dies is left out, and another process tries the rest. On a CPU they are tried in this
process, so a C function that crashes ends the stage.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from klear_core import products
from klear_core.config.train import AttentionKernel
from klear_core.hf_config import HfConfig
from klear_core.train.distributed import World
from klear_core.train.kernels import attention, registry
from klear_core.train.kernels.check_cases import (
    PARTS,
    ModelSizes,
    Outputs,
    Trial,
    compiler_failure,
    is_used,
    why_missing,
)
from klear_core.train.model import DTYPES, Dtype

# ---- proof ----
# Compare one fast path with plain operations: its results and gradients, and its time.


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
        used = [name for name in registry.provided() if is_used(name, self.sizes, self.device, self.dtype)]
        order = list(PARTS)
        return sorted(used, key=lambda name: order.index(name.split("/")[0]))


def prove(conditions: Conditions, names: Sequence[str] | None = None, *, is_timed: bool = False) -> Iterator[Proof]:
    """Yield the proof of each path (all by default), tried in this process; a path that fails is left out at once."""
    for name in conditions.names() if names is None else names:
        proof = _prove_one(name, conditions, is_timed=is_timed)
        # Leave it out at once, because the head's trial uses the products if they are in use.
        if proof.verdict != "agrees":
            registry.leave_out(name, proof.reason)
        yield proof


def _prove_one(name: str, conditions: Conditions, *, is_timed: bool) -> Proof:
    sizes, device, dtype = conditions.sizes, conditions.device, conditions.dtype
    missing = why_missing(name, sizes)
    if missing:
        return Proof(name=name, verdict="missing", reason=missing)
    run, part = registry.provided()[name], PARTS[name.split("/", maxsplit=1)[0]]
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


# ---- proofs ----


log = logging.getLogger(__name__)


_PROCESS_TIMEOUT_S = 300.0
"""Seconds in which a process must try its paths; torch.compile takes most of them, once for a machine."""


def prove_fast_paths(
    config: HfConfig, world: World, dtype: Dtype, *, context_parallel: int = 1, kernel: AttentionKernel = "torch"
) -> tuple[str, ...]:
    """Leave out all fast paths that fail on any rank, with a warning; return notes for the manifest (collective call).

    `kernel` is the attention that the settings ask for.

    All ranks use the same paths: with different kernels their shares of a gradient would be rounded differently, and
    the others would wait for a rank that compiles for longer.
    """
    attention.ask_for(kernel)
    sizes = ModelSizes.of(config, context_parallel=context_parallel)
    dtypes = [DTYPES[dtype]]
    # Where a CPU multiplies in bfloat16, all but the products stays in float32; see `half_linear`.
    if world.device.type == "cpu" and dtype == "bfloat16" and products.instructions():
        dtypes.append(torch.float32)
    mine: list[Proof] = []
    for tried in dtypes:
        mine += _proofs_of_process(Conditions(device=world.device, dtype=tried, sizes=sizes))
    failed: dict[str, tuple[Proof, int]] = {}
    for rank, proofs in enumerate(world.gather(mine)):
        for proof in proofs:
            if proof.verdict != "agrees":
                registry.leave_out(proof.name, proof.reason)
                failed.setdefault(proof.name, (proof, rank))  # one note for a path, with the first rank's reason
    # After the loop, because a note names what is used instead.
    lines = tuple(_note(proof, rank, world) for proof, rank in failed.values())
    if world.rank == 0:
        for line in lines:
            log.warning("%s", line)
    return lines


def _note(proof: Proof, rank: int, world: World) -> str:
    """Return what was left out and what is used instead."""
    part, kind, *_ = proof.name.split("/")
    others = [name for name in registry.provided() if name.startswith(f"{part}/{kind}/") and registry.in_use(name)]
    instead = others[0] if others else PARTS[part].plain
    where = "" if world.size == 1 else f" on rank {rank}"
    return f"fast path {proof.name} was left out{where}: {proof.reason}; {instead} took its place"


_proven: dict[tuple[Conditions, tuple[Any, ...]], tuple[Proof, ...]] = {}


def _proofs_of_process(conditions: Conditions) -> tuple[Proof, ...]:
    """Return the proofs under these conditions, from this process's earlier ones if nothing has changed since."""
    runs = registry.provided()
    # The functions themselves are part of the key: tests replace some under the same names.
    key = conditions, tuple(runs[name] for name in conditions.names())
    if key not in _proven:
        in_other_process = conditions.device.type == "cuda"
        _proven[key] = tuple(prove_in_process(conditions) if in_other_process else prove(conditions))
    return _proven[key]


def prove_in_process(conditions: Conditions, *, is_timed: bool = False) -> Iterator[Proof]:
    """Yield the same proofs as `prove`, tried in another process; one that dies costs only the path it was trying."""
    names, left_out = conditions.names(), dict(registry.left_out())
    while names:
        task = _Task(conditions=conditions, names=names, runs=registry.provided(), left_out=left_out, is_timed=is_timed)
        trial = _run_process(task)
        if not trial.has_started:
            # For example, the GPU admits only one process.
            log.warning("fast paths are tried in the stage's own process: another one %s", trial.ending)
            yield from prove(conditions, names, is_timed=is_timed)
            return
        proofs = list(trial.proofs)
        # The process tries the paths in this order, so the first without a proof is the one that it died in.
        names = names[len(proofs) :]
        if names and not trial.is_over:
            proofs.append(Proof(name=names[0], verdict="crashed", reason=f"the process that tried it {trial.ending}"))
            names = names[1:]
        # The next process starts without what failed in this one, as the head's trial uses the products if it can.
        left_out |= {proof.name: proof.reason for proof in proofs if proof.verdict != "agrees"}
        yield from proofs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Input of the other process."""

    conditions: Conditions
    names: Sequence[str]
    runs: Mapping[str, registry.Run]
    left_out: Mapping[str, str]
    is_timed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Output of the other process."""

    proofs: Sequence[Proof]
    has_started: bool
    is_over: bool
    """Whether it has ended by itself: all paths are tried, or one raised an error after which no other can be."""
    ending: str


def _run_process(task: _Task) -> _Trial:
    # This process may have been started with another path to its modules than the interpreter's own.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory(prefix="klear-proofs-") as folder:
        written = Path(folder) / "proofs.jsonl"
        code = "from klear_core.train.kernels.check import main; main()"
        command = [sys.executable, "-c", code, str(written)]
        try:
            # No multiprocessing: ranks are daemonic, and may have no children of that kind.
            done = subprocess.run(
                command, input=pickle.dumps(task), capture_output=True, env=env, timeout=_PROCESS_TIMEOUT_S, check=False
            )
            is_over, ending = (
                done.returncode == 0,
                _describe_exit(done.returncode, done.stderr.decode(errors="replace")),
            )
        except subprocess.TimeoutExpired:
            is_over, ending = False, f"took more than {_PROCESS_TIMEOUT_S:g} s"
        has_started = written.exists()
        lines = written.read_text().splitlines() if has_started else []
    proofs = [Proof(**json.loads(line)) for line in lines]
    return _Trial(proofs=proofs, has_started=has_started, is_over=is_over, ending=ending)


def _describe_exit(code: int, stderr: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    last = stderr.strip().rpartition("\n")[2]
    return f"ended with exit code {code}" + (f": {first_line(last)}" if last else "")


def main() -> None:
    """Try the paths of a pickled task on stdin; append a line to the file named by the argument for each."""
    task: _Task = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our own parent process)
    for name, run in task.runs.items():
        registry.provide(name, run)
    for name, reason in task.left_out.items():
        registry.leave_out(name, reason)
    if task.conditions.device.type == "cuda":
        torch.cuda.set_device(task.conditions.device)
        torch.zeros(1, device=task.conditions.device)  # fails here, and not in a trial, if the GPU admits no process
    # The file exists from here on, which tells the parent that trials have begun.
    with open(sys.argv[1], "a") as file:
        for proof in prove(task.conditions, task.names, is_timed=task.is_timed):
            # Queued work may still fail, which must count against this path and not the next one.
            wait_for_gpu()
            file.write(json.dumps(asdict(proof)) + "\n")
            file.flush()  # what the parent reads if the next trial ends this process
            # After an error on a GPU, the rest needs another process.
            if proof.verdict == "crashed" and task.conditions.device.type == "cuda":
                return
