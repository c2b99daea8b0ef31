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
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from klear_core.hf_config import HfConfig
from klear_core.train.kernels import paths
from klear_core.train.kernels.cases import PARTS, ModelSizes
from klear_core.train.kernels.proof import Conditions, Proof, first_line, prove, wait_for_gpu
from klear_core.train.model import DTYPES, Dtype
from klear_core.train.world import World

log = logging.getLogger(__name__)


_PROCESS_TIMEOUT_S = 300.0
"""Seconds in which a process must try its paths; torch.compile takes most of them, once for a machine."""


def prove_fast_paths(config: HfConfig, world: World, dtype: Dtype, *, context_parallel: int = 1) -> tuple[str, ...]:
    """Leave out all fast paths that fail on any rank, with a warning; return notes for the manifest (collective call).

    All ranks use the same paths: with different kernels their shares of a gradient would be rounded differently, and
    the others would wait for a rank that compiles for longer.
    """
    sizes = ModelSizes.of(config, context_parallel=context_parallel)
    mine = _proofs_of_process(Conditions(device=world.device, dtype=DTYPES[dtype], sizes=sizes))
    failed: dict[str, tuple[Proof, int]] = {}
    for rank, proofs in enumerate(world.gather(mine)):
        for proof in proofs:
            if proof.verdict != "agrees":
                paths.leave_out(proof.name, proof.reason)
                failed.setdefault(proof.name, (proof, rank))  # one note for a path, with the first rank's reason
    # After the loop, because a note names what is used instead.
    notes = [_note(proof, rank, world) for proof, rank in failed.values()]
    lines = tuple(filter(None, notes))
    if world.rank == 0:
        for line in lines:
            log.warning("%s", line)
    return lines


def _note(proof: Proof, rank: int, world: World) -> str:
    """Return what was left out and what is used instead; nothing if another library already provides the path."""
    part, kind, *_ = proof.name.split("/")
    others = [name for name in paths.provided() if name.startswith(f"{part}/{kind}/") and paths.in_use(name)]
    if others and proof.verdict == "missing":
        return ""
    instead = others[0] if others else PARTS[part].plain
    where = "" if world.size == 1 else f" on rank {rank}"
    return f"fast path {proof.name} was left out{where}: {proof.reason}; {instead} took its place"


_proven: dict[tuple[Conditions, tuple[Any, ...]], tuple[Proof, ...]] = {}


def _proofs_of_process(conditions: Conditions) -> tuple[Proof, ...]:
    """Return the proofs under these conditions, from this process's earlier ones if nothing has changed since."""
    runs = paths.provided()
    # The functions themselves are part of the key: tests replace some under the same names.
    key = conditions, tuple(runs[name] for name in conditions.names())
    if key not in _proven:
        in_other_process = conditions.device.type == "cuda"
        _proven[key] = tuple(prove_in_process(conditions) if in_other_process else prove(conditions))
    return _proven[key]


def prove_in_process(conditions: Conditions, *, is_timed: bool = False) -> Iterator[Proof]:
    """Yield the same proofs as `prove`, tried in another process; one that dies costs only the path it was trying."""
    names, left_out = conditions.names(), dict(paths.left_out())
    while names:
        task = _Task(conditions=conditions, names=names, runs=paths.provided(), left_out=left_out, is_timed=is_timed)
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
    runs: Mapping[str, paths.Run]
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
        code = "from klear_core.train.proofs import main; main()"
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
        paths.provide(name, run)
    for name, reason in task.left_out.items():
        paths.leave_out(name, reason)
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
