"""Which traces are learnt from. Wrong ones stay unless a difficulty's policy says otherwise (Klear-Reasoner section 3.1)."""

from __future__ import annotations

from klear_core.config.distill import SelectConfig
from klear_core.types import Dropped, TeacherReply, TeacherTrace


def why_incomplete(reply: TeacherReply, cfg: SelectConfig) -> str:
    """Why a reply is no whole trace: `truncated`, `no_reasoning` or `no_answer`; empty if it is one or is kept by setting."""
    if reply.finish_reason != "stop":
        return "" if cfg.keep_truncated else "truncated"
    if not reply.reasoning:
        return "no_reasoning"
    return "" if reply.answer else "no_answer"


def drop_reason(trace: TeacherTrace, cfg: SelectConfig) -> Dropped | None:
    """Why a judged trace is left out, or None if it is kept."""
    outcome = trace.verdict.outcome
    if not outcome.is_models_doing and not cfg.keep_unjudged:
        return unjudged(trace)
    if cfg.policy_for(trace.difficulty) == "correct_only" and not trace.verdict.is_correct:
        reason = f"{'wrong' if outcome.is_models_doing else 'unjudged'}_{trace.difficulty}"
        return dropped(trace.problem_id, trace.sample_idx, step="select", reason=reason, detail=trace.verdict.detail)
    return None


def unjudged(trace: TeacherTrace) -> Dropped:
    """The record of a trace whose judge failed, by its outcome."""
    return dropped(trace.problem_id, trace.sample_idx, step="judge", reason=trace.verdict.outcome, detail=trace.verdict.detail)


def dropped(problem_id: str, sample_idx: int, *, step: str, reason: str, detail: str) -> Dropped:
    """The record of one left-out sample."""
    return Dropped(problem_id=problem_id, step=step, reason=reason, detail=f"sample {sample_idx}: {detail}")
