"""Evaluations that nobody made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klear_core.config.evaluate import EvaluateSamplingConfig, TorchEngineConfig
from klear_core.scores import DecodingProfile, EvalReport, Range, Score, write_reports


def write_scores(folder: Path, *scores: float, names: Sequence[str] = ("b0", "b1", "b2", "b3")) -> None:
    """Write the reports of an evaluation, of one benchmark a score."""
    decoding = DecodingProfile(sampling=EvaluateSamplingConfig(), engine=TorchEngineConfig(), seed_policy="any")
    reports = tuple(
        EvalReport(
            benchmark=name,
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
        for name, score in zip(names, scores, strict=False)
    )
    write_reports(folder, reports)
