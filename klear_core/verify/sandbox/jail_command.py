"""Build each backend's command line for an isolated interpreter, and choose the account that runs it.

Each firejail flag is explained in `infra/firejail/README.md`. Three that other projects use are left out on purpose:
`--timeout` makes every run last two seconds, `--read-only=/` silently switches off the user namespace (fork bombs then
starve all jails of the user), and a profile needs a package that may be missing.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, assert_never

from klear_core.config.verify import SandboxConfig
from klear_core.errors import SandboxError

Backend = Literal["firejail", "bubblewrap", "rlimits-only"]

SETUP_HINT = "as root on Debian or Ubuntu: sh infra/firejail/setup.sh"
_BOOT = (
    "import os,sys\nn=int.from_bytes(os.read(0,4),'big')\ns=b''\n"
    "while len(s)<n:s+=os.read(0,n-len(s))\nexec(compile(s,'<klear supervisor>','exec'))"
)
"""Program of the jail's interpreter: read the supervisor's source from standard input, after its length, and run it."""
_KEPT_TOP_LEVEL = frozenset(["usr", "bin", "sbin", "etc", "proc", "dev", "sys", "run", "tmp", "var", "home"])
"""Folders of the root that are not hidden as a whole; other flags restrict them."""
_WHITELISTABLE = frozenset(["opt", "srv", "mnt", "media"])
"""Folders of the root of which firejail can show a part and hide the rest."""
_DENIED_CALLS = "socket,io_uring_setup,io_uring_enter,io_uring_register,memfd_secret"
_FALLBACK_USER = "games"  # exists on Debian, Fedora and related systems; owns no process and no valuable file
_DEADLINE_S = 3600  # the longest a jail may live; a supervisor that lost its host ends long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account that runs untrusted programs. `must_switch` is true if we are root."""

    uid: int
    gid: int
    home: str
    must_switch: bool


def account_for(cfg: SandboxConfig) -> Account:
    """Return our own account, or that of an ordinary user if we are root. Raise SandboxError if there is none."""
    if os.getuid() != 0:
        try:
            entry = pwd.getpwuid(os.getuid())
        except KeyError as e:
            raise SandboxError(
                f"user id {os.getuid()} has no passwd entry, which firejail needs; give it one ({e})"
            ) from e
        return Account(uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir, must_switch=False)
    for name in [cfg.user] if cfg.user else ["klear-sandbox", _FALLBACK_USER]:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid == 0:
            raise SandboxError(f"verify.limits.user = {name!r} is root; untrusted programs never run as root")
        return Account(uid=entry.pw_uid, gid=entry.pw_gid, home=entry.pw_dir, must_switch=True)
    wanted = cfg.user or f"klear-sandbox or {_FALLBACK_USER}"
    raise SandboxError(
        f"we are root and need an ordinary user for untrusted programs, but {wanted} does not exist; {SETUP_HINT}"
    )


def python_for(cfg: SandboxConfig) -> Path:
    """Return the sandbox's interpreter: the configured one, the system's, or ours without its virtual environment."""
    if cfg.python:
        path = Path(cfg.python)
        if not path.is_absolute() or not path.exists():
            raise SandboxError(
                f"verify.limits.python = {cfg.python!r} must be the absolute path of an interpreter that exists"
            )
        return path
    system = Path("/usr/bin/python3")
    return system if system.exists() else Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"


@cache
def has_numpy(python: Path) -> bool:
    """Return whether an interpreter has numpy, with the packages that are installed for it."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('numpy') is None)"
    return subprocess.run([python, "-I", "-c", program], check=False).returncode == 0


def clean_environment(account: Account) -> dict[str, str]:
    """Return the environment variables for untrusted programs: six, none of them secret. Firejail adds some itself."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": account.home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


