"""Decide whether a distillation has enough traces to continue, and explain why if it has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from klear_core.artifacts.floors import check_floor
from klear_core.config.distill import DistillRuntime
from klear_core.distill.teacher import Usage
from klear_core.distill.trace_counts import TraceCounts
from klear_core.errors import DataError, JudgeError, TeacherError
from klear_core.types import Dropped

_REMEDIES = {
    "no_reasoning": "The teacher must return its reasoning, as reasoning_content or in <think> tags: "
    "serve it with a reasoning parser",
    "no_answer": "The teacher must answer after its reasoning: see what it returns to one request",
    "truncated": "Raise distill.teacher.max_tokens (sampling.max_new_tokens of a local teacher), or set "
    "distill.select.keep_truncated = true",
    "over_budget": "Raise distill.teacher.runtime.budget and run again: nothing is paid twice",
}
"""Remedy to name in the message, by the most common reason of loss."""


def floor_warnings(
    trace_counts: TraceCounts, runtime: DistillRuntime, *, with_selected: bool = True
) -> tuple[str, ...]:
    """Return warnings about shares below `warn_below`; raise DataError for one below `stop_below` or empty."""
    complete = trace_counts.complete()
    main_reason = max(complete.lost, key=complete.lost.__getitem__, default="")
    remedy = _REMEDIES.get(main_reason, "Remove that cause first; the lost answers are then requested again")
    warnings = check_floor(complete, runtime.complete, key="distill.runtime.complete", remedy=remedy)
    if with_selected:
        remedy = "Check the references, or let distill.select keep wrong answers too"
        warnings += check_floor(
            trace_counts.selected(), runtime.selected, key="distill.runtime.selected", remedy=remedy
        )
    return warnings


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
