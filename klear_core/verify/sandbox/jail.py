"""Control one jail from the host: start it, send frames, receive frames within a deadline, kill everything in it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import marshal
import os
import select
import signal
import struct
import subprocess
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from klear_core.config.verify import SandboxConfig
from klear_core.errors import SandboxError
from klear_core.verify.sandbox.jail_command import Account, Backend, account_for, clean_environment, jail_command

_HEAD = struct.Struct(">BiIII")
_MARSHAL_VERSION = 4  # readable by every interpreter from 3.4 on, whichever version the host runs
# In both lists a module imports only from those before it.
_SUPERVISOR_MODULES = ("kernel", "parallel", "programs", "frames", "processes", "child")
_CHILD_MODULES = ("values", "turns", "forms", "remote", "looks", "tester", "service")
_START_S = 20.0  # seconds in which a jail must have started
_END_S = 2.0  # seconds for a jail to exit once its pipes are closed
STARVED_FACTOR = 6
"""Limit on a test's total time, in wall-clock limits: the supervisor does not count time spent waiting for a core."""
_GRACE_S = 15.0  # added to the supervisor's own limits; a jail that has not answered by then is broken


class Status(IntEnum):
    """The way a test ended, as the supervisor reports it; the numbers are those of guest/processes.py."""

    OK = 0
    EXITED = 1
    SIGNALLED = 2
    CPU_LIMIT = 3
    WALL_LIMIT = 4
    MEMORY_LIMIT = 5
    OUTPUT_LIMIT = 6
    NO_FORK = 7
    REPLIED = 8
    NOT_PYTHON = 9
    READY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TestLimits:
    """The resource limits of one test's process."""

    cpu_s: float
    wall_s: float
    memory_mb: int
    output_bytes: int
    recursion_limit: int
    may_exit: bool = False
    """Whether `sys.exit` with any status ends a program well, as in LiveCodeBench's harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JailReply:
    """A supervisor's answer. `code` is an exit status or signal; `text` explains it; `data` is the program's output."""

    status: Status
    code: int
    cpu_ms: int
    wall_ms: int
    text: str
    data: bytes


class JailBrokenError(Exception):
    """Raised if the jail did not start, died, or sent an invalid answer; nothing is known about the program."""


class Jail:
    """A running supervisor. Not thread-safe. After JailBrokenError only `kill` may be called."""

    def __init__(self, backend: Backend, cfg: SandboxConfig) -> None:
        self.backend = backend
        self._cfg = cfg
        account = account_for(cfg)
        command = jail_command(backend, cfg, account)
        self._process = _start(command, account)
        LIVE_GUARDS.add(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        # Without blocking, so that a supervisor that hangs cannot hold us beyond a deadline.
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        try:
            self.facts = self._greet()
        except JailBrokenError as e:
            self.kill()
            raise JailBrokenError(f"{backend} did not start its interpreter: {e}") from e

    def load(self, source: bytes, limits: TestLimits) -> JailReply:
        """Compile the program that the next tests run."""
        return self._call({"op": "program", "source": source, "memory_mb": limits.memory_mb}, 10.0 * STARVED_FACTOR)

    def run(self, given: bytes, limits: TestLimits) -> JailReply:
        """Run the program once on a standard input."""
        return self._call({"op": "test", "input": given, **dataclasses.asdict(limits)}, limits.wall_s * STARVED_FACTOR)

    def open(self, role: Literal["program", "tester"], limits: TestLimits) -> JailReply:
        """Start a session: a process of the program (or of our test code) that answers `ask` until `close_session`."""
        return self._call({"op": "open", "role": role, **dataclasses.asdict(limits)}, 1.0)

    def ask(self, payload: bytes, limits: TestLimits) -> JailReply:
        """Send a question to the session's process; return REPLIED with its answer, or how the process ended."""
        return self._call({"op": "ask", "payload": payload}, limits.wall_s * STARVED_FACTOR)

    def close_session(self) -> JailReply:
        """End the session's process and everything it started."""
        return self._call({"op": "close"}, 1.0)

    def kill(self) -> None:
        """End the jail and everything in it: close the supervisor's pipes, and kill it if it does not exit soon.

        A killed firejail leaves a small file in /run/firejail that belongs to root; if we are root, it is removed.
        """
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_tree(self._process)
            forget_dead_jails()
        LIVE_GUARDS.discard(self._process.pid)
        reap_orphans()

    def _greet(self) -> dict[str, str]:
        # The jail's interpreter waits for the supervisor's source on its standard input (`_BOOT` of jail_command.py).
        supervisor = _supervisor_source()
        self._write(struct.pack(">I", len(supervisor)) + supervisor, time.monotonic() + _START_S)
        hello = {
            "host_pid_ns": os.readlink("/proc/self/ns/pid"),
            "is_jailed": self.backend != "rlimits-only",
            "guest": list(_guest_modules(_CHILD_MODULES).items()),
            "open_files": self._cfg.open_files,
            "processes": self._cfg.processes,
            "total_memory_mb": self._cfg.total_memory_mb,
        }
        reply = self._call(hello, _START_S)
        if reply.status is not Status.READY:
            raise JailBrokenError(f"unexpected greeting {reply.status.name}")
        return dict(line.split("=", 1) for line in reply.text.splitlines())

    def _call(self, request: dict[str, object], allowed_s: float) -> JailReply:
        deadline = time.monotonic() + allowed_s + _GRACE_S
        frame = marshal.dumps(request, _MARSHAL_VERSION)
        self._write(struct.pack(">I", len(frame)) + frame, deadline)
        size = struct.unpack(">I", self._read(4, deadline))[0]
        if size < _HEAD.size or size > (self._cfg.output_mb << 20) + (1 << 20):
            raise JailBrokenError(f"a frame of {size} bytes")
        frame = self._read(size, deadline)
        status, code, cpu_ms, wall_ms, text_size = _HEAD.unpack_from(frame)
        text = frame[_HEAD.size : _HEAD.size + text_size].decode("utf-8", "replace")
        return JailReply(
            status=Status(status),
            code=code,
            cpu_ms=cpu_ms,
            wall_ms=wall_ms,
            text=text,
            data=frame[_HEAD.size + text_size :],
        )

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._to, view) :]
            except BlockingIOError:
                self._wait(self._to, select.POLLOUT, deadline)
            except BrokenPipeError as e:
                raise JailBrokenError(self._how_it_ended()) from e

    def _read(self, count: int, deadline: float) -> bytes:
        buffer = bytearray()
        while len(buffer) < count:
            try:
                part = os.read(self._from, min(count - len(buffer), 1 << 20))
            except BlockingIOError:
                self._wait(self._from, select.POLLIN, deadline)
                continue
            if not part:
                raise JailBrokenError(self._how_it_ended())
            buffer += part
        return bytes(buffer)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        left_ms = (deadline - time.monotonic()) * 1000
        poller = select.poll()
        poller.register(fd, event)
        if left_ms <= 0 or not poller.poll(left_ms):
            raise JailBrokenError("the supervisor did not answer in time")

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return "the supervisor closed its pipe"
        return f"the jail ended with status {status}"


