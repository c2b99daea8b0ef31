"""The published benchmark files, answered perfectly and in ways that must not count, through the real judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.evaluate.run import answer_benchmarks, report_scores
from klear_core.evaluate.sample import Benchmark, EngineAnswerer, EvalSetup, read_suite
from klear_core.generate.engine import SamplingParams
from klear_core.metrics import NullTelemetry
from klear_core.prompts import render_response
from klear_core.scores import EvalReport, read_reports
from klear_core.types import Completion, FinishReason, MathReference
from klear_core.verify import JudgePool

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
FILES = {
    "aime24": "bench-aime24/aime24.qs.jsonl",
    "aime25": "bench-aime25/aime25.qs.jsonl",
    "hmmt25": "bench-hmmt25/HMMT-202502.jsonl",
}

pytestmark = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the published benchmark files are not here (../shared/data)"
)


class KeyEngine:
    """Knows every reference answer: right when sampled; greedily it puts the right answer in thinking that never ends."""

    def __init__(self, answers: dict[tuple[int, ...], str]) -> None:
        self.answers = answers

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        boxed = f"\\boxed{{{self.answers[tuple(prompt_ids)]}}}"
        text, finish_reason = render_response("I know it.", f"The answer is ${boxed}$."), "stop"
        if params.temperature == 0:
            text, finish_reason = f"<think>\nIt is ${boxed}$, I am sure", "length"
        return [completion(text, finish_reason)]  # type: ignore[arg-type]

    async def close(self) -> None:
        pass


def completion(text: str, finish_reason: FinishReason) -> Completion:
    ids = tuple(text.encode())
    return Completion(
        text=text, token_ids=ids, logps=(0.0,) * len(ids), finish_reason=finish_reason, policy_versions=(0,) * len(ids)
    )


def render(question: str) -> tuple[int, ...]:
    return tuple(question.encode())


def key_of(suite: Sequence[Benchmark]) -> dict[tuple[int, ...], str]:
    key = {}
    for problem in (p for benchmark in suite for p in benchmark.problems):
        assert isinstance(problem.reference, MathReference)
        key[render(problem.question)] = problem.reference.answers[0]
    return key


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EvalReport]:
    folder = tmp_path_factory.mktemp("published")
    configs = [
        BenchmarkConfig(
            name=name,
            source=FileSource(path=str(SHARED / path), row_schema="klear_bench"),
            expected_rows=30,
            num_samples=1,
        )
        for name, path in FILES.items()
    ]
    prepare_benchmarks(
        configs, seed=0, runtime=BenchmarksRuntime(), workdir=folder / "benchmarks", telemetry=NullTelemetry()
    )
    suite = read_suite(folder / "benchmarks", configs)
    cfg = EvaluateConfig(max_unscored_rate=0.0)
    with JudgePool(VerifyConfig()) as judges:
        answerer = EngineAnswerer(engine=KeyEngine(key_of(suite)), render=render)
        setup = EvalSetup(answer=answerer.answer, judge=judges.judge_async)
        asyncio.run(answer_benchmarks(cfg, suite, setup, seed=0, workdir=folder, telemetry=NullTelemetry()))
    report_scores(cfg, suite, VerifyConfig(), seed=0, workdir=folder, telemetry=NullTelemetry())
    return {r.benchmark: r for r in read_reports(folder)}


@pytest.mark.parametrize("name", FILES)
def test_perfect_answers_score_100_percent_of_thirty_problems(reports: dict[str, EvalReport], name: str) -> None:
    assert (reports[name].avg.value, reports[name].avg.num_problems) == (1.0, 30)
    assert reports[name].avg.new_problems.low < 0.91  # thirty problems cannot prove more


@pytest.mark.parametrize("name", FILES)
def test_a_right_answer_in_thinking_that_never_ended_is_no_answer(reports: dict[str, EvalReport], name: str) -> None:
    greedy = reports[name].greedy
    assert greedy is not None
    assert greedy.value == 0.0
    assert reports[name].greedy_truncated_frac == 1.0
