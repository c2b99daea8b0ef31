"""What every teacher promises, whatever is behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from distill_fakes import make_problem
from scripted_server import ScriptedServer

from klear_core.config.distill import HttpTeacherConfig, ProceduralTeacherConfig
from klear_core.distill.teachers.http_teacher import HttpTeacher
from klear_core.distill.teachers.procedural import ProceduralTeacher
from klear_core.distill.teachers.teacher import Teacher, TeacherResult
from klear_core.types import TeacherReply

PROBLEM = make_problem(0, question="mod 10: 3,+4,*7,-2=?")
MakeTeacher = Callable[[], Teacher]


@pytest.fixture(params=["procedural", pytest.param("http", marks=pytest.mark.slow)])
def make_teacher(request: pytest.FixtureRequest) -> MakeTeacher:
    if request.param == "procedural":
        return lambda: ProceduralTeacher(ProceduralTeacherConfig(slip_rate=0.5))
    server: ScriptedServer = request.getfixturevalue("server")
    return lambda: HttpTeacher(HttpTeacherConfig.model_validate({"base_url": server.base_url, "model": "r1"}))


def solve(make_teacher: MakeTeacher, num_samples: int, num_calls: int = 1) -> list[Sequence[TeacherResult]]:
    async def run() -> list[Sequence[TeacherResult]]:
        teacher = make_teacher()

        async def call() -> list[TeacherResult]:
            samples = [teacher.sample(PROBLEM, sample_idx=i, seed=1) for i in range(num_samples)]
            return [sample.result for sample in await asyncio.gather(*samples)]

        try:
            return list(await asyncio.gather(*(call() for _ in range(num_calls))))
        finally:
            await teacher.close()

    return asyncio.run(run())


def test_as_many_replies_come_as_were_asked_for(make_teacher: MakeTeacher) -> None:
    (results,) = solve(make_teacher, 5)
    assert len(results) == 5
    assert all(isinstance(r, TeacherReply) and r.reasoning and r.answer and r.num_tokens > 0 for r in results)


def test_calls_overlap_and_the_same_seed_gives_the_same_samples_in_order(make_teacher: MakeTeacher) -> None:
    first, *others = solve(make_teacher, 3, num_calls=4)
    assert all(list(other) == list(first) for other in others)
    (more,) = solve(make_teacher, 6)
    assert list(more[:3]) == list(first)


def test_a_teacher_says_who_it_is_and_how_it_asks(make_teacher: MakeTeacher) -> None:
    one, other = make_teacher(), make_teacher()
    assert one.name
    assert one.prompt_version == other.prompt_version
    assert dict(one.retries) == {}


def test_closing_twice_does_no_harm(make_teacher: MakeTeacher) -> None:
    async def run() -> None:
        teacher = make_teacher()
        await teacher.close()
        await teacher.close()

    asyncio.run(run())
