"""Select the traces to train on; wrong ones stay unless a policy drops them (Klear-Reasoner section 3.1)."""

from __future__ import annotations

from collections.abc import Collection

from klear_core.config.distill import IncompleteReason, SelectConfig
from klear_core.types import Dropped, Outcome, TeacherReply, TeacherTrace


def defect_of(reply: TeacherReply | TeacherTrace) -> str:
    """Return what is missing in a reply: `refused`, `empty`, `truncated`, `no_reasoning` or `no_answer`; else ""."""
    # The finish reason first: a reply that ran out of tokens often lacks an answer too, and needs another remedy.
    if reply.finish_reason == "content_filter":
        return "refused"
    if reply.finish_reason == "length":
        return "truncated"
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
