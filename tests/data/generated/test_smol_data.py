"""The problems of the smol profile: no held-out one has numbers and answer of a training one; its teacher is right."""

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from klear_core.config.curate import DifficultyConfig
from klear_core.config.data import GymSource
from klear_core.config.load import load_profile
from klear_core.data.candidates import Candidate, problem_from
from klear_core.data.sources import read_source
from klear_core.distill.teachers.procedural import PuzzleTeacher
from klear_core.types import MathReference, Problem, TeacherReply

pytest.importorskip("reasoning_gym", reason="needs the extra `gym`")

CONFIGS = Path(__file__).parents[3] / "configs"
SMOL = load_profile(CONFIGS / "smol")
SUM = re.compile(r"\d+(?: [-+] \d+)+")


def problems(source: object) -> list[Problem]:
    assert isinstance(source, GymSource)
    rows = list(read_source(source, seed=SMOL.seed))
    assert all(isinstance(row, Candidate) for row in rows)
    return [problem_from(row, DifficultyConfig()) for row in rows]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def training() -> list[Problem]:
    return [problem for source in SMOL.curate.sources for problem in problems(source)]


@pytest.fixture(scope="module")
def heldout() -> list[Problem]:
    return [problem for benchmark in SMOL.benchmarks for problem in problems(benchmark.source)]


def numbers_of(problem: Problem) -> tuple[tuple[str, ...], str]:
    """The numbers in any order and the value: what is left of a sum without its words."""
    (text,) = SUM.findall(problem.question)
    return tuple(sorted(re.findall(r"\d+", text))), str(eval(text))


@pytest.mark.slow
def test_no_heldout_sum_has_the_numbers_and_the_value_of_a_training_sum(training, heldout):
    assert len(heldout) == 400
    assert not {numbers_of(p) for p in heldout} & {numbers_of(p) for p in training}


@pytest.mark.slow
def test_no_sum_comes_twice_in_other_words(training):
    assert len(training) == 2000
    assert Counter(map(numbers_of, training)).most_common(1)[0][1] == 1


@pytest.mark.slow
def test_all_four_wordings_occur_and_every_reference_is_the_value(training):
    openings = Counter(problem.question.split(SUM.findall(problem.question)[0])[0] for problem in training)
    assert set(openings) == {"What is ", "Solve ", "Compute ", "Evaluate: "}
    assert all(p.reference == MathReference(answers=(numbers_of(p)[1],)) for p in training)


@pytest.mark.slow
def test_the_teacher_is_right_on_every_problem(training):
    async def replies() -> list[object]:
        teacher = PuzzleTeacher(SMOL.distill.teacher)  # type: ignore[arg-type]
        return [(await teacher.sample(problem, sample_idx=0, seed=0)).result for problem in training]

    for problem, reply in zip(training, asyncio.run(replies()), strict=True):
        assert isinstance(reply, TeacherReply)
        assert reply.answer == f"\\boxed{{{numbers_of(problem)[1]}}}"


def test_a_malformed_answer_never_scores_above_a_wrong_one():
    for name in ("smol", "smol_ci"):
        reward = load_profile(CONFIGS / name).rl.reward
        assert reward.missing_close is not None
        assert reward.missing_open is not None
        assert max(reward.missing_close, reward.missing_open) <= reward.wrong
