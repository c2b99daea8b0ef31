"""Functions of the user's own are checked in a child process and called in workers that may be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from klear_core.config.rewards import CustomReward
from klear_core.config.verify import CustomJudge, VerifyConfig, VerifyRuntime, source_digest
from klear_core.errors import ConfigError
from klear_core.types import FAILED_ON_ANSWER, JudgedAnswer, Outcome, Verdict
from klear_core.verify import JudgePool
from klear_core.verify.user_code import check, load

SOURCE = """
import os, pathlib, signal, subprocess, sys, time

print("a module that prints when imported")

def length(answer):
    return answer.num_tokens / 4

def is_right(answer):
    return answer.score == 1 and answer.answers == ("7",) and answer.question == "3 + 4?"

def by_text(answer):
    text = answer.text
    if text == "raise": raise KeyError("no such word")
    if text == "exit": sys.exit(0)
    if text == "die": os._exit(7)
    if text == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if text == "sleep": time.sleep(1000)
    if text == "loop":
        while True: pass
    if text == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(1000)
    if text == "alarm_cancelled":
        signal.alarm(0)
        time.sleep(1000)
    if text == "alarm_replaced":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        time.sleep(1000)
    if text == "all_blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(1000)
    if text == "child": subprocess.run(["sleep", "5"])
    if text == "pause": time.sleep(1.5)
    if text == "alarm_left":
        signal.alarm(1)
    return {"nan": float("nan"), "inf": float("inf"), "big": 3.0, "none": None, "word": "1"}.get(text, 0.5)

def waits(answer):
    time.sleep(1000)

def waits_once(answer):
    try: pathlib.Path("was_here").touch(exist_ok=False)
    except FileExistsError: return 0.25
    time.sleep(1000)

def of_known_problems(answer):
    return {"What is 7906 + 1?": 1.0}[answer.question]
"""


SHAPES = """
def two(answer, more): return 0.0
def none(): return 0.0
async def later(answer): return 0.0
def stream(answer): yield 0.0
constant = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made, before = tmp_path_factory.mktemp("user"), Path.cwd()
    (made / "my_rewards.py").write_text(SOURCE)
    os.chdir(made)  # judging processes start in the working directory
    yield made
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[JudgePool]:
    with JudgePool(VerifyConfig(runtime=VerifyRuntime(reward_workers=1))) as made:
        assert folder == Path.cwd()
        yield made


def value(
    pool: JudgePool, function: str, text: str = "", *, module: str = "my_rewards", digest: str = "", **settings: object
) -> Verdict:
    reward = CustomReward.model_validate({"function": f"{module}:{function}"} | settings)
    answer = JudgedAnswer(
        problem_id="p",
        source="s",
        question="3 + 4?",
        answers=("7",),
        text=text,
        score=1.0,
        num_tokens=6,
        finish_reason="stop",
    )
    return pool.submit_reward(reward, digest or source_digest(module), answer).result()


def test_a_number_is_the_value_whatever_its_type(pool: JudgePool) -> None:
    assert [value(pool, name).score for name in ("length", "is_right", "by_text")] == [1.5, 1.0, 0.5]
    assert value(pool, "length").outcome is Outcome.SCORED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", r"KeyError: 'no such word' \(my_rewards.py, line 14\)"),
        ("nan", "returned nan, which is not between -2 and 2"),
        ("inf", "returned inf"),
        ("big", "returned 3, which is not between -2 and 2"),
        ("none", "returned NoneType, and not a number"),
        ("word", "returned str, and not a number"),
        ("exit", "SystemExit: 0"),
        ("loop", "killed at its limit of CPU time|ran out of time"),  # the clock may be first on a busy machine
        ("die", "a worker died"),
        ("segfault", "a worker died"),
    ],
)
def test_a_reward_that_fails_on_one_answer_alone_has_failed_on_it_and_the_next_one_has_a_value(
    pool: JudgePool, text: str, why: str
) -> None:
    failed = value(pool, "by_text", text, min_value=-2, max_value=2, timeout_s=0.5)
    assert (failed.outcome, failed.score) == (Outcome.SCORED, FAILED_ON_ANSWER)
    assert failed.detail.startswith("the reward works on another answer, but on this one it failed")
    assert re.search(why, failed.detail)
    assert value(pool, "by_text").score == 0.5