def jail_command(backend: Backend, cfg: SandboxConfig, account: Account) -> list[str]:
    """Return the command that runs our supervisor in isolation, for Popen.

    Raise SandboxError if the backend is not installed.
    """
    python = python_for(cfg)
    interpreter = [str(python), "-I"]
    if not cfg.with_packages:
        interpreter.append("-S")  # do not import `site`, which adds site-packages
    interpreter += ["-c", _BOOT]
    match backend:
        case "firejail":
            jail = [_find("firejail"), *_firejail_flags(cfg, account, python)]
        case "bubblewrap":
            jail = [_find("bwrap"), *_bubblewrap_flags(account, python)]
        case "rlimits-only":
            jail = []
        case _:
            assert_never(backend)
    # When we die, `setpriv --pdeathsig` has the kernel end `timeout`, which ends its child. A parent-death signal on
    # firejail itself would be lost because firejail is setuid.
    guard = [_find("setpriv"), "--pdeathsig", "TERM", _find("timeout"), "-k", "0.5", str(_DEADLINE_S)]
    if account.must_switch:
        guard += [_find("setpriv"), f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups"]
    return [*guard, *jail, *interpreter]


def _find(program: str) -> str:
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/bin:/bin:/usr/local/bin")
    if path is None:
        package = {"bwrap": "bubblewrap", "setpriv": "util-linux", "timeout": "coreutils"}.get(program, program)
        raise SandboxError(f"{program} is not installed (package {package}; {SETUP_HINT})")
    return path


def _firejail_flags(cfg: SandboxConfig, account: Account, python: Path) -> list[str]:
    flags = ["--quiet", "--noprofile", "--private-tmp", "--private-dev", "--no3d", "--net=none", "--protocol=unix"]
    flags += [
        f"--seccomp={_DENIED_CALLS}",
        "--caps.drop=all",
        "--nonewprivs",
        "--noroot",
        "--nogroups",
        "--ipc-namespace",
    ]
    flags += ["--restrict-namespaces", "--hostname=sandbox"]
    flags += [f"--read-only={path}" for path in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "${HOME}")]  # noqa: S108
    flags += [f"--rlimit-nproc={cfg.processes}", f"--rlimit-nofile={cfg.open_files}"]
    return flags + _home_flags(account, python) + _blacklist_flags(python)


def _home_flags(account: Account, python: Path) -> list[str]:
    """Return the flags that hide the home folder. An interpreter inside it stays visible, alone and read-only."""
    home = Path(account.home)
    prefix = _prefix_of(python)
    if prefix.is_relative_to(home) and home != Path("/"):
        return [f"--whitelist={prefix}", f"--read-only={prefix}"]
    owns_home = home.is_dir() and home.stat().st_uid == account.uid
    # firejail refuses --private for a home that belongs to another user; such a home is read-only anyway.
    return ["--private"] if owns_home else []


def _blacklist_flags(python: Path) -> list[str]:
    prefix_top = _prefix_of(python).parts[1]
    flags = []
    for entry in sorted(os.scandir("/"), key=lambda e: e.name):
        name = entry.name
        if name in _KEPT_TOP_LEVEL or name.startswith("lib") or entry.is_symlink():
            continue
        if name != prefix_top:
            flags.append(f"--blacklist=/{name}")
        elif name in _WHITELISTABLE:
            flags.append(f"--whitelist={_prefix_of(python)}")
    return flags


def _bubblewrap_flags(account: Account, python: Path) -> list[str]:
    flags = [
        "--unshare-all",
        "--unshare-user",
        "--as-pid-1",  # else bubblewrap itself is the first process, with memory that programs may write
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
    ]
    flags += ["--uid", str(account.uid), "--gid", str(account.gid), "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        top = Path("/") / name
        if top.is_symlink():
            flags += ["--symlink", str(top.readlink()), str(top)]
        elif top.is_dir():
            flags += ["--ro-bind", str(top), str(top)]
    for path in ("/etc/ld.so.cache", "/etc/localtime"):
        flags += ["--ro-bind-try", path, path]
    flags += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", account.home]  # noqa: S108
    prefix = _prefix_of(python)
    if prefix != Path("/usr"):
        flags += ["--ro-bind", str(prefix), str(prefix)]
    # Last, because nothing can be mounted below a folder that is read-only.
    remounts = [part for path in ("/tmp", "/dev/shm", "/dev", "/") for part in ("--remount-ro", path)]  # noqa: S108
    return [*flags, "--tmpfs", "/dev/shm", *remounts, "--chdir", "/", "--"]  # noqa: S108


def _prefix_of(python: Path) -> Path:
    """Return the folder that holds an interpreter and its library: /usr for /usr/bin/python3."""
    return python.resolve().parent.parent
