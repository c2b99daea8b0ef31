"""Three nodes that share nothing but an object store, on Debian's /etc/hosts: power cuts in SFT and RL cost no bit."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import HOST, Machines, machines
from object_server import object_server

from klear_core.artifacts.remote_paths import NODE_ROOT

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 840.0  # it took 750 s at a load of 30 on two cores
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-gpus=0", "--disable-usage-stats"]
RAY += ["--include-log-monitor=false"]  # a process of each node that nobody reads
STORE = f"--object-store-memory={80 << 20}"


class Cluster:
    """A head with the driver on machine 1, and nodes with a CPU each on others."""

    def __init__(self, made: Machines) -> None:
        self.made = made
        self.head = f"{made.address(1)}:6379"
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a-token-of-the-test-that-is-long-enough",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }

    def start_driver(self) -> None:
        root = self.made.disks / "1" / "root"
        head = [
            *RAY,
            "--head",
            "--no-monitor",
            "--num-cpus=0",
            "--port=6379",
            f"--node-ip-address={self.made.address(1)}",
            STORE,
        ]
        head += ["--include-dashboard=false", f"--system-config='{json.dumps(QUICK_DEATH)}'"]
        driver = [
            sys.executable,
            str(REPOSITORY / "tests" / "cluster" / "machine_driver.py"),
            str(root),
            "s3://klear/m",
        ]
        # The driver imports and uploads while the head starts, and waits for it then.
        up = root.parent / "up"
        command = f"(until {' '.join(head)}; do sleep 1; done; touch {up}) & exec {' '.join(driver)} {up}"
        env = self.env | {"RAY_ADDRESS": self.head, NODE_ROOT: str(root)}
        self.made.start(1, ["/bin/bash", "-c", command], env, "driver.log")

    def start_node(self, number: int) -> None:
        node = [*RAY, f"--address={self.head}", f"--node-ip-address={self.made.address(number)}", "--num-cpus=1", STORE]
        env = self.env | {NODE_ROOT: str(self.made.disks / str(number) / "root")}
        # Again and again: on a busy machine a raylet may take longer than Ray waits for it.
        again = f"until {' '.join(node)} --block; do sleep 1; done"
        self.made.start(number, ["/bin/bash", "-c", again], env, f"node-{time.monotonic():.0f}.log")

    def said(self) -> str:
        return (self.made.disks / "1" / "driver.log").read_text()

    def wait_for(self, pattern: str, deadline: float) -> None:
        """Wait until the driver has printed this; fail with its output if it ends before."""
        while not re.search(pattern, self.said()):
            assert self.made.running[1].poll() is None, self.said()[-6000:]
            assert time.monotonic() < deadline, f"{pattern} did not come: {self.said()[-6000:]}"
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with machines(tmp_path, 4) as made, object_server("klear", HOST):
        yield Cluster(made)


@pytest.mark.timeout(LIMIT_S + 50)
def test_power_cuts_of_a_node_in_sft_and_rl_cost_no_bit(cluster: Cluster) -> None:
    """Ranks on two nodes. One is cut off, and another comes into the cluster some seconds later."""
    deadline = time.monotonic() + LIMIT_S
    cluster.start_driver()
    cluster.wait_for("Ray runtime started", deadline)
    cluster.start_node(2)
    cluster.start_node(3)
    cut: list[tuple[str, Callable[[], None]]] = [
        ("sft-cut step 2", lambda: cluster.made.cut_power(3)),
        ("waiting up to .* for nodes", lambda: cluster.start_node(4)),
        ("rl-cut step 3", lambda: cluster.made.cut_power(4)),
        ("(?s)waiting up to .*waiting up to .* for nodes", lambda: cluster.start_node(3)),
    ]
    for sign, act in cut:
        cluster.wait_for(sign, deadline)
        act()
    cluster.wait_for("rl cut weights", deadline)
    weights = dict(re.findall(r"^(\w+ \w+) weights (\w+)$", cluster.said(), re.MULTILINE))
    assert weights["sft cut"] == weights["sft calm"]
    assert weights["rl cut"] == weights["rl calm"]
    assert len(re.findall("starting another", cluster.said())) >= 2, "each cut costs the learner its ranks"


def test_a_machine_in_a_namespace_sees_only_its_own_disk(cluster: Cluster) -> None:
    (cluster.made.disks / "2").mkdir()
    (cluster.made.disks / "2" / "secret").write_text("of machine 2")
    looked = cluster.made.start(3, ["ls", str(cluster.made.disks / "2")], dict(os.environ), "ls.log")
    assert looked.wait(90) == 0
    assert (cluster.made.disks / "3" / "ls.log").read_text() == ""
