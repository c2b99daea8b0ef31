"""`klear doctor --gpu`: ask driver, torch and vLLM themselves whether they work together; and a cluster's nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.doctor import Check, ask_program, check_disk, check_sandbox
from klear_core.cluster.network import SHM, NetworkReport, NodeFacts, node_facts, try_network
from klear_core.errors import KlearError

_DRIVER_OF_CUDA = {13: 580, 12: 525, 11: 450}
"""Oldest NVIDIA driver of each major version of CUDA (its release notes, minor version compatibility)."""
_NO_SMI = "there is no nvidia-smi"
_CHILD_S = 300.0
"""Longest wait for a program that imports torch or vLLM, from a slow disk too."""
_MIN_SHM_GB = 8.0
_MIN_FILES = 65_536
_MIN_LOCKED_MB = 8192.0
_MAX_SKEW_S = 1.0
_MIN_DISK_GB = 200.0
_SLOW_GB_PER_S = {"nccl": 1.0, "gloo": 0.0}
"""All-reduce below this is 10 Gbit Ethernet or less, over which sharded training mostly waits."""

TORCH_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "is_available": torch.cuda.is_available()}
if found["is_available"]:
    x = torch.ones(64, 64, device="cuda")
    product = x.bfloat16() @ x.bfloat16()
    found |= {
        "is_right": bool((product.float() == 64).all()) and float(x.sum()) == 4096,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": torch.cuda.get_device_capability(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
        "free_gb": round(torch.cuda.mem_get_info()[0] / 1e9, 1),
        "total_gb": round(torch.cuda.mem_get_info()[1] / 1e9, 1),
    }
print(json.dumps(found))
"""
_VLLM_PROBE = """
import json, vllm
from vllm import AsyncEngineArgs
from vllm.outputs import WeightVersionSpan
from vllm.platforms import current_platform
import vllm.v1.engine.async_llm
if current_platform.is_cuda():
    import vllm._C
print(json.dumps({"vllm": vllm.__version__, "platform": current_platform.device_type}))
"""


def check_gpu_machine(python: str = sys.executable) -> Iterator[Check]:
    """Yield all checks of a machine that trains on GPUs. `python` runs the programs that import torch and vLLM."""
    cuda = ask_json(python, TORCH_PROBE)
    driver = ask_driver()
    yield driver_check(driver, cuda)
    yield torch_check(cuda, driver)
    yield from other_processes()
    yield vllm_check(ask_json(python, _VLLM_PROBE), has_gpu=bool(cuda.get("is_available")))
    yield check_sandbox()
    yield from facts_checks(node_facts())
    yield clock_check()
    yield check_disk(Path.cwd(), min_gb=_MIN_DISK_GB)
    yield from network_checks()


def ask_json(python: str, program: str) -> dict[str, Any]:
    """Return what a program prints as JSON; its `failure` if it dies, hangs or prints something else."""
    answer = ask_program([python, "-c", program], timeout_s=_CHILD_S)
    if answer.failure:
        return {"failure": answer.failure}
    try:
        found = json.loads(answer.output.splitlines()[-1])
    except (ValueError, IndexError):
        return {"failure": f"it printed {answer.output[-200:]!r}"}
    return found if isinstance(found, dict) else {"failure": f"it printed {answer.output[-200:]!r}"}


def ask_driver() -> dict[str, Any]:
    """Return the driver's version and the names of the GPUs, by nvidia-smi; its `failure` if it gives none."""
    if shutil.which("nvidia-smi") is None:
        return {"failure": _NO_SMI}
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    answer = ask_program(query, timeout_s=60)
    if answer.failure:
        return {"failure": answer.failure}
    rows = [line.split(", ", 1) for line in answer.output.splitlines() if ", " in line]
    if not rows:
        return {"failure": "nvidia-smi lists no GPU"}
    return {"driver": rows[0][0], "gpus": [row[1] for row in rows]}


def needed_driver(cuda: str) -> int:
    """Return the oldest major version of the driver for a version of CUDA such as `13.0`; 0 if it is not known."""
    major = cuda.partition(".")[0]
    return _DRIVER_OF_CUDA.get(int(major), 0) if major.isdigit() else 0


