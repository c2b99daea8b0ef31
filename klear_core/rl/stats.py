"""What happened to the tokens of an RL step, summed up on the device and read once at its end. N: loss tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klear_core.config.rl import LossConfig
from klear_core.rl.losses import TokenLoss, TrainBatch
from klear_core.train.parallel import World

_SUMS = (
    "tokens",
    "entropy",
    "ratio",
    "low",
    "high",
    "dual",
    "erc",
    "bounded",
    "corrected",
    "positive_below",
    "negative_above",
    "pull",
    "pull_of_clipped",
)


class TokenStats:
    """Sums and extremes over all tokens of a step, on this rank until they are taken `over` all."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._extremes = torch.full((2,), -math.inf, device=device)  # of minus the log-ratio, and of the log-ratio

    def add(self, token: TokenLoss, batch: TrainBatch, entropy_N: Tensor, cfg: LossConfig) -> None:
        """Count one chunk of tokens."""
        if token.loss_N.numel() == 0:
            return
        ratio_N = token.log_ratio_N.exp()
        is_below_N, is_above_N = ratio_N < 1 - cfg.eps_low, ratio_N > 1 + cfg.eps_high
        pull_N = (token.weight_N * batch.advantage_N).abs()  # the size of the token's gradient with respect to its log-prob
        is_clipped_N = token.low_N | token.high_N | token.dual_N
        columns = (
            torch.ones_like(ratio_N),
            entropy_N,
            ratio_N,
            token.low_N,
            token.high_N,
            token.dual_N,
            token.erc_N,
            token.bounded_N,
            batch.correction_N != 1,
            is_below_N & (batch.advantage_N > 0),
            is_above_N & (batch.advantage_N < 0),
            pull_N,
            pull_N * is_clipped_N,
        )
        self._sums += torch.stack([c.to(torch.float32) for c in columns]).sum(dim=1, dtype=torch.float64)
        extremes = torch.stack([-token.log_ratio_N.min(), token.log_ratio_N.max()])
        self._extremes = torch.maximum(self._extremes, extremes)

    def over(self, world: World) -> TokenStats:
        """Those of all ranks together; every rank must call."""
        total = TokenStats(world.device)
        total._sums, total._extremes = world.sum(self._sums), world.max(self._extremes)
        return total

    def metrics(self) -> dict[str, float]:
        """Shares of all tokens, and the extremes. Empty if there was no token."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        tokens = sums["tokens"]
        if tokens == 0:
            return {}
        return {
            "rl/entropy/mean": sums["entropy"] / tokens,
            "rl/ratio/mean": sums["ratio"] / tokens,
            "rl/ratio/min": math.exp(-self._extremes[0].item()),
            "rl/ratio/max": math.exp(self._extremes[1].item()),
            "rl/ratio/bounded_frac": sums["bounded"] / tokens,
            "rl/clip/low_frac": sums["low"] / tokens,
            "rl/clip/high_frac": sums["high"] / tokens,
            "rl/clip/dual_frac": sums["dual"] / tokens,
            "rl/clip/erc_frac": sums["erc"] / tokens,
            "rl/clip/pull_frac": sums["pull_of_clipped"] / max(sums["pull"], 1e-30),
            "rl/outside/positive_below_frac": sums["positive_below"] / tokens,
            "rl/outside/negative_above_frac": sums["negative_above"] / tokens,
            "rl/mismatch/corrected_frac": sums["corrected"] / tokens,
        }