def _start(command: list[str], account: Account) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=clean_environment(account),
            bufsize=0,
        )
    except OSError as e:
        raise SandboxError(f"cannot start {command[0]}: {e}") from e


@cache
def guest_source(name: str) -> bytes:
    """Return the contents of a file of `klear_core.verify.sandbox.guest`."""
    return (resources.files("klear_core.verify.sandbox.guest") / name).read_bytes()


def _guest_modules(names: tuple[str, ...]) -> dict[str, bytes]:
    return {f"klear_{name}": guest_source(f"{name}.py") for name in names}


@cache
def _supervisor_source() -> bytes:
    """Return the supervisor and the modules that it imports as one program."""
    program = f"""
import sys, types
for name, source in {_guest_modules(_SUPERVISOR_MODULES)!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
del name, source, module
exec(compile({guest_source("supervisor.py")!r}, "<klear supervisor>", "exec"))
"""
    return program.encode()


# ---- orphans ----
# Clean up what a jail may leave behind: processes, which we adopt in order to kill them, and files of firejail.


LIVE_GUARDS: set[int] = set()
"""Process ids of the jails in use. In a process without other children, any child not listed here is an orphan."""

_FIREJAIL_RUNS = Path("/run/firejail/sandbox")
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
_may_reap = False


def adopt_orphans(*, has_other_children: bool) -> None:
    """Make this process the parent of all processes that a killed jail leaves behind.

    If it has other children, `reap_orphans` does nothing, and orphans stay until `end_orphans`. Without adoption they
    would go to the machine's init, which in many containers reaps nothing.
    """
    global _may_reap  # noqa: PLW0603  a property of the process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _may_reap = not has_other_children


