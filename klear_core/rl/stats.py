"""What happened to the tokens of an RL step's updates, summed up on the device and read once at its end. N: loss tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klear_core.config.rl import LossConfig
from klear_core.rl.losses import TokenLoss, TrainBatch
from klear_core.train.parallel import World

_SHARES = {
    "rl/entropy/mean": "entropy",
    "rl/ratio/mean": "ratio",
    "rl/ratio/bounded_frac": "bounded",
    "rl/clip/low_frac": "low",
    "rl/clip/high_frac": "high",
    "rl/clip/dual_frac": "dual",
    "rl/clip/erc_frac": "erc",
    "rl/outside/positive_below_frac": "positive_below",
    "rl/outside/negative_above_frac": "negative_above",
    "rl/mismatch/truncated_frac": "truncated",
    "rl/mismatch/masked_frac": "masked",
}
"""Metrics that are a column's mean over all tokens."""
_SUMS = ("tokens", *_SHARES.values(), "pull", "pull_of_clipped")


class TokenStats:
    """Sums and extremes over the tokens of an update or a step, on this rank until they are taken `over` all."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._extremes = torch.full((2,), -math.inf, device=device)  # of minus the log-ratio, and of the log-ratio

    def add(
        self, token: TokenLoss, batch: TrainBatch, entropy_N: Tensor, scale_N: Tensor, cfg: LossConfig, *, truncate_at: float | None
    ) -> None:
        """Count one chunk of tokens; `scale_N` is what each counts in the loss, `truncate_at` where its correction was cut."""
        if token.loss_N.numel() == 0:
            return
        ratio_N = token.log_ratio_N.exp()
        pull_N = (token.weight_N * batch.advantage_N * scale_N).abs()  # the size of the loss's gradient by the token's log-prob
        columns = {
            "tokens": torch.ones_like(ratio_N),
            "entropy": entropy_N,
            "ratio": token.log_ratio_N.double().exp(),
            "bounded": token.bounded_N,
            "low": token.low_N,
            "high": token.high_N,
            "dual": token.dual_N,
            "erc": token.erc_N,
            "positive_below": (batch.advantage_N > 0) & (ratio_N < 1 - cfg.eps_low),
            "negative_above": (batch.advantage_N < 0) & (ratio_N > 1 + cfg.eps_high),
            "truncated": torch.zeros_like(token.low_N) if truncate_at is None else batch.correction_N == truncate_at,
            "masked": batch.correction_N == 0,
            "pull": pull_N,
            "pull_of_clipped": pull_N * token.clipped_N,
        }
        self._sums += torch.stack([columns[name].double() for name in _SUMS]).sum(dim=1)
        extremes = torch.stack([-token.log_ratio_N.min(), token.log_ratio_N.max()])
        self._extremes = torch.maximum(self._extremes, extremes)

    def merge(self, other: TokenStats) -> None:
        """Count the tokens of `other` too."""
        self._sums += other._sums
        self._extremes = torch.maximum(self._extremes, other._extremes)

    def over(self, world: World) -> TokenStats:
        """Those of all ranks together; every rank must call."""
        total = TokenStats(world.device)
        total._sums, total._extremes = world.sum(self._sums), world.max(self._extremes)
        return total

    def metrics(self) -> dict[str, float]:
        """Means over all tokens, the extremes of the ratio, and the clipped tokens' share of the pull. Empty if there was no token."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        if sums["tokens"] == 0:
            return {}
        return {name: sums[column] / sums["tokens"] for name, column in _SHARES.items()} | {
            "rl/ratio/min": math.exp(-self._extremes[0].item()),
            "rl/ratio/max": math.exp(self._extremes[1].item()),
            "rl/clip/pull_frac": sums["pull_of_clipped"] / sums["pull"] if sums["pull"] else 0.0,
        }
