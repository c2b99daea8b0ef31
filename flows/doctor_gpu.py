"""`klear doctor --gpu`: compare every fast path of this machine with plain operations, and show a table."""

from __future__ import annotations

import importlib.metadata
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from klear_core.train.kernels.proof import Conditions, Proof

_TRANSFER_TIMEOUT_S = 120.0
_RECEIVER = """
import sys
from klear_core.generate.engine import load_offer
from klear_core.generate.transfer import fetch
for name, tensor in fetch(load_offer(sys.argv[1]), rank=1):
    print(name, int(tensor.cpu().long().sum()), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCheck:
    """One line of the table."""

    name: str
    verdict: str
    """`not run` says nothing about the path."""
    dtype: str = ""
    error: float = math.nan
    time_ratio: float = math.nan
    note: str = ""

    @property
    def is_bad(self) -> bool:
        """Return whether the path is there and does not work."""
        return self.verdict in ("disagrees", "crashed")


def check_paths() -> Iterator[PathCheck]:
    """Yield a check of each fast path as soon as it is known: on the GPU if there is one, and always on the CPU."""
    import torch

    from klear_core.train.kernels.proof import prove
    from klear_core.train.proofs import prove_in_process

    if torch.cuda.is_available():
        for dtype in (torch.bfloat16, torch.float32):
            yield from map(partial(_line, dtype), prove_in_process(_on_gpu(dtype), is_timed=True))
    else:
        yield PathCheck(name="*/cuda", verdict="not run", note="no GPU: torch sees no CUDA device")
    # One thread, because on a busy machine several wait for each other, and the ratio of times means nothing.
    torch.set_num_threads(1)
    here = _on_cpu()
    yield from map(partial(_line, here.dtype), prove(here, is_timed=True))
    yield from _compiled_for_cpu(here)
    yield check_transfer("gloo")
    if torch.cuda.device_count() > 1:
        yield check_transfer("nccl")
    else:
        yield PathCheck(name="transfer/nccl", verdict="not run", note="two GPUs are needed")
    yield _vllm_path()


def show_paths(checks: Iterator[PathCheck]) -> bool:
    """Print the table; return whether no path that is there fails."""
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("path", "dtype", "verdict", "error / allowed", "time / plain", "note"):
        table.add_column(column, overflow="fold")
    is_good = True
    for check in checks:
        is_good &= not check.is_bad
        colour = {"agrees": "green", "disagrees": "red", "crashed": "red"}.get(check.verdict, "yellow")
        numbers = map(_number, (check.error, check.time_ratio))
        table.add_row(check.name, check.dtype, f"[{colour}]{check.verdict}[/]", *numbers, escape(check.note))
    console.print(table)
    console.print(
        "A stage leaves out what does not agree, with a note in its manifest. On a GPU: pytest -m gpu tests/gpu"
    )
    return is_good


def _number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.2g}"


def _line(dtype: object, proof: Proof, *, name: str | None = None) -> PathCheck:
    return PathCheck(
        name=name or proof.name,
        dtype=str(dtype).removeprefix("torch."),
        verdict=proof.verdict,
        error=proof.error,
        time_ratio=proof.time_ratio,
        note=proof.reason,
    )


def _on_gpu(dtype: object) -> Conditions:
    import torch

    from klear_core.train.kernels.cases import ModelSizes
    from klear_core.train.kernels.proof import Conditions

    # Qwen3-1.7B
    sizes = ModelSizes(
        hidden=2048,
        intermediate=6144,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab=151_936,
        is_qwen3=True,
    )
    assert isinstance(dtype, torch.dtype)
    return Conditions(device=torch.device("cuda", 0), dtype=dtype, sizes=sizes)


def _on_cpu() -> Conditions:
    import torch

    # A thousandth of the vocabulary, since the CPU's paths do not depend on it.
    gpu = _on_gpu(torch.float32)
    sizes = replace(gpu.sizes, hidden=256, intermediate=768, num_heads=4, num_kv_heads=2, head_dim=64, vocab=500)
    return replace(gpu, device=torch.device("cpu"), sizes=sizes)


def _compiled_for_cpu(here: Conditions) -> Iterator[PathCheck]:
    """Yield checks of what torch.compile makes of CUDA's functions for the CPU, where a C++ compiler is needed."""
    from klear_core.train.kernels import paths
    from klear_core.train.kernels.fused_cuda import Kernels
    from klear_core.train.kernels.proof import prove
    from klear_core.train.logits import Passes

    kernels, passes = Kernels("inductor"), Passes("inductor")
    compiled: dict[str, Any] = {
        "norm/cpu": kernels.norm,
        "gate/cpu": kernels.gate,
        "rotate/cpu": kernels.rotate,
        "head/cpu": passes,
    }
    # The CPU's gate takes both halves in one tensor, and the head's path is what returns its passes.
    runs: dict[str, paths.Run] = {
        **compiled,
        "gate/cpu": lambda gate_up: kernels.gate(*gate_up.chunk(2, dim=-1)),
        "head/cpu": lambda: passes,
    }
    with paths.replaced(runs):
        for proof in prove(here, list(runs), is_timed=True):
            failure = compiled[proof.name].failure
            found = replace(proof, verdict="missing", reason=failure[:200]) if failure else proof
            yield _line(here.dtype, found, name=f"{proof.name}, torch.compile")


def check_transfer(backend: Literal["gloo", "nccl"]) -> PathCheck:
    """Send tensors from this process to another one, as the learner does to an engine, and compare what arrived."""
    import torch

    from klear_core.generate.engine import TensorSpec, dump_offer
    from klear_core.generate.transfer import WeightServer

    device = "cuda:0" if backend == "nccl" else "cpu"
    weights = {f"w{i}": torch.arange(1000 * i, 3000 * i, dtype=torch.int32, device=device) for i in (1, 2, 3)}
    specs = [TensorSpec(name=name, dtype="int32", shape=tuple(w.shape)) for name, w in weights.items()]
    server = WeightServer("127.0.0.1", timeout_s=_TRANSFER_TIMEOUT_S)
    offer = server.offer(specs, version=0, backend=backend, num_ranks=1, chunk_bytes=20_000)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if backend == "nccl":
        torch.cuda.set_device(0)
        # The other process sees the second GPU alone.
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    receiver = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, dump_offer(offer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    lost: list[list[int]] = []
    sending = threading.Thread(target=lambda: lost.append(server.send(offer, weights.items(), [0])), daemon=True)
    sending.start()
    try:
        received, complaint = receiver.communicate(timeout=_TRANSFER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        receiver.kill()
        received, complaint = "", f"nothing arrived within {_TRANSFER_TIMEOUT_S:g} s"
        receiver.communicate()
    sending.join(_TRANSFER_TIMEOUT_S)
    wanted = [f"{name} {int(w.long().sum())}" for name, w in weights.items()]
    name = f"transfer/{backend}"
    if received.splitlines() == wanted and lost == [[]]:
        return PathCheck(name=name, dtype="int32", verdict="agrees", error=0.0, note="two processes of this machine")
    last = complaint.strip().rpartition("\n")[2] or f"received {received.split()}"
    return PathCheck(name=name, dtype="int32", verdict="disagrees" if received else "crashed", note=last[:200])


def _vllm_path() -> PathCheck:
    try:
        found = f"vllm {importlib.metadata.version('vllm')}: run pytest -m gpu tests/gpu/test_engine_gpu.py"
    except importlib.metadata.PackageNotFoundError:
        found = "vllm is not installed"
    return PathCheck(name="vllm/cuda", verdict="not run", note=found)
