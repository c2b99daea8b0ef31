"""Select the traces to train on; wrong ones stay unless a policy drops them (Klear-Reasoner section 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from klear_core.artifacts.manifest import LedgerStep, ReasonCounts, check_yield
from klear_core.config.distill import DistillRuntime, IncompleteReason, SelectConfig
from klear_core.distill.teachers.teacher import OVER_BUDGET, Usage
from klear_core.errors import DataError, JudgeError, TeacherError
from klear_core.types import Dropped, Outcome, TeacherReply, TeacherTrace


def defect_of(reply: TeacherReply | TeacherTrace) -> str:
    """Return what is missing in a reply, else "": `refused`, `truncated`, `tool_calls`, `other_shape`, `empty`,
    `no_reasoning` or `no_answer`."""
    # The finish reason first: a reply that ran out of tokens often lacks an answer too, and needs another remedy.
    if reply.finish_reason == "content_filter":
        return "refused"
    if reply.finish_reason == "length":
        return "truncated"
    if reply.finish_reason == "tool_calls":
        return "tool_calls"
    if reply.finish_reason == "other":
        return "other_shape"
    if not reply.reasoning:
        return "no_reasoning" if reply.answer else "empty"
    return "" if reply.answer else "no_answer"


def why_incomplete(
    reply: TeacherReply, cfg: SelectConfig, *, keep_incomplete: Collection[IncompleteReason] = ()
) -> str:
    """Return the defect of a reply that must not be used; empty if the reply is complete or the settings keep it."""
    defect = defect_of(reply)
    is_kept = cfg.keep_truncated if defect == "truncated" else defect in keep_incomplete
    has_text = bool(reply.reasoning or reply.answer)
    return "" if is_kept and has_text else defect


def drop_reason(trace: TeacherTrace, cfg: SelectConfig) -> Dropped | None:
    """Return the drop record of a judged trace, or None if it is kept."""
    outcome = trace.verdict.outcome
    if failed_to_judge(trace) and not cfg.keep_unjudged:
        return unjudged(trace)
    if cfg.policy_for(trace.difficulty) == "correct_only" and not trace.verdict.is_correct:
        fault = "unjudged"
        if outcome is Outcome.UNVERIFIABLE:
            fault = "unverifiable"
        elif outcome.counts_for_model:
            fault = "wrong"
        reason = f"{fault}_{trace.difficulty}"
        return dropped(trace.problem_id, trace.sample_idx, step="select", reason=reason, detail=trace.verdict.detail)
    return None


def failed_to_judge(trace: TeacherTrace) -> bool:
    """Return whether the answer should have been judged and was not.

    A judge or sandbox failure says nothing about the answer, so it is neither correct nor wrong. A problem without a
    reference is no failure: its traces are selected like wrong ones, by policies that ask for no right answer.
    """
    outcome = trace.verdict.outcome
    return not outcome.counts_for_model and outcome is not Outcome.UNVERIFIABLE


def unjudged(trace: TeacherTrace) -> Dropped:
    """Return the drop record of a trace whose judge failed; the reason is the verdict's outcome."""
    return dropped(
        trace.problem_id, trace.sample_idx, step="judge", reason=trace.verdict.outcome, detail=trace.verdict.detail
    )


def dropped(problem_id: str, sample_idx: int, *, step: str, reason: str, detail: str) -> Dropped:
    """Return the drop record of one sample."""
    return Dropped(problem_id=problem_id, step=step, reason=reason, detail=f"sample {sample_idx}: {detail}")


# ---- trace counts ----
# Count the samples of distillation: every requested sample is a trace or is dropped for a counted reason.


_TO_COMPLETE = ("ask", "complete", "judge")
STEPS = (*_TO_COMPLETE, "select")
"""Steps that a sample passes: the teacher replies, the reply is complete, it is judged, the policy keeps it."""