COMPUTES = """
import signal
from klear_core.verify.user_code import ended_after
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX])  # that of the clock: SIGKILL comes a second later
with ended_after(0.02):
    while True: pass
"""


def test_a_block_that_computes_is_ended_by_its_limit_of_cpu_time() -> None:
    """It comes before SIGKILL where the process gets a fiftieth of a core."""
    assert subprocess.run([sys.executable, "-c", COMPUTES], check=False).returncode == -signal.SIGXCPU


def test_a_reward_that_fails_on_a_trivial_answer_to_the_problem_too_has_failed_by_itself(pool: JudgePool) -> None:
    failed = value(pool, "of_known_problems")
    assert failed.outcome is Outcome.JUDGE_FAILED
    assert re.search(r"KeyError: '3 \+ 4\?' \(my_rewards.py, line 49\)", failed.detail)


@pytest.mark.parametrize("text", ["sleep", "blocked", "alarm_cancelled", "alarm_replaced", "child", "all_blocked"])
def test_a_function_that_waits_twice_on_one_answer_alone_has_failed_on_it(pool: JudgePool, text: str) -> None:
    failed = value(pool, "by_text", text, timeout_s=1.0)
    assert (failed.outcome, failed.score) == (Outcome.SCORED, FAILED_ON_ANSWER), failed
    assert "ran out of time" in failed.detail
    assert value(pool, "by_text").score == 0.5


def test_a_function_that_waits_on_every_answer_has_timed_out(pool: JudgePool) -> None:
    assert value(pool, "waits", timeout_s=0.2).outcome is Outcome.TIMED_OUT


def test_a_function_that_waits_once_is_called_again_for_its_value(pool: JudgePool) -> None:
    assert value(pool, "waits_once", timeout_s=3.0).score == 0.25


def test_an_alarm_that_a_function_leaves_behind_does_not_end_the_next_call(pool: JudgePool) -> None:
    assert value(pool, "by_text", "alarm_left").score == 0.5
    assert value(pool, "by_text", "pause").score == 0.5


EATERS = """
import subprocess, sys
import numpy as np

KEPT = []

def bytes_at_once(answer): return float(len(bytearray(int(answer.text) << 20)) > 0)

def small_pieces(answer):
    held = [bytearray(1 << 20) for _ in range(int(answer.text))]
    return 0.5

def array(answer): return float(np.ones(int(answer.text) << 17).sum() > 0)

def keeps(answer):
    KEPT.append(bytearray(int(answer.text) << 20))
    return 0.5

def in_a_thread_pool_of_c(answer): raise RuntimeError("DefaultCPUAllocator: error code 12 (Cannot allocate memory)")

def in_a_child(answer):
    code = f"x = bytearray({answer.text} << 20)"
    return float(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode)
"""


@pytest.fixture(scope="module")
def eaters(folder: Path) -> None:
    (folder / "eaters.py").write_text(EATERS)


@pytest.mark.parametrize("function", ["bytes_at_once", "small_pieces", "array", "in_a_thread_pool_of_c"])
@pytest.mark.usefixtures("eaters")
def test_a_function_that_eats_memory_has_failed_with_the_limit_and_the_next_one_has_a_value(
    pool: JudgePool, function: str
) -> None:
    failed = value(pool, function, "400", module="eaters", memory_mb=256)
    assert failed.outcome is Outcome.JUDGE_FAILED
    assert failed.detail == f"eaters:{function} needs more memory than its memory_mb = 256"
    assert value(pool, "bytes_at_once", "100", module="eaters", memory_mb=256).score == 1


@pytest.mark.usefixtures("eaters")
def test_memory_that_a_function_keeps_counts_until_its_worker_is_replaced(pool: JudgePool) -> None:
    outcomes = [value(pool, "keeps", "100", module="eaters", memory_mb=256).outcome for _ in range(4)]
    # its imports take some, and the third call finds too little left
    assert outcomes == [Outcome.SCORED, Outcome.SCORED, Outcome.JUDGE_FAILED, Outcome.SCORED]


