"""Evaluation: every benchmark problem is answered n times and once greedily, judged while others are sampled, and scored.

A shard of answers is the unit of resume. An answer that could not be judged is never wrong: it is kept, counted, and
judged again, without being sampled again, by the next run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shard, write_shard
from klear_core.artifacts.shards import Shard, work_shards
from klear_core.config.data import BenchmarkConfig
from klear_core.config.engine import SamplingConfig
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError, JudgeError, KlearError, ResourceError
from klear_core.evaluate.suite import Ask, Benchmark, load_benchmark, plan_answers
from klear_core.evaluate.summarise import ledger_step, lines_of_warning, make_report, metrics_of, tally
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.metrics import Telemetry
from klear_core.scores import EvalReport, write_reports
from klear_core.seeding import seed_for
from klear_core.types import EvalSample, Outcome, Problem, Verdict

log = logging.getLogger(__name__)

Judge = Callable[[Problem, str], Awaitable[Verdict]]
"""The verdict on a whole model output: `JudgePool.judge_async`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What answers and what judges: the three seams of an evaluation."""

    engine: InferenceEngine
    render: Callable[[str], tuple[int, ...]]
    """A question as prompt token ids."""
    judge: Judge


def evaluate(
    cfg: EvaluateConfig,
    verify: VerifyConfig,
    benchmark_configs: Sequence[BenchmarkConfig],
    *,
    model: Path,
    benchmarks: Path,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> StageSummary:
    """Write `workdir/samples` and `workdir/report.json` for a model's and the benchmarks' artifact folders.

    JudgeError if more than `cfg.max_unscored_rate` of a benchmark's answers cannot be judged, DataError if a problem does
    not fit the model; finished shards are kept for the rerun.
    """
    from klear_core.generate.factory import build_engine
    from klear_core.prompts import load_tokenizer, render_prompt
    from klear_core.train.base import model_folder, wanted_window
    from klear_core.verify import build_verifier

    suite = [load_benchmark(benchmarks, b) for b in benchmark_configs]
    folder = model_folder(model)
    render = partial(render_prompt, load_tokenizer(folder))

    async def run(judge: Judge) -> None:
        own_seed, window = seed_for(seed, "evaluate/engine"), wanted_window(model)
        engine = await build_engine(cfg.engine, folder, num_threads=cfg.runtime.num_threads, seed=own_seed, window=window)
        try:
            exam = Examination(engine=engine, render=render, judge=judge)
            await answer_benchmarks(cfg, suite, exam, seed=seed, workdir=workdir, telemetry=telemetry)
        finally:
            await engine.close()

    with build_verifier(verify) as judges:
        notes = judges.prepare(problem for benchmark in suite for problem in benchmark.problems)
        asyncio.run(run(judges.judge_async))
    summary = report_scores(cfg, suite, seed=seed, workdir=workdir, telemetry=telemetry)
    return summary.model_copy(update={"notes": (*summary.notes, *notes)})


async def answer_benchmarks(
    cfg: EvaluateConfig, suite: Sequence[Benchmark], exam: Examination, *, seed: int, workdir: Path, telemetry: Telemetry
) -> None:
    """Have every answer that is not there yet, judge it, and write it with its shard."""
    run = _Run(cfg, suite, exam, seed=seed, telemetry=telemetry)
    shards = [shard for benchmark in suite for shard in plan_answers(cfg, benchmark, workdir)]
    todo = [shard for shard in shards if not shard.is_done]
    if len(todo) < len(shards):
        log.info("evaluate: %d of %d shards are there already", len(shards) - len(todo), len(shards))
    for shard in shards:
        if shard.is_done:
            await run.reopen(shard)
    async with aclosing(work_shards(todo, run.work, limit=cfg.runtime.max_in_flight)) as finished:
        async for shard, samples in finished:
            write_shard(shard.path, samples)


class _Run:
    """One run of the stage: how an answer is had, and what could not be judged so far."""

    def __init__(self, cfg: EvaluateConfig, suite: Sequence[Benchmark], exam: Examination, *, seed: int, telemetry: Telemetry) -> None:
        self.cfg = cfg
        self.exam = exam
        self.seed = seed
        self.telemetry = telemetry
        self.num_asked = {b.name: len(b.problems) * (b.num_samples + cfg.greedy) for b in suite}
        self.unscored: dict[str, Counter[Outcome]] = {b.name: Counter() for b in suite}
        self.num_done = 0

    async def reopen(self, shard: Shard[Ask]) -> None:
        """Count a shard that an earlier run finished, and judge again what could not be judged then."""
        problems = {ask.problem.problem_id: ask.problem for ask in shard.items}
        earlier = read_shard(shard.path, EvalSample)
        samples = await asyncio.gather(*(self._judge_again(s, problems[s.problem_id]) for s in earlier))
        if samples != earlier:
            write_shard(shard.path, samples)
        for sample in samples:
            self._settle(sample)

    async def _judge_again(self, sample: EvalSample, problem: Problem) -> EvalSample:
        if sample.verdict.outcome.is_models_doing:
            return sample
        return dataclasses.replace(sample, verdict=await self.exam.judge(problem, sample.response))

    async def work(self, _shard: Shard[Ask], ask: Ask) -> EvalSample:
        """Sample one answer and judge it."""
        problem = ask.problem
        params = sampling_params(self.cfg.sampling, ask, seed=self.seed)
        try:
            (completion,) = await self.exam.engine.generate(self.exam.render(problem.question), params)
        except KlearError:
            raise
        except ValueError as e:
            raise DataError(f"benchmark {ask.benchmark!r}, problem {problem.problem_id}: the engine cannot answer it: {e}") from e
        if completion.finish_reason == "abort":
            raise ResourceError(f"benchmark {ask.benchmark!r}, problem {problem.problem_id}: the engine gave up midway")
        sample = EvalSample(
            benchmark=ask.benchmark,
            problem_id=problem.problem_id,
            question=problem.question,
            difficulty=problem.difficulty,
            decoding=ask.decoding,
            sample_idx=ask.sample_idx,
            response=completion.text,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            verdict=await self.exam.judge(problem, completion.text),
        )
        self._settle(sample)
        return sample

    def _settle(self, sample: EvalSample) -> None:
        """Count a judged answer. JudgeError once more are unscored than the whole benchmark may have."""
        self.num_done += 1
        self.telemetry.progress(self.num_done, sum(self.num_asked.values()), f"answers, {sample.benchmark}")
        if sample.verdict.outcome.is_models_doing:
            return
        unscored, num_asked = self.unscored[sample.benchmark], self.num_asked[sample.benchmark]
        unscored[sample.verdict.outcome] += 1
        if unscored.total() > self.cfg.max_unscored_rate * num_asked:
            by_outcome = ", ".join(f"{n} {outcome}" for outcome, n in unscored.most_common())
            raise JudgeError(
                f"benchmark {sample.benchmark!r}: {unscored.total()} of {num_asked} answers could not be judged ({by_outcome}), above "
                f"evaluate.max_unscored_rate = {self.cfg.max_unscored_rate:g}; the last: problem {sample.problem_id}: "
                f"{sample.verdict.detail}. Finished shards are kept, and what is unscored there is judged again by the next run"
            )


def sampling_params(cfg: SamplingConfig, ask: Ask, *, seed: int) -> SamplingParams:
    """How one answer is decoded. Every sample has a seed of its own: with a shared one, all n would be the same text."""
    is_greedy = ask.decoding == "greedy"
    return SamplingParams(
        num_samples=1,
        temperature=0.0 if is_greedy else cfg.temperature,
        top_p=1.0 if is_greedy else cfg.top_p,
        top_k=0 if is_greedy else cfg.top_k,
        repetition_penalty=cfg.repetition_penalty,
        max_new_tokens=cfg.max_new_tokens,
        seed=seed_for(seed, "evaluate/sample", ask.benchmark, ask.problem.problem_id, ask.sample_idx),
    )


def report_scores(cfg: EvaluateConfig, suite: Sequence[Benchmark], *, seed: int, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Score what the shards hold and write `report.json`, one report a benchmark."""
    reports: list[EvalReport] = []
    ledger: list[LedgerStep] = []
    for benchmark in suite:
        samples = (s for shard in plan_answers(cfg, benchmark, workdir) for s in read_shard(shard.path, EvalSample))
        tallies = tally(samples, benchmark.problems)
        reports.append(make_report(tallies, cfg, benchmark=benchmark.name, num_samples=benchmark.num_samples, seed=seed))
        ledger.append(ledger_step(benchmark.name, tallies))
    write_reports(workdir, tuple(reports))
    telemetry.log({name: value for report in reports for name, value in metrics_of(report).items()}, step=0)
    counts: dict[str, int | float] = {"problems": sum(r.num_problems for r in reports), "answers": sum(step.num_in for step in ledger)}
    scores = {f"{r.benchmark}_avg_at_{r.num_samples}": round(r.avg.value, 4) for r in reports}
    return StageSummary(counts=scores | counts, ledger=tuple(ledger), seeds={"evaluate": seed}, notes=lines_of_warning(reports))
