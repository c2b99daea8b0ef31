"""Check that a sandbox isolates before the first untrusted program runs: a canary tries to escape, the host checks.

Firejail in particular does not report when it isolates nothing: inside another PID namespace (a container) it assumes
that it is already sandboxed, ignores all its options and runs the program bare with status 0.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klear_core.config.verify import VerifyConfig
from klear_core.errors import SandboxError
from klear_core.verify.sandbox.jail import Jail, JailBrokenError, Status, TestLimits, guest_source
from klear_core.verify.sandbox.jail_command import SETUP_HINT, Backend, account_for

_LOG = logging.getLogger(__name__)
_FOLDERS = (
    "/",
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/dev/shm",  # noqa: S108
    "/dev",
    "/run",
    "/run/lock",
    "/usr",
    "/etc",
    "/var",
    "/home",
    "/proc/sys",
)
"""Folders that no program may write to."""
_HARMLESS_VARIABLES = frozenset(
    [
        "PATH",
        "HOME",
        "LANG",
        "LC_CTYPE",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONHASHSEED",
        "PWD",
        "SHELL",
        "container",
        "PROMPT_COMMAND",
        "FIREJAIL_QUIET",
        "QT_X11_NO_MITSHM",
        "QML_DISABLE_DISK_CACHE",
        "KDE_FORK_SLAVES",
    ]
)
"""Environment variables that a program may see: ours, and those that Python, shells and firejail add."""
_CANARY_MEMORY_MB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that the sandbox let the canary do, and how to prevent it."""

    what: str
    fix: str


_SYSTEMS = (("Linux", "x86_64"), ("Linux", "aarch64"))
"""Systems and processors whose kernel and system calls the sandbox knows."""


def checked_backend(
    cfg: VerifyConfig, *, system: str = platform.system(), machine: str = platform.machine()
) -> Backend:
    """Return the backend to use, once a check has shown that it isolates.

    Raise SandboxError, which says what is missing in each backend and how to fix it, or that this system has none.
    """
    if (system, machine) not in _SYSTEMS:
        here = f"{'macOS' if system == 'Darwin' else system} on {machine}"
        raise SandboxError(
            f"{here}: programs are judged on Linux alone (x86_64 or aarch64), whose kernel isolates them: use a "
            "machine, virtual machine or container with it. Math problems need no sandbox"
        )
    if cfg.sandbox == "rlimits-only":
        gaps = find_gaps("rlimits-only", cfg)
        if gaps:
            raise SandboxError(_refusal([("rlimits-only", gaps)]))
        _LOG.warning(
            'verify.sandbox = "rlimits-only": untrusted programs see this machine\'s files and share its namespaces'
        )
        return "rlimits-only"
    candidates: tuple[Backend, ...] = ("firejail", "bubblewrap") if cfg.sandbox == "auto" else (cfg.sandbox,)
    refused: list[tuple[Backend, list[Gap]]] = []
    for backend in candidates:
        gaps = find_gaps(backend, cfg)
        if not gaps:
            return backend
        refused.append((backend, gaps))
    raise SandboxError(_refusal(refused))


def find_gaps(backend: Backend, cfg: VerifyConfig) -> list[Gap]:
    """Return what the canary could do but must not; empty if the backend isolates."""
    # The canary forks as often as it may. Each fork is counted with the pages that all of them share.
    room_mb = _CANARY_MEMORY_MB * (cfg.limits.processes + 8)
    limits_of_jail = cfg.jail_limits.model_copy(update={"total_memory_mb": max(cfg.limits.total_memory_mb, room_mb)})
    try:
        jail = Jail(backend, limits_of_jail)
    except SandboxError as e:
        return [Gap(what=str(e), fix="")]
    except JailBrokenError as e:
        return [Gap(what=str(e), fix=_start_hint(backend))]
    try:
        with tempfile.NamedTemporaryFile(prefix="klear-sentinel-") as sentinel:
            os.chmod(sentinel.name, 0o644)
            limits = TestLimits(
                cpu_s=10.0, wall_s=30.0, memory_mb=_CANARY_MEMORY_MB, output_bytes=1 << 20, recursion_limit=1000
            )
            jail.load(guest_source("canary.py"), limits)
            reply = jail.run(_request(cfg, sentinel.name), limits)
    except JailBrokenError as e:
        return [Gap(what=f"the canary could not be run: {e}", fix=_start_hint(backend))]
    finally:
        jail.kill()
    if reply.status is not Status.OK:
        return [Gap(what=f"the canary ended with {reply.status.name} {reply.text}", fix=_start_hint(backend))]
    return _judge_findings(json.loads(reply.data), backend, cfg)


def _request(cfg: VerifyConfig, sentinel: str) -> bytes:
    folders = [*_FOLDERS, account_for(cfg.limits).home, str(Path.home()), str(Path.cwd())]
    request = {
        "folders": sorted(set(folders)),
        "secrets": [sentinel, "/etc/shadow", str(Path.home() / ".bashrc"), str(Path.home() / ".ssh")],
        "pids": [os.getpid(), os.getppid()],
        "processes": cfg.limits.processes,
        "memory_mb": _CANARY_MEMORY_MB + 1,
    }
    return json.dumps(request).encode()


