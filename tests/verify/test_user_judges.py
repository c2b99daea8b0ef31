"""A judge of the user's own gives verdicts; whose fault a failure is depends on whether it works on an answer of ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from pydantic import ValidationError
from verify_builders import boxed, math_problem, problem

from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import check_references
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.judge_file import BadRow, judge_file
from klear_core.types import CustomReference, Domain, Outcome, Problem, Verdict
from klear_core.verify import JudgePool, faulty_references
from klear_core.verify.client import Fault, Task

SOURCE = """
import os, time
import numpy as np

def near(answer):
    if answer.box is None: return 0
    if answer.box == "raise": raise KeyError("no such word")
    if answer.box == "exit": raise SystemExit(0)
    if answer.box == "late": raise TimedOut("after 5 s")
    if answer.box == "die": os._exit(3)
    while answer.box == "spin": pass
    if answer.box == "sleep" or answer.reference.get("sleep"): time.sleep(1000)
    if answer.box == "eat": return len(bytearray(10**10))
    odd = {"none": None, "word": "1", "two": 2, "minus": -0.1, "nan": float("nan"), "list": [1]}
    if answer.box in odd: return odd[answer.box]
    if answer.box == "numpy": return np.isclose(answer.reference["target"], 24)
    return abs(float(answer.box) - answer.reference["target"]) <= answer.reference.get("within", 0)

def words(answer):
    return answer.box == answer.reference or 0 / (not answer.box.isdigit())

def part(answer):
    return answer.reference.index(answer.answer.strip()) / 4

def shown(answer):
    parts = answer.problem_id, answer.source, answer.question, answer.reference, answer.answer, answer.box
    expected = ("p0", "test", "?", {"a": [1, None, "\u00e9"]}, " so \\\\boxed{ 5 }", " 5 ")
    return parts == expected and answer.response == "<think>x</think> so \\\\boxed{ 5 }"

class TimedOut(BaseException): pass
"""
# Judges that read answers of one shape, and raise on all others.
STRICT = """
import ast, datetime, json, re
from fractions import Fraction

def table(a): return json.loads(a.box)["moves"] == a.reference["moves"]
def pair(a):
    x, y = map(int, a.box.split())
    return x * y == a.reference["product"]
def listed(a): return sorted(ast.literal_eval(a.box)) == a.reference
def grid(a): return all(len(row) == a.reference["width"] for row in json.loads(a.box))
def letter(a): return {"A": 0, "B": 1, "C": 2}[a.box] == a.reference["index"]
def word(a): return {"yes": True, "no": False}[a.box.lower()] is a.reference
def bits(a): return int(a.box, 2) == a.reference["value"]
def day(a): return datetime.date.fromisoformat(a.box).year == a.reference["year"]
def clock(a):
    hours, minutes = a.box.split(":")
    return int(hours) * 60 + int(minutes) == a.reference
def equation(a):
    left, right = a.box.split("=")
    return right.strip() == a.reference["x"]
