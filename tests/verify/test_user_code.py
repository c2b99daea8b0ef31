"""Functions of the user's own are checked in a child process and called in workers that may be killed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from klear_core.config.rl import CustomReward
from klear_core.config.user_code import source_digest
from klear_core.config.verify import VerifyConfig, VerifyRuntime
from klear_core.errors import ConfigError
from klear_core.types import JudgedAnswer, Outcome, Verdict
from klear_core.verify import JudgePool
from klear_core.verify.user_code import check, load

SOURCE = """
import os, signal, sys, time

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
    return {"nan": float("nan"), "inf": float("inf"), "big": 3.0, "none": None, "word": "1"}.get(text, 0.5)
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


def value(pool: JudgePool, function: str, text: str = "", *, digest: str = "", **settings: object) -> Verdict:
    reward = CustomReward.model_validate({"function": f"my_rewards:{function}"} | settings)
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
    return pool.submit_reward(reward, digest or source_digest("my_rewards"), answer).result()


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
        ("exit", ""),
        ("die", "a worker died"),
        ("segfault", "a worker died"),
    ],
)
def test_a_function_that_fails_has_no_value_and_the_next_one_has(pool: JudgePool, text: str, why: str) -> None:
    failed = value(pool, "by_text", text, min_value=-2, max_value=2)
    assert failed.outcome is Outcome.JUDGE_FAILED
    assert re.search(why, failed.detail)
    assert value(pool, "by_text").score == 0.5


@pytest.mark.parametrize("text", ["sleep", "loop", "blocked"])
def test_a_function_that_hangs_is_killed_at_its_wall_clock(pool: JudgePool, text: str) -> None:
    assert value(pool, "by_text", text, timeout_s=0.2).outcome is Outcome.TIMED_OUT
    assert value(pool, "by_text").score == 0.5


def test_a_source_that_changes_while_the_stage_runs_gives_no_value(pool: JudgePool) -> None:
    value(pool, "by_text", "die")  # so that the next worker imports the module anew
    changed = value(pool, "length", digest="that of another source")
    assert changed.outcome is Outcome.JUDGE_FAILED
    assert "the source of my_rewards:length changed while the stage ran" in changed.detail


def test_a_fit_function_passes_without_being_imported_here(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check("my_rewards:by_text")
    assert folder == Path.cwd()
    assert capfd.readouterr() == ("", "")
    assert "my_rewards" not in sys.modules


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_library", "its import failed: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os\nos._exit(4)", "its import ended the process .exit status 4"),
        ("raise SystemExit(0)", "its import ended the process .exit status 0"),
    ],
)
def test_an_import_that_fails_does_so_in_the_child(folder: Path, source: str, why: str) -> None:
    (folder / "unfit.py").write_text(source)
    with pytest.raises(ConfigError, match=why):
        check("unfit:f")


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
