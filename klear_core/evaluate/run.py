"""Evaluate a model, or tag problems with their difficulty: sample answers, judge them as they arrive, and score them.

`evaluate_model` is the story: `sample.py` plans and samples the answers and has each judged, `counts.py` counts them by
problem, and `score.py` makes the report from the counts.

The unit of resume is a shard of answers. An answer that could not be judged does not count as wrong: it is kept and
counted, and the next run judges it again without sampling it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shard, read_shards, work_shards, write_shard, write_shards
from klear_core.config.curate import TagConfig
from klear_core.config.evaluate import EvaluateConfig, ServedModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError
from klear_core.evaluate.counts import ProblemCounts, tally, write_clusters
from klear_core.evaluate.sample import AnswerWorker, Benchmark, EngineAnswerer, EvalSetup, plan_answers, plan_suite
from klear_core.evaluate.score import (
    fence_note,
    judge_record,
    ledger_step,
    make_report,
    metrics_of,
    read_math_vote,
    template_score,
    think_tag_note,
    warning_lines,
)
from klear_core.generate.engine import EngineStats, engine_stats
from klear_core.generate.factory import EngineSpec, LongestFirst, StartSampler, running, start_here
from klear_core.generate.pool import expect
from klear_core.metrics import SILENT, Telemetry
from klear_core.scores import RATES_FOLDER, EvalReport, TemplateScore, write_reports
from klear_core.seeding import seed_for
from klear_core.types import EvalSample, Judge, PassRate, Problem, UnverifiableReference
from klear_core.verify import JudgePool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesAndJudges:
    """Start a stage's engines and judges: by default one engine in this process, and judges on this machine."""

    section: str
    """Section of the stage's settings, for messages."""
    start_sampler: StartSampler = start_here
    build_judges: Callable[[VerifyConfig], JudgePool] = JudgePool


_HERE = EnginesAndJudges(section="evaluate")


def evaluate_model(
    cfg: EvaluateConfig,
    verify: VerifyConfig,
    suite: Sequence[Benchmark],
    *,
    model: Path,
    workdir: Path,
    seed: int = 0,
    telemetry: Telemetry = SILENT,
    compute: EnginesAndJudges = _HERE,
) -> StageSummary:
    """Evaluate a model artifact or a Hugging Face folder; write `workdir/samples` and `workdir/report.json`.

    Raise JudgeError if more than `cfg.max_unscored_rate` of a benchmark's answers cannot be judged, DataError if a
    problem does not fit the model. Finished shards are kept for a rerun.
    """
    notes, load = answer_suite(
        model, cfg, suite, verify, compute=compute, seed=seed, workdir=workdir, telemetry=telemetry
    )
    summary = report_scores(cfg, suite, verify, seed=seed, workdir=workdir, telemetry=telemetry)
    if load is not None:
        telemetry.add(load.metrics("eval"), step=0)
    return summary.model_copy(update={"notes": (*summary.notes, *notes)})


