"""All nodes of a cluster sum and send numbers to one another, as the doctor asks; gloo in NCCL's place."""

import pytest
from two_nodes import two_nodes

from klear_core.cluster.network import node_facts

pytest.importorskip("ray")
import ray

from flows.doctor_gpu import network_checks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_exchange_the_right_numbers_and_tell_their_limits() -> None:
    with two_nodes():
        try:
            checks = {check.name: check for check in network_checks()}
        finally:
            ray.shutdown()
    network = checks["network, gloo"]
    assert network.is_good, network
    assert "2 nodes: all-reduce of 4 MB" in network.found
    assert checks["clocks"].is_good  # one machine has one clock


def test_facts_of_this_machine_are_there() -> None:
    facts = node_facts()
    assert facts.max_files > 0
    assert facts.shm_free_gb >= 0