def _judge_findings(found: dict[str, Any], backend: Backend, cfg: VerifyConfig) -> list[Gap]:
    gaps = [Gap(what=what, fix=fix) for is_open, what, fix in _everywhere(found) if is_open]
    if backend != "rlimits-only":
        gaps += [Gap(what=what, fix=fix) for is_open, what, fix in _in_a_jail(found, cfg) if is_open]
    return gaps


def _everywhere(found: dict[str, Any]) -> list[tuple[bool, str, str]]:
    """Return what must hold with every backend: whether there is a gap, what it is, and how to close it."""
    unknown = sorted(set(found["environment"]) - _HARMLESS_VARIABLES)
    return [
        (found["uid"] == 0, "programs run as root", f"give verify.limits.user an ordinary user; {SETUP_HINT}"),
        (found["seccomp"] != "2", "no seccomp filter", "use a kernel with CONFIG_SECCOMP_FILTER"),
        (found["no_new_privs"] != "1", "no_new_privs is off", "use Linux 3.5 or newer"),
        (int(found["capabilities"], 16) != 0, f"capabilities {found['capabilities']}", "run as an ordinary user"),
        (found["socket"], "sockets can be opened", "use a kernel with CONFIG_SECCOMP_FILTER"),
        (found["namespace"], "namespaces can be created", "use a kernel with CONFIG_SECCOMP_FILTER"),
        (
            bool(found["kills"]),
            "processes of the host can be signalled",
            "run firejail outside of containers, or use bubblewrap",
        ),
        (bool(unknown), f"environment variables {unknown}", "report this: Klear starts jails with a clean environment"),
        (bool(found["descriptors"]), f"open descriptors {found['descriptors']}", "report this: Klear closes them"),
        (found["memory"], "the limit on memory is not enforced", "use a kernel that enforces RLIMIT_AS"),
        (found["core_limit"] != 0, "core files are written", "report this: Klear forbids them"),
    ]


def _in_a_jail(found: dict[str, Any], cfg: VerifyConfig) -> list[tuple[bool, str, str]]:
    """Return, in the same form, what must also hold with a backend that isolates."""
    container = (
        "firejail ignores all options inside a container's PID namespace: "
        "run on the host, with --pid=host, or use bubblewrap"
    )
    shared = [name for name in ("pid", "net", "ipc") if found[f"{name}_ns"] == os.readlink(f"/proc/self/ns/{name}")]
    user_namespaces = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0)"
    return [
        (
            found["forks"] > cfg.limits.processes,
            "the limit on processes is not enforced",
            "do not run as root; allow user namespaces",
        ),
        (bool(shared), f"namespaces shared with the host: {', '.join(shared)}", container),
        (
            bool(found["memory_of"]),
            f"the memory of processes {found['memory_of']} of the jail is accessible",
            "report this: the supervisor is not dumpable, and there is no other process",
        ),
        (found["pids"] > 20, f"{found['pids']} processes are visible", container),
        (
            found["uid_map"] == Path("/proc/self/uid_map").read_text().split(),
            "no user namespace of its own",
            user_namespaces,
        ),
        (found["interfaces"] not in ([], ["lo"]), f"network interfaces {found['interfaces']}", container),
        (
            bool(found["writable"]),
            f"writable folders {found['writable']}",
            "mount them read-only; report which tool left them open",
        ),
        (
            bool(found["readable"]),
            f"readable files of the host {found['readable']}",
            "keep secrets out of /usr, /etc and /var",
        ),
        (bool(found["gpu"]), f"GPU devices {found['gpu']}", "use firejail 0.9.72 or newer (--no3d)"),
    ]


def _start_hint(backend: Backend) -> str:
    hints = {
        "firejail": "it needs its setuid bit, CAP_SYS_ADMIN in the bounding set, no no_new_privs, "
        "and a passwd entry for the user",
        "bubblewrap": "it needs user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0)",
        "rlimits-only": "the interpreter must be readable and executable by the user "
        "(verify.limits.python, verify.limits.user)",
    }
    return (
        f"{hints[backend]}; the interpreter must be readable by the user and outside of other users' homes "
        "(verify.limits.python)"
    )


def _refusal(refused: list[tuple[Backend, list[Gap]]]) -> str:
    lines = ["no sandbox isolates here; nothing untrusted was run."]
    for backend, gaps in refused:
        lines.append(f"  {backend}:")
        for gap in gaps:
            fix = f". Fix: {gap.fix}" if gap.fix else ""
            lines.append(f"    - {gap.what}{fix}")
    lines.append(
        "  To run programs with limits only, all the same: --set verify.sandbox=rlimits-only "
        "(it is noted in the artifact)."
    )
    return "\n".join(lines)