def answer_suite(
    model: Path,
    cfg: EvaluateConfig,
    suite: Sequence[Benchmark],
    verify: VerifyConfig,
    *,
    compute: EnginesAndJudges,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
) -> tuple[tuple[str, ...], EngineStats | None]:
    """Answer and judge a suite with the model in an artifact folder or a Hugging Face folder; see `answer_benchmarks`.

    Return warnings about the judges, and the load of the engines.
    """
    from klear_core.prompts import load_tokenizer, opening_of, render_prompt
    from klear_core.train.base_model import model_folder

    tokenizer = load_tokenizer(model_folder(model))
    render = partial(render_prompt, tokenizer)

    assert not isinstance(cfg.engine, ServedModelConfig), "a served model has no folder"
    spec = EngineSpec.of_model(
        cfg.engine,
        model,
        num_threads=cfg.runtime.num_threads,
        seed=seed_for(seed, "evaluate/engine"),
        workdir=workdir,
        answer_tokens=cfg.sampling.max_new_tokens,
    )

    async def run(judge: Judge) -> EngineStats | None:
        async with running(compute.start_sampler, spec) as sampler:
            answerer = EngineAnswerer(engine=sampler.engine, render=render, opening=opening_of(tokenizer))
            setup = EvalSetup(
                answer=answerer.answer,
                judge=judge,
                expect=partial(expect, sampler.engine),
                section=compute.section,
                max_sampling=sampler.limit,
                num_engines=sampler.num_engines,
            )
            await answer_benchmarks(cfg, suite, setup, seed=seed, workdir=workdir, telemetry=telemetry)
            return await engine_stats(sampler.engine)

    with compute.build_judges(verify) as judges:
        # tests the sandbox, if there are code problems, before the model is loaded
        notes = judges.prepare(problem for benchmark in suite for problem in benchmark.problems)
        load = asyncio.run(run(judges.judge_async))
    return notes, load


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
    num_requests = sum(answer.earlier is None for shard in todo for answer in shard.items)
    gate = LongestFirst(setup.max_sampling, num_requests=num_requests)
    setup.expect(num_requests)
    run = AnswerWorker(cfg, suite, setup, gate, seed=seed, telemetry=telemetry)
    # Before anything is sampled: answers that failed in an earlier run count for `max_unscored_rate` as well.
    for shard in shards:
        if shard.is_done:
            await run.count_finished(shard)
    limit = cfg.runtime.max_in_flight * setup.num_engines
    # aclosing: an error in this loop also cancels the requests in flight
    async with aclosing(work_shards(todo, run.work, limit=limit)) as finished:
        async for shard, samples in finished:
            answered = [sample for sample in samples if sample is not None]
            if len(answered) == len(samples):  # else a later run completes the shard
                write_shard(shard.path, answered)


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
    judge, read_vote = judge_record(verify), partial(read_math_vote, verify)
    reports: list[EvalReport] = []
    ledger: list[LedgerStep] = []
    notes: list[str] = []
    for benchmark in suite:
        name, problems = benchmark.name, benchmark.problems
        clusters = benchmark.clusters
        tallies = tally(_stored(cfg, benchmark, workdir), problems, clusters=clusters, read_vote=read_vote)
        report = make_report(
            tallies,
            cfg,
            benchmark=name,
            num_samples=benchmark.num_samples,
            seed=seed,
            prompt=benchmark.prompt,
            judge=judge,
        )
        ledger.append(ledger_step(name, tallies))
        notes += filter(None, [think_tag_note(name, tallies), fence_note(name, tallies, report.prompt)])
        templates: list[TemplateScore] = []
        for template in cfg.templates:
            tallies = tally(_stored(cfg, benchmark, workdir, template), problems, clusters=clusters)
            templates.append(template_score(tallies, cfg, template=template, benchmark=name))
            ledger.append(ledger_step(f"{name}_{template}", tallies))
        reports.append(report.model_copy(update={"templates": tuple(templates)}))
    write_clusters(workdir, {benchmark.name: benchmark.clusters for benchmark in suite if benchmark.clusters})
    write_reports(workdir, tuple(reports))
    metrics: dict[str, float] = {}
    counts: dict[str, int | float] = {}
    for report in reports:
        metrics |= metrics_of(report)
        counts[f"{report.benchmark}_avg_at_{report.num_samples}"] = round(report.avg.value, 4)
    telemetry.log(metrics, step=0)
    counts["problems"] = sum(report.num_problems for report in reports)
    counts["answers"] = sum(step.num_in for step in ledger)
    notes += warning_lines(reports)
    notes += filter(None, (_line_of_earlier(cfg, benchmark, workdir) for benchmark in suite))
    return StageSummary(counts=counts, ledger=tuple(ledger), seeds={"evaluate": seed}, notes=tuple(notes))


def _line_of_earlier(cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path) -> str:
    """Return how many answers other evaluations sampled, for the report; empty if none."""
    known = [answer.earlier is not None for shard in plan_answers(cfg, benchmark, workdir) for answer in shard.items]
    if not any(known):
        return ""
    of = ", ".join(benchmark.earlier.evaluations)
    return (
        f"{benchmark.name}: {sum(known):,} of {len(known):,} answers were sampled by earlier evaluations ({of}) and "
        "judged again"
    )


def _stored(cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path, template: str = "") -> Iterator[EvalSample]:
    """Yield the stored answers to a benchmark's questions, plain or in a template."""
    for shard in plan_answers(cfg, benchmark, workdir, template):
        yield from read_shard(shard.path, EvalSample)