class TraceCounts:
    """Counts over finished shards; a resumed run gets the same ones, because it recounts the records in the shards."""

    def __init__(self) -> None:
        self.num_traces = 0
        self.num_tokens = 0
        self.num_correct: Counter[str] = Counter()
        """Number of correct answers by difficulty."""
        self.num_judged: Counter[str] = Counter()
        """Number of answers judged correct or wrong by difficulty, kept or not."""
        self.drops = ReasonCounts()
        self._noted: dict[str, Counter[str]] = {step: Counter() for step in STEPS}

    def add(self, traces: Iterable[TeacherTrace], dropped: Iterable[Dropped]) -> None:
        """Count the records of one shard."""
        for trace in traces:
            self._add_trace(trace)
        for drop in dropped:
            example = f"problem {drop.problem_id}, {drop.reason}, {drop.detail}"
            self.drops.count(drop.step, drop.reason, example=example)
            # Wrong answers that the policy drops were judged too; their reason is `wrong_<difficulty>`.
            kind, _, difficulty = drop.reason.partition("_")
            if drop.step == "select" and kind == "wrong":
                self.num_judged[difficulty] += 1

    def merge(self, later: TraceCounts) -> None:
        """Add the counts of shards that come after those counted so far."""
        self.num_traces += later.num_traces
        self.num_tokens += later.num_tokens
        self.num_correct += later.num_correct
        self.num_judged += later.num_judged
        self.drops.add(later.drops)
        for step in STEPS:
            self._noted[step] += later._noted[step]

    def _add_trace(self, trace: TeacherTrace) -> None:
        self.num_traces += 1
        self.num_tokens += trace.num_tokens
        verdict = trace.verdict
        if defect := defect_of(trace):
            self._noted["complete"][f"{defect}_but_kept"] += 1
        if not verdict.outcome.counts_for_model:
            self._noted["judge"][f"{verdict.outcome}_but_kept"] += 1
            return
        self.num_judged[trace.difficulty] += 1
        if verdict.is_correct:
            self.num_correct[trace.difficulty] += 1
        else:
            self._noted["select"][f"wrong_but_kept_{trace.difficulty}"] += 1

    @property
    def num_asked(self) -> int:
        """Return the number of requested samples in the counted shards."""
        return self.num_traces + self.drops.counts.total()

    def complete(self) -> LedgerStep:
        """Return how many samples have a complete, judged answer."""
        return LedgerStep.of("complete", "trace", num_in=self.num_asked, dropped=self.drops.of(*_TO_COMPLETE))

    def selected(self) -> LedgerStep:
        """Return how many complete, judged answers the policy keeps."""
        num_complete = self.complete().num_out
        return LedgerStep.of("select", "trace", num_in=num_complete, dropped=self.drops.of("select"))

    def ledger(self) -> tuple[LedgerStep, ...]:
        """Return one entry per step, in order; each step's output count is the next one's input count."""
        noted = {step: dict(sorted(counts.items())) for step, counts in self._noted.items()}
        ledger = self.drops.ledger(dict.fromkeys(STEPS, "trace"), num_in=self.num_asked, noted=noted)
        assert ledger[-1].num_out == self.num_traces, (ledger[-1].num_out, self.num_traces)
        return ledger

    def metrics(self) -> dict[str, float]:
        """Return counts and rates so far, by metric name."""
        metrics: dict[str, float] = {
            "distill/trace/count": self.num_traces,
            "distill/trace/tokens_mean": self.num_tokens / max(self.num_traces, 1),
            "distill/request/failed": sum(self.drops.of("ask").values()),
            "distill/reply/incomplete": sum(self.drops.of("complete").values()),
            "distill/judge/failed": sum(self.drops.of("judge").values()),
        }
        if self.num_judged:
            metrics["distill/accuracy/all"] = self.num_correct.total() / self.num_judged.total()
        for difficulty, num_judged in sorted(self.num_judged.items()):
            metrics[f"distill/accuracy/{difficulty}"] = self.num_correct[difficulty] / num_judged
        return metrics


class FailureBudget:
    """Checks the failure rate. Failures in unfinished shards do not persist: a rerun requests those samples again."""

    def __init__(self, max_failure_rate: float) -> None:
        self.max_failure_rate = max_failure_rate
        self._num_asked = 0
        self._num_failed = 0

    def count(self, *, num_asked: int, num_failed: int) -> None:
        """Count a finished shard."""
        self._num_asked += num_asked
        self._num_failed += num_failed

    def is_exceeded(self, *, num_asked: int, num_failed: int) -> bool:
        """Return whether a shard of `num_asked` requests, `num_failed` of them failed, puts the total above the limit.

        The shard's remaining requests count as successes. A shard finishes only within the limit, so that a rerun can
        finish the rest once the cause is fixed.
        """
        return self._num_failed + num_failed > self.max_failure_rate * (self._num_asked + num_asked)


