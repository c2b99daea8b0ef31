"""Evaluations that nobody made."""

from __future__ import annotations

from pathlib import Path

from klear_core.config.engine import TorchEngineConfig
from klear_core.config.evaluate import EvaluateSamplingConfig
from klear_core.scores import DecodingProfile, EvalReport, Range, Score, write_reports


def write_scores(folder: Path, *scores: float) -> None:
    """Write the reports of an evaluation, of one benchmark a score."""
    decoding = DecodingProfile(sampling=EvaluateSamplingConfig(), engine=TorchEngineConfig(), seed_policy="any")
    reports = tuple(
        EvalReport(
            benchmark=f"b{i}",
            decoding=decoding,
            seed=0,
            confidence=0.95,
            num_problems=4,
            num_samples=2,
            avg=Score(value=score, new_problems=Range(low=0, high=1), rerun=None, num_problems=4, num_samples=8),
            pass_at=(),
            greedy=None,
            truncated_frac=0,
            greedy_truncated_frac=None,
            mean_tokens=1,
            unscored={},
            greedy_unscored={},
            unscored_problems=(),
            by_difficulty=(),
        )
        for i, score in enumerate(scores)
    )
    write_reports(folder, reports)
