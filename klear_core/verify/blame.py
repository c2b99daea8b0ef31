"""Say whose fault a broken judgement is, by trials of references alone, and count faults that are not the model's.

A reference that passes its trial can be judged by. Whatever happens afterwards within the limits of CPU time and memory
is then the doing of the answer, which is wrong. One that fails leaves all its answers unscored; a single test that
fails is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
from collections import Counter

from klear_core.config.verify import MathConfig, VerifyConfig
from klear_core.errors import JudgeError
from klear_core.types import (
    CodeReference,
    JudgedAnswer,
    MathReference,
    Outcome,
    Problem,
    Reference,
    StoredTests,
    Verdict,
)
from klear_core.verify.client import CodeTask, CodeTrial, MathTask, UserTask
from klear_core.verify.code.program import chosen_tests, num_chosen, reference_fault
from klear_core.verify.math.answer_text import MathAnswer
from klear_core.verify.math.rules import decide, usable_references
from klear_core.verify.math.text_compare import AlgebraComparison, Pair

PASSED = Verdict(outcome=Outcome.SCORED, score=1.0, detail="the reference passed its trial")
TRIAL_ANSWER = "7907"
"""A plain number as the answer: text rules decide only if the reference is a number or words; else it is parsed."""
TRIAL_RESPONSE = f"<think>\n</think>\n\\boxed{{{TRIAL_ANSWER}}}"
_COMMON_SHAPES = (
    "A",
    "yes",
    "1",
    "1 1",
    "1, 1",
    "(1, 1)",
    "[1, 1]",
    "[[1, 1], [1, 1]]",
    '{"1": 1}',
    "x = 1",
    "1:1",
    "1/1",
    "2000-01-01",
)
"""Answers whose shape a user's judge may require."""
_PLACES = (("\\boxed{", "}"), ("", ""), ("<answer>", "</answer>"))
"""Where a user's judge may look for an answer."""
_MAX_PARTS = 8
"""Most texts of a reference's value that are tried as answers."""
_COMPUTES_NOTHING = re.compile(r"(?=.*\w)[\w\s.,:;'()%$-]*")
"""Numbers, words and lists of them, over which algebra can neither fail nor take long."""


def has_test_program(reference: Reference) -> bool:
    """Return whether judging by this reference runs a program that belongs to it: assertions or a checker."""
    return isinstance(reference, CodeReference) and bool(reference.checker or reference.test_kind == "asserts")


def math_trial(reference: MathReference, cfg: MathConfig) -> Verdict | MathTask:
    """Return the verdict on a reference that needs no algebra, or the task that compares it by algebra."""
    golds = usable_references(reference.answers, cfg)
    if not golds:
        detail = (
            f"no usable reference among {len(reference.answers)} "
            f"(empty, unbalanced braces, or longer than {cfg.max_answer_chars} characters)"
        )
        return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
    if all(_COMPUTES_NOTHING.fullmatch(gold) for gold in golds):
        return PASSED
    # The reference as it is read against a plain number, and as a whole: other answers meet one of these forms.
    read = decide(golds, MathAnswer(texts=(TRIAL_ANSWER,), is_unboxed=False), cfg)
    sides = [[gold] for gold in golds]
    if isinstance(read, AlgebraComparison):
        sides = [[pair.gold for pair in pairs] for pairs in read.alternatives] + sides
    if isinstance(read, bool):
        sides.append(["0"])  # text rules alone read this reference: algebra need not, and must only not break off
    # Against itself, which text may decide at once, and against another value.
    alternatives = tuple(
        tuple(Pair(gold=side, answer=answer) for side in group for answer in (side, TRIAL_ANSWER)) for group in sides
    )
    return MathTask(
        golds=golds,
        comparison=AlgebraComparison(alternatives=alternatives),
        unboxed="",
        answer="",
        cfg=cfg,
        is_trial=True,
    )


def code_trial(problem_id: str, reference: CodeReference, cfg: VerifyConfig) -> Verdict | CodeTask:
    """Return the verdict on a reference without programs of its own, or the task that runs these alone."""
    defect = reference_fault(reference, cfg.code)
    if defect is not None:
        detail = f"problem {problem_id}: {defect}"
        return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
    if not has_test_program(reference):
        return PASSED
    return code_task(problem_id, reference, None, cfg)


def code_task(problem_id: str, reference: CodeReference, program: bytes | None, cfg: VerifyConfig) -> CodeTask:
    """Return the task that runs a program on the tests chosen for the problem; without one it tries the reference."""
    tests = reference.tests
    if not isinstance(tests, StoredTests):  # a worker reads stored tests, and chooses among them in the same way
        reference = dataclasses.replace(reference, tests=chosen_tests(tests, problem_id, cfg.code))
    return CodeTask(
        problem_id=problem_id,
        program=program,
        reference=reference,
        num_tests=num_chosen(reference.num_tests, cfg.code),
    )