def failures_of(outcomes: Iterable[TeacherTrace | Dropped]) -> list[Dropped]:
    """Return the samples that failed at the teacher or the judge, including those that a setting keeps."""
    found: list[Dropped] = []
    for outcome in outcomes:
        match outcome:
            case Dropped(step="ask" | "judge", reason=reason) if reason != OVER_BUDGET:
                found.append(outcome)
            case TeacherTrace() if failed_to_judge(outcome):
                found.append(unjudged(outcome))
            case _:
                pass
    return found


# ---- checks ----
# Decide whether a distillation has enough traces to continue, and explain why if it has not.


_REMEDIES = {
    "no_reasoning": "The teacher must return its reasoning, as reasoning_content or in <think> tags: "
    "serve it with a reasoning parser",
    "no_answer": "The teacher must answer after its reasoning: see what it returns to one request",
    "truncated": "Raise distill.teacher.max_tokens (sampling.max_new_tokens of a local teacher), or set "
    "distill.select.keep_truncated = true",
    "tool_calls": "No tools are offered to the teacher: serve it without a tool parser, and see what it returns to one "
    "request",
    "other_shape": "The endpoint answers in a shape that is not read (the report names it): serve the teacher by an "
    "OpenAI-compatible server",
    "over_budget": "Raise distill.teacher.runtime.budget and run again: nothing is paid twice",
}
"""Remedy to name in the message, by the most common reason of loss."""


def floor_warnings(
    trace_counts: TraceCounts, runtime: DistillRuntime, *, with_selected: bool = True
) -> tuple[str, ...]:
    """Return warnings about shares below `warn_below`; raise DataError for one below `stop_below` or empty."""
    complete, examples = trace_counts.complete(), trace_counts.drops.examples
    main_reason = max(complete.dropped, key=complete.dropped.__getitem__, default="")
    warnings = check_yield(
        complete,
        "answers of the teacher are complete and judged",
        runtime.complete,
        key="distill.runtime.complete",
        remedy=_REMEDIES.get(main_reason, "Remove that cause first; the lost answers are then requested again"),
        example=next((examples[step] for step in _TO_COMPLETE if step in examples), ""),
    )
    if not with_selected:
        return warnings
    return warnings + check_yield(
        trace_counts.selected(),
        "complete answers are kept by distill.select",
        runtime.selected,
        key="distill.runtime.selected",
        remedy="Check the references, or let distill.select keep wrong answers too",
        example=examples.get("select", ""),
    )


def is_enough(trace_counts: TraceCounts, runtime: DistillRuntime) -> bool:
    """Return whether no share is below its floor."""
    try:
        floor_warnings(trace_counts, runtime)
    except DataError:
        return False
    return True


def usage_warnings(usage: Usage, *, teacher: str) -> tuple[str, ...]:
    """Return warnings about estimated token counts and about seeds that a server may ignore."""
    notes: list[str] = []
    if usage.estimated:
        notes.append(
            f"{usage.estimated:,} of {usage.replies:,} replies of {teacher} came without token counts: tokens "
            f"and cost are "
            "estimated at 4 characters per token"
        )
    if usage.unseeded and usage.unseeded == usage.replies:
        notes.append(
            f"no reply of {teacher} has a system_fingerprint: its server may ignore seeds, and a repeated request may "
            "then give another reply"
        )
    return tuple(notes)


def too_many_failures(
    failures: Sequence[Dropped], *, num_asked: int, max_failure_rate: float
) -> TeacherError | JudgeError:
    """Return the error of a stage with too many failed samples."""
    counts = Counter(failure.reason for failure in failures)
    by_reason = ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
    last = failures[-1]
    error_type = TeacherError if last.step == "ask" else JudgeError
    return error_type(
        f"distill: {len(failures)} of the {num_asked} answers of a shard failed ({by_reason}), "
        f"above distill.max_failure_rate = {max_failure_rate:g}; the last: problem {last.problem_id}, {last.detail}. "
        "Finished shards are kept: fix the cause and run again"
    )
