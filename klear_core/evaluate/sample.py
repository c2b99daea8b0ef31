"""Plan the answers of an evaluation, in shards; sample each with an engine, and judge it as it arrives."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.records import Shard, plan_shards, read_shard, read_shards, write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.benchmark_prompts import MATH_PROMPTS, QUESTION, livecodebench_prompt
from klear_core.config.data import BenchmarkConfig
from klear_core.config.evaluate import EvaluateConfig, SamplingConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import EvaluateJob
from klear_core.data.benchmarks import CLUSTERS, read_by_problem
from klear_core.data.formats.code_rows import without_instructions
from klear_core.errors import ArtifactError, DataError, JudgeError, KlearError, ResourceError
from klear_core.generate.engine import InferenceEngine, SamplingParams, one_sample
from klear_core.generate.factory import LongestFirst
from klear_core.metrics import Telemetry
from klear_core.prompts import completed
from klear_core.scores import SAMPLES_FOLDER
from klear_core.seeding import seed_for
from klear_core.types import Domain, EvalSample, FinishReason, Judge, Outcome, Problem

log = logging.getLogger(__name__)

TEMPLATES_FOLDER = "templates"
"""Folder of an evaluation with a folder for each prompt template, which has the answers to the questions in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The text of an answer, and what is counted of it."""

    text: str
    num_tokens: int
    finish_reason: FinishReason


AnswerKey = tuple[str, str, str, int]
"""What an answer depends on in a run: its benchmark, the question as it was asked, the decoding, and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAnswers:
    """Answers of finished evaluations that another one would sample again; it judges them, and samples the others."""

    responses: Mapping[AnswerKey, Response] = field(default_factory=dict)
    evaluations: tuple[str, ...] = ()
    """First digits of the fingerprints of those evaluations."""


NO_EARLIER = EarlierAnswers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark's problems, and the number of samples per problem."""

    name: str
    problems: tuple[Problem, ...]
    num_samples: int
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Cluster by problem id; problems without one are left out."""
    prompt: str = "plain"
    """Name or template of the prompt that the questions are asked in."""
    earlier: EarlierAnswers = NO_EARLIER
    """Answers that are not sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """One answer to judge, and to sample first unless an earlier evaluation has its response."""

    benchmark: str
    problem: Problem
    decoding: Literal["sampled", "greedy"]
    sample_idx: int
    template: str = ""
    """Name of the prompt template; empty for the benchmark's own prompt."""
    prompt: str = "plain"
    """The benchmark's own prompt."""
    earlier: Response | None = None
    """The response of an earlier evaluation; None: it is to be sampled."""


def read_suite(
    folder: Path, configs: Sequence[BenchmarkConfig], earlier: EarlierAnswers = NO_EARLIER
) -> list[Benchmark]:
    """Read these benchmarks from the benchmarks' artifact folder; problems are unique, and each has at least one."""
    suite = []
    by_problem = read_by_problem(folder / CLUSTERS)
    for cfg in configs:
        problems = tuple(read_shards(folder / cfg.name, Problem))
        ids = (problem.problem_id for problem in problems)
        clusters = {problem_id: by_problem[problem_id] for problem_id in ids if problem_id in by_problem}
        suite.append(
            Benchmark(
                name=cfg.name,
                problems=problems,
                num_samples=cfg.num_samples,
                clusters=clusters,
                prompt=cfg.prompt,
                earlier=earlier,
            )
        )
    return suite


