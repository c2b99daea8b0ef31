"""Runs inside the jail between the host and the untrusted programs. Sent there as text with its two helper modules; the host
imports none of them.

The host writes frames (length, marshal) and reads frames (length, raw bytes): nothing that a program made is unpickled.
A program never shares a process with this one: it is compiled in one fork and run in another for each test. What a test
leaves behind (threads, daemons, sessions) is killed before the next begins.
"""

import gc
import marshal
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import time

from klear_kernel import LIBC, PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, restrict_system_calls
from klear_programs import ERROR_BYTES, Program, leave, new_main, open_stdio, report, scan

OK, EXITED, SIGNALLED, CPU_LIMIT, WALL_LIMIT, MEMORY_LIMIT, OUTPUT_LIMIT, NO_FORK, REPLIED, NOT_PYTHON, READY = range(11)

_HEAD = struct.Struct(">BiIII")  # status, exit status or signal, cpu ms, wall ms, length of the text that explains
_POLL_MS = 50
_CPU_SLACK_S = 0.5  # of all processes of a test together, over the limit of one
_MOST_STARVED = 4  # times the wall clock that a test is given for having had no core
_SPARE_FD, _CONTROL_IN, _CONTROL_OUT = 40, 50, 51  # below the least of verify.limits.open_files
_STACK_BYTES = 112 << 20  # the kernel leaves 128 MB below the stack whatever the limit was at exec
_COMPILE_S = 10

_INTERPRETERS_OWN = (sys.stdin, sys.stdout, sys.stderr)  # kept alive: their end would close descriptors 0 to 2 of a child


# --- frames ---------------------------------------------------------------------------------------------------------


def read_exactly(fd, count):
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(fd):
    return read_exactly(fd, struct.unpack(">I", read_exactly(fd, 4))[0])


def write_frame(fd, payload):
    view = memoryview(struct.pack(">I", len(payload)) + payload)
    while view:
        view = view[os.write(fd, view) :]


# --- compiling -----------------------------------------------------------------------------------------------------------


def compile_apart(source, memory_mb):
    """A Program, or the text of why it does not compile. The parser meets hostile text in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            close_all_but(writer)
            limit_process(cpu_s=_COMPILE_S, memory_mb=memory_mb, file_bytes=0)
            restrict_system_calls()
            try:
                code, defined, free, modules = scan(source)
                texts = [" ".join(sorted(names)).encode() for names in (defined, free, modules)]
                frame = b"+" + struct.pack(">III", *map(len, texts)) + b"".join(texts) + marshal.dumps(code)
            except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as e:
                frame = b"-" + ("%s: %s" % (type(e).__name__, e)).encode("utf-8", "replace")[:ERROR_BYTES]
            write_frame(writer, frame)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        frame = read_frame(reader)
    except EOFError:
        frame = b"-the compiler crashed or took too long"
    finally:
        os.close(reader)
        JAIL.sweep(pid)
    return Program(frame[1:]) if frame[:1] == b"+" else frame[1:].decode("utf-8", "replace")


# --- the child -------------------------------------------------------------------------------------------------------------


def close_all_but(*kept):
    previous = -1
    for fd in [*sorted(kept), JAIL.max_fd]:
        if previous + 1 < fd:  # closerange(0, 0) closes everything
            os.closerange(previous + 1, fd)
        previous = fd


def limit_process(cpu_s, memory_mb, file_bytes):
    memory = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    cpu = max(1, math.ceil(cpu_s))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def enter_child(test, fds):
    """From here on the process belongs to the program: no descriptor of ours is open, no limit can be raised again."""
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, _SPARE_FD + target)
    for target in range(len(fds)):
        os.dup2(_SPARE_FD + target, target, inheritable=True)
    close_all_but(*range(len(fds)))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    limit_process(test["cpu_s"], test["memory_mb"], test["output_bytes"])
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    restrict_system_calls()


def run_script(program, test, fds):
    status = 1
    try:
        enter_child(test, fds)
        open_stdio()
        exec(marshal.loads(program.code), new_main("__main__", program.globals))
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else (0 if e.code is None else 1)
    except BaseException as e:
        report(e)
    leave(status & 0xFF)


def run_service(program, test, fds):
    """Define the program's names, then answer frames on descriptors 3 and 4 with the guest code that the host sent."""
    try:
        enter_child(test, fds)
        open_stdio()
        service = new_main("klear_guest", {})
        exec(JAIL.guest, service)
        service["serve"](marshal.loads(program.code) if program else None, program, new_main, test["role"])
    except SystemExit as e:
        report(e)
    except BaseException as e:
        report(e)
    os._exit(1)


