"""The prompts that a benchmark's questions may be asked in."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.data.formats.code_rows import with_instructions, without_instructions
from klear_core.evaluate.sample import in_prompt
from klear_core.types import Domain


def benchmark(prompt: str) -> BenchmarkConfig:
    return BenchmarkConfig(name="mine", source=ProceduralSource(num_problems=4), prompt=prompt)


def test_a_plain_prompt_is_the_question_and_is_in_no_fingerprint() -> None:
    assert in_prompt("1 + 1?", "plain", Domain.MATH) == "1 + 1?"
    assert "prompt" not in benchmark("plain").model_dump()
    assert benchmark("boxed").model_dump()["prompt"] == "boxed"


def test_the_prompt_of_model_cards_asks_for_a_box_and_leaves_programs_alone() -> None:
    asked = in_prompt("1 + 1?", "boxed", Domain.MATH)
    assert asked == "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert in_prompt("Sort.", "boxed", Domain.CODE) == "Sort."


def test_simple_evals_asks_gpqa_for_the_letter_on_a_last_line() -> None:
    asked = in_prompt("Which?\n\nA) 1\nB) 2", "simple_evals", Domain.MATH)
    assert asked.startswith("Answer the following multiple choice question. The last line of your response should be")
    assert asked.endswith("Think step by step before answering.\n\nWhich?\n\nA) 1\nB) 2")


def test_a_template_of_ones_own_has_the_question_once() -> None:
    assert in_prompt("1 + 1?", "Q: {question} {A}", Domain.MATH) == "Q: 1 + 1? {A}"
    for wrong in ("Q:", "{question}{question}", "qwen"):
        with pytest.raises(ValidationError, match="neither one of plain, boxed"):
            benchmark(wrong)


@pytest.mark.parametrize("starter", ["", "class Solution:\n    def f(self, x):\n        "])
def test_livecodebenchs_prompt_has_its_words_in_place_of_ours_and_asks_for_a_fence(starter: str) -> None:
    """The words are those of lcb_runner/prompts/code_generation.py, for models without a prompt of their own."""
    question = with_instructions("Sort the list.", starter)
    assert without_instructions(question) == ("Sort the list.", starter.rstrip())
    asked = in_prompt(question, "livecodebench", Domain.CODE)
    assert asked.startswith("### Question:\nSort the list.\n\n### Format: ")
    assert f"```python\n{starter.rstrip() or '# YOUR CODE HERE'}\n```\n\n" in asked
    assert asked.endswith("### Answer: (use the provided format with backticks)\n\n")
    assert "Read standard input" not in asked
    assert "Complete this code" not in asked
    assert in_prompt("1 + 1?", "livecodebench", Domain.MATH) == "1 + 1?"