def plan_answers(
    cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path, template: str = ""
) -> list[Shard[PlannedAnswer]]:
    """Return all answers to judge for a benchmark's questions, plain or in a template, problem by problem in shards.

    Greedy answers are to the plain questions alone.
    """
    # The order must be the same in every run: a finished shard is known by its place in it.
    name, answers = benchmark.name, list[PlannedAnswer]()
    for problem in benchmark.problems:
        for i in range(benchmark.num_samples):
            answers.append(
                PlannedAnswer(
                    benchmark=name,
                    problem=problem,
                    decoding="sampled",
                    sample_idx=i,
                    template=template,
                    prompt=benchmark.prompt,
                )
            )
        if cfg.greedy and not template:
            answers.append(
                PlannedAnswer(benchmark=name, problem=problem, decoding="greedy", sample_idx=0, prompt=benchmark.prompt)
            )
    if not template and benchmark.earlier.responses:
        answers = [_with_earlier(answer, cfg, benchmark.earlier) for answer in answers]
    folder = workdir / TEMPLATES_FOLDER / template if template else workdir / SAMPLES_FOLDER
    return plan_shards(folder, answers, items_per_shard=cfg.runtime.answers_per_shard, prefix=f"{name}-")


def _with_earlier(answer: PlannedAnswer, cfg: EvaluateConfig, earlier: EarlierAnswers) -> PlannedAnswer:
    key = (answer.benchmark, prompted_question(answer, cfg), answer.decoding, answer.sample_idx)
    return replace(answer, earlier=earlier.responses.get(key))


def plan_suite(cfg: EvaluateConfig, suite: Sequence[Benchmark], workdir: Path) -> list[Shard[PlannedAnswer]]:
    """Return all answers to judge for all benchmarks and templates, cut into shards."""
    shards: list[Shard[PlannedAnswer]] = []
    for benchmark in suite:
        for template in ("", *cfg.templates):
            shards += plan_answers(cfg, benchmark, workdir, template)
    return shards


def earlier_answers(artifacts: Path, job: EvaluateJob, *, model: str) -> EarlierAnswers:
    """Return the answers that this evaluation would sample again: those of finished evaluations of the same model (by
    its fingerprint) with the same seed, sampling and engine. Their benchmarks and judges may be others.

    `artifacts` is the workspace's folder of them; a damaged evaluation is left out with a warning.
    """
    store, wanted = LocalStore(artifacts), _sampled_by(result_settings(job))
    responses: dict[AnswerKey, Response] = {}
    used: list[str] = []
    for folder in store.folders(job.kind):
        try:
            manifest = read_manifest(folder)
            is_of_model = ("model", model) in [(record.role, record.fingerprint) for record in manifest.inputs]
            if not is_of_model or manifest.code_version != job.code_version:
                continue
            if _sampled_by(manifest.result_config) != wanted:
                continue
            if damage := store.damage(job.kind, manifest.fingerprint):
                raise ArtifactError(damage)
        except ArtifactError as e:
            log.warning("the answers of a damaged evaluation are not used: %s: %s", folder, e)
            continue
        used.append(manifest.fingerprint[:6])
        for sample in read_shards(folder / SAMPLES_FOLDER, EvalSample):
            response = Response(text=sample.response, num_tokens=sample.num_tokens, finish_reason=sample.finish_reason)
            responses[sample.benchmark, sample.question, sample.decoding, sample.sample_idx] = response
    return EarlierAnswers(responses=responses, evaluations=tuple(used))


def _sampled_by(result_config: Mapping[str, Any]) -> list[Any]:
    """Return the settings of an evaluation that decide what is sampled, beside its benchmarks."""
    evaluate = result_config["evaluate"]
    return [result_config["seed"], evaluate["sampling"], evaluate["engine"]]


