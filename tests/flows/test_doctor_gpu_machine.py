"""`klear doctor --gpu` says what does not work together, with its remedy; fakes of driver and libraries fail in every way."""

import json
import sys
from pathlib import Path

import pytest

from flows.doctor import Check
from flows.doctor_gpu import (
    TORCH_PROBE,
    ask_driver,
    ask_json,
    driver_check,
    facts_checks,
    needed_driver,
    other_processes,
    report_checks,
    torch_check,
    vllm_check,
)
from klear_core.cluster.network import Exchange, NetworkReport, NodeFacts

GOOD = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "is_available": True,
    "is_right": True,
    "gpus": ["NVIDIA H100"],
    "capability": [9, 0],
    "nccl": "2.29.7",
    "free_gb": 84.0,
    "total_gb": 85.0,
}
DRIVER = {"driver": "580.65.06", "gpus": ["NVIDIA H100", "NVIDIA H100"]}


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def is_answered(check: Check) -> bool:
    """A line that is not good says what to do."""
    return check.is_good or bool(check.fix)


@pytest.mark.parametrize(("cuda", "driver"), [("13.0", 580), ("12.8", 525), ("14.1", 0), ("", 0), ("none", 0)])
def test_the_driver_that_a_cuda_needs(cuda: str, driver: int):
    assert needed_driver(cuda) == driver


def test_a_driver_that_is_too_old_for_torch_is_named_with_the_one_that_is_needed():
    old = driver_check(DRIVER | {"driver": "550.54.15"}, GOOD)
    assert (old.is_good, old.is_fatal) == (False, True)
    assert old.found == "550.54.15, 2 x NVIDIA H100"
    assert "torch's CUDA 13.0 needs 580 or newer" in old.fix
    assert driver_check(DRIVER, GOOD).is_good


def test_nvidia_smi_is_asked_and_may_fail_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not driver_check(ask_driver(), GOOD).is_fatal  # a machine without GPUs is not broken
    program(tmp_path, "nvidia-smi", "echo '580.65.06, NVIDIA H100'; echo '580.65.06, NVIDIA H100'")
    assert ask_driver() == DRIVER
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    broken = driver_check(ask_driver(), GOOD)
    assert broken.is_fatal
    assert "Driver/library version mismatch" in broken.found
    program(tmp_path, "nvidia-smi", "exit 0")
    assert driver_check(ask_driver(), GOOD).found == "nvidia-smi lists no GPU"


@pytest.mark.parametrize(
    ("changes", "told", "remedy"),
    [
        ({"failure": "ImportError: libcudart.so.13"}, "libcudart.so.13", "make gpu"),
        ({"failure": "killed by signal 11"}, "killed by signal 11", "make gpu"),
        ({"cuda": "", "is_available": False}, "a build for CPUs", "make gpu"),
        ({"is_available": False}, "no GPU", "needed are 580 or newer"),
        ({"is_right": False}, "a product is wrong", "ECC"),
        ({"capability": [7, 5]}, "capability [7, 5]", "A100"),
    ],
)
def test_what_torch_lacks_is_named_with_its_remedy(changes: dict, told: str, remedy: str):
    check = torch_check(GOOD | changes, DRIVER)
    assert not check.is_good
    assert told in check.found
    assert remedy in check.fix
    assert torch_check(GOOD, DRIVER).is_good


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("kill -11 $$", "killed by signal 11"),
        ("echo 'OSError: libtorch_cuda.so: cannot open' >&2; exit 1", "OSError: libtorch_cuda.so: cannot open"),
        ("echo not JSON", "it printed 'not JSON'"),
        ("true", "it printed ''"),
        ("echo 3", "it printed '3'"),
    ],
)
def test_a_child_that_dies_is_described(tmp_path: Path, script: str, failure: str):
    assert ask_json(str(program(tmp_path, "python", script)), "") == {"failure": failure}


def test_torch_itself_is_asked_here_where_it_has_no_gpu():
    cuda = ask_json(sys.executable, TORCH_PROBE)
    assert cuda["is_available"] is False
    check = torch_check(cuda, {"failure": "there is no nvidia-smi"})
    assert (check.is_good, check.is_fatal) == (False, False)


