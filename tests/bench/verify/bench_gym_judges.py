"""The math judge against the own scorers of reasoning-gym's tasks, on the references' answers and on changed ones.

It needs the extra `gym`. `klear bench gym_judges` writes the table of docs/data/reasoning_gym.md; it takes ten minutes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

from klear_core.config.curate import DifficultyConfig
from klear_core.config.data import REASONING_GYM, GymSource
from klear_core.config.verify import VerifyConfig
from klear_core.data.candidates import Candidate, problem_from
from klear_core.data.generated.gym_problems import BY_TEXT
from klear_core.data.sources import read_source
from klear_core.errors import ConfigError
from klear_core.types import CustomReference, MathReference, Problem
from klear_core.verify import JudgePool, gym

PAGE = Path(__file__).parents[3] / "docs/data/reasoning_gym.md"
NUM_PROBLEMS = 8
NUM_SLOW, SLOW = 4, ("futoshiki", "knight_swap", "sokoban", "zebra_puzzles")
"""Tasks that take a quarter of a second or more to make a problem."""
_NUM_OTHERS = 3
_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_FRACTION = re.compile(r"-?\d+/\d+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FORMULA = re.compile(r"[\d\s.+*/()-]*\d[\d\s.+*/()-]*")
_SHOWN = 40


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Verdicts of both judges on the answers to one task's problems."""

    task: str
    num_problems: int = 0
    num_without: int = 0
    """Problems without a reference answer."""
    num_read: int = 0
    """Reference answers that the math judge calls right, too."""
    agreed: int = 0
    only_math: list[str] = field(default_factory=list)
    """Other answers that only the math judge calls right, each before the reference's."""
    forms: list[str] = field(default_factory=list)
    """Forms of the reference's answer that only the math judge calls right."""
    only_own: list[str] = field(default_factory=list)
    parts: Counter[float] = field(default_factory=Counter)
    """Scores between 0 and 1 of the own scorer."""
    error: str = ""

    @property
    def is_math(self) -> bool:
        """Whether the math judge can score the task by itself."""
        return not (self.num_read < self.num_problems or self.only_math or self.only_own or self.error)


def measure() -> list[dict[str, object]]:
    """Compare the judges on all tasks, and write the page."""
    found = []
    with JudgePool(VerifyConfig()) as judges:
        for task in gym.tasks():
            found.append(_compared(task, judges))
            print(_line(found[-1]), flush=True)
    PAGE.write_text(page(found))
    able = sum(comparison.is_math for comparison in found)
    broken = [comparison.task for comparison in found if comparison.error]
    versions = {"reasoning-gym": REASONING_GYM}
    entries = [
        ("gym_judges/tasks", len(found), "tasks", "-", True),
        ("gym_judges/math_judge_suffices", able, "tasks", "-", True),
        ("gym_judges/without_problems", len(broken), "tasks", "0", not broken),
    ]
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _compared(task: str, judges: JudgePool) -> Comparison:
    comparison = Comparison(task=task)
    source = GymSource(task=task, name=task, num_problems=NUM_SLOW if task in SLOW else NUM_PROBLEMS)
    try:
        rows = [row for row in read_source(source, seed=0) if isinstance(row, Candidate)]
    except ConfigError as e:
        return replace(comparison, error=str(e))
    problems = [problem_from(row, DifficultyConfig()) for row in rows]
    answers = [_reference_answer(problem) for problem in problems]
    comparison.num_problems, comparison.num_without = len(problems), answers.count(None)
    for problem, answer in zip(problems, answers, strict=True):
        if answer is not None:
            others = [other for other in dict.fromkeys(answers) if other is not None and other != answer]
            _judge(comparison, judges, problem, answer, others[:_NUM_OTHERS])
    return comparison


def _judge(comparison: Comparison, judges: JudgePool, problem: Problem, answer: str, others: Sequence[str]) -> None:
    by_math = replace(problem, reference=MathReference(answers=(answer,)))
    same = list(dict.fromkeys(chain([answer], same_in_another_form(answer))))
    more = chain(other_answers(answer), value_alone(answer), numbers_asked(problem.question, answer))
    tried = list(dict.fromkeys(chain(same, others, more)))
    responses = [f"<think>\n</think>\n\\boxed{{{text}}}" for text in tried]
    verdicts = [(judges.submit(problem, r), judges.submit(by_math, r)) for r in responses]
    for text, (own_future, math_future) in zip(tried, verdicts, strict=True):
        own, math = own_future.result(), math_future.result()
        comparison.num_read += text == answer and math.is_correct
        comparison.agreed += own.is_correct == math.is_correct
        if 0 < own.score < 1:
            comparison.parts[round(own.score, 2)] += 1
        if own.is_correct != math.is_correct:
            by_math_alone = comparison.forms if text in same else comparison.only_math
            place = comparison.only_own if own.is_correct else by_math_alone
            place.append(f"{_short(text)} for {_short(answer)}")