def driver_check(driver: dict[str, Any], cuda: dict[str, Any]) -> Check:
    """Compare the driver with the CUDA that torch was built for."""
    version = str(cuda.get("cuda") or "")
    needed = needed_driver(version)
    wants = f"torch's CUDA {version} needs {needed} or newer" if needed else ""
    if "failure" in driver:
        # A machine without GPUs is not broken; one whose nvidia-smi fails is.
        is_fatal = driver["failure"] != _NO_SMI
        fix = f"where there is a GPU, install its driver{f': {wants}' if wants else ''}; in a container, --gpus all"
        return Check(name="driver", found=driver["failure"], is_good=False, is_fatal=is_fatal, fix=fix)
    found = f"{driver['driver']}, {len(driver['gpus'])} x {driver['gpus'][0]}"
    major = re.match(r"\d+", driver["driver"])
    if major and int(major[0]) < needed:
        fix = f"{wants}: install a newer driver, or a torch for an older CUDA with a vLLM that was built for it"
        return Check(name="driver", found=found, is_good=False, is_fatal=True, fix=fix)
    return Check(name="driver", found=f"{found}; {wants}" if wants else found, is_good=True)


def torch_check(cuda: dict[str, Any], driver: dict[str, Any]) -> Check:
    """Say whether torch computes on the GPU."""
    if "failure" in cuda:
        fix = "make gpu installs the versions of infra/locks/gpu.txt"
        found = f"does not import or compute: {cuda['failure']}"
        return Check(name="torch", found=found, is_good=False, is_fatal=True, fix=fix)
    found = f"{cuda['torch']}, CUDA {cuda['cuda'] or 'none: a build for CPUs'}"
    if not cuda["is_available"]:
        is_fatal = driver.get("failure") != _NO_SMI
        if not cuda["cuda"]:
            fix = "make gpu, or pip install torch from an index with CUDA builds"
        elif "failure" in driver:
            fix = "torch sees no GPU: see the line of the driver"
        else:
            fix = (
                "nvidia-smi sees a GPU and torch does not: CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}, the driver {driver.get('driver')}, needed are "
                f"{needed_driver(cuda['cuda'])} or newer; after an update of the driver, reboot"
            )
        return Check(name="torch", found=f"{found}, no GPU", is_good=False, is_fatal=is_fatal, fix=fix)
    found = f"{found}, NCCL {cuda['nccl'] or 'none'}, {cuda['free_gb']} of {cuda['total_gb']} GB free"
    if not cuda["is_right"]:
        fix = "the GPU computes wrong numbers: look at `nvidia-smi -q -d ECC`, and use another one"
        return Check(name="torch", found=f"{found}; a product is wrong", is_good=False, is_fatal=True, fix=fix)
    if tuple(cuda["capability"]) < (8, 0):
        fix = "bfloat16 needs compute capability 8.0 (A100) or newer"
        return Check(name="torch", found=f"{found}, capability {cuda['capability']}", is_good=False, fix=fix)
    return Check(name="torch", found=f"{found}; a product in bfloat16 is right", is_good=True)


def vllm_check(found: dict[str, Any], *, has_gpu: bool) -> Check:
    """Say whether vLLM imports, as 0.32 or newer, for the device that is here."""
    if "failure" in found:
        is_there = "No module named 'vllm'" not in found["failure"]
        fix = "make gpu installs the versions of infra/locks/gpu.txt" + (", in a new environment" if is_there else "")
        told = f"does not import: {found['failure']}" if is_there else "not installed"
        return Check(name="vLLM", found=told, is_good=False, is_fatal=is_there, fix=fix)
    told = f"{found['vllm']} for {found['platform']}"
    if has_gpu and found["platform"] != "cuda":
        fix = "this is vLLM's build for CPUs: install vllm in a new environment (make gpu)"
        return Check(name="vLLM", found=told, is_good=False, is_fatal=True, fix=fix)
    return Check(name="vLLM", found=told, is_good=True)


def other_processes() -> Iterator[Check]:
    """Yield a line for each process that holds memory of a GPU."""
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    answer = ask_program(query, timeout_s=60)
    if answer.failure:  # which the line of the driver tells; nvidia-smi prints its errors to standard output
        return
    for line in answer.output.splitlines():
        pid, *what = line.split(", ")
        fix = f"an engine's cache becomes smaller by what it holds; if nobody needs it: kill {pid}"
        yield Check(name="GPU memory", found=f"process {pid} ({', '.join(what)})", is_good=False, fix=fix)