Answer = Callable[[PlannedAnswer, str, SamplingParams], Awaitable[Response | None]]
"""Returns the response to a question, by engines that have the model or endpoints that serve it; None if a server gave
none, so that a later run asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswerer:
    """Answers questions with an engine, or a pool of them."""

    engine: InferenceEngine
    render: Callable[[str], tuple[int, ...]]
    """Turns a question into prompt token ids."""
    opening: str = ""
    """Start of every response that is part of the prompt (`<think>`); see `opening_of`."""

    async def answer(self, planned: PlannedAnswer, question: str, params: SamplingParams) -> Response:
        """Return the response; DataError if the engine rejects the request, ResourceError if it aborts it."""
        where = f"benchmark {planned.benchmark!r}, problem {planned.problem.problem_id}"
        try:
            (sampled,) = await self.engine.generate(self.render(question), params)
        except KlearError:  # DataError and ConfigError are ValueErrors too; their messages already name the cause
            raise
        except ValueError as e:
            raise DataError(f"{where}: the engine rejected the request: {e}") from e
        if sampled.finish_reason == "abort":
            raise ResourceError(f"{where}: the engine aborted the request")
        answer = completed(sampled, self.opening)
        return Response(text=answer.text, num_tokens=len(answer.token_ids), finish_reason=answer.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetup:
    """The functions of an evaluation that answer and judge, and its limits; tests pass fakes."""

    answer: Answer
    judge: Judge
    expect: Callable[[int], None] = lambda _: None
    """Told the number of requests before the first; see `EnginePool.expect`."""
    section: str = "evaluate"
    """Section of the settings, for messages."""
    max_sampling: int = 1024
    """Answers that are sampled at a time."""
    num_engines: int = 1
    """Engines behind `answer`."""


class AnswerWorker:
    """Samples and judges single answers in one run of the stage, and counts those that could not be judged."""

    def __init__(
        self,
        cfg: EvaluateConfig,
        suite: Sequence[Benchmark],
        setup: EvalSetup,
        gate: LongestFirst,
        *,
        seed: int,
        telemetry: Telemetry,
    ) -> None:
        self.cfg = cfg
        self.setup = setup
        self.gate = gate
        self.seed = seed
        self.telemetry = telemetry
        # Templates are sampled n times each, like the plain question; greedy answers are to the plain question alone.
        per_problem = {b.name: b.num_samples * (1 + len(cfg.templates)) + cfg.greedy for b in suite}
        self.num_asked = {b.name: len(b.problems) * per_problem[b.name] for b in suite}
        self.unscored: dict[str, Counter[Outcome]] = {b.name: Counter() for b in suite}
        self.num_done = 0

    async def count_finished(self, shard: Shard[PlannedAnswer]) -> None:
        """Count the answers of a shard from an earlier run, and judge again those that could not be judged then."""
        # a shard belongs to one benchmark, where problem ids are unique
        problems = {planned.problem.problem_id: planned.problem for planned in shard.items}
        earlier = read_shard(shard.path, EvalSample)
        _require_planned(shard, earlier)
        samples = await asyncio.gather(*(self._judge_again(s, problems[s.problem_id]) for s in earlier))
        # A shard in which nothing was judged again stays as it is.
        if samples != earlier:
            write_shard(shard.path, samples)
        for sample in samples:
            self._count(sample)

    async def _judge_again(self, sample: EvalSample, problem: Problem) -> EvalSample:
        if sample.verdict.outcome.counts_for_model:
            return sample
        return dataclasses.replace(sample, verdict=await self.setup.judge(problem, sample.response))

    async def work(self, _shard: Shard[PlannedAnswer], planned: PlannedAnswer) -> EvalSample | None:
        """Judge one answer, sampled unless an earlier evaluation has it; None if the server gave none.

        A later run asks again then.
        """
        params = sampling_params(self.cfg.sampling, planned, seed=self.seed)
        # All benchmarks are one queue, so that the engine runs empty only at the end of the last one.
        key = (planned.benchmark, planned.problem.problem_id)
        question = prompted_question(planned, self.cfg)
        response = planned.earlier
        if response is None:
            async with self.gate.slot(key):
                # The slot covers sampling alone: an answer that waits for its judge keeps no room in the engine.
                response = await self.setup.answer(planned, question, params)
            if response is None:
                return None
            self.gate.record(key, response.num_tokens)
        sample = await judge_response(planned, question, response, self.setup.judge)
        self._count(sample)
        return sample

    def _count(self, sample: EvalSample) -> None:
        """Count an answer; raise JudgeError once the benchmark's unscored answers exceed `max_unscored_rate`."""
        self.num_done += 1
        self.telemetry.progress(self.num_done, sum(self.num_asked.values()), f"answers, {sample.benchmark}")
        if sample.verdict.outcome.counts_for_model:
            return
        unscored, num_asked = self.unscored[sample.benchmark], self.num_asked[sample.benchmark]
        unscored[sample.verdict.outcome] += 1
        # A share of all planned answers and not of those so far: the run stops only when it is certain to fail.
        if unscored.total() > self.cfg.max_unscored_rate * num_asked:
            by_outcome = ", ".join(f"{n} {outcome}" for outcome, n in unscored.most_common())
            raise JudgeError(
                f"benchmark {sample.benchmark!r}: {unscored.total()} of {num_asked} answers could not be judged "
                f"({by_outcome}), above {self.setup.section}.max_unscored_rate = {self.cfg.max_unscored_rate:g}; "
                f"the last: problem {sample.problem_id}: {sample.verdict.detail}. "
                "Finished shards are kept, and the next run judges their unscored answers again"
            )


