"""The sandbox proves itself, and refuses to go on where it does not isolate."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from verify_builders import ADD_ASSERTS, ADD_CALL, ADD_STDIN, code_config, fenced, problem

from klear_core.config.verify import SandboxConfig, VerifyConfig
from klear_core.errors import SandboxError
from klear_core.types import Outcome
from klear_core.verify import JudgePool
from klear_core.verify.sandbox import jail as jails
from klear_core.verify.sandbox.jail_command import (
    SETUP_HINT,
    _bubblewrap_flags,
    _firejail_flags,
    account_for,
    clean_environment,
    python_for,
)
from klear_core.verify.sandbox.selftest import checked_backend, find_gaps

PROFILE = Path(__file__).parents[3] / "infra" / "firejail" / "klear.profile"
IS_ROOT = os.getuid() == 0


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("backend", ["firejail", "bubblewrap"])
def test_a_backend_that_isolates_has_no_gaps(sandbox_name: str, backend: str) -> None:
    needs("bwrap" if backend == "bubblewrap" else backend)
    assert find_gaps(backend, VerifyConfig()) == []


def test_the_first_process_of_a_jail_by_bubblewrap_is_ours() -> None:
    """bubblewrap's own first process has no seccomp filter, and memory that every program of its user may write."""
    assert "--as-pid-1" in _bubblewrap_flags(account_for(SandboxConfig()), Path("/usr/bin/python3"))


def test_memory_of_another_process_that_can_be_opened_is_a_gap(sandbox_name: str) -> None:
    program = "import os, time\nif os.fork() == 0:\n    time.sleep(30)\n"  # the canary would find this child of its own
    jail = jails.Jail(sandbox_name, SandboxConfig())
    limits = jails.TestLimits(cpu_s=10.0, wall_s=30.0, memory_mb=512, output_bytes=1 << 20, recursion_limit=1000)
    try:
        jail.load(program.encode() + jails.guest_source("canary.py"), limits)
        request = {"folders": [], "secrets": [], "pids": [], "processes": 8, "memory_mb": 64}
        reply = jail.run(json.dumps(request).encode(), limits)
    finally:
        jail.kill()
    assert len(json.loads(reply.data)["memory_of"]) == 1


def test_limits_alone_have_none_of_the_gaps_they_can_close() -> None:
    needs("setpriv")
    assert find_gaps("rlimits-only", VerifyConfig()) == []


def test_a_small_limit_of_memory_is_no_gap(sandbox_name: str) -> None:
    """The canary's forks share their pages, which the limit of a test counts for each of them."""
    cfg = VerifyConfig()
    limits = cfg.limits.model_copy(update={"total_memory_mb": 256})
    assert find_gaps(sandbox_name, cfg.model_copy(update={"limits": limits})) == []


@pytest.mark.parametrize("backend", ["bubblewrap", "rlimits-only"])
def test_the_other_backends_judge_alike(sandbox_name: str, backend: str) -> None:
    needs("bwrap" if backend == "bubblewrap" else "setpriv")
    add = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"
    with JudgePool(code_config().model_copy(update={"sandbox": backend})) as pool:
        for reference in (ADD_STDIN, ADD_CALL, ADD_ASSERTS):
            verdict = pool.judge(problem(reference), fenced(add))
            assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail
        daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\nprint(3)"
        assert pool.judge(problem(ADD_STDIN), fenced(daemon)).score == pytest.approx(1 / 3)


def test_firejail_inside_a_container_is_found_out() -> None:
    """In another PID namespace firejail ignores its options, runs the program bare and says nothing."""
    needs("firejail")
    if not IS_ROOT or shutil.which("unshare") is None:
        pytest.skip("making a PID namespace with its own /proc takes root and unshare")
    script = (
        "from klear_core.verify.sandbox.selftest import checked_backend\nfrom klear_core.config.verify import VerifyConfig\n"
        "from klear_core.errors import SandboxError\n"
        "try:\n    checked_backend(VerifyConfig(sandbox='firejail'))\nexcept SandboxError as e:\n    print(e)\n"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if run.returncode:
        pytest.skip(f"unshare does not work here: {run.stderr[:200]}")
    assert "no sandbox isolates here" in run.stdout
    assert "--pid=host" in run.stdout


def test_a_sandbox_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_more: None)
    with pytest.raises(SandboxError) as refusal:
        checked_backend(VerifyConfig())
    assert "is not installed" in str(refusal.value)
    assert SETUP_HINT in str(refusal.value)
    assert "--set verify.sandbox=rlimits-only" in str(refusal.value)


def test_an_interpreter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"verify\.limits\.python"):
        python_for(SandboxConfig(python="/no/such/python"))


def test_root_is_never_the_user_of_the_sandbox() -> None:
    if not IS_ROOT:
        pytest.skip("only root chooses a user")
    with pytest.raises(SandboxError, match="is root"):
        account_for(SandboxConfig(user="root"))
    with pytest.raises(SandboxError, match="does not exist"):
        account_for(SandboxConfig(user="klear-nobody-of-this-name"))


def test_the_environment_carries_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in clean_environment(account_for(SandboxConfig())).values()


def test_an_interpreter_under_a_home_is_shown_alone_and_read_only(tmp_path: Path) -> None:
    python = tmp_path / "pyenv" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.touch()
    account = account_for(SandboxConfig())
    at_home = type(account)(uid=account.uid, gid=account.gid, home=str(tmp_path), must_switch=False)
    flags = _firejail_flags(SandboxConfig(), at_home, python)
    assert f"--whitelist={tmp_path}/pyenv" in flags
    assert f"--read-only={tmp_path}/pyenv" in flags
    assert "--private" not in flags


def test_the_profile_in_infra_says_what_the_command_line_says() -> None:
    lines = {line for line in PROFILE.read_text().splitlines() if line and not line.startswith("#")}
    flags = _firejail_flags(SandboxConfig(), account_for(SandboxConfig()), Path("/usr/bin/python3"))
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        if name in ("quiet", "noprofile", "private", "blacklist"):  # of a run or of a machine, not of the profile
            continue
        assert f"{name} {value}".strip() in lines, flag


def test_our_own_interpreter_is_found_where_there_is_no_system_python() -> None:
    assert Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}").exists() or sysconfig.is_python_build()


@pytest.mark.parametrize(
    ("system", "machine", "named"), [("Darwin", "arm64", "macOS on arm64"), ("Linux", "riscv64", "Linux on riscv64")]
)
@pytest.mark.parametrize("sandbox", ["auto", "rlimits-only"])
def test_a_system_without_isolation_is_refused_by_name_before_anything_is_tried(system, machine, named, sandbox):
    with pytest.raises(SandboxError, match=f"{named}: programs are judged on Linux alone"):
        checked_backend(VerifyConfig(sandbox=sandbox), system=system, machine=machine)
