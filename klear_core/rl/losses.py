"""Compute the policy loss of each token. N: loss tokens of a micro-batch.

A loss gives each token a value and a weight F (`weights.py`): the gradient of its term is -F * advantage * grad(logp).
Both are detached numbers computed from a bounded log-ratio, and only `token_loss` attaches the gradient, so no overflow
can produce a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from klear_core.config.losses import (
    AspoConfig,
    CispoConfig,
    ClipConfig,
    DgpoConfig,
    ErcConfig,
    GppoConfig,
    GspoConfig,
    LossConfig,
    SapoConfig,
    TrmConfig,
)
from klear_core.train.context_parallel import ALONE, Context

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
    weights = token_weights(log_ratio_N, logp_N.detach(), batch, cfg)
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


# ---- weights ----
# Compute value and weight F of each token for every kind of policy loss. N: loss tokens of a micro-batch; R: rows.
#
# r is the ratio of new to old probability, A the advantage, el and eh are eps_low and eps_high, bl and bh beta_low and
# beta_high, n and m low_power and high_root of dgpo, c is dual_clip or (aspo) max_weight.
#
# | weight F        | r < 1-el, A > 0 | r < 1-el, A < 0 | inside | r > 1+eh, A > 0 | r > 1+eh, A < 0 |
# |-----------------|-----------------|-----------------|--------|-----------------|-----------------|
# | clip            | r               | 0               | r      | 0               | r               |
# | gppo            | r               | bl(1-el)        | r      | bh(1+eh)        | r               |
# | cispo           | r               | r               | r      | 1+eh            | 1+eh            |
# | cispo two-sided | 1-el            | 1-el            | r      | 1+eh            | 1+eh            |
# | + dual clip c   |                 |                 |        |                 | 0 where r > c   |
# | dgpo            | r               | r(r/(1-el))^n   | r      | r((1+eh)/r)^1/m | r               |
# | aspo, A > 0     | min(1/r, c)     |                 | 1/r    | 0               |                 |
# | aspo, A < 0     |                 | 0               | r      |                 | min(r, c)       |
# | sapo            | 4rs(1-s) with s = sigmoid(tau(r-1)), everywhere                                   |
# | trm             | r; 0 in rows of which any token's (log r)^2 / 2 is above max_divergence           |


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Inputs of a loss per token, apart from log-probs and entropies under the policy being trained."""

    old_logp_N: Tensor
    """Log-probs under the old policy, the denominator of the ratio."""
    old_entropy_N: Tensor
    """Entropy of the old policy over the vocabulary, nats; read only by ERC, NaN without it."""
    advantage_N: Tensor
    correction_N: Tensor
    """Factor on value and weight that corrects the sampler/learner mismatch; 1 without correction."""
    row_N: Tensor
    """Row index of each token, int64, 0 to num_rows - 1. A row never spans two micro-batches."""
    num_rows: int
    cp_group: Context = ALONE
    """Context-parallel ranks that hold the other tokens of these rows."""

    def chunk(self, where: slice) -> TrainBatch:
        """Return the batch restricted to a slice of its tokens."""
        return replace(
            self,
            old_logp_N=self.old_logp_N[where],
            old_entropy_N=self.old_entropy_N[where],
            advantage_N=self.advantage_N[where],
            correction_N=self.correction_N[where],
            row_N=self.row_N[where],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """Value and weight F of each token, and masks of where they differ from the ratio; all detached."""

    value_N: Tensor
    weight_N: Tensor
    low_N: Tensor
    high_N: Tensor
    clipped_N: Tensor
    dual_N: Tensor


def token_weights(log_ratio_N: Tensor, logp_N: Tensor, batch: TrainBatch, cfg: LossConfig) -> TokenWeights:
    """Return value and weight of each token from detached log-ratios and log-probs, all finite but for NaN."""
    match cfg:
        case GppoConfig():
            return _gppo(log_ratio_N.exp(), batch.advantage_N, cfg)
        case ClipConfig():
            return _clip(log_ratio_N.exp(), batch.advantage_N, cfg)
        case CispoConfig():
            return _cispo(log_ratio_N.exp(), logp_N, batch.advantage_N, cfg)
        case GspoConfig():
            # The row's ratio is the geometric mean of its tokens' ratios, the same number for each of them. Its
            # gradient by a token's log-prob is itself over the row's length: `normalise = "sample"` divides by that.
            return _clip(row_mean(log_ratio_N, batch).exp(), batch.advantage_N, cfg)
        case DgpoConfig():
            return _dgpo(log_ratio_N.exp(), batch.advantage_N, cfg)
        case AspoConfig():
            return _aspo(log_ratio_N, batch.advantage_N, cfg)
        case SapoConfig():
            return _sapo(log_ratio_N.exp(), batch.advantage_N, cfg)
        case TrmConfig():
            return _trm(log_ratio_N, batch, cfg)
        case _:
            assert_never(cfg)


def _gppo(ratio_N: Tensor, advantage_N: Tensor, cfg: GppoConfig) -> TokenWeights:
    """Cap a clipped token's weight instead of removing its gradient; the betas scale its value and gradient.

    Klear-Reasoner equations 11 and 17, CE-GPPO equation 8.
    """
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    weight_N = torch.where(high_N, cfg.beta_high * (1 + cfg.eps_high), ratio_N)
    weight_N = torch.where(low_N, cfg.beta_low * (1 - cfg.eps_low), weight_N)
    weights = _ranged(weight_N, weight_N, low_N, high_N)
    return _dual_clipped(weights, ratio_N, advantage_N, cfg.dual_clip)


def _clip(ratio_N: Tensor, advantage_N: Tensor, cfg: ClipConfig | GspoConfig) -> TokenWeights:
    """Take PPO's minimum of clipped and unclipped: a clipped token has the bound as its value and no gradient."""
    # min(r A, clip(r) A) is the clipped branch only where the ratio left the range in A's direction: see `_outside`.
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    value_N = torch.where(high_N, 1 + cfg.eps_high, torch.where(low_N, 1 - cfg.eps_low, ratio_N))
    weight_N = ratio_N.masked_fill(low_N | high_N, 0)
    weights = _ranged(value_N, weight_N, low_N, high_N)
    return _dual_clipped(weights, ratio_N, advantage_N, cfg.dual_clip)


def _cispo(ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, cfg: CispoConfig) -> TokenWeights:
    """Weigh REINFORCE by the clipped ratio, without regard to the sign of the advantage (MiniMax-M1)."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)  # for metrics only: the weight below does not depend on them
    weight_N = ratio_N.clamp(min=1 - cfg.eps_low if cfg.two_sided else None, max=1 + cfg.eps_high)
    return TokenWeights(
        value_N=weight_N * logp_N,  # REINFORCE's surrogate is weight * logp, where PPO's is the ratio
        weight_N=weight_N,
        low_N=low_N,
        high_N=high_N,
        clipped_N=weight_N != ratio_N,
        dual_N=torch.zeros_like(low_N),
    )


def _dgpo(ratio_N: Tensor, advantage_N: Tensor, cfg: DgpoConfig) -> TokenWeights:
    """Let the weight of out-of-range tokens decay from the bound on, without a jump (DGPO, its published code)."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    below_N = ratio_N * (ratio_N / (1 - cfg.eps_low)) ** cfg.low_power
    above_N = ratio_N * ((1 + cfg.eps_high) / ratio_N) ** (1 / cfg.high_root)
    # `where` selects numbers: what the unused branch is for other tokens, even infinite, does not matter.
    weight_N = torch.where(low_N, below_N, torch.where(high_N, above_N, ratio_N))
    return _ranged(weight_N, weight_N, low_N, high_N)


def _aspo(log_ratio_N: Tensor, advantage_N: Tensor, cfg: AspoConfig) -> TokenWeights:
    """Weigh positive tokens by 1/r, so that the least likely are raised most; clip as PPO does, then cap (ASPO)."""
    ratio_N = log_ratio_N.exp()
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    flipped_N = torch.where(advantage_N > 0, -log_ratio_N, log_ratio_N).exp()
    dual_N = flipped_N > cfg.max_weight
    # The cap changes the weight and does not remove it, unlike the dual clip of the other losses.
    capped_N = flipped_N.clamp(max=cfg.max_weight)
    # A clipped token has the value at its bound: there a positive one weighs 1/r, a negative one r.
    value_N = torch.where(high_N, 1 / (1 + cfg.eps_high), torch.where(low_N, 1 - cfg.eps_low, capped_N))
    return TokenWeights(
        value_N=value_N,
        weight_N=capped_N.masked_fill(low_N | high_N, 0),
        low_N=low_N,
        high_N=high_N,
        clipped_N=low_N | high_N | dual_N,
        dual_N=dual_N,
    )


def _sapo(ratio_N: Tensor, advantage_N: Tensor, cfg: SapoConfig) -> TokenWeights:
    """Weigh by the derivative of a sigmoid of the ratio, which is 1 at r = 1 and falls on both sides (SAPO)."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)  # for metrics only: the weight below does not depend on them
    tau_N = torch.full_like(ratio_N, cfg.tau_negative).masked_fill(advantage_N > 0, cfg.tau_positive)
    x_N = tau_N * (ratio_N - 1)
    gate_N = x_N.sigmoid()
    # The value is 4/tau s; its derivative by log(pi) is r times 4 s (1 - s), the weight.
    # sigmoid(-x) is 1 - sigmoid(x) without the cancellation at large x.
    return _ranged(4 / tau_N * gate_N, 4 * ratio_N * gate_N * (-x_N).sigmoid(), low_N, high_N)


def _trm(log_ratio_N: Tensor, batch: TrainBatch, cfg: TrmConfig) -> TokenWeights:
    """Keep the rows all of whose tokens are in the trust region, unclipped, and mask the others whole (TRM).

    Masked rows still count in the mean's denominator. The divergence is k2, (log r)^2 / 2, an estimate of the KL
    divergence that sees changes in both directions.
    """
    ratio_N = log_ratio_N.exp()
    low_N, high_N = _outside(ratio_N, batch.advantage_N, cfg)
    masked_N = row_max(log_ratio_N.square() / 2, batch) > cfg.max_divergence
    weight_N = ratio_N * ~masked_N  # a product, so that a NaN in a masked row stays one
    return TokenWeights(
        value_N=weight_N,
        weight_N=weight_N,
        low_N=low_N,
        high_N=high_N,
        clipped_N=masked_N,
        dual_N=torch.zeros_like(low_N),
    )


def _ranged(value_N: Tensor, weight_N: Tensor, low_N: Tensor, high_N: Tensor) -> TokenWeights:
    """Return weights of which the tokens outside the range in the direction of their advantage count as clipped."""
    return TokenWeights(
        value_N=value_N,
        weight_N=weight_N,
        low_N=low_N,
        high_N=high_N,
        clipped_N=low_N | high_N,
        dual_N=torch.zeros_like(low_N),
    )


def _outside(ratio_N: Tensor, advantage_N: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Return masks (low, high) of tokens that left the clip range in the direction of their advantage."""
    return (advantage_N < 0) & (ratio_N < 1 - cfg.eps_low), (advantage_N > 0) & (ratio_N > 1 + cfg.eps_high)


def _dual_clipped(weights: TokenWeights, ratio_N: Tensor, advantage_N: Tensor, bound: float | None) -> TokenWeights:
    """Apply the dual clip (arXiv 1912.09729): with A < 0 and a ratio above `bound`, value `bound` and no gradient."""
    if bound is None:
        return weights
    # The one quadrant in which clip and gppo leave the weight unbounded.
    dual_N = (advantage_N < 0) & (ratio_N > bound)
    value_N = torch.where(dual_N, bound, weights.value_N)
    weight_N = weights.weight_N.masked_fill(dual_N, 0)
    return replace(weights, value_N=value_N, weight_N=weight_N, clipped_N=weights.clipped_N | dual_N, dual_N=dual_N)


def row_mean(x_N: Tensor, batch: TrainBatch) -> Tensor:
    """Return for each token the mean of the detached `x_N` over its row (collective call within the context)."""
    # One reduction gives sums and counts. In float64, because a row may have tens of thousands of tokens.
    both_N2 = torch.stack([x_N, torch.ones_like(x_N)], dim=1).double()
    here_R2 = both_N2.new_zeros(batch.num_rows, 2).index_add(0, batch.row_N, both_N2)
    # Context-parallel ranks hold other tokens of the same rows, so sums and counts are added before dividing.
    total_R, count_R = batch.cp_group.sum(here_R2).unbind(1)
    mean_R = total_R / count_R.clamp(min=1)  # rows of other micro-batches have no token here and are never looked up
    return mean_R.to(x_N.dtype)[batch.row_N]


def row_max(x_N: Tensor, batch: TrainBatch) -> Tensor:
    """Return for each token the largest of the detached `x_N` in its row (collective call within the context)."""
    here_R = x_N.new_full((batch.num_rows,), -torch.inf).scatter_reduce(0, batch.row_N, x_N.detach(), reduce="amax")
    # Rows of other micro-batches stay at minus infinity and are never looked up.
    return batch.cp_group.max(here_R)[batch.row_N]
