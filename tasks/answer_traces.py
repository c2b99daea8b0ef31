"""Show single answers in MLflow, as traces of a stage's run: rollouts of RL with the parts of their reward, and every
answer that the gate found right of one model and wrong of the other.

The artifact has them in a file; nothing else is traced. A trace's id follows from the run and its place in the file, so
that a record that is delivered twice makes no second trace.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from klear_core.artifacts.records import read_shard
from klear_core.evaluate.compare.paired import FlippedAnswer
from klear_core.evaluate.compare.promotion import FLIPPED_FILE
from klear_core.scores import SHOWN_FILE
from klear_core.types import EvalSample

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

_MOST_ROLLOUTS, _MOST_FLIPS = 50, 2000
"""Traces of one artifact, evenly from those in its file; each takes 10 ms."""
_ATTRIBUTE_CHARS = 50_000
_SPANS_A_REQUEST = 50
Value = str | float | bool
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTrace:
    """A question, the answers to it, and what was found of them."""

    name: str
    question: str
    answers: Mapping[str, str]
    """Texts of one or several answers, by whose they are."""
    found: Mapping[str, Value]
    """Verdicts and rewards, shown as assessments."""
    tags: Mapping[str, str] = field(default_factory=dict)


def answer_traces(artifact: Path) -> list[AnswerTrace]:
    """Return the traces of an artifact folder; none for most kinds."""
    return [*_rollouts(artifact), *_flips(artifact)]


def _rollouts(artifact: Path) -> Iterator[AnswerTrace]:
    if not (artifact / SHOWN_FILE).is_file():
        return
    from klear_core.rl.step_metrics import ShownRollout  # imports torch

    for shown in _evenly(read_shard(artifact / SHOWN_FILE, ShownRollout), _MOST_ROLLOUTS):
        found: dict[str, Value] = {"verdict": shown.outcome.value, "score": shown.score, "reward": shown.reward}
        if shown.parts.is_positive is not None:
            found["right_and_well_formed"] = shown.parts.is_positive
        found |= {f"reward_term/{name}": value for name, value in shown.parts.terms.items()}
        found |= {f"reward/{name}": value for name, value in shown.parts.custom.items() if value is not None}
        yield AnswerTrace(
            name=f"rollout, step {shown.step}",
            question=shown.question,
            answers={"policy": shown.response},
            found=found,
            tags={
                "klear.step": str(shown.step),
                "klear.problem": shown.problem_id,
                "klear.tokens": str(shown.num_tokens),
                "klear.finish_reason": shown.finish_reason,
            },
        )


def _evenly(rows: list[T], most: int) -> list[T]:
    return rows[:: max(1, -(-len(rows) // most))]


def _flips(artifact: Path) -> Iterator[AnswerTrace]:
    if not (artifact / FLIPPED_FILE).is_file():
        return
    for flipped in _evenly(read_shard(artifact / FLIPPED_FILE, FlippedAnswer), _MOST_FLIPS):
        before, after = flipped.before, flipped.after
        yield AnswerTrace(
            name="fixed" if after.verdict.is_correct else "broken",
            question=after.question,
            answers={"before": before.response, "after": after.response},
            found={"before": _verdict(before), "after": _verdict(after), "fixed": after.verdict.is_correct},
            tags={
                "klear.benchmark": after.benchmark,
                "klear.problem": after.problem_id,
                "klear.sample": f"{after.decoding} {after.sample_idx}",
            },
        )


def _verdict(sample: EvalSample) -> str:
    return (
        "right" if sample.verdict.is_correct else f"wrong ({sample.verdict.outcome.value}, {sample.num_tokens} tokens)"
    )


# ---- MLflow's form ----


def send_traces(
    traces: Sequence[AnswerTrace], *, tracking_uri: str, experiment_id: str, run_id: str, stage: str, at_ms: int
) -> None:
    """Send traces to MLflow, linked with a run. An error leaves those that were sent, which a later call repeats."""
    from mlflow.tracing.client import TracingClient

    client = TracingClient(tracking_uri)
    spans = []
    for i, trace in enumerate(traces):
        number = hashlib.blake2b(f"{run_id}/{i}".encode(), digest_size=16).digest()
        # A millisecond apart, so that the page shows them in the file's order.
        info, span = _in_form(trace, number, experiment_id=experiment_id, run_id=run_id, stage=stage, at_ms=at_ms + i)
        client.start_trace(info)
        spans.append(span)
    for start in range(0, len(spans), _SPANS_A_REQUEST):
        client.log_spans(experiment_id, spans[start : start + _SPANS_A_REQUEST])


def _in_form(
    trace: AnswerTrace, number: bytes, *, experiment_id: str, run_id: str, stage: str, at_ms: int
) -> tuple[TraceInfo, Span]:
    from mlflow.entities import AssessmentSource, Feedback, Span, TraceInfo, TraceLocation, TraceState

    trace_id = f"tr-{number.hex()}"
    asked = {"question": trace.question[:_ATTRIBUTE_CHARS]}
    answered = {whose: text[-_ATTRIBUTE_CHARS:] for whose, text in trace.answers.items()}  # the end has the answer
    judge = AssessmentSource(source_type="CODE", source_id="klear")
    times: dict[str, Any] = {"create_time_ms": at_ms, "last_update_time_ms": at_ms}
    found = []
    for name, value in trace.found.items():
        feedback = Feedback(name=name, value=value, source=judge, trace_id=trace_id, **times)
        feedback.assessment_id = f"a-{hashlib.blake2b(f'{trace_id}/{name}'.encode(), digest_size=16).hexdigest()}"
        found.append(feedback)
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=at_ms,
        execution_duration=0,
        state=TraceState.OK,
        request_preview=trace.question[:1000],
        response_preview=" | ".join(text[-500:] for text in trace.answers.values()),
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags={"mlflow.traceName": trace.name, "klear.stage": stage, **trace.tags},
        assessments=found,
    )
    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "LLM",
        "mlflow.spanInputs": asked,
        "mlflow.spanOutputs": answered,
    }
    at_ns = at_ms * 1_000_000
    span = Span.from_dict(
        {
            "trace_id": base64.b64encode(number).decode(),
            "span_id": base64.b64encode(number[:8]).decode(),
            "parent_span_id": "",
            "name": trace.name,
            "start_time_unix_nano": at_ns,
            "end_time_unix_nano": at_ns,
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {name: json.dumps(value) for name, value in attributes.items()},
            "events": [],
        }
    )
    return info, span