def reap_orphans() -> None:
    """Kill and reap all children except jails in use, if this process adopts orphans and has no other children."""
    if _may_reap:
        _reap_all_but(LIVE_GUARDS)


def _reap_all_but(kept: set[int]) -> None:
    for child in _children_of(os.getpid()):
        if child not in kept:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                # Waiting for a process that we may not kill could take for ever.
                os.waitpid(child, 0 if _kill(child) else os.WNOHANG)


def end_orphans() -> None:
    """Kill and reap all children, and their descendants, which then become our children.

    Processes that only root may kill end by themselves.
    """
    deadline = time.monotonic() + _KILL_S
    while _children_of(os.getpid()) and time.monotonic() < deadline:
        _reap_all_but(set())
        time.sleep(0.01)


def kill_tree(guard: subprocess.Popen[bytes]) -> None:
    """Kill what the guard started, then the guard. Killing firejail itself ends everything in its PID namespace."""
    for child in _children_of(guard.pid):
        with contextlib.suppress(ProcessLookupError):
            _kill(child)
    guard.terminate()
    try:
        guard.wait(3.0)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def forget_dead_jails() -> None:
    """Remove the files in /run/firejail that killed firejails left behind. Only root may; others leave them."""
    if os.geteuid() != 0 or not _FIREJAIL_RUNS.is_dir():
        return
    for file in _FIREJAIL_RUNS.iterdir():
        if file.name.isdigit() and not _is_alive(int(file.name)):
            file.unlink(missing_ok=True)


def _kill(pid: int) -> bool:
    """Kill a process. Return False if only root may: such a process is setuid, and it ends when its guard does."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def _children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(child) for child in f.read().split()]
    except OSError:
        return []


# ---- wire ----
# Decode the results that a program's process sends, from tagged JSON to plain JSON values and nothing else.


class WireError(ValueError):
    """Raised if the program raised, or sent something that is not a result."""


def plain_value(frame: bytes, *, is_exact: bool = False) -> object:
    """Return the result of a call as lists, dicts and scalars; tuples and iterators become lists, sets are refused.

    `is_exact` refuses what Python finds unequal to any JSON value, but for a tuple as the whole result: LiveCodeBench's
    rule.
    """
    try:
        reply = json.loads(frame)
        match reply:
            case {"value": ["t", [*items]]} if is_exact:
                return [_plain(v, is_exact=True) for v in items]
            case {"value": value}:
                return _plain(value, is_exact=is_exact)
            case {"error": str(error), "text": str(text)}:
                raise WireError(f"{error}: {text}")
            case _:
                raise WireError("the program's process sent no result")
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, WireError) else WireError(f"the program's process sent no JSON: {e}") from e


def _plain(value: object, *, is_exact: bool = False) -> object:
    match value:
        case ["t" | "i", _] if is_exact:
            raise WireError("the result has a tuple or an iterator where JSON has a list")
        case ["l" | "t" | "i", [*items]]:
            return [_plain(v, is_exact=is_exact) for v in items]
        case ["d", [*pairs]]:
            found = {}
            for pair in pairs:
                match pair:
                    case [key, item]:
                        found[_key(key, is_exact=is_exact)] = _plain(item, is_exact=is_exact)
            return found
        case ["x", "inf" | "-inf" | "nan" as text]:
            return float(text)
        case ["n", "ListNode", [value, following]]:
            return _list_values(value, following)
        case [str(tag), *_]:
            raise WireError(f"the result is no JSON value (kind {tag!r:.20})")
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise WireError("the program's process sent no result")


def _key(key: object, *, is_exact: bool) -> str:
    plain = _plain(key)
    if isinstance(plain, str):
        return plain
    if is_exact:
        raise WireError("the result has a dict with keys other than text")
    return json.dumps(plain)


def _list_values(value: object, following: object) -> list[object]:
    """Return the values of a LeetCode linked list as a list, which is how expected results are written."""
    values = [_plain(value)]
    while isinstance(following, list):
        match following:
            case ["n", "ListNode", [value, rest]]:
                values.append(_plain(value))
                following = rest
            case _:
                raise WireError("a linked list with a node of another kind")
    return values
