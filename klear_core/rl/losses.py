"""Policy losses as one number per token. N: loss tokens of a micro-batch; R: its rows (whole responses).

A loss is a value and a weight F for each token: the gradient of its term is -F * advantage * grad(logp). Both are plain
numbers computed on a bounded log-ratio, and only `token_loss` attaches the gradient, so nothing can become NaN.

| weight F        | r < 1-el, A > 0 | r < 1-el, A < 0 | inside | r > 1+eh, A > 0 | r > 1+eh, A < 0 |
|-----------------|-----------------|-----------------|--------|-----------------|-----------------|
| clip            | r               | 0               | r      | 0               | r               |
| gppo            | r               | bl(1-el)        | r      | bh(1+eh)        | r               |
| cispo           | r               | r               | r      | 1+eh            | 1+eh            |
| cispo two-sided | 1-el            | 1-el            | r      | 1+eh            | 1+eh            |
| + dual clip c   |                 |                 |        |                 | 0 where r > c   |
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import assert_never

import torch
from torch import Tensor

from klear_core.config.rl import CispoConfig, ClipConfig, ErcConfig, GppoConfig, GspoConfig, LossConfig
from klear_core.train.context import ALONE, Context

_MAX_ABS_LOGP = 1e4  # stands in for infinity: no real log-prob is as low, and products with it stay finite
_SMALL = 1e-5  # where the series of k3 and the difference that it stands for are equally exact, to 2e-11
_ENTROPY_FLOOR = 1e-8  # keeps 0/0 of two certain tokens at 1 (ERC's code)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What a loss knows of its tokens, apart from their log-probs and entropies under the policy being trained."""

    old_logp_N: Tensor
    """Of the policy that the ratio is taken against."""
    old_entropy_N: Tensor
    """Of that policy over the vocabulary, nats; read by ERC alone, NaN elsewhere."""
    advantage_N: Tensor
    correction_N: Tensor
    """Factor of value and weight for sampler/learner mismatch; 1 without correction."""
    row_N: Tensor
    """Long: the row of each token, 0 to num_rows - 1. A row never spans two micro-batches."""
    num_rows: int
    context: Context = ALONE
    """The ranks that have other tokens of these rows."""

    def chunk(self, where: slice) -> TrainBatch:
        """The same of some tokens."""
        return replace(self, **{f.name: getattr(self, f.name)[where] for f in fields(self) if f.name.endswith("_N")})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss before reduction. All but `loss_N` are detached; masks are bool."""

    loss_N: Tensor
    weight_N: Tensor
    """F of the table above: what the token's advantage pull is multiplied with."""
    log_ratio_N: Tensor
    """New over old, bounded."""
    low_N: Tensor
    """Negative tokens below the range."""
    high_N: Tensor
    """Positive tokens above the range."""
    clipped_N: Tensor
    """Tokens whose weight the loss made another than their ratio (in gspo their row's); only in cispo not just low, high and dual ones."""
    dual_N: Tensor
    """Negative tokens capped by the dual clip."""
    erc_N: Tensor
    """Tokens whose gradient the entropy ratio removed."""
    bounded_N: Tensor
    """Tokens whose log-ratio was cut to its bound."""


