"""Machines on this one: network, process and mount namespaces on a bridge, each with its own disk and shared memory.

Needs root and iproute2, as a container of CI has them or not. A machine's power is cut by killing its first process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NETWORK = f"10.77.{os.getpid() % 250}"  # another for each run of the tests on this machine
HOST = f"{NETWORK}.254"
"""Address of this machine, where the object server listens."""

_ENTER = r"""
mount --make-rprivate /
mkdir -p /tmp/ray && mount --bind "$DISK/ray" /tmp/ray
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$DISK/hosts" /etc/hosts
for other in "$DISKS"/*; do [ "$other" = "$DISK" ] || mount -t tmpfs -o size=1m,ro tmpfs "$other"; done
cd "$DISK" && exec "$@"
"""


@dataclass
class Machines:
    """The machines of a test, and what runs on them."""

    disks: Path
    prefix: str
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    """Process of each machine that is up; its end is that of the machine."""

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number}"

    def start(self, number: int, command: Sequence[str], env: Mapping[str, str], log: str) -> subprocess.Popen[str]:
        """Run a command on a machine, on Debian's /etc/hosts; its output goes to a file of this name on its disk."""
        disk = self.disks / str(number)
        for folder in ("ray", "root", "home"):
            (disk / folder).mkdir(parents=True, exist_ok=True)
        (disk / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        own = {"DISK": str(disk), "DISKS": str(self.disks), "HOME": str(disk / "home")}
        # A test that is killed takes its machines along.
        within = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", f"{self.prefix}{number}"]
        within += ["unshare", "-mpf", "--mount-proc", "--kill-child=KILL"]
        with (disk / log).open("w") as output:
            process = subprocess.Popen(
                [*within, "/bin/bash", "-ec", _ENTER, "machine", *command],
                env={**os.environ, **env, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.running[number] = process
        return process

    def cut_power(self, number: int) -> None:
        """End everything on a machine at once; the others hear nothing of it but silence."""
        process = self.running.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def machines(disks: Path, count: int) -> Iterator[Machines]:
    """Make the networks of machines 1 to `count`, and delete them afterwards; skip where that is not allowed."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "setpriv"))):
        pytest.skip("machines in namespaces need root, iproute2 and util-linux")
    made = Machines(disks, prefix=f"kl{os.getpid()}-")
    bridge = f"klb{os.getpid()}"
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{HOST}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for number in range(1, count + 1):
                _add(made, bridge, number)
            subprocess.run(["unshare", "-mpf", "--mount-proc", "true"], check=True, capture_output=True)
        except subprocess.CalledProcessError as refused:
            pytest.skip(f"this machine allows no namespaces: {refused.stderr.decode().strip()}")
        yield made
    finally:
        for number in list(made.running):
            made.cut_power(number)
        for number in range(1, count + 1):
            # The cable first: a network ends some time after its deletion, and its cables with it.
            for things in (("link", "delete", _cable(number)), ("netns", "delete", f"{made.prefix}{number}")):
                with suppress(subprocess.CalledProcessError):
                    _ip(*things)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", bridge)


def _cable(number: int) -> str:
    return f"klv{os.getpid()}-{number}"  # at most 15 letters


def _add(made: Machines, bridge: str, number: int) -> None:
    name, cable = f"{made.prefix}{number}", _cable(number)
    _ip("netns", "add", name)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", cable, "master", bridge)
    _ip("link", "set", cable, "up")
    _ip("-n", name, "addr", "add", f"{made.address(number)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "route", "add", "default", "via", HOST)
