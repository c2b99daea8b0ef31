"""Several prompt templates: each is asked and scored, and the plain question's answers stay as they are."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from evaluate_fakes import FakeEngine, FakeJudge, make_problem, make_setup
from pydantic import ValidationError

from klear_core.artifacts.records import read_shards
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.settings import config_digest
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.run import answer_benchmarks, report_scores
from klear_core.evaluate.sample import Benchmark, EngineAnswerer
from klear_core.generate.engine import SamplingParams
from klear_core.metrics import NullTelemetry
from klear_core.scores import EvalReport, read_reports
from klear_core.types import Completion, EvalSample, Problem, Verdict

TOY = Benchmark(name="toy", problems=tuple(make_problem(i) for i in range(4)), num_samples=4)
BOXED = r"{question} Put it in \boxed{}."
TERSE = "Solve: {question}"


class Wording(FakeEngine):
    """Remembers the questions that it was asked, and answers with them."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[str] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        question = bytes(prompt_ids).decode()
        self.questions.append(question)
        (answer,) = await super().generate((0,), params)
        return [dataclasses.replace(answer, text=f"{question} | {params.seed}")]


def right_if_terse(_problem: Problem, response: str) -> Verdict:
    from evaluate_fakes import RIGHT, WRONG

    return RIGHT if response.startswith("Solve") else WRONG


def evaluated(workdir: Path, **settings: object) -> tuple[EvalReport, Wording]:
    cfg = EvaluateConfig.model_validate(settings)
    engine = Wording()
    setup = make_setup(judge=FakeJudge(right_if_terse))
    answerer = EngineAnswerer(engine=engine, render=lambda question: tuple(question.encode()))
    setup = dataclasses.replace(setup, answer=answerer.answer)
    telemetry = NullTelemetry()
    asyncio.run(answer_benchmarks(cfg, (TOY,), setup, seed=3, workdir=workdir, telemetry=telemetry))
    summary = report_scores(cfg, (TOY,), VerifyConfig(), seed=3, workdir=workdir, telemetry=telemetry)
    assert summary.counts["answers"] == len(engine.questions)
    (report,) = read_reports(workdir)
    return report, engine


def test_every_template_is_asked_n_times_a_problem_and_has_a_score(tmp_path: Path) -> None:
    report, engine = evaluated(tmp_path, templates={"boxed": BOXED, "terse": TERSE})
    assert sorted(engine.questions) == sorted(
        [f"{i}" for i in range(4)] * 5  # four samples and the greedy answer
        + [rf"{i} Put it in \boxed{{}}." for i in range(4)] * 4
        + [f"Solve: {i}" for i in range(4)] * 4
    )
    assert [(t.name, t.avg.value, t.avg.num_samples) for t in report.templates] == [
        ("boxed", 0.0, 16),
        ("terse", 1.0, 16),
    ]
    assert report.avg.value == 0.0
    spread = report.template_spread
    assert spread is not None
    assert (spread.num_templates, spread.least, spread.most) == (3, 0.0, 1.0)
    assert spread.std == pytest.approx((1 / 3) ** 0.5)  # of 0, 0 and 1, divided by two


def test_plain_answers_and_the_fingerprint_without_templates_stay_as_they_were(tmp_path: Path) -> None:
    alone, _ = evaluated(tmp_path / "alone")
    among, _ = evaluated(tmp_path / "among", templates={"terse": TERSE})
    answers = [list(read_shards(tmp_path / run / "samples", EvalSample)) for run in ("alone", "among")]
    assert answers[0] == answers[1]
    assert among.avg == alone.avg
    assert (alone.templates, alone.template_spread) == ((), None)
    assert "templates" not in json.loads(EvaluateConfig().model_dump_json())
    assert config_digest(EvaluateConfig()) != config_digest(EvaluateConfig(templates={"terse": TERSE}))


def test_templates_draw_their_own_samples(tmp_path: Path) -> None:
    evaluated(tmp_path, templates={"terse": TERSE, "boxed": BOXED})
    drawn = [
        answer.response.rpartition("| ")[2]
        for folder in ("samples", "templates/terse", "templates/boxed")
        for answer in read_shards(tmp_path / folder, EvalSample)
        if answer.decoding == "sampled"
    ]
    assert len(drawn) == len(set(drawn)) == 48


def test_a_killed_run_resumes_in_the_middle_of_the_templates(tmp_path: Path) -> None:
    settings = {"templates": {"terse": TERSE}, "runtime": {"answers_per_shard": 4}}
    whole, _ = evaluated(tmp_path, **settings)
    shards = sorted((tmp_path / "templates" / "terse").glob("*.parquet"))
    shards[-1].unlink()
    cfg = EvaluateConfig.model_validate(settings)
    engine = Wording()
    setup = make_setup(judge=FakeJudge(right_if_terse))
    answerer = EngineAnswerer(engine=engine, render=lambda question: tuple(question.encode()))
    setup = dataclasses.replace(setup, answer=answerer.answer)
    asyncio.run(answer_benchmarks(cfg, (TOY,), setup, seed=3, workdir=tmp_path, telemetry=NullTelemetry()))
    report_scores(cfg, (TOY,), VerifyConfig(), seed=3, workdir=tmp_path, telemetry=NullTelemetry())
    assert engine.questions == ["Solve: 3"] * 4
    assert read_reports(tmp_path) == (whole,)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ({"boxed": r"Put it in \boxed{}."}, r"template 'boxed' has \{question\} 0 times, not once"),
        ({"twice": "{question} {question}"}, r"has \{question\} 2 times"),
        ({"plain": "Say: {question}"}, "the question as it stands is always asked, as 'plain'"),
        ({"same": "{question}"}, "the question as it stands is always asked"),
        ({"a": TERSE, "b": TERSE}, "templates 'a' and 'b' are the same text"),
        ({"With Space": TERSE}, "String should match pattern"),
    ],
)
def test_a_template_that_cannot_be_asked_or_told_apart_is_refused(templates: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateConfig(templates=templates)
