"""Traces and settings for the tests of SFT."""

from __future__ import annotations

from pathlib import Path

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.config.train import CheckpointConfig, SftConfig, SftOptimConfig, SftRuntime, TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base
from klear_core.types import Difficulty, Domain, FinishReason, Outcome, TeacherTrace, Verdict, problem_id_of

TINY = TinyModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=24)


def trace(
    question: str,
    reasoning: str = "1+1=2",
    answer: str = "\\boxed{2}",
    *,
    finish_reason: FinishReason = "stop",
    source: str = "chain",
) -> TeacherTrace:
    return TeacherTrace(
        problem_id=problem_id_of(question, Domain.MATH),
        question=question,
        difficulty=Difficulty.EASY,
        source=source,
        teacher="t",
        sample_idx=0,
        reasoning=reasoning,
        answer=answer,
        finish_reason=finish_reason,
        num_tokens=3,
        verdict=Verdict(outcome=Outcome.SCORED, score=1.0),
        prompt_version="1",
    )


def sums(count: int) -> list[TeacherTrace]:
    """a + b for many a, b: rows of slightly different lengths."""
    pairs = [(i % 40, 7 * i // 40) for i in range(count)]
    return [trace(f"{a}+{b} = ?", f"{a}+{b}={a + b}", f"\\boxed{{{a + b}}}") for a, b in pairs]


def inputs(folder: Path, *, num_traces: int = 40, seed: int = 0) -> tuple[Path, Path]:
    """(model artifact, traces artifact)."""
    (folder / "base").mkdir(parents=True)
    prepare_base(TINY, seed=seed, workdir=folder / "base", telemetry=NullTelemetry())
    all_traces = sums(num_traces)
    for shard in range(2):
        write_shard(folder / "traces" / "traces" / f"{shard_name(shard, 2)}", all_traces[shard::2])
    return folder / "base", folder / "traces"


def config(*, every_steps: int = 3, num_workers: int = 1, context_parallel: int = 1, **changes: object) -> SftConfig:
    workers = {"num_workers": num_workers, "context_parallel": context_parallel}
    runtime = SftRuntime(device="cpu", checkpoint=CheckpointConfig(every_steps=every_steps), **workers)
    settings = {
        "optim": SftOptimConfig(lr=4e-3, min_lr_ratio=0.05, warmup_steps=3, weight_decay=0.01),
        "num_epochs": 2,
        "rows_per_step": 8,
        "validation_frac": 0.1,
        "eval_every_steps": 4,
        "dtype": "float32",
        "runtime": runtime,
    }
    return SftConfig.model_validate(settings | changes)
