"""What is reported of a step's tokens, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from rl_builders import train_batch

from klear_core.config.losses import AspoConfig, CispoConfig, ErcConfig, GppoConfig, LossConfig
from klear_core.rl.losses import token_loss
from klear_core.rl.step_metrics import TokenStats

CPU = torch.device("cpu")


def stats_of(
    ratios: list[float],
    advantages: list[float],
    cfg: LossConfig,
    *,
    scales: list[float] | None = None,
    corrections: list[float] | None = None,
    truncate_at: float | None = None,
    entropies: list[tuple[float, float]] | None = None,
) -> dict[str, float]:
    """`entropies` are (old, new)."""
    num = len(ratios)
    old_logp_N = torch.full((num,), -9.0)
    old_entropy_N, entropy_N = torch.tensor(entropies or [(1.0, 1.0)] * num).unbind(1)
    batch = train_batch(
        old_logp_N,
        torch.tensor(advantages),
        old_entropy_N=old_entropy_N,
        correction_N=torch.tensor(corrections or [1.0] * num),
        scale_N=torch.tensor(scales or [1.0] * num),
    )
    _, token = token_loss(
        old_logp_N + torch.tensor(ratios).log(), entropy_N, batch, cfg, erc=ErcConfig(), max_log_ratio=3.0
    )
    stats = TokenStats(CPU)
    stats.add(token, batch, entropy_N, cfg, truncate_at=truncate_at)
    return stats.metrics()


def test_every_share_is_of_all_tokens() -> None:
    """Six tokens; the last one's ratio of e^4 is cut to e^3, the fifth is over the dual clip and of a masked sequence."""
    metrics = stats_of(
        [0.5, 0.5, 3.0, 3.0, 12.0, math.exp(4)],
        [1.0, -1.0, 1.0, -1.0, -1.0, 1.0],
        GppoConfig(dual_clip=10),
        scales=[1, 1, 2, 1, 1, 1],
        corrections=[1, 1, 1.1, 1, 0, 1],
        truncate_at=1.1,
        entropies=[(0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.8, 0.4), (0.5, 0.5), (0.6, 0.6)],
    )
    pulls = [0.5, 0.8, 2 * 1.28 * 1.1, 0, 0, 1.28]  # the fourth is stopped by its entropy
    assert metrics == pytest.approx(
        {
            "rl/entropy/mean": 2.1 / 6,
            "rl/ratio/mean": (19 + math.exp(3)) / 6,
            "rl/ratio/min": 0.5,
            "rl/ratio/max": math.exp(3),
            "rl/ratio/bounded_frac": 1 / 6,
            "rl/clip/low_frac": 1 / 6,
            "rl/clip/high_frac": 2 / 6,
            "rl/clip/dual_frac": 1 / 6,
            "rl/clip/erc_frac": 1 / 6,
            "rl/clip/masked_frac": 0,
            "rl/clip/positive_frac": 2 / 6,
            "rl/clip/negative_frac": 2 / 6,
            "rl/weight/positive": (0.5 + 1.28 * 1.1 + 1.28) / 3,
            "rl/weight/negative": 0.8 / 3,
            "rl/clip/pull_frac": (pulls[1] + pulls[2] + pulls[5]) / sum(pulls),
            "rl/outside/positive_below_frac": 1 / 6,
            "rl/outside/negative_above_frac": 2 / 6,
            "rl/mismatch/truncated_frac": 1 / 6,
            "rl/mismatch/masked_frac": 1 / 6,
        },
        rel=1e-5,
    )


def test_the_pull_of_clipped_tokens_is_of_those_that_the_loss_clips() -> None:
    """One-sided cispo lets the first token weigh its ratio of 0.5, and cuts the second from 3 to 1.28."""
    metrics = stats_of([0.5, 3.0], [-1.0, -1.0], CispoConfig())
    assert metrics["rl/clip/pull_frac"] == pytest.approx(1.28 / (0.5 + 1.28))


def test_the_pull_counts_tokens_as_the_loss_does() -> None:
    """Averaged row by row, a token of a row of ten counts a tenth of one that is alone in its row."""
    metrics = stats_of([0.5, 1.0], [-1.0, -1.0], GppoConfig(), scales=[1.0, 0.1])
    assert metrics["rl/clip/pull_frac"] == pytest.approx(0.8 / 0.9)


def test_the_mean_weight_of_a_sign_is_of_its_tokens_alone() -> None:
    metrics = stats_of([0.25, 0.5, 2.0], [1.0, 1.0, -1.0], AspoConfig())
    assert (metrics["rl/weight/positive"], metrics["rl/weight/negative"]) == pytest.approx((2.5, 2))
    assert "rl/weight/negative" not in stats_of([0.5], [1.0], AspoConfig())


def test_no_pull_and_no_token_are_no_trouble() -> None:
    assert stats_of([0.5], [0.0], GppoConfig())["rl/clip/pull_frac"] == 0
    assert TokenStats(CPU).metrics() == {}
