"""Runs inside the jail as module `klear_parallel`: lets multiprocessing work where it has no semaphores and no signals.

Named semaphores need a writable /dev/shm, and a program may signal no other process, not even its own children. Event
descriptors take the place of the semaphores, and a pipe to each child that of the signals.
"""

import contextlib
import mmap
import os
import select
import sys
import threading
import time

from klear_kernel import LIBC

_NON_BLOCKING, _SEMAPHORE = 0o4000, 1  # flags of eventfd(2)
_TOLD = 128  # added to the number of a signal, in the exit status of a child that was told to end by it
_MAX_CPUS = 4  # more workers would meet the limits on processes and open files
_ONE = (1).to_bytes(8, sys.byteorder)


class EventSemaphore:
    """Has the interface of `_multiprocessing.SemLock`; forked processes share the descriptor."""

    SEM_VALUE_MAX = 2**31 - 1
    handle = 0
    name = None

    def __init__(self, kind, value, maxvalue, *_):
        self.kind, self.maxvalue = kind, maxvalue  # kind 0 is a recursive lock, 1 a semaphore
        self.fd = LIBC.eventfd(value, _NON_BLOCKING | _SEMAPHORE)
        if self.fd < 0:
            raise OSError("no file descriptor is left")
        self.owner, self.depth = None, 0

    def __del__(self):
        os.close(self.fd)

    def acquire(self, block=True, timeout=None):
        me = threading.get_ident()
        if self.kind == 0 and self.owner == me:
            self.depth += 1
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        poller = None
        while True:
            try:
                os.read(self.fd, 8)
                break
            except BlockingIOError:
                left_s = 0 if not block else None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                if poller is None:
                    poller = select.poll()
                    poller.register(self.fd, select.POLLIN)
                poller.poll(None if left_s is None else left_s * 1000)
        self.owner = me
        self.depth += 1
        return True

    def release(self):
        if self.kind == 0:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self.depth > 1:
                self.depth -= 1
                return
            self.owner = None
        elif self.maxvalue == 1 and not self._is_zero():
            raise ValueError("semaphore or lock released too many times")
        self.depth -= 1
        os.write(self.fd, _ONE)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()

    def _count(self):
        return self.depth

    def _is_mine(self):
        return self.depth > 0 and self.owner == threading.get_ident()

    def _get_value(self):
        with open("/proc/self/fdinfo/%d" % self.fd) as f:
            return next(int(line.split()[1], 16) for line in f if line.startswith("eventfd-count"))

    def _is_zero(self):
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return not poller.poll(0)

    def _after_fork(self):
        self.owner, self.depth = None, 0


def provide_parallel():
    """Patch multiprocessing in this process, which is about to run a program that mentions it."""
    import _multiprocessing
    import multiprocessing.heap
    import multiprocessing.popen_fork
    from multiprocessing import util

    def launch(self, process):
        parent_reader, child_writer = os.pipe()
        child_reader, parent_writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(parent_reader)
                os.close(parent_writer)
                threading.Thread(target=_exit_when_told, args=(os.dup(child_reader),), daemon=True).start()
                code = process._bootstrap(parent_sentinel=child_reader)
            finally:
                os._exit(code)
        os.close(child_writer)
        os.close(child_reader)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_reader, parent_writer))
        self.sentinel = parent_reader
        self._klear_orders = parent_writer

    def send_signal(self, number):
        if self.returncode is None:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and nobody has waited for it yet
                os.write(self._klear_orders, bytes([number]))
                self._klear_status = _TOLD + number

    own_poll = multiprocessing.popen_fork.Popen.poll

    def poll(self, flag=os.WNOHANG):
        status = own_poll(self, flag)
        if status is not None and status == getattr(self, "_klear_status", None):
            self.returncode = _TOLD - status  # as of a process that a signal has ended
        return self.returncode

    _multiprocessing.SemLock = EventSemaphore
    multiprocessing.popen_fork.Popen._launch = launch
    multiprocessing.popen_fork.Popen._send_signal = send_signal
    multiprocessing.popen_fork.Popen.poll = poll
    multiprocessing.heap.Arena.__init__ = _make_arena
    multiprocessing.set_start_method("fork", force=True)
    num_cpus = min(os.cpu_count() or 1, _MAX_CPUS)
    os.cpu_count = multiprocessing.cpu_count = lambda: num_cpus
    if hasattr(os, "process_cpu_count"):
        os.process_cpu_count = os.cpu_count


def _make_arena(self, size, fd=-1):
    self.size, self.fd = size, fd
    self.buffer = mmap.mmap(-1, size)


def _exit_when_told(fd):
    number = os.read(fd, 1)
    if number:
        os._exit(_TOLD + number[0])
