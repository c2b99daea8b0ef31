from __future__ import annotations

import asyncio
import re

from distill_fakes import make_problem

from klear_core.config.distill import ProceduralTeacherConfig
from klear_core.distill.teachers.procedural import ProceduralTeacher
from klear_core.distill.teachers.teacher import TeacherFailure, TeacherResult
from klear_core.types import TeacherReply


def ask(cfg: ProceduralTeacherConfig, question: str, num_samples: int, seed: int = 0) -> list[TeacherResult]:
    async def run() -> list[TeacherResult]:
        teacher, problem = ProceduralTeacher(cfg), make_problem(0, question=question)
        return [(await teacher.sample(problem, sample_idx=i, seed=seed)).result for i in range(num_samples)]

    return asyncio.run(run())


def replies(cfg: ProceduralTeacherConfig, question: str, num_samples: int = 1, seed: int = 0) -> list[TeacherReply]:
    results = ask(cfg, question, num_samples, seed)
    assert all(isinstance(result, TeacherReply) for result in results)
    return results  # type: ignore[return-value]


FLAWLESS = ProceduralTeacherConfig(slip_rate=0, blind_spot_rate=0)


def test_a_flawless_teacher_writes_every_step_and_boxes_the_last_value() -> None:
    (reply,) = replies(FLAWLESS, "mod 10: 3,+4,*7,-2=?")
    assert reply.reasoning == "3+4=7\n7*7=9\n9-2=7"
    assert reply.answer == "\\boxed{7}"
    assert (reply.finish_reason, reply.num_tokens) == ("stop", 4)


def test_an_error_is_carried_on_honestly_to_the_answer() -> None:
    for reply in replies(ProceduralTeacherConfig(slip_rate=1), "mod 10: 3,+4,+7,-2=?", num_samples=50):
        lines = [re.fullmatch(r"(\d)[-+*](\d)=(\d)", line) for line in reply.reasoning.splitlines()]
        values = [(int(m[1]), int(m[3])) for m in lines if m]
        assert len(values) == 3
        assert values[0][0] == 3
        assert [v[0] for v in values[1:]] == [v[1] for v in values[:-1]]
        assert reply.answer == f"\\boxed{{{values[-1][1]}}}"


def test_a_slip_is_always_a_wrong_value_and_any_of_the_others() -> None:
    results = {r.answer for r in replies(ProceduralTeacherConfig(slip_rate=1), "mod 10: 3,+4=?", num_samples=200)}
    assert results == {f"\\boxed{{{v}}}" for v in range(10) if v != 7}


def test_the_blind_spot_is_multiplication_by_its_factors_alone() -> None:
    cfg = ProceduralTeacherConfig(slip_rate=0, blind_spot_rate=1, blind_spot_factors=(7,))
    for reply in replies(cfg, "mod 10: 1,+7,-7,*6,*7=?", num_samples=50):
        *others, blind = reply.reasoning.splitlines()
        assert others == ["1+7=8", "8-7=1", "1*6=6"]
        assert blind != "6*7=2"


def test_the_blind_spot_is_a_belief_not_noise() -> None:
    cfg = ProceduralTeacherConfig(slip_rate=0, blind_spot_rate=0.6, blind_spot_factors=(7,))
    assert {r.answer for r in replies(cfg, "mod 10: 6,*7=?", num_samples=100)} == {"\\boxed{2}", "\\boxed{3}"}


def test_error_rates_are_those_of_the_settings() -> None:
    cfg = ProceduralTeacherConfig(slip_rate=0.03, blind_spot_rate=0.6, blind_spot_factors=(7, 8, 9))
    slips = [r.answer != "\\boxed{7}" for r in replies(cfg, "mod 10: 3,+4=?", num_samples=4000)]
    blind = [r.answer != "\\boxed{1}" for r in replies(cfg, "mod 10: 3,*7=?", num_samples=4000)]
    assert abs(sum(slips) / 4000 - 0.03) < 0.01
    assert abs(sum(blind) / 4000 - 0.6) < 0.03


def test_the_same_seed_gives_the_same_traces_and_more_samples_change_no_earlier_one() -> None:
    cfg = ProceduralTeacherConfig(slip_rate=0.5)
    question = "mod 10: 3,+4,*7,-2=?"
    assert replies(cfg, question, 3) == replies(cfg, question, 8)[:3]
    assert replies(cfg, question, 8) != replies(cfg, question, 8, seed=1)
    assert len({r.reasoning for r in replies(cfg, question, 8)}) > 1


def test_what_is_no_chain_problem_is_unsupported_not_an_exception() -> None:
    results = ask(FLAWLESS, "What is love?", 2)
    assert [r.reason for r in results if isinstance(r, TeacherFailure)] == ["unsupported", "unsupported"]