@pytest.mark.parametrize(
    ("found", "has_gpu", "is_good", "told"),
    [
        ({"vllm": "0.32.0", "platform": "cuda"}, True, True, "0.32.0 for cuda"),
        ({"vllm": "0.32.0", "platform": "cpu"}, True, False, "for cpu"),
        ({"vllm": "0.32.0", "platform": "cpu"}, False, True, "for cpu"),
        ({"failure": "ModuleNotFoundError: No module named 'vllm'"}, True, False, "not installed"),
        ({"failure": "ImportError: undefined symbol: _ZN3c10"}, True, False, "undefined symbol"),
        ({"failure": "ImportError: cannot import name 'WeightVersionSpan'"}, True, False, "WeightVersionSpan"),
    ],
)
def test_vllm_is_asked_itself(found: dict, has_gpu: bool, is_good: bool, told: str):
    check = vllm_check(found, has_gpu=has_gpu)
    assert check.is_good == is_good
    assert told in check.found
    assert is_answered(check)


def facts(**changes: object) -> NodeFacts:
    good = {
        "name": "a",
        "clock_s": 0.0,
        "shm_free_gb": 100.0,
        "max_files": 1 << 20,
        "max_locked_mb": float("inf"),
        "environment": {},
    }
    return NodeFacts(**(good | changes))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"shm_free_gb": 0.06}, "--shm-size"),  # Docker's default
        ({"max_files": 1024}, "ulimit -n 65536"),
        ({"max_locked_mb": 8}, "ulimit -l unlimited"),
    ],
)
def test_limits_of_a_node_are_named_with_their_remedy(changes: dict, remedy: str):
    (bad,) = [check for check in facts_checks(facts(**changes), node="b") if not check.is_good]
    assert remedy in bad.fix
    assert bad.name.endswith(" on b")
    assert all(check.is_good for check in facts_checks(facts()))


def report(**changes: object) -> NetworkReport:
    good = {
        "backend": "nccl",
        "facts": (facts(), facts(name="b")),
        "skew_s": 0.01,
        "exchange": Exchange(all_reduce_s=0.01, broadcast_s=0.01, num_bytes=1 << 28),
        "failure": "",
    }
    return NetworkReport(**(good | changes))


def test_a_network_that_does_not_connect_names_the_variables_that_are_set():
    failed = report(
        exchange=None,
        failure="DistBackendError: socketStartConnect: Connect to 127.0.1.1 failed",
        facts=(facts(environment={"NCCL_SOCKET_IFNAME": "lo"}), facts(name="b", shm_free_gb=0.1)),
        skew_s=40,
    )
    checks = {check.name: check for check in report_checks(failed)}
    assert checks["network, nccl"].is_fatal
    assert "now: NCCL_SOCKET_IFNAME=lo" in checks["network, nccl"].fix
    assert not checks["clocks"].is_good
    assert not checks["/dev/shm on b"].is_good
    assert all(map(is_answered, checks.values()))


def test_nodes_whose_gpus_other_work_holds_are_named():
    busy = report(exchange=None, facts=(), skew_s=0.0, failure="no process has started within 120 s on 10.0.0.5")
    checks = {check.name: check for check in report_checks(busy)}
    assert "10.0.0.5" in checks["network, nccl"].found
    assert "`ray status`" in checks["network, nccl"].fix


def test_a_slow_network_is_no_failure_and_has_a_remedy():
    slow = {
        c.name: c for c in report_checks(report(exchange=Exchange(all_reduce_s=2, broadcast_s=1, num_bytes=1 << 28)))
    }
    assert "0.13 GB/s" in slow["network, nccl"].found
    assert (slow["network, nccl"].is_good, slow["network, nccl"].is_fatal) == (False, False)
    assert all(check.is_good for check in report_checks(report()))


def test_the_programs_are_json_on_one_line(tmp_path: Path):
    """A library may print a warning first."""
    python = program(tmp_path, "python", f"echo warning; echo '{json.dumps({'vllm': '0.32.0'})}'")
    assert ask_json(str(python), "") == {"vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.; exit 9", []),
        ("echo 4711, python3, 20000 MiB", ["process 4711 (python3, 20000 MiB)"]),
    ],
)
def test_a_broken_driver_is_no_process_that_holds_memory(tmp_path: Path, monkeypatch, script: str, found: list[str]):
    program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [check.found for check in other_processes()] == found