def plain(a): return int(a.answer) == a.reference
def tagged(a): return re.search(r"<answer>(.*)</answer>", a.answer)[1] == a.reference
def choice(a): return a.reference.index(a.box) == 0
def move(a): return re.fullmatch(r"([a-h][1-8])-([a-h][1-8])", a.box)[2] == a.reference["to"]
def ratio(a): return Fraction(a.box) == Fraction(a.reference["value"])
"""
STRICT_CASES = {  # a reference, a right answer, and a reference on which the judge raises whatever the answer
    "table": ({"moves": [1, 2]}, '\\boxed{{"moves": [1, 2]}}', {"steps": [1, 2]}),
    "pair": ({"product": 12}, "\\boxed{3 4}", {"sum": 7}),
    "listed": ([1, 2], "\\boxed{[2, 1]}", None),
    "grid": ({"width": 2}, "\\boxed{[[1, 0], [0, 1]]}", {"height": 2}),
    "letter": ({"index": 2}, "\\boxed{C}", {"option": 2}),
    "word": (True, "\\boxed{Yes}", None),
    "bits": ({"value": 5}, "\\boxed{101}", {"bits": 5}),
    "day": ({"year": 1969}, "\\boxed{1969-07-20}", {"month": 7}),
    "clock": (750, "\\boxed{12:30}", None),
    "equation": ({"x": "4"}, "\\boxed{x = 4}", {"y": "4"}),
    "plain": (42, "42", None),
    "tagged": ("Rome", "<answer>Rome</answer>", None),
    "choice": (["e4", "d4"], "\\boxed{e4}", 7),
    "move": ({"to": "e4", "answer": "d2-e4"}, "\\boxed{e2-e4}", {"goal": "e4", "answer": "e2-e4"}),
    "ratio": ({"value": "1/2"}, "\\boxed{2/4}", {"value": "half"}),
}
JUDGES = [
    {"name": "near", "function": "my_judges:near", "timeout_s": 1.0, "memory_mb": 256},
    {"name": "words", "function": "my_judges:words", "memory_mb": 256},
    {"name": "part-of", "function": "my_judges:part", "memory_mb": 256},
    {"name": "shown", "function": "my_judges:shown", "memory_mb": 256},
]
STRICT_JUDGES = [{"name": name, "function": f"strict:{name}", "memory_mb": 256} for name in STRICT_CASES]


def settings(*judges: dict[str, object], **more: object) -> VerifyConfig:
    return VerifyConfig.model_validate({"judges": judges, "runtime": {"reward_workers": 1}} | more)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made, before = tmp_path_factory.mktemp("user"), Path.cwd()
    (made / "my_judges.py").write_text(SOURCE)
    (made / "strict.py").write_text(STRICT)
    os.chdir(made)  # judging processes start in the working directory
    yield made
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[JudgePool]:
    assert folder == Path.cwd()
    with JudgePool(settings(*JUDGES, *STRICT_JUDGES)) as made:
        yield made


def to_judge(judge: str, value: object) -> Problem:
    return problem(CustomReference(judge=judge, domain=Domain.MATH, value_json=json.dumps(value)))


def verdict(pool: JudgePool, answer: str, value: object = None, *, judge: str = "near") -> Verdict:
    return pool.submit(to_judge(judge, value or {"target": 24}), boxed(answer)).result()


def test_what_the_function_returns_is_the_score(pool: JudgePool) -> None:
    assert verdict(pool, "24") == Verdict(outcome=Outcome.SCORED, score=1.0)
    assert verdict(pool, "25") == Verdict(outcome=Outcome.SCORED, score=0.0)
    assert verdict(pool, "25", {"target": 24, "within": 1}).is_correct
    assert verdict(pool, "numpy").is_correct
    partial = pool.submit(to_judge("part-of", ["a", "b", "c"]), "</think> c").result()
    assert (partial.score, partial.is_correct) == (0.5, False)


def test_the_judge_sees_the_value_of_the_reference_and_the_parts_of_the_answer(pool: JudgePool) -> None:
    seen = pool.submit(to_judge("shown", {"a": [1, None, "é"]}), "<think>x</think> so \\boxed{ 5 }").result()
    assert seen == Verdict(outcome=Outcome.SCORED, score=1.0)


def test_an_answer_without_the_required_tags_is_no_answer_and_the_judge_is_not_asked(pool: JudgePool) -> None:
    assert pool.submit(to_judge("near", {"target": 24}), "\\boxed{die}").result().outcome is Outcome.NO_ANSWER


def test_where_a_judge_raises_on_all_answers_one_without_the_required_tags_is_unscored_as_the_others(
    pool: JudgePool,
) -> None:
    responses = [boxed("24"), "\\boxed{24}"]
    outcomes = [pool.submit(to_judge("near", {"aim": 24}), response).result().outcome for response in responses]
    assert outcomes == [Outcome.JUDGE_FAILED, Outcome.JUDGE_FAILED]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", r"KeyError: 'no such word' \(my_judges.py, line 7\)"),
        ("exit", "SystemExit: 0"),
        ("late", "TimedOut: after 5 s"),
        ("die", "a worker died"),
        ("spin", "limit of CPU time|ran out of time"),  # on a busy machine its wall clock may end first
        ("sleep", "ran out of time"),
        ("eat", "my_judges:near needs more memory than its memory_mb = 256"),
        ("none", "returned NoneType, and not a number"),
        ("word", "returned str, and not a number"),
        ("list", "returned list, and not a number"),
        ("two", "returned 2, which is not between 0 and 1"),
        ("minus", "returned -0.1, which is not between 0 and 1"),
        ("nan", "returned nan"),
        ("seven", "ValueError: could not convert string"),
    ],
)
def test_an_answer_over_which_a_working_judge_fails_is_wrong(pool: JudgePool, answer: str, why: str) -> None:
    failed = verdict(pool, answer)
    assert (failed.outcome, failed.score) == (Outcome.SCORED, 0.0)
    assert re.search(why, failed.detail), failed.detail
    assert verdict(pool, "24").is_correct


def test_a_judge_that_waits_or_fails_on_every_answer_gives_no_verdict(pool: JudgePool) -> None:
    slow = verdict(pool, "24", {"target": 24, "sleep": True})
    assert (slow.outcome, "ran out of time" in slow.detail) == (Outcome.TIMED_OUT, True), slow
    for answer in ("24", "7", "raise"):
        broken = verdict(pool, answer, {"goal": 24})
        assert broken.outcome is Outcome.JUDGE_FAILED, broken
    assert "KeyError: 'target'" in verdict(pool, "24", {"goal": 24}).detail


def test_a_judge_that_reads_only_answers_like_its_reference_works(pool: JudgePool) -> None:
    assert verdict(pool, "no word", "word", judge="words").score == 0.0
    odd = verdict(pool, "7", "word", judge="words")
    assert (odd.outcome, odd.score, "ZeroDivisionError" in odd.detail) == (Outcome.SCORED, 0.0, True), odd


ODD_ANSWERS = [
    "",
    "?",
    "x y z",
    "[",
    "{}",
    "1e999",
    "0/0",
    "9" * 5000,
    "A=B=C",
    "\ud800",
    "null",
    "1 1",
    "[[]]",
    "e9-e4",
]


@pytest.mark.parametrize("name", STRICT_CASES)
def test_a_judge_that_raises_on_other_shapes_scores_every_answer(pool: JudgePool, name: str) -> None:
    value, right, _ = STRICT_CASES[name]
    asked = to_judge(name, value)
    assert faulty_references([asked], pool, run_tests=True) == []
    assert pool.submit(asked, f"</think>{right}").result().is_correct
    texts = [f"</think>\\boxed{{{odd}}}" for odd in ODD_ANSWERS] + ["</think>I do not know."]
    found = [pool.submit(asked, text) for text in texts]
    assert {done.result().outcome for done in found} == {Outcome.SCORED}


@pytest.mark.parametrize("name", [name for name, (_, _, broken) in STRICT_CASES.items() if broken is not None])
def test_no_answer_is_scored_by_a_reference_on_which_the_judge_always_raises(pool: JudgePool, name: str) -> None:
    _, right, broken = STRICT_CASES[name]
    for text in (right, "\\boxed{?}", "I do not know."):
        assert pool.submit(to_judge(name, broken), f"</think>{text}").result().outcome is Outcome.JUDGE_FAILED


def test_a_judge_that_reads_none_of_our_answers_is_told_what_to_do(pool: JudgePool) -> None:
    unread = to_judge("move", {"to": "e4"})
    for text in ("\\boxed{e2-e4}", "\\boxed{?}"):  # also an answer that it could read
        failed = pool.submit(unread, f"</think>{text}").result()
        assert failed.outcome is Outcome.JUDGE_FAILED
        assert "needs a right answer under `answer` of its reference's value" in failed.detail


def test_a_reference_that_names_no_judge_of_the_settings_is_told_before_anything_is_spent(pool: JudgePool) -> None:
    unknown = to_judge("nearer", 1)
    with pytest.raises(
        ConfigError, match=r"problem p0 of test: verify.judges has no judge 'nearer'; it has near, words"
    ):
        pool.prepare([math_problem("7"), unknown])
    assert pool.submit(unknown, boxed("1")).result().outcome is Outcome.BAD_REFERENCE
    assert pool.prepare([math_problem("7"), to_judge("near", 1)]) == ()


def test_references_on_which_the_judge_fails_are_found_before_training(pool: JudgePool) -> None:
    good, bad = to_judge("near", {"target": 1}), to_judge("near", {"goal": 1})
    assert check_references([good], pool, 0.0, benchmark="b").counts == {}
    with pytest.raises(DataError, match="judge_failed: KeyError: 'target'"):
        check_references([good, bad], pool, 0.0, benchmark="b")


def test_a_module_that_is_not_there_or_two_judges_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="no Python file of module 'nowhere'"):
        JudgePool(settings({"name": "a", "function": "nowhere:f"}))
    with pytest.raises(ValidationError, match="two have the name 'a'"):
        settings({"name": "a", "function": "x:f"}, {"name": "a", "function": "y:f"})
    with pytest.raises(ValidationError, match="should match pattern"):
        settings({"name": "a b", "function": "x:f"})


class Elsewhere:
    """Judging processes of nodes that do not have the user's files."""

    def __init__(self) -> None:
        self.is_closed = False

    def submit(self, task: Task) -> Future[Verdict | Fault]:
        done: Future[Verdict | Fault] = Future()
        done.set_result(Fault(kind="raised", detail=f"{type(task).__name__} was sent to another node"))
        return done

    def close(self) -> None:
        self.is_closed = True