@pytest.mark.usefixtures("eaters")
def test_what_one_function_keeps_does_not_fail_another_with_a_smaller_limit(pool: JudgePool) -> None:
    assert value(pool, "keeps", "100", module="eaters", memory_mb=300).score == 0.5
    assert value(pool, "by_text", memory_mb=64).score == 0.5


@pytest.mark.usefixtures("eaters")
def test_a_process_that_a_function_starts_has_its_limit_too(pool: JudgePool) -> None:
    assert value(pool, "in_a_child", "3000", module="eaters", memory_mb=256).score == 1
    assert value(pool, "in_a_child", "100", module="eaters", memory_mb=256).score == 0


def test_a_source_that_changes_while_the_stage_runs_gives_no_value(pool: JudgePool) -> None:
    changed = value(pool, "length", digest="that of another source", memory_mb=300)  # a worker that has not imported it
    assert changed.outcome is Outcome.JUDGE_FAILED
    assert "the source of my_rewards:length changed while the stage ran" in changed.detail


def test_a_fit_function_passes_without_being_imported_here(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(CustomReward(function="my_rewards:by_text"))
    assert folder == Path.cwd()
    assert capfd.readouterr() == ("", "")
    assert "my_rewards" not in sys.modules


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_library", "its import failed: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os\nos._exit(4)", "its import ended the process .exit status 4"),
        ("x = bytearray(10**9)", "its import failed: unfit:f needs more memory than its memory_mb = 256"),
        ("raise SystemExit(0)", r"its import failed: SystemExit: 0 \(unfit.py, line 1\)"),
        ("import os\nos.write(2, b'\\xff')\nos._exit(4)", "its import ended the process .exit status 4"),
    ],
)
def test_an_import_that_fails_does_so_in_the_child(folder: Path, source: str, why: str) -> None:
    (folder / "unfit.py").write_text(source)
    with pytest.raises(ConfigError, match=why):
        check(CustomReward(function="unfit:f", memory_mb=256))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return answer.no_such", r"failed: AttributeError: .*no_such.* \(tried.py, line 2\)"),
        ("raise SystemExit(3)", r"failed: SystemExit: 3 \(tried.py, line 2\)"),
        ("return 1e9", "failed: ValueError: it returned 1e.09, which is not between -100 and 100"),
        ("return None", "failed: TypeError: it returned NoneType, and not a number"),
        ("import os; os._exit(4)", "ended the process .exit status 4"),
        ("return len(bytearray(10**9))", "failed: tried:f needs more memory than its memory_mb = 256"),
        ("import time; time.sleep(1000)", "does not end within timeout_s = 0.3"),
        ("while True: pass", "does not end within timeout_s = 0.3"),
    ],
)
def test_a_reward_that_gives_a_trivial_answer_no_value_is_refused_with_its_line(
    folder: Path, body: str, why: str
) -> None:
    (folder / "tried.py").write_text(f"def f(answer):\n    {body}\n")
    with pytest.raises(ConfigError, match=f"its call on a trivial answer {why}"):
        check(CustomReward(function="tried:f", memory_mb=256, timeout_s=0.3))
    check(CustomJudge(name="tried", function="tried:f", memory_mb=256))  # a judge is tried on references


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("nowhere:f", "no Python file of module 'nowhere'"),
        ("shapes:absent", "shapes.py has no function 'absent'"),
        ("shapes:constant", "has no function 'constant'"),
        ("shapes:two", "must take one answer, and nothing else: missing a required argument: 'more'"),
        ("shapes:none", "must take one answer, and nothing else: too many positional arguments"),
        ("shapes:later", "is a coroutine or generator"),
        ("shapes:stream", "is a coroutine or generator"),
    ],
)
def test_an_unfit_function_is_told_with_what_it_lacks(
    folder: Path, function: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "shapes.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ConfigError, match=why):
        load(function)


def test_a_module_that_hides_behind_another_of_its_name_is_refused(folder: Path) -> None:
    """What runs must be what is hashed: `json` is imported already, and is not the file in the working directory."""
    (folder / "json.py").write_text("def loads(answer): return 0.0")
    try:
        with pytest.raises(ConfigError, match=r"module 'json' is .*, and not .*json.py, whose content is hashed"):
            load("json:loads")
    finally:
        (folder / "json.py").unlink()
