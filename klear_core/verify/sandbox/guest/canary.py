"""Runs inside the jail as an untrusted program would, tries what must not work, and prints the findings as JSON."""

import ctypes
import json
import os
import resource
import sys

REQUEST = json.loads(sys.stdin.read())


def works(action, *args):
    try:
        action(*args)
    except (OSError, ValueError):
        return False
    return True


def can_write(folder):
    path = os.path.join(folder, "klear-canary-%d" % os.getpid())
    if not works(lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))):
        return False
    works(os.unlink, path)
    return True


def opens_socket():
    import socket

    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 40):
        if works(lambda family=family: socket.socket(family, socket.SOCK_STREAM).close()):
            return True
    return False


def count_forks(limit):
    """Count how many children can be alive at once, up to `limit`."""
    children = []
    reader, writer = os.pipe()
    try:
        while len(children) < limit:
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    os.close(writer)
    for pid in children:
        os.waitpid(pid, 0)
    return len(children)


def process_status():
    status = {}
    with open("/proc/self/status") as f:
        for line in f:
            if ":" in line:
                key, value = line.split(":", 1)
                status[key] = value.strip()
    return status


def makes_namespace():
    return ctypes.CDLL(None).unshare(0x10000000) == 0


def interfaces():
    with open("/proc/net/dev") as f:
        return [line.split(":")[0].strip() for line in f.read().splitlines()[2:]]


def escapes_memory_limit():
    try:
        return len(bytearray(REQUEST["memory_mb"] << 20)) > 0
    except MemoryError:
        return False


def writable_folders():
    return [folder for folder in REQUEST["folders"] if can_write(folder)]


def readable_secrets():
    return [path for path in REQUEST["secrets"] if works(lambda path=path: open(path, "rb").close())]


def processes_to_signal():
    return [pid for pid in REQUEST["pids"] if works(os.kill, pid, 0)]


def accessible_memory():
    """Return the other processes whose memory can be read or written, among them the first of the namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            paths = ["/proc/%s/%s" % (name, file) for file in ("mem", "environ", "maps")]
            if any(
                works(lambda path=path, mode=mode: open(path, mode).close()) for path in paths for mode in ("rb", "r+b")
            ):
                found.append(int(name))
    return found


def open_descriptors():
    return [fd for fd in range(3, 64) if works(os.fstat, fd)]


def gpu_devices():
    return [name for name in os.listdir("/dev") if name.startswith("nvidia")]


status = process_status()
found = {
    "uid": os.getuid(),
    "uid_map": open("/proc/self/uid_map").read().split(),
    "seccomp": status.get("Seccomp"),
    "no_new_privs": status.get("NoNewPrivs"),
    "capabilities": status.get("CapEff"),
    "pid_ns": os.readlink("/proc/self/ns/pid"),
    "net_ns": os.readlink("/proc/self/ns/net"),
    "ipc_ns": os.readlink("/proc/self/ns/ipc"),
    "interfaces": interfaces(),
    "socket": opens_socket(),
    "namespace": makes_namespace(),
    "writable": writable_folders(),
    "readable": readable_secrets(),
    "kills": processes_to_signal(),
    "memory_of": accessible_memory(),
    "environment": sorted(os.environ),
    "descriptors": open_descriptors(),
    "forks": count_forks(REQUEST["processes"] + 8),
    "pids": sum(name.isdigit() for name in os.listdir("/proc")),
    "memory": escapes_memory_limit(),
    "core_limit": resource.getrlimit(resource.RLIMIT_CORE)[1],
    "gpu": gpu_devices(),
}
print(json.dumps(found))
