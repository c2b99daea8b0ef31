"""Which node judges what, and what happens when one is lost."""

from __future__ import annotations

from concurrent.futures import Future

from klear_core.config.verify import MathConfig
from klear_core.types import Outcome, Verdict
from klear_core.verify.client import CheckSandbox, Fault, JudgeNode, JudgeNodes, MathTask, Task

TASK = MathTask(golds=("1",), comparison=None, unboxed="1", answer="1", cfg=MathConfig())
RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0, detail="")


class Node:
    """The judges of a node that keep their tasks until they are told what becomes of them."""

    def __init__(self, name: str, num_workers: int = 1, sandbox: str = "bwrap") -> None:
        self.name, self.num_workers, self.sandbox = name, num_workers, sandbox
        self.open: list[Future[Verdict | Fault]] = []
        self.checks: list[Future[Verdict | Fault]] = []
        self.num_seen = 0
        self.is_closed = False

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        future: Future[Verdict | Fault] = Future()
        self.num_seen += 1
        (self.checks if isinstance(task, CheckSandbox) else self.open).append(future)
        return future

    def finish(self, result: Verdict | Fault) -> None:
        tasks, self.open = self.open, []
        for future in tasks:
            future.set_result(result)

    def close(self) -> None:
        self.is_closed = True


def judges_on(*nodes: Node) -> JudgeNodes:
    return JudgeNodes([JudgeNode(name=node.name, num_workers=node.num_workers, backend=node) for node in nodes])


def lost() -> Fault:
    return Fault(kind="lost", detail="ActorDiedError")


def test_tasks_go_to_the_node_that_is_least_busy_for_its_workers() -> None:
    small, large = Node("small", num_workers=2), Node("large", num_workers=4)
    nodes = judges_on(small, large)
    results = [nodes.submit(TASK) for _ in range(6)]
    assert (len(small.open), len(large.open)) == (2, 4)
    large.finish(RIGHT)
    results += [nodes.submit(TASK) for _ in range(2)]
    assert (len(small.open), len(large.open)) == (2, 2)
    small.finish(RIGHT)
    large.finish(RIGHT)
    assert [r.result(0) for r in results] == [RIGHT] * 8
    nodes.close()
    assert small.is_closed
    assert large.is_closed


def test_the_tasks_of_a_lost_node_are_judged_by_the_others_and_it_gets_no_more() -> None:
    first, second = Node("first"), Node("second")
    nodes = judges_on(first, second)
    results = [nodes.submit(TASK) for _ in range(6)]
    first.finish(lost())
    assert len(second.open) == 6
    results.append(nodes.submit(TASK))
    second.finish(RIGHT)
    assert [r.result(0) for r in results] == [RIGHT] * 7
    assert first.num_seen == 3


def test_without_a_node_every_task_says_so() -> None:
    first, second = Node("first"), Node("second")
    nodes = judges_on(first, second)
    result = nodes.submit(TASK)
    first.finish(lost())
    second.finish(lost())
    fault = Fault(kind="died", detail="all 2 judging nodes were lost")
    assert result.result(0) == fault
    assert nodes.submit(TASK).result(0) == fault


def test_a_task_with_which_node_after_node_is_lost_is_given_up() -> None:
    machines = [Node(f"node {i}") for i in range(5)]
    nodes = judges_on(*machines)
    result = nodes.submit(TASK)
    for node in machines:
        node.finish(lost())
    answer = result.result(0)
    assert isinstance(answer, Fault)
    assert answer.kind == "died"
    assert answer.detail.startswith("3 nodes were lost while they had this task")
    assert [node.num_seen for node in machines] == [1, 1, 1, 0, 0]


def test_other_faults_are_the_callers() -> None:
    node = Node("only")
    nodes = judges_on(node)
    result = nodes.submit(TASK)
    fault = Fault(kind="timed_out", detail="")
    node.finish(fault)
    assert result.result(0) == fault


def test_the_sandbox_is_checked_on_every_node_and_the_one_without_is_named() -> None:
    machines = [Node("a", sandbox="bwrap"), Node("b", sandbox="firejail")]
    nodes = judges_on(*machines)
    for faulty in (False, True):
        result = nodes.submit(CheckSandbox())
        for node in machines:
            passed: Verdict | Fault = Verdict(outcome=Outcome.SCORED, score=1.0, detail=node.sandbox)
            is_faulty = faulty and node.name == "b"
            node.checks.pop().set_result(Fault(kind="no_sandbox", detail="no user namespaces") if is_faulty else passed)
        if faulty:
            assert result.result(0) == Fault(kind="no_sandbox", detail="b: no user namespaces")
        else:
            assert result.result(0) == Verdict(outcome=Outcome.SCORED, score=1.0, detail="bwrap, firejail")


def test_the_sandbox_is_not_waited_for_once_all_nodes_are_lost() -> None:
    node = Node("only")
    nodes = judges_on(node)
    task = nodes.submit(TASK)
    node.finish(lost())
    fault = Fault(kind="died", detail="all 1 judging nodes were lost")
    assert task.result(0) == fault
    assert nodes.submit(CheckSandbox()).result(0) == fault
