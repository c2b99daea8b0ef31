"""Turn problems into judged traces, shard by shard, and count every sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from klear_core.artifacts.manifest import StageSummary
from klear_core.artifacts.records import Shard
from klear_core.config.distill import DistillConfig, HttpTeacherConfig
from klear_core.distill.select import (
    FailureBudget,
    TraceCounts,
    drop_reason,
    dropped,
    failures_of,
    floor_warnings,
    too_many_failures,
    usage_warnings,
    why_incomplete,
)
from klear_core.distill.shards import FinishedShard, Journal, ShardFiles, ShardRecords, UnusedReply
from klear_core.distill.teachers.teacher import OVER_BUDGET, BudgetError, Teacher, TeacherFailure, TeacherResult, Usage
from klear_core.metrics import Telemetry
from klear_core.prompts import render_response
from klear_core.types import Dropped, Judge, Problem, TeacherReply, TeacherTrace

T = TypeVar("T")

_EARLY_STOP_FROM = 200
"""Number of answers from which their share may stop the stage early.

At a true share of 0.6, one run in 500 would be below 0.5 by chance.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """The outcomes of one problem's samples."""

    outcomes: tuple[TeacherTrace | Dropped, ...]
    unused: tuple[UnusedReply, ...]

    @property
    def dropped(self) -> list[Dropped]:
        """Return the samples that are no traces."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Dropped)]


class Collection:
    """One run of the stage: turns problems into traces and keeps the counts so far."""

    def __init__(
        self, cfg: DistillConfig, teacher: Teacher, judge: Judge, *, seed: int, telemetry: Telemetry, num_problems: int
    ) -> None:
        self.cfg = cfg
        self.teacher = teacher
        self.judge = judge
        self.seed = seed
        self.telemetry = telemetry
        self.num_problems = num_problems
        self.trace_counts = TraceCounts()
        self.budget = FailureBudget(cfg.max_failure_rate)
        self.num_shards_done = 0
        self.progress = Throughput()
        self.usage = Usage()
        """Tokens and money that this run and earlier ones spent, on replies of unfinished shards too."""
        self.is_over_budget = False
        self.failures: dict[Path, list[Dropped]] = {}
        """Failures in the shards in progress, by shard path."""
        self._journals: dict[Path, Journal] = {}
        self._unpaid: dict[Path, Sequence[_Solved]] = {}
        """Results of shards that lack samples because the budget is spent."""

    def awaited(self) -> str:
        """Return what the collection waits for, and what came of it so far."""
        teacher = self.cfg.teacher
        where = ""
        if isinstance(teacher, HttpTeacherConfig):
            where = " at " + ", ".join(endpoint.base_url for endpoint in teacher.runtime.endpoints)
        done = f"{self.progress.num_done} problems done, {self.usage.tokens} tokens"
        return f"replies of the teacher{where} or their verdicts; last: {done}"

    def count_earlier(self, shards: Sequence[Shard[Problem]], finished: Mapping[Path, FinishedShard]) -> None:
        """Count what earlier runs finished and used, before new work: counts and limits are over all shards."""
        for shard in shards:
            files = ShardFiles(shard)
            if shard.is_done:
                earlier = finished[shard.path]
                self.usage += earlier.usage
                self.progress.num_done += len(shard.items)
                self._count(shard, earlier.counts, num_failed=earlier.num_failed)
                files.journal.unlink(missing_ok=True)  # of a killed run
            else:
                self.usage += files.used_so_far()
        self.teacher.count_earlier(self.usage)
        self.progress.start(self.usage)

    def affordable(self, shards: Sequence[Shard[Problem]]) -> Iterator[Shard[Problem]]:
        """Yield the shards in turn; once the budget is spent, only those with replies that earlier runs paid for."""
        for shard in shards:
            # Their replies need no budget, and a shard that is not begun would be published without them.
            if not self.is_over_budget or ShardFiles(shard).journal.exists():
                yield shard

    async def work(self, shard: Shard[Problem], problem: Problem) -> _Solved:
        """Request the teacher's replies to one problem and judge them; raise if the failure rate is above its limit."""
        journal = self._journal_of(shard)
        samples = [self._sample(problem, i, journal) for i in range(self.cfg.samples_per_problem)]
        solved = await _all(samples)
        outcomes = tuple(outcome for outcome, _ in solved)
        # After every problem and not every shard: a broken teacher must not be paid for the rest of a shard.
        self._check_failures(shard, failures_of(outcomes))
        self.progress.num_done += 1
        self.telemetry.progress(self.progress.num_done, self.num_problems, self._note())
        return _Solved(outcomes=outcomes, unused=tuple(unused for _, unused in solved if unused))

    async def _sample(
        self, problem: Problem, sample_idx: int, journal: Journal | None
    ) -> tuple[TeacherTrace | Dropped, UnusedReply | None]:
        """Return the outcome of one sample, and its reply if it was paid for and became no trace."""
        sample_id = (problem.problem_id, sample_idx)
        result: TeacherResult
        if journal and sample_id in journal.replies:  # a reply that an earlier run paid for
            result = journal.replies.pop(sample_id)
            # The count at the start of the run has this sample too.
            self.teacher.expect(-1)
        else:
            sample = await self.teacher.sample(problem, sample_idx=sample_idx, seed=self.seed)
            result = sample.result
            self.usage += sample.usage
            if journal:
                # Before it is judged: a judge that fails, or a kill, loses no paid reply.
                await journal.append(sample_id, sample)
        outcome = await self._judge(problem, sample_idx, result)
        # A teacher that costs nothing writes the same reply again, so none of its replies is kept.
        if isinstance(outcome, Dropped) and isinstance(result, TeacherReply) and self.teacher.is_costly:
            unused = UnusedReply(
                problem_id=outcome.problem_id,
                sample_idx=sample_idx,
                step=outcome.step,
                reason=outcome.reason,
                teacher=self.teacher.name,
                reasoning=result.reasoning,
                answer=result.answer,
                finish_reason=result.finish_reason,
                num_tokens=result.num_tokens,
            )
            return outcome, unused
        return outcome, None

    async def _judge(self, problem: Problem, sample_idx: int, reply: TeacherResult) -> TeacherTrace | Dropped:
        if isinstance(reply, TeacherFailure):
            # Ends `affordable`; the samples that are under way still finish.
            self.is_over_budget |= reply.reason == OVER_BUDGET
            return dropped(problem.problem_id, sample_idx, step="ask", reason=reply.reason, detail=reply.detail)
        keep_incomplete = self.cfg.teacher.keep_incomplete
        if reason := why_incomplete(reply, self.cfg.select, keep_incomplete=keep_incomplete):
            ending = reply.defect or f"finish_reason {reply.finish_reason}"
            detail = f"{reply.num_tokens} tokens, {ending}"
            return dropped(problem.problem_id, sample_idx, step="complete", reason=reason, detail=detail)
        trace = TeacherTrace(
            problem_id=problem.problem_id,
            question=problem.question,
            difficulty=problem.difficulty,
            source=problem.source,
            teacher=self.teacher.name,
            sample_idx=sample_idx,
            reasoning=reply.reasoning,
            answer=reply.answer,
            finish_reason=reply.finish_reason,
            num_tokens=reply.num_tokens,
            verdict=await self.judge(problem, render_response(reply.reasoning, reply.answer)),
            prompt_version=self.teacher.prompt_version,
        )
        return drop_reason(trace, self.cfg.select) or trace

    def finish(self, shard: Shard[Problem], results: Sequence[_Solved]) -> None:
        """Count and write a complete shard; keep a shard in memory if it lacks samples because the budget is spent."""
        if any(drop.reason == OVER_BUDGET for solved in results for drop in solved.dropped):
            # Its file would mark it as done. Whether it is written is decided once all shards have ended.
            self._unpaid[shard.path] = results
        else:
            self._finish(shard, results)

    def _finish(self, shard: Shard[Problem], results: Sequence[_Solved]) -> None:
        journal = self._journal_of(shard)
        outcomes = [outcome for solved in results for outcome in solved.outcomes]
        traces = [outcome for outcome in outcomes if isinstance(outcome, TeacherTrace)]
        drops = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
        unused = [reply for solved in results for reply in solved.unused]
        usage = journal.usage if journal else Usage()
        records = ShardRecords(traces=traces, dropped=drops, unused=unused, usage=usage)
        counts = TraceCounts()
        counts.add(traces, drops)
        self._count(shard, counts, num_failed=len(failures_of(outcomes)))
        self._check_complete_share()  # before the write, so that a rerun requests these samples again
        ShardFiles(shard).write(records)
        if journal:
            self._journals.pop(shard.path).delete()
        self.failures.pop(shard.path, None)
        retries = {f"distill/retry/{reason}": float(count) for reason, count in self.teacher.retries.items()}
        metrics = self.trace_counts.metrics() | retries | self._usage_metrics()
        self.telemetry.log(metrics, step=self.num_shards_done)

    def finish_over_budget(self, unfinished: Sequence[Shard[Problem]]) -> None:
        """Write the shards that the budget left unfinished, without the samples that it could not pay for.

        Raise BudgetError if the settings ask for a larger share of all samples.
        """
        # A shard without results was not begun before the budget was spent, in this run or an earlier one.
        results = {shard.path: self._unpaid.get(shard.path) or self._not_requested(shard) for shard in unfinished}
        drops = [drop for solved in results.values() for one in solved for drop in one.dropped]
        num_missing = sum(drop.reason == OVER_BUDGET for drop in drops)
        num_all = self.num_problems * self.cfg.samples_per_problem
        num_requested = num_all - num_missing
        assert isinstance(self.cfg.teacher, HttpTeacherConfig), self.cfg.teacher.kind
        publish_from = self.cfg.teacher.runtime.budget.publish_from
        # A plain quotient, because `1 - publish_from` rounds: 9 of 10 samples would be fewer than 0.9 of them.
        if num_requested / num_all < publish_from:
            enough = num_requested * 1000 // num_all / 1000  # rounded down: 2 of 3 are not 0.667
            raise BudgetError(
                f"distill: the budget is spent ({self.usage.tokens:,} tokens, cost {self.usage.cost:,.2f}): "
                f"{num_requested:,} of {num_all:,} samples were requested. All replies are kept: raise "
                "distill.teacher.runtime.budget and run again, and nothing is paid twice; or set its publish_from, now "
                f"{publish_from:g}, to at most {enough:.3f} to go on with what is there"
            )
        for shard in unfinished:
            self._finish(shard, results[shard.path])

    def _not_requested(self, shard: Shard[Problem]) -> list[_Solved]:
        """Return drop records for all samples of a shard."""
        unpaid: list[_Solved] = []
        for problem in shard.items:
            drops = [
                dropped(problem.problem_id, i, step="ask", reason=OVER_BUDGET, detail="not requested")
                for i in range(self.cfg.samples_per_problem)
            ]
            unpaid.append(_Solved(outcomes=tuple(drops), unused=()))
        return unpaid

    def close(self) -> None:
        """Close the journals of the shards in progress."""
        for journal in self._journals.values():
            journal.close()

    def _journal_of(self, shard: Shard[Problem]) -> Journal | None:
        if not self.teacher.is_costly:
            return None
        if shard.path not in self._journals:
            path = ShardFiles(shard).journal
            self._journals[shard.path] = Journal(path, fsync_s=self.cfg.runtime.fsync_s)
        return self._journals[shard.path]

    def _count(self, shard: Shard[Problem], counts: TraceCounts, *, num_failed: int) -> None:
        self.num_shards_done += 1
        self.trace_counts.merge(counts)
        self.budget.count(num_asked=self._num_asked(shard), num_failed=num_failed)

    def _check_complete_share(self) -> None:
        """Raise DataError if too few answers are complete; called before the newest shard is written as done."""
        is_last = self.trace_counts.num_asked == self.num_problems * self.cfg.samples_per_problem
        if is_last or self.trace_counts.num_asked >= _EARLY_STOP_FROM:
            floor_warnings(self.trace_counts, self.cfg.runtime, with_selected=is_last)

    def _num_asked(self, shard: Shard[Problem]) -> int:
        return len(shard.items) * self.cfg.samples_per_problem

    def _check_failures(self, shard: Shard[Problem], new: Sequence[Dropped]) -> None:
        failures = self.failures.setdefault(shard.path, [])
        failures.extend(new)
        num_asked = self._num_asked(shard)
        if failures and self.budget.is_exceeded(num_asked=num_asked, num_failed=len(failures)):
            raise too_many_failures(failures, num_asked=num_asked, max_failure_rate=self.cfg.max_failure_rate)

    def _note(self) -> str:
        if not self.teacher.is_costly:
            return "problems distilled"
        return f"problems distilled{self.progress.text(self.usage, self.num_problems)}"

    def _usage_metrics(self) -> dict[str, float]:
        if not self.teacher.is_costly:
            return {}
        return {
            "distill/paid/tokens": self.usage.tokens,
            "distill/paid/cost": self.usage.cost,
            "distill/paid/tokens_per_s": self.progress.tokens_per_s(self.usage),
        }

    def summary(self) -> StageSummary:
        """Return the stage's counts, ledger and warnings; raise DataError if a share is below its floor."""
        trace_counts = self.trace_counts
        counts: dict[str, int | float] = {
            "problems": self.num_problems,
            "traces": trace_counts.num_traces,
            "tokens": trace_counts.num_tokens,
        }
        if trace_counts.num_judged:
            counts["teacher_accuracy"] = round(trace_counts.num_correct.total() / trace_counts.num_judged.total(), 4)
        warnings = floor_warnings(trace_counts, self.cfg.runtime)
        if trace_counts.num_judged and not trace_counts.num_correct:
            num_judged = trace_counts.num_judged.total()
            warnings += (f"none of {num_judged:,} judged answers of the teacher is right: check the references",)
        if self.teacher.is_costly:
            counts |= {"paid_tokens": self.usage.tokens, "cost": round(self.usage.cost, 4)}
            warnings += (*usage_warnings(self.usage, teacher=self.teacher.name), *self.teacher.notes)
        return StageSummary(counts=counts, ledger=trace_counts.ledger(), seeds={"distill": self.seed}, notes=warnings)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together; if one fails, cancel the others before raising."""
    # `gather` alone raises the first error and lets the other requests run on.
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- progress ----
# Measure how fast and at what cost a distillation proceeds.


class Throughput:
    """Measures this run's speed, and estimates the remaining time."""

    def __init__(self) -> None:
        self.num_done = 0
        """Problems, those of earlier runs included."""

    def start(self, used: Usage) -> None:
        """Begin to measure; `used` is what earlier runs used."""
        self._started, self._num_before, self._used_before = time.monotonic(), self.num_done, used

    def tokens_per_s(self, used: Usage) -> float:
        """Return the tokens of replies a second in this run."""
        num_tokens = used.output_tokens - self._used_before.output_tokens
        return num_tokens / max(time.monotonic() - self._started, 1e-9)

    def text(self, used: Usage, num_problems: int) -> str:
        """Return speed, cost and remaining time in words."""
        cost = f", cost {used.cost:,.2f}" if used.cost else ""
        num_new = self.num_done - self._num_before
        if not num_new:
            return cost
        elapsed_s = time.monotonic() - self._started
        left_h = elapsed_s / num_new * (num_problems - self.num_done) / 3600
        return f", {self.tokens_per_s(used):,.0f} tokens/s{cost}, {left_h:.1f} h left"
