"""A point of the curve, by engines and judges that are fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from evaluate_fakes import FakeEngine, FakeJudge, make_problem, render
from toy_inline_evals import toy_inline_eval

from klear_core.errors import DataError, KlearError, ResourceError
from klear_core.evaluate.inline_eval import CheckpointInlineEval


@pytest.mark.parametrize("error", [ResourceError("the engine died"), DataError("the prompt is too long")])
def test_the_error_of_an_answer_is_raised_as_it_is(tmp_path: Path, error: KlearError) -> None:
    """In a group of errors its kind, which decides on another attempt, and its message would be hidden."""
    inline_eval = CheckpointInlineEval(
        job=toy_inline_eval(tmp_path),
        problems=[make_problem(i) for i in range(4)],
        render=render,
        judge=FakeJudge().judge_async,
        opening="",
        seed=0,
    )
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(inline_eval(FakeEngine({1: error, 2: error})))


def test_an_answer_that_the_engine_aborted_is_an_error_as_in_an_evaluation(tmp_path: Path) -> None:
    inline_eval = CheckpointInlineEval(
        job=toy_inline_eval(tmp_path),
        problems=[make_problem(0)],
        render=render,
        judge=FakeJudge().judge_async,
        opening="",
        seed=0,
    )
    with pytest.raises(ResourceError, match="problem p000: the engine aborted the request"):
        asyncio.run(inline_eval(FakeEngine({0: ("answ", "abort")})))
