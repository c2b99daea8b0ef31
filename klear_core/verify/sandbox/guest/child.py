"""Runs inside the jail as module `klear_child`: compiles and runs hostile programs in forks of the supervisor."""

import marshal
import math
import os
import resource
import signal
import struct

from klear_frames import read_frame, write_frame
from klear_kernel import LIBC, PR_SET_DUMPABLE, restrict_system_calls
from klear_programs import ERROR_BYTES, Program, behave_like_an_interpreter, leave, new_main, report, scan

_SPARE_FD = 40  # below the supervisor's own descriptors and the smallest valid verify.limits.open_files
_STACK_BYTES = 112 << 20  # the kernel leaves 128 MB below the stack whatever the limit was at exec
_COMPILE_S = 10


def compile_apart(tracker, source, memory_mb):
    """Compile in a separate process, because the text is hostile; return the Program or the error message."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            close_all_but(tracker, writer)
            limit_process(cpu_s=_COMPILE_S, memory_mb=memory_mb, file_bytes=0)
            restrict_system_calls()
            try:
                code, defined = scan(source)
                names = " ".join(sorted(defined)).encode()
                frame = b"+" + struct.pack(">I", len(names)) + names + marshal.dumps(code)
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
        tracker.sweep(pid)
    return Program(source, frame[1:]) if frame[:1] == b"+" else frame[1:].decode("utf-8", "replace")


def close_all_but(tracker, *kept):
    """Close all file descriptors except these: everything between two kept ones, and above the last."""
    previous = -1
    for fd in [*sorted(kept), tracker.max_fd]:
        if previous + 1 < fd:  # closerange(0, 0) closes everything
            os.closerange(previous + 1, fd)
        previous = fd


def limit_process(cpu_s, memory_mb, file_bytes):
    memory = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    cpu = max(1, math.ceil(cpu_s))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # SIGXCPU, which can be ignored, and then SIGKILL
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def enter_child(tracker, test, fds):
    """Prepare a fork to run the program: close our descriptors and set limits; but for the stack's they are final."""
    os.setsid()  # so that a signal to its own process group, which is allowed, does not reach the supervisor
    # In two steps, because a descriptor may already have the number that another one is to get.
    for target, fd in enumerate(fds):
        os.dup2(fd, _SPARE_FD + target)
    for target in range(len(fds)):
        os.dup2(_SPARE_FD + target, target, inheritable=True)
    close_all_but(tracker, *range(len(fds)))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As Python does at its start: a failed write raises an exception and does not end the process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Programs of contests ask for a larger stack, which the limit of memory bounds in any case.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    limit_process(test["cpu_s"], test["memory_mb"], test["output_bytes"])
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise its files in /proc would belong to root
    restrict_system_calls()


def run_script(tracker, program, test, fds):
    status, names = 1, {}
    try:
        enter_child(tracker, test, fds)
        behave_like_an_interpreter(test["recursion_limit"])
        program.provide()
        names = new_main("__main__", {})
        exec(marshal.loads(program.code), names)
        status = 0
    except SystemExit as e:
        status = 1
        if e.code is None or test["may_exit"]:
            status = 0
        elif isinstance(e.code, int):
            status = e.code
    except BaseException as e:
        report(e)
    leave(status & 0xFF, names)


def run_service(tracker, program, test, fds):
    """Define the program's names, then answer frames on descriptors 3 and 4 with the guest code that the host sent."""
    try:
        enter_child(tracker, test, fds)
        behave_like_an_interpreter(test["recursion_limit"])
        for name, code in tracker.guest:
            service = new_main(name, {})
            exec(code, service)
        service["serve"](marshal.loads(program.code) if program else None, program, new_main, test["role"])
    except BaseException as e:
        report(e)
    os._exit(1)
