"""Evaluate a model: sample n answers and one greedy answer per problem, judge them as they arrive, and score them.

The unit of resume is a shard of answers. An answer that could not be judged does not count as wrong: it is kept and
counted, and the next run judges it again without sampling it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from klear_core.artifacts.home import home_of
from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shard, write_shard
from klear_core.artifacts.shards import work_shards
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.answering import AnswerWorker, EvalSetup
from klear_core.evaluate.compute import Compute
from klear_core.evaluate.judge_record import judge_record
from klear_core.evaluate.suite import Benchmark, plan_answers, plan_suite
from klear_core.evaluate.summarise import ledger_step, make_report, metrics_of, warning_lines
from klear_core.evaluate.tally import read_math_vote, tally
from klear_core.evaluate.templates import template_scores
from klear_core.generate.factory import EngineSpec
from klear_core.generate.longest_first import LongestFirst
from klear_core.generate.pool import expect
from klear_core.metrics import Telemetry
from klear_core.scores import EvalReport, TemplateScore, write_reports
from klear_core.seeding import seed_for
from klear_core.types import EvalSample, Judge

log = logging.getLogger(__name__)

_HERE = Compute(section="evaluate")


def evaluate(
    cfg: EvaluateConfig,
    verify: VerifyConfig,
    suite: Sequence[Benchmark],
    *,
    model: Path,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
    compute: Compute = _HERE,
) -> StageSummary:
    """Evaluate the model in the artifact folder `model`, and write `workdir/samples` and `workdir/report.json`.

    Raise JudgeError if more than `cfg.max_unscored_rate` of a benchmark's answers cannot be judged, DataError if a
    problem does not fit the model. Finished shards are kept for a rerun.
    """
    notes = answer_suite(model, cfg, suite, verify, compute=compute, seed=seed, workdir=workdir, telemetry=telemetry)
    summary = report_scores(cfg, suite, verify, seed=seed, workdir=workdir, telemetry=telemetry)
    return summary.model_copy(update={"notes": (*summary.notes, *notes)})


def answer_suite(
    model: Path,
    cfg: EvaluateConfig,
    suite: Sequence[Benchmark],
    verify: VerifyConfig,
    *,
    compute: Compute,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> tuple[str, ...]:
    """Answer and judge a suite with the model in an artifact folder or a Hugging Face folder; see `answer_benchmarks`.

    Return warnings about the judges.
    """
    from klear_core.prompts import load_tokenizer, opening_of, render_prompt
    from klear_core.train.base import model_folder, wanted_window

    is_hf_folder = (model / "config.json").is_file()
    folder = model if is_hf_folder else model_folder(model)
    window = None if is_hf_folder else wanted_window(model)
    tokenizer = load_tokenizer(folder)
    render = partial(render_prompt, tokenizer)

    spec = EngineSpec(
        cfg=cfg.engine,
        model_folder=folder,
        num_threads=cfg.runtime.num_threads,
        seed=seed_for(seed, "evaluate/engine"),
        window=window,
        artifact=None if is_hf_folder else model,
        home=home_of(workdir),
    )

    async def run(judge: Judge) -> None:
        sampler = await compute.start_sampler(spec)
        try:
            setup = EvalSetup(
                engine=sampler.engine,
                render=render,
                judge=judge,
                section=compute.section,
                opening=opening_of(tokenizer),
                max_sampling=sampler.limit,
                num_engines=sampler.num_engines,
            )
            await answer_benchmarks(cfg, suite, setup, seed=seed, workdir=workdir, telemetry=telemetry)
        finally:
            await sampler.engine.close()

    with compute.build_judges(verify) as judges:
        # tests the sandbox, if there are code problems, before the model is loaded
        notes = judges.prepare(problem for benchmark in suite for problem in benchmark.problems)
        asyncio.run(run(judges.judge_async))
    return notes


async def answer_benchmarks(
    cfg: EvaluateConfig,
    suite: Sequence[Benchmark],
    setup: EvalSetup,
    *,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> None:
    """Sample and judge every answer whose shard is missing, and write each shard when it is complete."""
    shards = plan_suite(cfg, suite, workdir)
    todo = [shard for shard in shards if not shard.is_done]
    if len(todo) < len(shards):
        log.info("evaluate: %d of %d shards were finished by an earlier run", len(shards) - len(todo), len(shards))
    num_requests = sum(len(shard.items) for shard in todo)
    gate = LongestFirst(setup.max_sampling, num_requests=num_requests)
    expect(setup.engine, num_requests)
    run = AnswerWorker(cfg, suite, setup, gate, seed=seed, telemetry=telemetry)
    # Before anything is sampled: answers that failed in an earlier run count for `max_unscored_rate` as well.
    for shard in shards:
        if shard.is_done:
            await run.count_finished(shard)
    limit = cfg.runtime.max_in_flight * setup.num_engines
    # aclosing: an error in this loop also cancels the requests in flight
    async with aclosing(work_shards(todo, run.work, limit=limit)) as finished:
        async for shard, samples in finished:
            write_shard(shard.path, samples)


def report_scores(
    cfg: EvaluateConfig,
    suite: Sequence[Benchmark],
    verify: VerifyConfig,
    *,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> StageSummary:
    """Score the answers in the shards and write `report.json`, with one report per benchmark."""
    judge = judge_record(verify)
    reports: list[EvalReport] = []
    ledger: list[LedgerStep] = []
    for benchmark in suite:
        samples = (s for shard in plan_answers(cfg, benchmark, workdir) for s in read_shard(shard.path, EvalSample))
        tallies = tally(samples, benchmark.problems, read_vote=partial(read_math_vote, verify))
        report = make_report(
            tallies, cfg, benchmark=benchmark.name, num_samples=benchmark.num_samples, seed=seed, judge=judge
        )
        ledger.append(ledger_step(benchmark.name, tallies))
        templates: list[TemplateScore] = []
        for score, step in template_scores(cfg, benchmark, workdir):
            templates.append(score)
            ledger.append(step)
        reports.append(report.model_copy(update={"templates": tuple(templates)}))
    write_reports(workdir, tuple(reports))
    metrics: dict[str, float] = {}
    counts: dict[str, int | float] = {}
    for report in reports:
        metrics |= metrics_of(report)
        counts[f"{report.benchmark}_avg_at_{report.num_samples}"] = round(report.avg.value, 4)
    telemetry.log(metrics, step=0)
    counts["problems"] = sum(report.num_problems for report in reports)
    counts["answers"] = sum(step.num_in for step in ledger)
    return StageSummary(counts=counts, ledger=tuple(ledger), seeds={"evaluate": seed}, notes=warning_lines(reports))