def digest_of(trial: CodeTask | UserTask) -> bytes:
    """Return a key of the reference in a trial, with the tests that were chosen."""
    return hashlib.blake2b(repr(trial).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def unusable_tests(problem: Problem, trial: Verdict) -> list[str]:
    """Return the problem with the first of its tests that failed their trial, if there are any and others passed."""
    if not isinstance(trial, CodeTrial) or not trial.unusable:
        return []
    number, why = trial.unusable[0]
    return [f"problem {problem.problem_id}: {trial.detail}; test {number}: {why}"]


def probes_of(task: UserTask) -> list[UserTask]:
    """Return calls of a user's judge or reward on answers of ours to the same problem.

    A reward gets a plain number, and the right answer. A judge may read answers of a shape of its own and raise on all
    others: it gets a plain number, the reference's value and the parts of it, which may hold a right answer (under
    `answer` by agreement), and texts of common shapes; each in a box, then plain, then in a tag.
    """
    asked = task.answer
    if isinstance(asked, JudgedAnswer):
        right = [trivial_answer(asked, box=asked.answers[0], score=1.0)] if asked.answers else []
        return [dataclasses.replace(task, answer=answer) for answer in (trivial_answer(asked), *right)]
    texts = dict.fromkeys([TRIAL_ANSWER, *_possible_answers(asked.reference), *_COMMON_SHAPES])
    probes: list[UserTask] = []
    for start, end in _PLACES:
        for text in texts:
            # The box is never missing: many judges return 0 without one, before they read the reference.
            shown = f"{start}{text}{end}"
            answer = dataclasses.replace(asked, answer=shown, box=text, response=f"<think>\n</think>\n{shown}")
            probes.append(dataclasses.replace(task, answer=answer))
    return probes


def _possible_answers(value: object) -> list[str]:
    """Return the texts in a custom reference's value that may be a right answer, the likeliest first."""
    parts: list[object] = [value]
    match value:
        case dict():
            stated = [value["answer"]] if "answer" in value else []
            parts = [*stated, value, *value.values()]
        case list():
            parts += value
    parts = parts[:_MAX_PARTS]
    return [part if isinstance(part, str) else json.dumps(part) for part in parts]


def trivial_answer(asked: JudgedAnswer, *, box: str = TRIAL_ANSWER, score: float = 0.0) -> JudgedAnswer:
    """Return a short, complete answer to the same problem."""
    text = f"<think>\n</think>\n\\boxed{{{box}}}"
    return dataclasses.replace(asked, text=text, score=score, num_tokens=len(text.split()), finish_reason="stop")


# ---- health ----
# Count verdicts by outcome, and stop a stage in which the judge itself fails too often.


_NOT_THE_MODELS = (Outcome.JUDGE_FAILED, Outcome.SANDBOX_FAILED, Outcome.TIMED_OUT, Outcome.BAD_REFERENCE)
"""Outcomes of a failed judge, machine or reference. An answer that uses up its CPU time is SCORED, not TIMED_OUT."""


class JudgeHealth:
    """Counts verdicts by outcome, and raises once too many of them failed for reasons that are not the model's."""

    def __init__(self, *, max_failed_frac: float, min_failed_count: int, what: str = "verdicts") -> None:
        """Count from zero. `what` names the counted verdicts in the error."""
        self._what = what
        self._max_failed_frac = max_failed_frac
        self._min_failed_count = min_failed_count
        self._lock = threading.Lock()
        self._counts: Counter[Outcome] = Counter()

    @property
    def counts(self) -> dict[Outcome, int]:
        """Return the number of verdicts so far, by outcome."""
        with self._lock:
            return dict(self._counts)

    @property
    def num_failed(self) -> int:
        """Return the number of failures so far that are not the model's."""
        counts = self.counts
        return sum(counts.get(outcome, 0) for outcome in _NOT_THE_MODELS)

    def record(self, verdict: Verdict) -> None:
        """Count a verdict. Raise JudgeError when failures of the judge, machine or references exceed the limit."""
        with self._lock:
            self._counts[verdict.outcome] += 1
            failed = sum(self._counts[o] for o in _NOT_THE_MODELS)
            total = self._counts.total()
        if (
            verdict.outcome in _NOT_THE_MODELS
            and failed >= self._min_failed_count
            and failed > self._max_failed_frac * total
        ):
            raise JudgeError(
                f"{failed} of {total} {self._what} failed for reasons that are not the model's "
                f"(limit {self._max_failed_frac:.0%}, verify.max_failed_frac); continuing would use unreliable "
                f"ones. Last failure: {verdict.outcome}: {verdict.detail}"
            )
