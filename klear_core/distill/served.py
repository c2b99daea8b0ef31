"""Score a model that is served elsewhere: ask its chat endpoints as teachers are asked, and judge what they answer.

Every reply is written as it arrives, so that a killed evaluation pays for none of them twice. Only text is exchanged:
how the server writes the prompt, and which weights it has, is not known here.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from klear_core.artifacts.manifest import GivenRecord, StageSummary
from klear_core.artifacts.model_files import SERVED
from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.evaluate import EvaluateConfig, ServedModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.distill.shards import JOURNAL_FOLDER, Journal
from klear_core.distill.teachers.fleet import NO_KEYS, BlockKeys
from klear_core.distill.teachers.http_teacher import HttpTeacher
from klear_core.distill.teachers.teacher import OVER_BUDGET, BudgetError, TeacherFailure, Usage
from klear_core.errors import TeacherError
from klear_core.evaluate.run import answer_benchmarks, report_scores
from klear_core.evaluate.sample import Benchmark, EvalSetup, PlannedAnswer, Response
from klear_core.generate.engine import SamplingParams
from klear_core.metrics import Telemetry
from klear_core.prompts import render_response
from klear_core.types import FinishReason, Judge, TeacherReply
from klear_core.verify import JudgePool

_FSYNC_S = 5.0
_MOST_FAILED = 20
"""Answers that could not be had, apart from a spent budget, after which the stage stops asking."""
_USAGE = "usage.json"
"""File of an evaluation with what its answers used, over all runs."""


def note_served(model: str, addresses: Sequence[str], *, workdir: Path) -> StageSummary:
    """Write `workdir/served.json`, which stands for a model whose weights are not here."""
    record = {"model": model, "addresses": list(addresses), "weights": "unknown"}
    (workdir / SERVED).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    note = f"{model} is served at {', '.join(addresses)}: its weights, template and training data are unknown"
    given = GivenRecord(origin=f"{model} at {', '.join(addresses)}", licence="not stated", files=())
    return StageSummary(notes=(note,), given=given)


def evaluate_served(
    cfg: EvaluateConfig,
    verify: VerifyConfig,
    suite: Sequence[Benchmark],
    *,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
    keys: BlockKeys = NO_KEYS,
    build_judges: Callable[[VerifyConfig], JudgePool] = JudgePool,
) -> StageSummary:
    """Evaluate the model that `cfg.engine` names; write what `evaluate_model` writes.

    Raise TeacherError if endpoints fail or answers are missing, BudgetError if the budget is spent; what has arrived is
    kept for a rerun.
    """
    assert isinstance(cfg.engine, ServedModelConfig), cfg.engine.kind
    journal = Journal(workdir / JOURNAL_FOLDER / "answers.jsonl", fsync_s=_FSYNC_S)

    async def run(judge: Judge) -> ServedAnswerer:
        teacher = HttpTeacher(_as_teacher(cfg), keys)
        answerer = ServedAnswerer(teacher, journal)
        setup = EvalSetup(answer=answerer.answer, judge=judge, max_sampling=cfg.runtime.max_in_flight)
        try:
            await answer_benchmarks(cfg, suite, setup, seed=seed, workdir=workdir, telemetry=telemetry)
        finally:
            await teacher.close()
        return answerer

    try:
        with build_judges(verify) as judges:
            # Before the endpoints are asked: a missing sandbox must not be found after the answers are paid for.
            notes = judges.prepare(problem for benchmark in suite for problem in benchmark.problems)
            answerer = asyncio.run(run(judges.judge_async))
        answerer.require_all()
    finally:
        journal.close()
    summary = report_scores(cfg, suite, verify, seed=seed, workdir=workdir, telemetry=telemetry)
    usage = _usage_of_all_runs(journal, workdir)
    counts = {**summary.counts, "paid_tokens": usage.tokens, "cost": round(usage.cost, 4)}
    return summary.model_copy(update={"counts": counts, "notes": (*summary.notes, *notes, *answerer.notes(usage))})


def _as_teacher(cfg: EvaluateConfig) -> HttpTeacherConfig:
    """Return the settings of a teacher that is asked questions as they stand."""
    assert isinstance(cfg.engine, ServedModelConfig), cfg.engine.kind
    return HttpTeacherConfig(
        model=cfg.engine.model,
        temperature=cfg.sampling.temperature,
        top_p=cfg.sampling.top_p,
        max_tokens=cfg.sampling.max_new_tokens,
        math_instruction="",
        send_seed=cfg.engine.send_seed,
        runtime=cfg.engine.runtime,
    )


def _usage_of_all_runs(journal: Journal, workdir: Path) -> Usage:
    """Return what all answers used, and keep it in a file in the place of the journal, which has their texts again."""
    file = workdir / _USAGE
    # Written before the journal is deleted: a run that was killed between the two finds the file.
    usage = Usage(**json.loads(file.read_text())) if file.is_file() else journal.usage
    file.write_text(json.dumps(asdict(usage)) + "\n", encoding="utf-8")
    journal.delete()
    (workdir / JOURNAL_FOLDER).rmdir()
    return usage


class ServedAnswerer:
    """Answers questions with a model behind chat endpoints. The endpoints bound the number of requests themselves."""

    def __init__(self, teacher: HttpTeacher, journal: Journal) -> None:
        self._teacher, self._journal = teacher, journal
        self._failures: list[TeacherFailure] = []
        self._num_unpaid = 0
        self._ends: Counter[str] = Counter()
        """Replies that ended in another way than by an end token or at the limit."""
        teacher.count_earlier(journal.usage)

    async def answer(self, planned: PlannedAnswer, question: str, params: SamplingParams) -> Response | None:
        """Return the response, of an earlier run if it was paid for then; None if it could not be had."""
        # All that an answer depends on beside its number.
        asked = "/".join([planned.benchmark, planned.template, planned.decoding, planned.problem.problem_id])
        sample_id = (asked, planned.sample_idx)
        reply = self._journal.replies.pop(sample_id, None)
        if reply is None:
            sample = await self._teacher.ask(
                question, temperature=params.temperature, top_p=params.top_p, seed=params.seed
            )
            # Before it is judged: a judge that fails, or a kill, loses no paid reply.
            await self._journal.append(sample_id, sample)
            if isinstance(sample.result, TeacherFailure):
                self._count(sample.result)
                return None
            reply = sample.result
        return self._response(reply)

    def require_all(self) -> None:
        """Raise BudgetError or TeacherError if answers are missing."""
        if self._num_unpaid:
            raise BudgetError(
                f"evaluate: the budget is spent ({self._journal.usage.tokens:,} tokens, cost "
                f"{self._journal.usage.cost:,.2f}), and {self._num_unpaid:,} answers were not requested. All replies "
                "are kept: raise evaluate.engine.runtime.budget and run again, and nothing is paid twice"
            )
        if self._failures:
            raise self._missing()

    def notes(self, usage: Usage) -> tuple[str, ...]:
        """Return warnings about the endpoints and their replies, for the report."""
        found = [f"{num:,} replies ended with {end} and are judged as they are" for end, num in self._ends.items()]
        if usage.estimated:
            found.append(f"{usage.estimated:,} replies came without token counts, which are estimated")
        if usage.unseeded:
            found.append(f"{usage.unseeded:,} replies without a system_fingerprint: their seeds may have had no effect")
        return (*found, *self._teacher.notes)

    def _count(self, failure: TeacherFailure) -> None:
        if failure.reason == OVER_BUDGET:
            self._num_unpaid += 1
            return
        self._failures.append(failure)
        if len(self._failures) >= _MOST_FAILED:
            raise self._missing()

    def _missing(self) -> TeacherError:
        counts = Counter(failure.reason for failure in self._failures)
        reasons = ", ".join(f"{num} {reason}" for reason, num in counts.most_common())
        return TeacherError(
            f"evaluate: {len(self._failures)} answers of {self._teacher.name!r} could not be had ({reasons}; the last: "
            f"{self._failures[-1].detail}). They are not counted as wrong: run again to ask for them; all replies so "
            "far are kept"
        )

    def _response(self, reply: TeacherReply) -> Response:
        end: FinishReason = "length" if reply.finish_reason == "length" else "stop"
        if reply.finish_reason not in ("stop", "length"):
            self._ends[reply.defect or reply.finish_reason] += 1
        # Without reasoning there is an empty thought: the judge then reads the same answer under every setting.
        return Response(
            text=render_response(reply.reasoning, reply.answer), num_tokens=reply.num_tokens, finish_reason=end
        )