def test_a_users_function_is_called_on_the_machine_that_has_its_source() -> None:
    elsewhere = Elsewhere()
    with JudgePool(settings(*JUDGES), elsewhere) as spread:
        assert verdict(spread, "24").is_correct
        assert "MathTask was sent" in spread.submit(math_problem("x+1"), boxed("2x+3")).result().detail
    assert elsewhere.is_closed


def test_a_file_of_answers_is_judged_by_the_judge_that_each_row_names(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    custom = {"kind": "custom", "judge": "near", "value": {"target": 24}}
    rows = [
        ("a", "24", custom),
        ("b", "25", custom),
        ("c", "raise", custom),
        ("d", "7", {"kind": "math", "answers": ["7"]}),
    ]
    lines = [json.dumps({"id": i, "response": boxed(answer), "reference": r}) for i, answer, r in rows]
    answers.write_text("\n".join(lines))
    summary = judge_file(answers, settings(*JUDGES), out=tmp_path / "out.jsonl")
    assert (summary.outcomes, summary.mean_score) == ({Outcome.SCORED: 4}, 2 / 4)
    (bad, *_) = judge_file(answers, settings(JUDGES[2])).bad_rows
    assert bad == BadRow(
        line=1, reason="reference of a: verify.judges has ifeval, part-of, reasoning_gym, and not 'near'"
    )
    with pytest.raises(
        ConfigError, match=r"verify.judges, name = 'near', function = 'my_judges:nearer': .* has no function"
    ):
        judge_file(answers, settings({"name": "near", "function": "my_judges:nearer"}))
