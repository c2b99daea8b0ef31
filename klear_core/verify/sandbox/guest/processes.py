"""Runs inside the jail as module `klear_processes`: tracks the processes below the supervisor and kills them."""

import os
import resource
import signal

from klear_kernel import LIBC, PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE

OK, EXITED, SIGNALLED, CPU_LIMIT, WALL_LIMIT, MEMORY_LIMIT, OUTPUT_LIMIT, NO_FORK, REPLIED, NOT_PYTHON, READY = range(
    11
)

_CPU_SLACK_S = 0.5  # all processes of a test together may exceed the limit of one by this much


class ProcessTracker:
    """Tracks the processes below the supervisor, and kills what a test left."""

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
                # Without a user namespace the kernel counts all threads of this user on the machine.
                value += threads_of_this_user()
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
        # Orphans of a test become children of this process, which can then kill and reap them.
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Programs, which run as the same user, must not read or trace this process.
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    def descendants(self):
        """Return the ids of all processes below this one."""
        if self.is_own_pid_namespace:
            pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
            return list(pids - {1, os.getpid()})
        found, queue = [], [os.getpid()]
        while queue:
            for child in _children(queue.pop()):
                found.append(child)
                queue.append(child)
        return found

    def sweep(self, pid):
        """Kill and reap everything below; return (wait status, rusage) of `pid`.

        Orphans are children of this process too, because it is their subreaper.
        """
        result = None
        while True:  # until no child is left: a process may fork between the listing and its kill
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
                os.kill(-1, signal.SIGKILL)  # everything in this PID namespace except init and this process
            except ProcessLookupError:
                pass
            return
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def excess(self, test):
        """Return the limit that all processes of the test together exceed, or None; rlimits bound each one alone."""
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