def token_loss(
    logp_N: Tensor, entropy_N: Tensor, batch: TrainBatch, cfg: LossConfig, *, erc: ErcConfig | None, max_log_ratio: float
) -> TokenLoss:
    """Unreduced loss: finite for every log-prob, infinite ones too. NaN stays NaN, for it is a fault to be noticed."""
    logp_N = logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP)
    unbounded_N = log_ratio(logp_N.detach(), batch.old_logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP))
    log_ratio_N = unbounded_N.clamp(-max_log_ratio, max_log_ratio)
    weights = _weights(log_ratio_N, logp_N.detach(), batch, cfg)
    erc_N = torch.zeros_like(weights.low_N) if erc is None else _entropy_moved(entropy_N.detach(), batch.old_entropy_N, erc)
    weight_N = weights.weight_N.masked_fill(erc_N, 0) * batch.correction_N

    carry_N = logp_N - logp_N.detach()  # 0; its gradient is that of logp
    return TokenLoss(
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
    """log(new / old); 0 where both are the same infinity."""
    return torch.where(logp_N == old_logp_N, 0, logp_N - old_logp_N)


def k3(log_ratio_N: Tensor) -> Tensor:
    """The low-variance estimate r - 1 - log r of a KL divergence, in float64: never negative, right to ten digits, as is its gradient.

    For small x it is about x^2 / 2, all of which exp(x) - 1 - x rounds away: in float32 from x = 1e-4 down, in float64 from 1e-8.
    """
    x_N = log_ratio_N.double()
    series_N = x_N.square() / 2 * (1 + x_N / 3)  # the next term is x^2 / 12 of this
    return torch.where(x_N.abs() < _SMALL, series_N, torch.expm1(x_N) - x_N)


def at_step(cfg: LossConfig, step: int) -> LossConfig:
    """The loss with its betas at this RL step (from 0): a straight line from the start of the schedule to its end."""
    if not isinstance(cfg, GppoConfig) or cfg.schedule is None or step < cfg.schedule.start_step:
        return cfg
    span = cfg.schedule.end_step - cfg.schedule.start_step
    done = min(1.0, (step - cfg.schedule.start_step) / span) if span else 1.0
    beta_low = cfg.beta_low + done * (cfg.schedule.beta_low - cfg.beta_low)
    beta_high = cfg.beta_high + done * (cfg.schedule.beta_high - cfg.beta_high)
    return cfg.model_copy(update={"beta_low": beta_low, "beta_high": beta_high, "schedule": None})


def joins_tokens(cfg: LossConfig) -> bool:
    """Whether a token's loss depends on other tokens of its row, so that it cannot be formed chunk by chunk."""
    return isinstance(cfg, GspoConfig)


def row_mean(x_N: Tensor, batch: TrainBatch) -> Tensor:
    """Each token gets the mean of the plain numbers `x` over its row, wherever in the context the row's other tokens are."""
    both_N2 = torch.stack([x_N, torch.ones_like(x_N)], dim=1).double()  # a row may have tens of thousands of tokens
    total_R, count_R = batch.context.sum(both_N2.new_zeros(batch.num_rows, 2).index_add(0, batch.row_N, both_N2)).unbind(1)
    mean_R = total_R / count_R.clamp(min=1)  # a row without tokens is never looked up
    return mean_R.to(x_N.dtype)[batch.row_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Value and weight of each token, and where they are not simply the ratio."""

    value_N: Tensor
    weight_N: Tensor
    low_N: Tensor
    high_N: Tensor
    clipped_N: Tensor
    dual_N: Tensor


def _weights(log_ratio_N: Tensor, logp_N: Tensor, batch: TrainBatch, cfg: LossConfig) -> _Weights:
    match cfg:
        case GppoConfig():
            return _gppo(log_ratio_N.exp(), batch.advantage_N, cfg)
        case ClipConfig():
            return _clip(log_ratio_N.exp(), batch.advantage_N, cfg)
        case CispoConfig():
            return _cispo(log_ratio_N.exp(), logp_N, batch.advantage_N, cfg)
        case GspoConfig():
            return _clip(row_mean(log_ratio_N, batch).exp(), batch.advantage_N, cfg)
        case _:
            assert_never(cfg)


def _gppo(ratio_N: Tensor, advantage_N: Tensor, cfg: GppoConfig) -> _Weights:
    """Cap how much a token weighs, never whether it pulls; the betas scale clipped tokens only, value and gradient alike."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    weight_N = torch.where(high_N, cfg.beta_high * (1 + cfg.eps_high), ratio_N)
    weight_N = torch.where(low_N, cfg.beta_low * (1 - cfg.eps_low), weight_N)
    weights = _Weights(
        value_N=weight_N, weight_N=weight_N, low_N=low_N, high_N=high_N, clipped_N=low_N | high_N, dual_N=torch.zeros_like(low_N)
    )
    return _dual_clipped(weights, ratio_N, advantage_N, cfg.dual_clip)


def _clip(ratio_N: Tensor, advantage_N: Tensor, cfg: ClipConfig | GspoConfig) -> _Weights:
    """PPO's minimum of clipped and unclipped: outside the range a token keeps its value and stops pulling."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    value_N = torch.where(high_N, 1 + cfg.eps_high, torch.where(low_N, 1 - cfg.eps_low, ratio_N))
    weight_N = ratio_N.masked_fill(low_N | high_N, 0)
    weights = _Weights(
        value_N=value_N, weight_N=weight_N, low_N=low_N, high_N=high_N, clipped_N=low_N | high_N, dual_N=torch.zeros_like(low_N)
    )
    return _dual_clipped(weights, ratio_N, advantage_N, cfg.dual_clip)


def _cispo(ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, cfg: CispoConfig) -> _Weights:
    """REINFORCE with a clipped weight: both signs of the advantage are treated alike."""
    low_N, high_N = _outside(ratio_N, advantage_N, cfg)
    weight_N = ratio_N.clamp(min=1 - cfg.eps_low if cfg.two_sided else None, max=1 + cfg.eps_high)
    return _Weights(
        value_N=weight_N * logp_N,
        weight_N=weight_N,
        low_N=low_N,
        high_N=high_N,
        clipped_N=weight_N != ratio_N,
        dual_N=torch.zeros_like(low_N),
    )


def _outside(ratio_N: Tensor, advantage_N: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """(low, high): tokens that have moved out of the range in the direction in which their advantage pulls."""
    return (advantage_N < 0) & (ratio_N < 1 - cfg.eps_low), (advantage_N > 0) & (ratio_N > 1 + cfg.eps_high)


def _dual_clipped(weights: _Weights, ratio_N: Tensor, advantage_N: Tensor, bound: float | None) -> _Weights:
    """Dual clip (arXiv 1912.09729): a negative token far above its old probability costs at most `bound` advantages."""
    if bound is None:
        return weights
    dual_N = (advantage_N < 0) & (ratio_N > bound)
    value_N = torch.where(dual_N, bound, weights.value_N)
    weight_N = weights.weight_N.masked_fill(dual_N, 0)
    return replace(weights, value_N=value_N, weight_N=weight_N, clipped_N=weights.clipped_N | dual_N, dual_N=dual_N)


def _entropy_moved(entropy_N: Tensor, old_entropy_N: Tensor, erc: ErcConfig) -> Tensor:
    ratio_N = (entropy_N + _ENTROPY_FLOOR) / (old_entropy_N + _ENTROPY_FLOOR)
    return ~((ratio_N > erc.low) & (ratio_N < erc.high))
