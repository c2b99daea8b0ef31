"""Runs inside the jail between the host and the untrusted programs.

The host sends it as text, together with its helper modules, and imports none of them.

The host writes frames (length, marshal) and reads frames (length, raw bytes): nothing that a program made is unpickled.
A program never shares a process with this one: it is compiled in one fork and run in another for each test. What a test
leaves behind (threads, daemons, sessions) is killed before the next begins.
"""

import gc
import marshal
import os
import platform
import select
import signal
import struct
import sys
import time

from klear_child import compile_apart, run_script, run_service
from klear_frames import read_frame, write_frame
from klear_processes import (
    CPU_LIMIT,
    EXITED,
    NO_FORK,
    NOT_PYTHON,
    OK,
    OUTPUT_LIMIT,
    READY,
    REPLIED,
    SIGNALLED,
    WALL_LIMIT,
    ProcessTracker,
)
from klear_programs import ERROR_BYTES, Program

_HEAD = struct.Struct(">BiIII")  # status, exit status or signal, cpu ms, wall ms, length of the text that explains
_POLL_MS = 50
_MAX_STARVED_LIMITS = 4  # a test that waits for a core gets at most this many wall-clock limits more
_SERVICE_MODULES = (
    "ast bisect builtins collections contextlib copy datetime decimal fractions functools heapq inspect io itertools "
    "json math operator random re string symtable typing"
).split()
_CONTROL_IN, _CONTROL_OUT = 50, 51  # below the smallest valid verify.limits.open_files

_STANDARD_STREAMS = (sys.stdin, sys.stdout, sys.stderr)  # kept alive: their deletion would close a child's fds 0 to 2


def head(status, code=0, cpu_s=0.0, wall_s=0.0, text=b""):
    return _HEAD.pack(status, code, int(cpu_s * 1000), int(wall_s * 1000), len(text)) + text


def run_test(tracker, program, test):
    """Run the program once in a new process, on one standard input, and return the frame that reports its end.

    Input and output are memory files: no pipe can fill up, and nothing stays on a disk.
    """
    given, written, errors = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    try:
        view = memoryview(test["input"])
        while view:
            view = view[os.write(given, view) :]
        os.lseek(given, 0, os.SEEK_SET)
        started = time.monotonic()
        try:
            pid = os.fork()
        except OSError as e:
            return head(NO_FORK, e.errno, text=str(e).encode())
        if pid == 0:
            run_script(tracker, program, test, (given, written, errors))
        reason = wait_for(tracker, pid, (), test, started + test["wall_s"])
        status, usage = tracker.sweep(pid)
        wall_s = time.monotonic() - started
        # A write that would exceed the limit only fails, and the program may go on: a full file means that it did.
        output = contents(written, test["output_bytes"])
        if len(output) >= test["output_bytes"]:
            reason = reason or OUTPUT_LIMIT
        return describe(status, usage, reason, wall_s, errors, test) + output
    finally:
        for fd in (given, written, errors):
            os.close(fd)


def wait_for(tracker, pid, fds, test, deadline):
    """Wait until the process ends or a descriptor is readable, and return None; or return the limit that was hit."""
    poller = select.poll()
    pidfd = os.pidfd_open(pid)
    try:
        for fd in (pidfd, *fds):
            poller.register(fd, select.POLLIN)
        while True:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                # Time in which the process waited for a core does not count, up to a bound.
                left_ms += min(starved_s(pid), _MAX_STARVED_LIMITS * test["wall_s"]) * 1000
                if left_ms <= 0:
                    return WALL_LIMIT
            if poller.poll(min(left_ms, _POLL_MS)):
                return None
            reason = tracker.excess(test)
            if reason is not None:
                return reason
    finally:
        os.close(pidfd)