def same_in_another_form(answer: str) -> Iterator[str]:
    """Yield the same value, or the same text in another case or wrapping."""
    if _INTEGER.fullmatch(answer):
        number = int(answer)
        yield from (f"{number}.0", f"{number:,}", f"{number:+}", rf"\frac{{{2 * number}}}{{2}}")
    elif _DECIMAL.fullmatch(answer):
        yield f"{answer}0"
    elif _FRACTION.fullmatch(answer):
        top, bottom = map(int, answer.split("/"))
        yield f"{3 * top}/{3 * bottom}"
    else:
        yield from (answer.upper(), answer.lower(), f"{answer}.", rf"\text{{{answer}}}")


def other_answers(answer: str) -> Iterator[str]:
    """Yield answers that are near the reference's, and not the same."""
    if _INTEGER.fullmatch(answer):
        yield from (str(int(answer) + 1), str(-int(answer) or 1), f"{answer}1")
    elif _DECIMAL.fullmatch(answer):
        yield from (answer[:-1], str(float(answer) + 1))
    elif _FRACTION.fullmatch(answer):
        yield str(Fraction(answer) + 1)
    else:
        yield from (f"{answer} x", answer[::-1], " ".join(reversed(answer.split())))


def value_alone(answer: str) -> Iterator[str]:
    """Yield the value of an answer that is a calculation: the answer to another question."""
    formula = answer.replace("\N{MULTIPLICATION SIGN}", "*")
    if _FRACTION.fullmatch(answer) or _DECIMAL.fullmatch(answer) or not _FORMULA.fullmatch(formula):
        return
    with suppress(SyntaxError):  # rows of numbers and times of day are no formulas
        yield str(gym.read_formula(formula))


def numbers_asked(question: str, answer: str) -> Iterator[str]:
    """Yield the numbers in the question, without one that is the answer."""
    right = Fraction(answer) if _DECIMAL.fullmatch(answer) else None
    yield from (number for number in _NUMBER.findall(question) if Fraction(number) != right)


def _reference_answer(problem: Problem) -> str | None:
    assert isinstance(problem.reference, CustomReference)
    answer = json.loads(problem.reference.value_json)["answer"]
    assert answer is None or isinstance(answer, str)
    return answer


# ---- page ----


def page(found: Sequence[Comparison]) -> str:
    """Return the page with one row for each task."""
    able = [comparison.task for comparison in found if comparison.is_math]
    rows = [_line(comparison) for comparison in found]
    return "\n".join(
        [
            "# The tasks of reasoning-gym",
            "",
            f"Version {REASONING_GYM}, {len(found)} tasks; `klear bench gym_judges` writes this page. Each task's own scorer and the math",
            f"judge judged the same boxed answers to {NUM_PROBLEMS} problems of the task's default configuration ({NUM_SLOW} of the four",
            f"slowest): the reference's, those of up to {_NUM_OTHERS} other problems, up to seven changed ones: the same value or text",
            "in another form (`6.0` for `6`, other case, a full stop), and near misses (one off, reversed, a word more); the value",
            "of a calculation without the calculation (`24` for `6*4*4/4`), and each number of the question.",
            "",
            f'The math judge can score {len(able)} tasks by itself (`judge = "math"`): it called right whatever the scorer gives',
            "the full score, and beyond that only other forms of the right answer. For other tasks the setting is refused.",
            f"These are {', '.join(f'`{task}`' for task in able)}.",
            "",
            "- **levels**: of the curriculum, from 0; none if the task has none.",
            "- **split by**: what decides training or held-out, numbers and answer, or the text without names.",
            "- **read**: reference answers that the math judge calls right, of all that there are.",
            "- **only math**, **only own**: answers that only one of them calls right, with an example; **forms**: those that only the",
            "  math judge calls right, and that are the reference's in another form; where the form is the task",
            "  (`fraction_simplification`) they are wrong.",
            "- **parts**: scores between 0 and 1 that the scorer gave to wrong answers.",
            "",
            "| task | levels | split by | read | agree | only math | forms | only own | parts |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _line(comparison: Comparison) -> str:
    if comparison.error:
        return f"| `{comparison.task}` | {comparison.error} |"
    with_answer = comparison.num_problems - comparison.num_without
    read = f"{comparison.num_read} of {with_answer}" if with_answer else "no reference answer"
    judged = comparison.agreed + len(comparison.only_math + comparison.forms + comparison.only_own)
    parts = ", ".join(f"{score:g}" for score in sorted(comparison.parts)[:4])
    cells = [
        f"`{comparison.task}`",
        str(gym.num_levels(comparison.task) or "none"),
        "text" if comparison.task in BY_TEXT else "numbers",
        read,
        f"{comparison.agreed} of {judged}" if judged else "",
        _examples(comparison.only_math),
        _examples(comparison.forms),
        _examples(comparison.only_own),
        f"{parts}{', …' if len(comparison.parts) > 4 else ''}",
    ]
    return f"| {' | '.join(cells)} |"


def _examples(answers: Sequence[str]) -> str:
    return f"{len(answers)}: {answers[0]}" if answers else ""


def _short(text: str) -> str:
    one_line = " ".join(text.split()).replace("|", "¦").replace("`", "'")
    return f"`{one_line if len(one_line) <= _SHOWN else f'{one_line[: _SHOWN - 1]}…'}`"
