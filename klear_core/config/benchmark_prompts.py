"""Define the prompts by which published scores were asked, so that a benchmark can be asked likewise.

A file of its own, because settings and the plan need the names, and neither may load what samples answers.
"""

from __future__ import annotations

from typing import Literal, get_args

QUESTION = "{question}"
"""Placeholder of the question in a prompt template."""

PromptName = Literal["plain", "boxed", "lighteval", "lm_eval", "simple_evals", "livecodebench"]

MATH_PROMPTS: dict[str, str] = {
    "boxed": QUESTION + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "lighteval": (
        "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
        "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without "
        "quotes) where ANSWER is just the final number or expression that solves the problem. Think step by step "
        "before answering.\n\n" + QUESTION
    ),
    "lm_eval": "Problem:\n" + QUESTION + "\n\nSolution:",
    "simple_evals": (
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
        "answering.\n\n" + QUESTION
    ),
}
"""`boxed`: the model cards of Qwen3 and DeepSeek-R1. `lighteval`: its MATH_QUERY_TEMPLATE (AIME, MATH-500). `lm_eval`:
its task minerva_math, without examples. `simple_evals`: GPQA in OpenAI's simple-evals, also DeepSeek-R1's."""

_LCB_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
_LCB_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)


def check_prompt(prompt: str) -> str:
    """Return a prompt that is a known name or a template with the question once; raise ValueError for another."""
    if prompt in get_args(PromptName) or prompt.count(QUESTION) == 1:
        return prompt
    known = ", ".join(get_args(PromptName))
    raise ValueError(f"prompt {prompt!r} is neither one of {known}, nor a template that has {QUESTION} once")


def livecodebench_prompt(statement: str, starter: str) -> str:
    """Return the prompt of LiveCodeBench's runner for models without one of their own (lcb_runner, generic)."""
    form = _LCB_STARTER if starter else _LCB_STDIN
    return (
        f"### Question:\n{statement}\n\n### Format: {form}\n```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
