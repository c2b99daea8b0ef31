"""Judging on two Ray nodes: the verdicts of one machine, from both, and from one when the other dies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import psutil
import pytest
from verify_builders import ADD_STDIN, boxed, code_config, fenced, math_problem, problem, stdin_reference

from klear_core.config.verify import VerifyConfig, VerifyRuntime
from klear_core.errors import SandboxError
from klear_core.types import Outcome, Problem
from klear_core.verify import JudgePool
from tasks.resources import Needs, ray_session

pytest.importorskip("ray")
from ray.cluster_utils import Cluster
from two_nodes import actors_of, two_nodes

from klear_core.cluster.pools import build_cluster_judges

pytestmark = pytest.mark.slow

NEEDS = Needs(num_cpus=1, object_store_bytes=80 << 20)
SLEEPS = "import time\na, b = map(int, input().split())\ntime.sleep(1)\nprint(a + b)"
QUESTIONS = [
    (problem(ADD_STDIN, "right"), fenced("a, b = map(int, input().split())\nprint(a + b)")),
    (problem(ADD_STDIN, "third"), fenced("a, b = map(int, input().split())\nprint(3)")),
    (problem(ADD_STDIN, "crash"), fenced("raise SystemExit(1)")),
    (problem(ADD_STDIN, "network"), fenced("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\nprint(3)")),
    (problem(ADD_STDIN, "silent"), "<think> x </think> I do not know."),
    (math_problem("1/2"), boxed("0.5")),
    (math_problem("x+1"), boxed("1+x")),
    (math_problem("7"), boxed("8")),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with JudgePool(config()) as pool:
        try:
            pool.check_sandbox()
        except SandboxError as error:
            if os.environ.get("CI", "").lower() in ("1", "true"):
                raise
            pytest.skip(str(error))
    with two_nodes() as found:
        yield found


def config() -> VerifyConfig:
    runtime = VerifyRuntime(math_workers=1, code_workers=2)
    return code_config().model_copy(update={"runtime": runtime})


def test_two_nodes_give_the_verdicts_of_one_machine_and_leave_nothing_behind(cluster: Cluster) -> None:
    with JudgePool(config()) as pool:
        backend = pool.check_sandbox()
        expected = [pool.judge(*question) for question in QUESTIONS]
    with ray_session(NEEDS):
        with build_cluster_judges(config()) as pool:
            assert pool.check_sandbox() == backend
            futures = [pool.submit(*question) for question in QUESTIONS * 2]
            assert [future.result() for future in futures] == expected * 2
            actors = actors_of("JudgeActor")
            judging = [child for actor in actors for child in actor.children(recursive=True)]
            assert len(actors) == 2
            assert len(judging) >= 2
        assert not psutil.wait_procs([*actors, *judging], timeout=60)[1]


def test_a_node_that_dies_with_work_in_flight_loses_none_of_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    sleeper: Problem = problem(stdin_reference(("1 2\n", "3\n")))
    with ray_session(NEEDS), build_cluster_judges(config()) as pool:
        pool.check_sandbox()
        futures = [pool.submit(sleeper, fenced(SLEEPS)) for _ in range(8)]
        time.sleep(0.5)
        assert not all(future.done() for future in futures)
        with caplog.at_level(logging.WARNING):
            # The head stays: killing the other's raylet takes its actor with it.
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            verdicts = [future.result(timeout=120) for future in futures]
        assert {(v.outcome, v.score) for v in verdicts} == {(Outcome.SCORED, 1.0)}
        assert [r for r in caplog.records if "judges no more" in r.getMessage()]
