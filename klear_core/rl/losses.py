"""Compute the policy loss of each token. N: loss tokens of a micro-batch.

A loss gives each token a value and a weight F (`weights.py`): the gradient of its term is -F * advantage * grad(logp).
Both are detached numbers computed from a bounded log-ratio, and only `token_loss` attaches the gradient, so no overflow
can produce a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from klear_core.config.losses import ErcConfig, GppoConfig, GspoConfig, LossConfig, TrmConfig
from klear_core.rl.weights import TrainBatch, weights_of

_MAX_ABS_LOGP = 1e4  # replaces infinity: no real log-prob is as low, and products with it stay finite
_SMALL = 1e-5  # below it k3 uses its series; here the series and the direct formula are equally accurate, to 2e-11
_ENTROPY_FLOOR = 1e-8  # makes the ratio of two zero entropies 1 instead of 0/0 (ERC's code)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss before reduction. All but `loss_N` are detached; masks are bool."""

    loss_N: Tensor
    weight_N: Tensor
    """F times the mismatch correction; 0 where ERC removed the gradient."""
    log_ratio_N: Tensor
    """log(new / old), clamped to the bound."""
    low_N: Tensor
    """Tokens with a negative advantage and a ratio below the clip range."""
    high_N: Tensor
    """Tokens with a positive advantage and a ratio above the clip range."""
    clipped_N: Tensor
    """Tokens whose weight the loss bounds, decays or removes: `low | high | dual`; in cispo for any sign of A, in gspo
    and trm all tokens of a row."""
    dual_N: Tensor
    """Tokens with a negative advantage capped by the dual clip; in aspo of both signs."""
    erc_N: Tensor
    """Tokens whose gradient entropy-ratio clipping (ERC) removed."""
    bounded_N: Tensor
    """Tokens whose log-ratio was clamped to the bound."""


def token_loss(
    logp_N: Tensor,
    entropy_N: Tensor,
    batch: TrainBatch,
    cfg: LossConfig,
    *,
    erc: ErcConfig | None,
    max_log_ratio: float,
) -> TokenLoss:
    """Return the unreduced loss, finite even for infinite log-probs; NaN stays NaN so that an error is noticed."""
    logp_N = logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP)
    # Detach, because ratio, value and weight are numbers: the gradient flows through `carry_N` alone.
    unbounded_N = log_ratio(logp_N.detach(), batch.old_logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP))
    log_ratio_N = unbounded_N.clamp(-max_log_ratio, max_log_ratio)
    weights = weights_of(log_ratio_N, logp_N.detach(), batch, cfg)
    erc_N = torch.zeros_like(weights.low_N)
    if erc is not None:
        erc_N = _entropy_moved(entropy_N.detach(), batch.old_entropy_N, erc)
    # ERC removes a token's gradient and leaves its value.
    weight_N = weights.weight_N.masked_fill(erc_N, 0) * batch.correction_N

    carry_N = logp_N - logp_N.detach()  # 0; its gradient is that of logp
    return TokenLoss(
        # Negative, since the optimizer minimises and the objective of the papers is maximised.
        loss_N=-batch.advantage_N * (weights.value_N * batch.correction_N + weight_N * carry_N),
        weight_N=weight_N,
        log_ratio_N=log_ratio_N,
        low_N=weights.low_N,
        high_N=weights.high_N,
        clipped_N=weights.clipped_N,
        dual_N=weights.dual_N,
        erc_N=erc_N,
        bounded_N=unbounded_N.abs() > max_log_ratio,
    )


def log_ratio(logp_N: Tensor, old_logp_N: Tensor) -> Tensor:
    """Return log(new / old); 0 where both are the same infinity, whose difference would be NaN."""
    return torch.where(logp_N == old_logp_N, 0, logp_N - old_logp_N)


def k3(log_ratio_N: Tensor) -> Tensor:
    """Return the low-variance KL estimate r - 1 - log r in float64: never negative, and right to ten digits.

    Its gradient is as accurate. With x = log r the estimate is about x^2 / 2 for small x. Computed as exp(x) - 1 - x it
    would be lost to rounding: in float32 from x = 1e-4 down, in float64 from 1e-8.
    """
    x_N = log_ratio_N.double()
    series_N = x_N.square() / 2 * (1 + x_N / 3)  # the omitted next term is x^2 / 12 relative to x^2 / 2
    return torch.where(x_N.abs() < _SMALL, series_N, torch.expm1(x_N) - x_N)


def at_step(cfg: LossConfig, step: int) -> LossConfig:
    """Return the loss with its betas at this RL step (from 0), interpolated linearly over the schedule."""
    if not isinstance(cfg, GppoConfig) or cfg.schedule is None or step < cfg.schedule.start_step:
        return cfg
    span = cfg.schedule.end_step - cfg.schedule.start_step
    done = min(1.0, (step - cfg.schedule.start_step) / span) if span else 1.0
    beta_low = cfg.beta_low + done * (cfg.schedule.beta_low - cfg.beta_low)
    beta_high = cfg.beta_high + done * (cfg.schedule.beta_high - cfg.beta_high)
    return cfg.model_copy(update={"beta_low": beta_low, "beta_high": beta_high, "schedule": None})


def joins_tokens(cfg: LossConfig) -> bool:
    """Return whether a token's loss depends on other tokens of its row and cannot be computed chunk by chunk."""
    return isinstance(cfg, GspoConfig | TrmConfig)


def _entropy_moved(entropy_N: Tensor, old_entropy_N: Tensor, erc: ErcConfig) -> Tensor:
    """Return the mask of tokens whose new entropy over old entropy is outside (low, high) (arXiv 2512.05591)."""
    ratio_N = (entropy_N + _ENTROPY_FLOOR) / (old_entropy_N + _ENTROPY_FLOOR)
    # Both comparisons are false for NaN, so the token keeps its gradient and the loss shows the error.
    return (ratio_N <= erc.low) | (ratio_N >= erc.high)