def starved_s(pid):
    """Return the seconds a process was ready to run and got no core: a loaded machine must not fail programs."""
    try:
        with open("/proc/%d/schedstat" % pid) as f:
            return int(f.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def contents(fd, limit):
    os.lseek(fd, 0, os.SEEK_SET)
    parts, left = [], limit
    while left and (part := os.read(fd, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def describe(status, usage, reason, wall_s, errors, test):
    cpu_s = usage.ru_utime + usage.ru_stime
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else os.WTERMSIG(status)
    if reason is None:
        # The kernel counts whole seconds: it lets a limit of 1.5 s become 2.
        if cpu_s > test["cpu_s"] or (os.WIFSIGNALED(status) and code == signal.SIGXCPU):
            reason = CPU_LIMIT
        elif os.WIFSIGNALED(status):
            reason = SIGNALLED
        else:
            reason = EXITED if code else OK
    text = contents(errors, 1 << 16)[-ERROR_BYTES:]
    return head(reason, code, cpu_s, wall_s, text)


class Session:
    """A process of the program, or of our test code, that answers requests one after another."""

    def __init__(self, tracker, program, test):
        for name in _SERVICE_MODULES:  # once a jail: its sessions are forks
            __import__(name)
        self.tracker = tracker
        self.test = test
        self.used_s = 0.0
        self.null = os.open("/dev/null", os.O_RDWR)
        self.errors = os.memfd_create("stderr")
        request_reader, self.requests = os.pipe()
        self.replies, reply_writer = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                run_service(tracker, program, test, (self.null, self.errors, self.errors, request_reader, reply_writer))
        finally:
            os.close(request_reader)
            os.close(reply_writer)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)

    def exchange(self, payload):
        """Send a request and return its reply. Only the time in between counts: the host may be slow to ask again."""
        started = time.monotonic()
        deadline = started + self.test["wall_s"] - self.used_s
        reason = self._send(struct.pack(">I", len(payload)) + payload, deadline)
        reply = b""
        if reason is None:
            reason, reply = self._receive(deadline)
        self.used_s += time.monotonic() - started  # all requests of a session share one wall-clock limit
        if reason is None:
            return head(REPLIED) + reply
        return self.end(reason if reason != EXITED else None)

    def _send(self, data, deadline):
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.requests, view) :]
            except BlockingIOError:
                select.select([], [self.requests], [], 0.01)
                if time.monotonic() > deadline:
                    return WALL_LIMIT
            except BrokenPipeError:
                return EXITED
        return None

    def _receive(self, deadline):
        """Return (None, the child's next frame), or (the limit that was hit, empty bytes)."""
        buffer, wanted = bytearray(), 4  # first the length of the frame, then as many bytes
        while len(buffer) < wanted:
            try:
                part = os.read(self.replies, min(wanted - len(buffer), 1 << 20))
            except BlockingIOError:
                reason = wait_for(self.tracker, self.pid, (self.replies,), self.test, deadline)
                if reason is not None:
                    return reason, b""
                if not select.select([self.replies], [], [], 0)[0]:
                    return EXITED, b""
                continue
            if not part:
                return EXITED, b""
            buffer += part
            if wanted == 4 and len(buffer) == 4:
                wanted += struct.unpack(">I", buffer)[0]
                if wanted > self.test["output_bytes"]:
                    return OUTPUT_LIMIT, b""
        return None, bytes(buffer[4:])

    def end(self, reason=None):
        status, usage = self.tracker.sweep(self.pid)
        answer = describe(status, usage, reason, self.used_s, self.errors, self.test)
        for fd in (self.null, self.errors, self.requests, self.replies):
            os.close(fd)
        self.pid = 0
        return answer


def facts(tracker):
    with open("/proc/self/status") as f:
        status = dict(line.split(":", 1) for line in f.read().splitlines())
    wanted = ("Seccomp", "NoNewPrivs", "CapEff")
    pairs = [(key, status.get(key, "?").strip()) for key in wanted]
    pairs += [
        ("uid", str(os.getuid())),
        ("python", platform.python_version()),
        ("own_pid_ns", str(int(tracker.is_own_pid_namespace))),
    ]
    return "\n".join("%s=%s" % pair for pair in pairs).encode()


def main():
    # Move the host's pipes away from 0 and 1, which programs use.
    os.dup2(0, _CONTROL_IN)
    os.dup2(1, _CONTROL_OUT)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    hello = marshal.loads(read_frame(_CONTROL_IN))
    tracker = ProcessTracker(hello)
    tracker.guest = [(name, compile(text, "<%s>" % name, "exec")) for name, text in hello["guest"]]
    write_frame(_CONTROL_OUT, head(READY, text=facts(tracker)))
    program = session = None
    gc.disable()
    gc.freeze()  # forks then touch fewer pages
    while True:
        try:
            request = marshal.loads(read_frame(_CONTROL_IN))
        except EOFError:
            return
        operation = request["op"]
        if operation == "program":
            program = compile_apart(tracker, request["source"], request["memory_mb"])
            if isinstance(program, Program):
                answer = head(OK)
            else:
                answer = head(NOT_PYTHON, text=program.encode("utf-8", "replace"))
        elif operation == "test":
            answer = run_test(tracker, program, request)
        elif operation == "open":
            try:
                session = Session(tracker, program if request["role"] == "program" else None, request)
                answer = head(OK)
            except OSError as e:
                answer = head(NO_FORK, e.errno, text=str(e).encode())
        elif operation == "ask":
            answer = session.exchange(request["payload"])
        else:
            answer = session.end() if session.pid else head(OK)
        write_frame(_CONTROL_OUT, answer)


main()
