"""A comparison's limit is CPU time: a verdict is the same on an idle and on a loaded machine."""

import json
import signal
import subprocess
import sys
from concurrent.futures import Future

import pebble
import pytest
from verify_builders import boxed, math_problem

from klear_core.config.verify import MathConfig, VerifyConfig, VerifyRuntime
from klear_core.types import Outcome, Verdict
from klear_core.verify import JudgePool
from klear_core.verify.client import Fault
from klear_core.verify.server import outcome_of

LIMITS = """
import contextlib, signal, time
from klear_core.verify.math.algebra import CpuLimitError, cpu_limit

def spend(*, cpu_s, num_swallowed=0):
    "Compute for ever under a limit, and swallow what stops it so many times, as a library's bare `except` may."
    with cpu_limit(cpu_s):
        for _ in range(num_swallowed):
            with contextlib.suppress(BaseException):
                while True:
                    pass
        while True:
            pass
"""
PROGRAMS = {
    "time without a core": "with cpu_limit(0.5):\n    time.sleep(1.0)\n",
    # the kernel counts in ticks, so a little less than 0.3 may do
    "time on a core": """
before = time.process_time()
try:
    spend(cpu_s=0.3)
except CpuLimitError:
    assert time.process_time() - before >= 0.2
else:
    raise AssertionError("nothing was raised")
""",
    "swallowed once": """
with contextlib.suppress(CpuLimitError):
    spend(cpu_s=0.1, num_swallowed=1)
""",
    "after the limit": """
with cpu_limit(0.1):
    pass
until = time.process_time() + 0.3
while time.process_time() < until:
    pass
assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
""",
    "never returns": "with cpu_limit(0.1):\n    sum(range(10**15))\n",
}
IN_TURN = """
import json, os, sys, traceback
statuses = {}
for name, program in json.load(sys.stdin).items():
    pid = os.fork()
    if pid == 0:
        try:
            exec(program)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    statuses[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def statuses() -> dict[str, int]:
    """Exit status of each program in a process of its own: the CPU time of all threads counts, and those of the test run have some.

    They are forked, so that sympy is imported once.
    """
    command = [sys.executable, "-c", LIMITS + IN_TURN]
    ended = subprocess.run(command, input=json.dumps(PROGRAMS), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "never returns"])
def test_the_limit_counts_time_on_a_core_alone_is_raised_again_and_leaves_nothing(
    statuses: dict[str, int], name: str
) -> None:
    assert statuses[name] == 0


def test_an_operation_that_the_alarm_cannot_stop_is_killed_and_is_out_of_cpu_time(statuses: dict[str, int]) -> None:
    assert statuses["never returns"] == -signal.SIGXCPU
    future: Future[Verdict] = Future()
    future.set_exception(pebble.ProcessExpired("died", code=-signal.SIGXCPU))
    assert outcome_of(future) == Fault(kind="out_of_cpu", detail="a worker was killed at its limit of CPU time")


def test_a_worker_that_died_of_something_else_is_no_time_out() -> None:
    future: Future[Verdict] = Future()
    future.set_exception(pebble.ProcessExpired("died", code=-signal.SIGKILL))
    fault = outcome_of(future)
    assert isinstance(fault, Fault)
    assert fault.kind == "killed"


def test_an_answer_that_explodes_is_wrong_and_names_cpu_time() -> None:
    with JudgePool(VerifyConfig(math=MathConfig(cpu_s=0.5), runtime=VerifyRuntime(math_workers=1))) as pool:
        verdict = pool.judge(math_problem("73"), boxed("9^{9^{9^{9}}}"))
        assert (verdict.outcome, verdict.score, "CPU time" in verdict.detail) == (Outcome.SCORED, 0.0, True), verdict
        assert pool.judge(math_problem(r"\sqrt{8}"), boxed(r"2\sqrt{2}")).score == 1.0
        assert pool.judge(math_problem("3"), boxed("99999999999999999999!!!")).outcome is Outcome.SCORED