# ---- difficulty tags ----


_NAME = "tagging"
"""Name of the problems among the samples and in messages, where an evaluation has a benchmark's."""
_ROWS_PER_SHARD = 4096
_TAGGING_HERE = EnginesAndJudges(section="tag")


def tag_problems(
    cfg: TagConfig,
    verify: VerifyConfig,
    *,
    model: Path,
    problems: Path,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
    compute: EnginesAndJudges = _TAGGING_HERE,
) -> StageSummary:
    """Write all problems of the artifact `problems` with new tags, their pass rates, and the judged answers.

    Unverifiable problems keep their tags; no answer to them is sampled.

    `model` is the tagger: a model artifact or a Hugging Face folder. Shards of answers are the unit of resume. Raise
    JudgeError if more than `cfg.max_unscored_rate` of the answers cannot be judged.
    """
    untagged = tuple(read_shards(problems / "problems", Problem))
    if not untagged:
        raise DataError(f"{problems}: there are no problems to tag")
    judged = tuple(p for p in untagged if not isinstance(p.reference, UnverifiableReference))
    if not judged:
        raise DataError(f"{problems}: none of its problems has a reference, so no answer can be judged")
    evaluation = EvaluateConfig(
        engine=cfg.engine,
        sampling=cfg.sampling,
        greedy=False,
        max_unscored_rate=cfg.max_unscored_rate,
        runtime=cfg.runtime,
    )
    suite = (Benchmark(name=_NAME, problems=judged, num_samples=cfg.samples_per_problem),)
    notes, _ = answer_suite(
        model, evaluation, suite, verify, compute=compute, seed=seed, workdir=workdir, telemetry=telemetry
    )

    summary = write_tags(cfg, untagged, _stored(evaluation, suite[0], workdir), workdir=workdir)
    return summary.model_copy(update={"seeds": {"tag": seed}, "notes": notes})


def write_tags(
    cfg: TagConfig, untagged: Sequence[Problem], samples: Iterable[EvalSample], *, workdir: Path
) -> StageSummary:
    """Write the problems with the tags that follow from the judged answers, and the pass rates."""
    tallies = tally(samples, untagged)["sampled"].problems
    tagged = [_tagged(problem, tallies[problem.problem_id], cfg) for problem in untagged]
    write_shards(workdir / "problems", tagged, rows_per_shard=_ROWS_PER_SHARD)
    write_shards(workdir / RATES_FOLDER, _pass_rates(tallies), rows_per_shard=_ROWS_PER_SHARD)
    return _summary(untagged, tagged, tallies)


def _pass_rates(tallies: Mapping[str, ProblemCounts]) -> list[PassRate]:
    """Return the pass rate of every problem with a judged answer."""
    return [
        PassRate(problem_id=problem_id, num_correct=found.num_correct, num_scored=found.num_scored)
        for problem_id, found in tallies.items()
        if found.num_scored
    ]


def _tagged(problem: Problem, found: ProblemCounts, cfg: TagConfig) -> Problem:
    """Return the problem with the tag of its pass rate; without a judged answer its tag stays."""
    return replace(problem, difficulty=cfg.difficulty_at(found.mean)) if found.num_scored else problem


def _summary(
    untagged: Sequence[Problem], tagged: Sequence[Problem], tallies: Mapping[str, ProblemCounts]
) -> StageSummary:
    num_scored = sum(found.num_scored for found in tallies.values())
    num_correct = sum(found.num_correct for found in tallies.values())
    noted = Counter(str(problem.difficulty) for problem in tagged)
    noted["not_judged"] = sum(not found.num_scored for found in tallies.values())
    noted["tag_changed"] = sum(new.difficulty != old.difficulty for new, old in zip(tagged, untagged, strict=True))
    step = LedgerStep.of("tag", "problem", num_in=len(untagged), dropped={}, noted=dict(sorted(noted.items())))
    counts = {"problems": len(tagged), "answers": num_scored, "pass_rate": round(num_correct / max(num_scored, 1), 4)}
    return StageSummary(counts=counts, ledger=(step,))
