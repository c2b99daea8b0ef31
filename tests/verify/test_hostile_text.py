"""What runs in the caller's thread is linear in the response: no text makes a regular expression backtrack."""

import time

import pytest

from klear_core.config.verify import CodeConfig, MathConfig
from klear_core.verify.code.program import find_program
from klear_core.verify.math.answer_text import MathAnswer, find_answer
from klear_core.verify.math.rules import decide, unboxed_verdict

MEGABYTE = 1 << 20
LITTLE_S = 20.0  # of CPU time; they take a tenth of a second, and backtracking through a megabyte would take days
TEXTS = {
    "fence that does not end": "```" + "a" * MEGABYTE + "`",
    "fences": "```\n" * (MEGABYTE // 4),
    "backticks": "`" * MEGABYTE,
    "indented fences": ("            ```" + "\n") * 50_000,
    "spaces after a fence": "```" + " " * MEGABYTE + "`",
    "box and spaces": "\\boxed" + " " * MEGABYTE,
    "boxes and spaces": "\\boxed    " * (MEGABYTE // 10),
    "braces": "\\boxed" + "{" * MEGABYTE,
    "answer and spaces": "answer" + " " * 1500 + "x" * 480,
    "answer and stars": "answer is x" + "*" * 1900 + "#",
    "answers": "answer " * 290 + "#",
    "answer and tabs": "answer:" + "\t:" * 900 + "x" * 180,
    "units": "\\boxed{1" + "a " * 490 + "#}",
    "numbers and units": "\\boxed{" + "1 a. " * 190 + "#}",
    "choice": "\\boxed{A" + ")" * 900 + "\n#}",
    "thousands": "\\boxed{" + "111,111" * 130 + "}",
    "superscripts": "\\boxed{" + "²" * 900 + "}",
    "names": "\\boxed{" + "a_" * 450 + "=1}",
    "equations": "\\boxed{" + "a=" * 450 + "1}",
    "gaps": "\\boxed{1" + "\\, " * 300 + "#}",
    "groups": "\\boxed{" + "1\\,000" * 160 + "#}",
    "blanks between digits": "\\boxed{" + "1 " * 490 + "}",
    "mixed numbers": "\\boxed{" + "1 1/2 " * 160 + "}",
    "relations": "\\boxed{" + "x<1, " * 195 + "}",
    "or": "\\boxed{" + "1 or " * 195 + "1}",
    "number words": "\\boxed{" + "twenty " * 140 + "}",
    "compound units": "\\boxed{5 " + "m/s " * 240 + "#}",
    "raised digits": "\\boxed{" + "²½" * 490 + "}",
    "letters and marks": "\\boxed{" + "B. " * 320 + "}",
    "bases": "\\boxed{" + "1_" * 490 + "}",
    "unit vectors": "\\boxed{" + "1" * 980 + "ij}",
    "vectors": "\\boxed{" + "1i+" * 300 + "j1}",
    "decimal commas": "\\boxed{" + "1.111," * 160 + "}",
    "tags": "</think>" * 100_000,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("gold", ["12 cm", "B", "yes", "x>3", "b=1, c=2"])
def test_reading_a_math_answer_takes_little_time(gold: str, name: str) -> None:
    started = time.process_time()
    answer = find_answer(TEXTS[name], MathConfig())
    if isinstance(answer, MathAnswer):
        (unboxed_verdict if answer.is_unboxed else decide)((gold,), answer, MathConfig())
    assert time.process_time() - started < LITTLE_S


@pytest.mark.parametrize("name", TEXTS)
def test_finding_a_program_takes_little_time(name: str) -> None:
    started = time.process_time()
    find_program(TEXTS[name], CodeConfig())
    assert time.process_time() - started < LITTLE_S