# --- the parent ------------------------------------------------------------------------------------------------------------


class Jail:
    """What this supervisor knows of its surroundings, and how it cleans up after a test."""

    def __init__(self, hello):
        self.is_own_pid_namespace = os.readlink("/proc/self/ns/pid") != hello["host_pid_ns"] and hello["is_jailed"]
        self.max_fd = hello["open_files"]
        self.memory_mb = hello["total_memory_mb"]
        self.page_bytes = resource.getpagesize()
        self.ticks_per_s = os.sysconf("SC_CLK_TCK")
        for kind, value in (("NPROC", hello["processes"]), ("NOFILE", hello["open_files"]), ("CORE", 0)):
            number = getattr(resource, "RLIMIT_" + kind)
            soft, hard = resource.getrlimit(number)
            if kind == "NPROC" and not self.is_own_pid_namespace:
                value += threads_of_this_user()  # without a user namespace the kernel counts the whole machine's
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    def descendants(self):
        if self.is_own_pid_namespace:
            own = os.getpid()
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, own)]
        found, queue = [], [os.getpid()]
        while queue:
            for child in _children(queue.pop()):
                found.append(child)
                queue.append(child)
        return found

    def sweep(self, pid):
        """Kill and reap everything below; returns (wait status, rusage) of `pid`. Orphans come to us as their subreaper."""
        result = None
        while True:
            self._kill_all()
            try:
                while True:
                    ended, status, usage = os.wait4(-1, 0)
                    if ended == pid:
                        result = (status, usage)
                    if not self.is_own_pid_namespace:
                        self._kill_all()
            except ChildProcessError:
                return result

    def _kill_all(self):
        if self.is_own_pid_namespace:
            try:
                os.kill(-1, signal.SIGKILL)  # everything in this PID namespace but init and us; proven ours in __init__
            except ProcessLookupError:
                pass
            return
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def excess(self, test):
        """The limit that all processes of the test together are over, if any; their own limits bound each alone."""
        pages = ticks = 0
        for pid in self.descendants():
            try:
                with open("/proc/%d/stat" % pid, "rb") as f:
                    fields = f.read().rpartition(b")")[2].split()
                ticks += sum(int(value) for value in fields[11:15])  # own and waited children's, user and system
                pages += int(fields[21])
            except (OSError, IndexError):
                pass
        if pages * self.page_bytes > self.memory_mb << 20:
            return MEMORY_LIMIT
        return CPU_LIMIT if ticks > (test["cpu_s"] + _CPU_SLACK_S) * self.ticks_per_s else None


def threads_of_this_user():
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat("/proc/" + name).st_uid == os.getuid():
                count += len(os.listdir("/proc/%s/task" % name))
        except OSError:
            pass
    return count


def _children(pid):
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
            return [int(p) for p in f.read().split()]
    except OSError:
        return []


JAIL = None


def head(status, code=0, cpu_s=0.0, wall_s=0.0, text=b""):
    return _HEAD.pack(status, code, int(cpu_s * 1000), int(wall_s * 1000), len(text)) + text


def run_test(program, test):
    """One program, one standard input, one process. The files are memory: no pipe to fill, nothing left on a disk."""
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
            run_script(program, test, (given, written, errors))
        reason = wait_for(pid, (), test, started + test["wall_s"])
        status, usage = JAIL.sweep(pid)
        wall_s = time.monotonic() - started
        output = contents(written, test["output_bytes"])
        if len(output) >= test["output_bytes"]:
            reason = reason or OUTPUT_LIMIT
        return describe(status, usage, reason, wall_s, errors, test) + output
    finally:
        for fd in (given, written, errors):
            os.close(fd)