def facts_checks(facts: NodeFacts, *, node: str = "") -> Iterator[Check]:
    """Yield the checks of a node's shared memory and limits; `node` names it where there are several."""
    where = f" on {node}" if node else ""
    is_good = facts.shm_free_gb >= _MIN_SHM_GB
    fix = "" if is_good else "--shm-size=32g in a container: Ray's objects and new weights of engines go through it"
    yield Check(name=f"{SHM}{where}", found=f"{facts.shm_free_gb:.1f} GB free", is_good=is_good, fix=fix)
    is_good = facts.max_files >= _MIN_FILES
    fix = "" if is_good else f"ulimit -n {_MIN_FILES} before ray start and klear"
    yield Check(name=f"open files{where}", found=f"{facts.max_files}", is_good=is_good, fix=fix)
    is_good = facts.max_locked_mb >= _MIN_LOCKED_MB
    fix = "" if is_good else "ulimit -l unlimited (containers: --ulimit memlock=-1) where NCCL uses InfiniBand"
    yield Check(name=f"locked memory{where}", found=f"{facts.max_locked_mb:.0f} MB", is_good=is_good, fix=fix)


def clock_check() -> Check:
    """Say whether this machine's clock is kept right, if the system can tell."""
    if shutil.which("timedatectl") is None:
        return Check(name="clock", found="no timedatectl to ask", is_good=True)
    answer = ask_program(["timedatectl", "show", "--property=NTPSynchronized", "--value"], timeout_s=10)
    if answer.failure:  # no systemd, as in a container
        return Check(name="clock", found="that of the host, which cannot be asked from here", is_good=True)
    if answer.output != "no":
        return Check(name="clock", found=answer.output, is_good=True)
    fix = "start chrony or systemd-timesyncd: leases of a shared store and logs of several nodes go by the clock"
    return Check(name="clock", found="not synchronised", is_good=False, fix=fix)


def network_checks() -> Iterator[Check]:
    """Yield the checks of the nodes of the cluster at RAY_ADDRESS: limits, clocks, and what NCCL or gloo brings."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        yield Check(name="network", found="one machine: RAY_ADDRESS names no cluster", is_good=True)
        return
    from tasks.resources import Needs, ray_session

    try:
        with ray_session(Needs(num_cpus=0, object_store_bytes=0)):
            yield from report_checks(try_network())
    except KlearError as e:
        fix = "start Ray on all nodes, in one environment and with one token (docs/cluster.md)"
        yield Check(name="network", found=str(e), is_good=False, is_fatal=True, fix=fix)


def report_checks(report: NetworkReport) -> Iterator[Check]:
    """Yield what there is to say about several nodes."""
    name = f"network, {report.backend}"
    if report.failure and not report.facts:
        fix = "`ray status` says which GPUs other work holds, and which nodes are there: ask again when they are free"
        yield Check(name=name, found=report.failure, is_good=False, is_fatal=True, fix=fix)
        return
    for facts in report.facts:
        yield from (check for check in facts_checks(facts, node=facts.name) if not check.is_good)
    is_good = report.skew_s <= _MAX_SKEW_S
    fix = "" if is_good else "synchronise the clocks of all nodes (chrony): leases of a shared store go by them"
    yield Check(name="clocks", found=f"{report.skew_s:.2f} s apart at most", is_good=is_good, fix=fix)
    if report.failure:
        told = sorted({f"{k}={v}" for facts in report.facts for k, v in facts.environment.items()})
        fix = (
            "in the environment of `ray start` on every node, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the "
            "interface that the nodes' addresses are on, NCCL_IB_HCA the InfiniBand cards (NCCL_IB_DISABLE=1: none), "
            f"NCCL_DEBUG=INFO says what is tried; now: {', '.join(told) or 'none is set'}; let all ports through"
        )
        yield Check(name=name, found=report.failure, is_good=False, is_fatal=True, fix=fix)
        return
    if report.exchange is None:
        yield Check(name=name, found="one node: nothing to exchange", is_good=True)
        return
    speed = report.exchange.num_bytes / report.exchange.all_reduce_s / 1e9
    found = (
        f"{len(report.facts)} nodes: all-reduce of {report.exchange.num_bytes / 1e6:.0f} MB at {speed:.2f} GB/s, "
        f"broadcast at {report.exchange.num_bytes / report.exchange.broadcast_s / 1e9:.2f} GB/s, all numbers right"
    )
    is_good = speed >= _SLOW_GB_PER_S[report.backend]
    fix = "" if is_good else "NCCL may use a slow interface: NCCL_DEBUG=INFO names it, NCCL_IB_HCA the fast cards"
    yield Check(name=name, found=found, is_good=is_good, fix=fix)
