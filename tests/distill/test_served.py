"""A model behind chat endpoints is scored: what is asked, what is kept, and what is paid."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from distill_fakes import RIGHT, WRONG, make_problem
from pydantic import ValidationError
from scripted_server import Answer, ScriptedServer

from klear_core.artifacts.manifest import StageSummary
from klear_core.artifacts.records import read_shards
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.verify import VerifyConfig
from klear_core.distill.served import evaluate_served, note_served
from klear_core.distill.teachers.teacher import BudgetError
from klear_core.errors import ArtifactError, TeacherError
from klear_core.evaluate.sample import Benchmark
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.preflight.exposure import given_contamination
from klear_core.scores import read_reports
from klear_core.train.base_model import model_folder
from klear_core.types import EvalSample, Problem, Verdict

TOY = Benchmark(name="toy", problems=tuple(make_problem(i) for i in (4, 5)), num_samples=2)
"""Two problems with two sampled answers and a greedy one each: six requests."""
ONE_BY_ONE = {"min_concurrency": 1, "max_concurrency": 1, "max_attempts": 1}


class EndJudges:
    """Judges that find an answer right which ends with the reference."""

    def __init__(self, _verify: VerifyConfig) -> None:
        pass

    def __enter__(self) -> EndJudges:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def prepare(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        assert len(list(problems)) == 2
        return ()

    async def judge_async(self, problem: Problem, response: str) -> Verdict:
        return RIGHT if response.endswith(problem.reference.answers[0]) else WRONG  # type: ignore[union-attr]


def settings(url: str, **runtime: object) -> EvaluateConfig:
    engine = {"kind": "served", "base_url": url, "model": "r1", "output_price": 2.0, "runtime": ONE_BY_ONE | runtime}
    return EvaluateConfig.model_validate({"engine": engine, "sampling": {"max_new_tokens": 50}})


def score(cfg: EvaluateConfig, workdir: Path) -> StageSummary:
    return evaluate_served(
        cfg,
        VerifyConfig(),
        (TOY,),
        seed=3,
        workdir=workdir,
        telemetry=NullTelemetry(),
        build_judges=EndJudges,  # type: ignore[arg-type]
    )


def test_questions_go_out_as_they_stand_and_each_sample_has_its_seed(server: ScriptedServer, tmp_path: Path) -> None:
    summary = score(settings(server.base_url), tmp_path)
    asked = [(r["messages"], r["temperature"], r["top_p"], r["max_tokens"]) for r in server.requests]
    greedy = [one for one in asked if one[1:] == (0.0, 1.0, 50)]
    sampled = [one for one in asked if one[1:] == (0.6, 0.95, 50)]
    assert (len(greedy), len(sampled)) == (2, 4)
    assert {message["content"] for (message,), *_ in asked} == {"question 4", "question 5"}  # type: ignore[attr-defined]
    assert len({r["seed"] for r in server.requests if r["temperature"]}) == 4

    # The server always says 4, after a thought, in 9 tokens: one problem of two is right.
    (report,) = read_reports(tmp_path)
    assert report.avg.value == 0.5
    assert report.greedy is not None
    assert report.greedy.value == 0.5
    assert report.decoding.engine.model_dump()["model"] == "r1"
    samples = list(read_shards(tmp_path / "samples", EvalSample))
    assert {sample.response for sample in samples} == {"<think>\n2+2=4\n</think>\n\n4"}
    assert summary.counts["cost"] == round(6 * 9 * 2 / 1e6, 4)
    assert not (tmp_path / "journal").exists()


def test_an_answer_that_cannot_be_had_is_not_wrong_and_alone_is_asked_again(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = [Answer(), Answer(), Answer(status=400, body="no"), Answer()]
    with pytest.raises(TeacherError, match=r"1 answers of 'r1' could not be had \(1 rejected.*not counted as wrong"):
        score(settings(server.base_url), tmp_path)
    assert len(server.requests) == 6
    score(settings(server.base_url), tmp_path)
    assert len(server.requests) == 7
    assert read_reports(tmp_path)[0].avg.value == 0.5
    third, last = server.requests[2], server.requests[6]
    assert third == last


def test_a_spent_budget_stops_the_scores_and_a_larger_one_pays_for_the_rest_alone(
    server: ScriptedServer, tmp_path: Path
) -> None:
    # A request reserves the bytes of its prompt and 50 tokens; it then costs the 9 tokens of the reply and its prompt.
    with pytest.raises(BudgetError, match=r"raise evaluate\.engine\.runtime\.budget and run again"):
        score(settings(server.base_url, budget={"max_tokens": 150}), tmp_path)
    num_paid = len(server.requests)
    assert 0 < num_paid < 6
    assert not list(tmp_path.glob("report.json"))
    score(settings(server.base_url, budget={"max_tokens": 10_000}), tmp_path)
    assert len(server.requests) == 6


def run_config(**sections: Any) -> PipelineConfig:
    engine = {"kind": "served", "base_url": "http://host/v1", "model": "r1"}
    sections["evaluate"] = {"engine": engine, **sections.get("evaluate", {})}
    benchmark = {"name": "toy", "source": {"kind": "file", "path": "toy.jsonl"}}
    return PipelineConfig.model_validate({"benchmarks": [benchmark], **sections})


def test_a_run_with_a_served_model_scores_it_alone_and_says_that_nothing_is_known_of_it(tmp_path: Path) -> None:
    config = run_config()
    stages = stages_of(config)
    assert [stage.name for stage in stages] == ["model", "benchmarks", "evaluate_model", "report"]
    assert stages[0].job.origin() == "r1 at http://host/v1, weights unknown"
    (exposure,) = given_contamination(config)
    assert exposure.warning == (
        "the training data behind 'model' (r1 at http://host/v1, weights unknown) is not known to have been compared "
        "with toy: scores may be of memory"
    )
    summary = note_served("r1", ["http://host/v1"], workdir=tmp_path)
    assert summary.notes == ("r1 is served at http://host/v1: its weights, template and training data are unknown",)
    assert summary.given is not None
    assert summary.given.files == ()
    with pytest.raises(ArtifactError, match="is served elsewhere, so that it can be scored"):
        model_folder(tmp_path)  # what trains, publishes or serves a model asks for its folder


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"promote": {}}, "scores r1 alone and takes nothing else; leave out promote"),
        ({"given": {"evaluate": {"path": "m"}}}, "leave out given.model"),
        ({"evaluate": {"sampling": {"top_k": 20}}}, "top_k = 20 and repetition_penalty = 1 would have no effect"),
    ],
)
def test_what_a_served_model_cannot_take_is_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        run_config(**sections)


def test_the_same_name_at_another_address_is_another_model() -> None:
    here, there = ("http://host/v1", "http://other/v1")
    jobs = [
        stages_of(
            PipelineConfig.model_validate({"evaluate": {"engine": {"kind": "served", "base_url": url, "model": "m"}}})
        )[0].job
        for url in (here, there)
    ]
    assert jobs[0] != jobs[1]
