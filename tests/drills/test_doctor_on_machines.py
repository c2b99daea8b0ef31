"""`klear doctor --gpu` tries the nodes as training uses them: on machines whose name is loopback, as Debian writes /etc/hosts.

On machines of one network, as in tests/cluster/test_network.py, gloo would find its way even where it binds to no interface.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from machines import HOST, machines
from object_server import object_server
from test_machines import RAY, STORE, Cluster

pytestmark = pytest.mark.bench

LIMIT_S = 600.0
DOCTOR = """
from flows.doctor_gpu import network_checks
for check in network_checks():
    print("good:" if check.is_good else "bad:", check.name, check.found, flush=True)
"""


def test_the_doctor_finds_a_sound_network_between_three_machines(tmp_path: Path) -> None:
    with machines(tmp_path, 3) as made, object_server("klear", HOST):
        cluster = Cluster(made)
        head = [*RAY, "--head", "--num-cpus=0", "--port=6379", f"--node-ip-address={made.address(1)}", STORE]
        command = (
            f"until {' '.join(head)} --include-dashboard=false; do sleep 1; done; until [ -e up ]; do sleep 1; done"
        )
        env = cluster.env | {"RAY_ADDRESS": cluster.head}
        asks = ["/bin/bash", "-c", f'{command}; exec "$@"', "doctor", sys.executable, "-c", DOCTOR]
        doctor = made.start(1, asks, env, "driver.log")
        deadline = time.monotonic() + LIMIT_S
        cluster.wait_for("Ray runtime started", deadline)
        for number in (2, 3):
            cluster.start_node(number)
            while not any(
                "Ray runtime started" in log.read_text() for log in (tmp_path / str(number)).glob("node-*.log")
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        (tmp_path / "1" / "up").touch()
        doctor.wait(max(1.0, deadline - time.monotonic()))
        said = cluster.said()
    assert "good: network, gloo 3 nodes: all-reduce of 4 MB" in said, said[-3000:]
    assert "bad: network" not in said
    assert "good: clocks" in said