def wait_for(pid, fds, test, deadline):
    """None when the process ended or a descriptor is readable, else the limit it ran into."""
    poller = select.poll()
    pidfd = os.pidfd_open(pid)
    try:
        for fd in (pidfd, *fds):
            poller.register(fd, select.POLLIN)
        while True:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                left_ms += min(starved_s(pid), _MOST_STARVED * test["wall_s"]) * 1000
                if left_ms <= 0:
                    return WALL_LIMIT
            if poller.poll(min(left_ms, _POLL_MS)):
                return None
            reason = JAIL.excess(test)
            if reason is not None:
                return reason
    finally:
        os.close(pidfd)


def starved_s(pid):
    """How long a process was ready to run and got no core: a loaded machine must not fail programs."""
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
        if cpu_s > test["cpu_s"] or (os.WIFSIGNALED(status) and code == signal.SIGXCPU):
            reason = CPU_LIMIT
        elif os.WIFSIGNALED(status):
            reason = SIGNALLED
        else:
            reason = EXITED if code else OK
    text = contents(errors, 1 << 16)[-ERROR_BYTES:]
    return head(reason, code, cpu_s, wall_s, text)


class Session:
    """A process that is asked one thing after another."""

    def __init__(self, program, test):
        self.test = test
        self.used_s = 0.0
        self.null = os.open("/dev/null", os.O_RDWR)
        self.errors = os.memfd_create("stderr")
        request_reader, self.requests = os.pipe()
        self.replies, reply_writer = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                run_service(program, test, (self.null, self.errors, self.errors, request_reader, reply_writer))
        finally:
            os.close(request_reader)
            os.close(reply_writer)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)

    def exchange(self, payload):
        """One question and its answer. Only the time between the two counts: the other side may be slow."""
        started = time.monotonic()
        deadline = started + self.test["wall_s"] - self.used_s
        reason = self._send(struct.pack(">I", len(payload)) + payload, deadline)
        reply = b""
        if reason is None:
            reason, reply = self._receive(deadline)
        self.used_s += time.monotonic() - started
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
        """One frame of the child, read no further than it says and no longer than is allowed."""
        buffer, wanted = bytearray(), 4
        while len(buffer) < wanted:
            try:
                part = os.read(self.replies, min(wanted - len(buffer), 1 << 20))
            except BlockingIOError:
                reason = wait_for(self.pid, (self.replies,), self.test, deadline)
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
        status, usage = JAIL.sweep(self.pid)
        answer = describe(status, usage, reason, self.used_s, self.errors, self.test)
        for fd in (self.null, self.errors, self.requests, self.replies):
            os.close(fd)
        self.pid = 0
        return answer


def facts():
    with open("/proc/self/status") as f:
        status = dict(line.split(":", 1) for line in f.read().splitlines())
    wanted = ("Seccomp", "NoNewPrivs", "CapEff")
    pairs = [(key, status.get(key, "?").strip()) for key in wanted]
    pairs += [("uid", str(os.getuid())), ("python", platform.python_version()), ("own_pid_ns", str(int(JAIL.is_own_pid_namespace)))]
    return "\n".join("%s=%s" % pair for pair in pairs).encode()


def main():
    global JAIL
    os.dup2(0, _CONTROL_IN)
    os.dup2(1, _CONTROL_OUT)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    hello = marshal.loads(read_frame(_CONTROL_IN))
    JAIL = Jail(hello)
    JAIL.guest = compile(hello["guest"], "<klear guest>", "exec")
    write_frame(_CONTROL_OUT, head(READY, text=facts()))
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
            program = compile_apart(request["source"], request["memory_mb"])
            answer = head(OK) if isinstance(program, Program) else head(NOT_PYTHON, text=program.encode("utf-8", "replace"))
        elif operation == "test":
            answer = run_test(program, request)
        elif operation == "open":
            try:
                session = Session(program if request["role"] == "program" else None, request)
                answer = head(OK)
            except OSError as e:
                answer = head(NO_FORK, e.errno, text=str(e).encode())
        elif operation == "ask":
            answer = session.exchange(request["payload"])
        else:
            answer = session.end() if session.pid else head(OK)
        write_frame(_CONTROL_OUT, answer)


main()