async def judge_response(planned: PlannedAnswer, question: str, response: Response, judge: Judge) -> EvalSample:
    """Judge a response to a question, and return it with the verdict."""
    problem = planned.problem
    return EvalSample(
        benchmark=planned.benchmark,
        problem_id=problem.problem_id,
        question=question,
        difficulty=problem.difficulty,
        decoding=planned.decoding,
        sample_idx=planned.sample_idx,
        response=response.text,
        num_tokens=response.num_tokens,
        finish_reason=response.finish_reason,
        verdict=await judge(problem, response.text),
    )


def _require_planned(shard: Shard[PlannedAnswer], stored: Sequence[EvalSample]) -> None:
    """Raise DataError if a finished shard does not hold the answers that are planned for it, all and no others."""
    planned = Counter((item.problem.problem_id, item.decoding, item.sample_idx) for item in shard.items)
    found = Counter((sample.problem_id, sample.decoding, sample.sample_idx) for sample in stored)
    missing, others = planned - found, found - planned
    if missing or others:
        problem_id, decoding, idx = next(iter(missing or others))
        raise DataError(
            f"{shard.path}: holds {len(stored)} of {len(shard.items)} planned answers to benchmark "
            f"{shard.items[0].benchmark!r} ({missing.total()} missing, {others.total()} not planned; the first: "
            f"problem {problem_id}, {decoding} {idx}); delete the file, and its answers are sampled again"
        )


def sampling_params(cfg: SamplingConfig, planned: PlannedAnswer, *, seed: int) -> SamplingParams:
    """Return the settings for one answer. Each sample has its own seed: with a shared seed all n would be the same."""
    template = (planned.template,) if planned.template else ()  # plain answers are the same with and without templates
    named = ("evaluate/sample", planned.benchmark, planned.problem.problem_id, planned.sample_idx, *template)
    params = one_sample(cfg, seed=seed_for(seed, *named))
    return replace(params, temperature=0.0, top_p=1.0, top_k=0) if planned.decoding == "greedy" else params


def prompted_question(planned: PlannedAnswer, cfg: EvaluateConfig) -> str:
    """Return the question of an answer in the prompt that it is asked in: a template, or the benchmark's own."""
    question = planned.problem.question
    # not str.format: templates have the braces of \boxed{}
    if planned.template:
        return cfg.templates[planned.template].replace(QUESTION, question)
    return in_prompt(question, planned.prompt, planned.problem.domain)


def in_prompt(question: str, prompt: str, domain: Domain) -> str:
    """Return a question in a prompt. Known prompts of one domain leave questions of the other as they stand."""
    if prompt == "plain":
        return question
    if prompt == "livecodebench":
        return livecodebench_prompt(*without_instructions(question)) if domain is Domain.CODE else question
    template = MATH_PROMPTS.get(prompt, prompt)
    return template.replace(QUESTION, question) if prompt not in MATH_PROMPTS or domain is Domain.MATH else question
