"""The puzzle teacher's own solutions, judged by the real judges: programs run in the sandbox."""

from __future__ import annotations

import asyncio

import pytest

from klear_core.config.curate import DifficultyConfig
from klear_core.config.data import PuzzleSource
from klear_core.config.distill import PuzzleTeacherConfig
from klear_core.data.candidates import Candidate, problem_from
from klear_core.data.generated.puzzles import generate_puzzles
from klear_core.distill.teachers.procedural import PuzzleTeacher
from klear_core.distill.teachers.teacher import TeacherFailure
from klear_core.prompts import build_byte_tokenizer, decode_response, encode_response, render_response
from klear_core.types import Difficulty, Domain, MathReference, Problem, TeacherReply, Verdict
from klear_core.verify import JudgePool

FLAWLESS = PuzzleTeacherConfig(slip_rate=0, blind_spot_rate=0)
BLIND = PuzzleTeacherConfig(slip_rate=0, blind_spot_rate=1)


def candidates(family: str, levels: tuple[int, ...], num_problems: int) -> list[Candidate]:
    cfg = PuzzleSource(family=family, name=family, levels=levels, num_problems=num_problems, split="heldout")
    return list(generate_puzzles(cfg, seed=0))


def asked(question: str) -> Problem:
    return Problem(
        problem_id="p",
        source="s",
        domain=Domain.MATH,
        question=question,
        reference=MathReference(answers=("0",)),
        difficulty=Difficulty.EASY,
    )


def reply(cfg: PuzzleTeacherConfig, problem: Problem, sample_idx: int = 0) -> TeacherReply:
    result = asyncio.run(PuzzleTeacher(cfg).sample(problem, sample_idx=sample_idx, seed=0)).result
    assert isinstance(result, TeacherReply)
    return result


def verdicts(pool: JudgePool, cfg: PuzzleTeacherConfig, problems: list[Candidate]) -> list[Verdict]:
    found = [problem_from(candidate, DifficultyConfig()) for candidate in problems]
    replies = [reply(cfg, problem) for problem in found]
    return [pool.judge(p, render_response(r.reasoning, r.answer)) for p, r in zip(found, replies, strict=True)]


@pytest.mark.parametrize(("family", "levels"), [("brackets", (2, 7, 9)), ("residues", (1, 8, 12))])
def test_every_math_problem_is_solved_by_its_own_trace(math_pool, family, levels):
    judged = verdicts(math_pool, FLAWLESS, candidates(family, levels, 30))
    assert {verdict.score for verdict in judged} == {1.0}


def test_every_program_problem_is_solved_by_its_own_trace_in_the_sandbox(code_pool):
    judged = verdicts(code_pool, FLAWLESS, candidates("programs", (2, 3, 5), 6))
    assert {verdict.score for verdict in judged} == {1.0}


def test_a_program_without_its_equal_sign_passes_some_calls_and_not_all(code_pool):
    boundary = [c for c in candidates("programs", (2,), 60) if "at least" in c.question and "at most" not in c.question]
    scores = [verdict.score for verdict in verdicts(code_pool, BLIND, boundary[:6])]
    assert any(0 < score < 1 for score in scores if score is not None)


def test_traces_are_the_procedure_step_by_step():
    brackets = reply(FLAWLESS, asked("mod 7: ((3+5)*(5-2))=?"))
    assert brackets.reasoning == "3+5=1 (1*(5-2))\n5-2=3 (1*3)\n1*3=3 3"
    assert brackets.answer == "\\boxed{3}"
    residues = reply(FLAWLESS, asked("mod 13: 5+7x=0, least x=?"))
    assert (residues.reasoning, residues.answer) == ("1:5+7=12 0n\n2:12+7=19-13=6 0n\n3:6+7=13-13=0 0y", "\\boxed{3}")
    chain = reply(FLAWLESS, asked("mod 6: 4,-1,*5=?"))
    assert (chain.reasoning, chain.answer) == ("4-1=3\n3*5=3", "\\boxed{3}")
    program = reply(FLAWLESS, asked("f(a): at least 4, reverse, sum"))
    assert program.reasoning == "at least 4: x>=4\nreverse: a[::-1]\nsum: sum(a)"
    assert program.answer == "```python\ndef f(a):\n a=[x for x in a if x>=4]\n a=a[::-1]\n return sum(a)\n```"


def test_errors_in_the_blind_spot_are_carried_on_to_the_answer():
    assert reply(BLIND, asked("mod 7: (1+(2*5))=?")).reasoning == "2*5=4 (1+4)\n1+4=5 5"
    residues = reply(BLIND, asked("mod 13: 5+7x=7, least x=?")).reasoning
    assert residues.startswith("1:5+7=12 7n\n2:12+7=19-13=7 7y")
    assert reply(BLIND, asked("mod 6: 4,-1,*5=?")).reasoning == "4-1=3\n3*5=4"
    assert "a if x<5]" in reply(BLIND, asked("f(a): at most 5, list")).answer


def test_a_search_that_finds_nothing_has_no_answer():
    never = asked("mod 13: 0+7x=1, least x=?")  # 7, then 14-13 = 1 or a slip, ...
    replies = [reply(PuzzleTeacherConfig(slip_rate=1, blind_spot_rate=1), never, i) for i in range(200)]
    cut = [r for r in replies if r.finish_reason == "length"]
    assert cut
    assert all(r.answer == "" and len(r.reasoning.splitlines()) == 30 for r in cut)
    assert all(r.answer for r in replies if r.finish_reason == "stop")


def test_the_same_seed_gives_the_same_trace_and_samples_differ():
    cfg = PuzzleTeacherConfig(slip_rate=0.5)
    question = asked("mod 7: ((3+4)*(5-2))=?")
    assert reply(cfg, question) == reply(cfg, question)
    assert len({reply(cfg, question, i).reasoning for i in range(20)}) > 1


def test_other_questions_are_unsupported():
    result = asyncio.run(PuzzleTeacher(FLAWLESS).sample(asked("What is love?"), sample_idx=0, seed=0)).result
    assert isinstance(result, TeacherFailure)
    assert result.reason == "unsupported"


@pytest.mark.parametrize(("family", "trained", "harder"), [("brackets", 6, 7), ("residues", 8, 9), ("programs", 3, 4)])
def test_harder_levels_have_longer_solutions_than_all_that_are_trained(family, trained, harder):
    tokenizer = build_byte_tokenizer()

    def lengths(level: int) -> list[int]:
        problems = [problem_from(c, DifficultyConfig()) for c in candidates(family, (level,), 10)]
        replies = [reply(FLAWLESS, problem) for problem in problems]
        encoded = [encode_response(tokenizer, render_response(r.reasoning, r.answer)) for r in replies]
        assert decode_response(tokenizer, encoded[0]) == render_response(replies[0].reasoning, replies[0].answer)
        return [len(ids) for ids in encoded]

    assert sum(lengths(harder)) > sum(lengths(trained))
