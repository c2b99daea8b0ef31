"""Compute the policy loss of each token, by GPPO or another. N: loss tokens of a micro-batch; R: rows.

Every loss has one form. It gives a token a surrogate (as PPO calls what the advantage multiplies) and a weight F, both
plain numbers computed from a bounded log-ratio:

    loss = -A * (surrogate + F * (logp - logp.detach()))      so that its gradient is -F * A * grad(logp)

Only `token_loss` attaches the gradient, so no overflow can produce a NaN. The losses' gradients differ in F alone. In
this table r is the ratio of new to old probability, A the advantage, el and eh are eps_low and eps_high, bl and bh
beta_low and beta_high, n and m low_power and high_root of dgpo, c is dual_clip or (aspo) max_weight:

| F               | r < 1-el, A > 0 | r < 1-el, A < 0 | inside      | r > 1+eh, A > 0 | r > 1+eh, A < 0 |
|-----------------|-----------------|-----------------|-------------|-----------------|-----------------|
| clip            | r               | 0               | r           | 0               | r               |
| gppo            | r               | bl(1-el)        | r           | bh(1+eh)        | r               |
| cispo           | r               | r               | r           | 1+eh            | 1+eh            |
| cispo two-sided | 1-el            | 1-el            | r           | 1+eh            | 1+eh            |
| + dual clip c   |                 |                 |             |                 | 0 where r > c   |
| dgpo            | r               | r(r/(1-el))^n   | r           | r((1+eh)/r)^1/m | r               |
| aspo, A > 0     | min(1/r, c)     |                 | min(1/r, c) | 0               |                 |
| aspo, A < 0     |                 | 0               | min(r, c)   |                 | min(r, c)       |
| sapo            | 4rs(1-s) with s = sigmoid(tau(r-1)), everywhere                                       |
| trm             | r; 0 in rows of which any token's (log r)^2 / 2 is above max_divergence               |
| m2po            | r; 0 if leaving and (log r)^2 >= `LossInputs.m2_cutoff`                               |
| dppo            | r; 0 if leaving and the token's divergence is above its bound                         |
| gspo            | as clip, with the geometric mean of r over the row in place of r                      |

Dual clip is for clip, gppo and gspo. Leaving means that the update leads away from the old policy: A > 0 and r > 1, or
A < 0 and r < 1. On top of any loss, `max_negative_kl` masks rows (`_off_policy_masked`) and ERC removes gradients
(`_entropy_clipped`).

So where PPO's clip gives a token outside the range no gradient, GPPO gives it a bounded one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, assert_never

import torch
from torch import Tensor

from klear_core.config.losses import (
    AspoConfig,
    CispoConfig,
    ClipConfig,
    DgpoConfig,
    DppoConfig,
    ErcConfig,
    GppoConfig,
    GspoConfig,
    LossConfig,
    M2poConfig,
    SapoConfig,
    TrmConfig,
)
from klear_core.train.context_parallel import ALONE, Context

_MAX_ABS_LOGP = 1e4  # replaces infinity: no real log-prob is as low, and products with it stay finite
_SMALL = 1e-5  # below it k3 uses its series; here the series and the direct formula are equally accurate, to 2e-11
_PROBABILITY_FLOOR = 1e-8  # keeps the ratio of two zero probabilities 1 instead of 0/0 (DPPO's code)
_ENTROPY_FLOOR = 1e-8  # makes the ratio of two zero entropies 1 instead of 0/0 (ERC's code)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a micro-batch's loss, per loss token.

    All but `m2_cutoff` are known before the first update of the RL step. `token_loss` adds a teacher's part of the
    advantage.
    """

    target_N: Tensor
    """Token ids, int64."""
    row_N: Tensor
    """Row index of each token, int64, 0 to num_rows - 1. A row never spans two micro-batches."""
    old_logp_N: Tensor
    """Log-probs under the old policy, the denominator of the ratio: the learner's or the sampler's (`old_logps`)."""
    sampler_logp_N: Tensor
    """Log-probs reported by the sampler."""
    ref_logp_N: Tensor
    """Log-probs under the frozen initial model; NaN without a KL term."""
    old_entropy_N: Tensor
    """Entropy of the old policy over the vocabulary, nats, for ERC alone; NaN without old log-probs of the learner."""
    advantage_N: Tensor
    """The rewards' advantage; `token_loss` adds the teacher's."""
    teacher_logp_N: Tensor
    """Log-probs under the teacher; 0 on tokens of rows that it did not read."""
    teacher_coef_N: Tensor
    """Factor of log(teacher / policy) in the advantage: coefficient and divisor of the teacher term over the divisor of
    the policy term, which `scale_N` has. 0 on tokens of rows that the teacher did not read."""
    top_id_NK: Tensor
    """The teacher's K likeliest tokens in place of each, int64. With K above 0 the teacher term is
    KL(teacher, policy) over them, a loss of its own, and nothing is added to the advantage."""
    top_logp_NK: Tensor
    """The teacher's log-probs among them: their probabilities add up to 1."""
    correction_N: Tensor
    """Factor on value and weight that corrects the sampler/learner mismatch; 1 without correction."""
    scale_N: Tensor
    """Factor of a token's policy, KL and entropy terms: its share in the mini-batch's mean."""
    lm_scale_N: Tensor
    """`lm_coef` over the mini-batch's number of positive tokens, on tokens of positive samples; 0 on others."""
    num_rows: int
    m2_cutoff: float = math.inf
    """M2PO masks leaving tokens with (log r)^2 of at least this, one number for all of the mini-batch (`m2_cutoff`)."""
    cp_group: Context = ALONE
    """Context-parallel ranks that hold the other tokens of these rows."""

    def chunk(self, where: slice) -> LossInputs:
        """Return the batch restricted to a slice of its tokens."""
        parts: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                parts[field.name] = value[where]
        return replace(self, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Value and weight F of each token, and what was done to it. All are detached; masks are bool."""

    surrogate_N: Tensor
    weight_N: Tensor
    """F times the mismatch correction; 0 where ERC removed the gradient."""
    log_ratio_N: Tensor
    """log(new / old), clamped to the bound."""
    ratio_N: Tensor
    """The ratio that is compared with the clip range: new over old, in gspo that of the row."""
    low_N: Tensor
    """Tokens with a negative advantage and a ratio below the clip range."""
    high_N: Tensor
    """Tokens with a positive advantage and a ratio above the clip range."""
    clipped_N: Tensor
    """Tokens whose weight the loss bounds, decays or removes: `low | high | dual`; in cispo for any sign of A, in gspo
    and trm all tokens of a row; in m2po and dppo the masked ones. Also those that `max_negative_kl` masks. In sapo only
    those outside the range, which its weight ignores."""
    dual_N: Tensor
    """Tokens with a negative advantage capped by the dual clip; in aspo of both signs."""
    erc_N: Tensor
    """Tokens whose gradient entropy-ratio clipping (ERC) removed."""
    masked_N: Tensor
    """Tokens without value and gradient: masked by trm, m2po, dppo or `max_negative_kl`."""
    bounded_N: Tensor
    """Tokens whose log-ratio was clamped to the bound."""
    advantage_N: Tensor
    """The advantage of rewards and teacher together."""
    teacher_log_ratio_N: Tensor
    """log(teacher / policy), bounded; 0 on tokens of rows that the teacher did not read."""


def _with_teacher_advantage(batch: LossInputs, logp_N: Tensor, max_log_ratio: float) -> LossInputs:
    """Return the batch with coefficient times log(teacher / policy) added to the advantage (on-policy distillation).

    The policy's log-probs are the present ones, so that the term is 0 once the policy agrees with the teacher. They are
    numbers: the mean of this advantage times the gradient of logp is minus the gradient of KL(policy, teacher).
    """
    gap_N = _teacher_log_ratio(batch, logp_N, max_log_ratio)
    return replace(batch, advantage_N=batch.advantage_N + batch.teacher_coef_N * gap_N)


def _teacher_log_ratio(batch: LossInputs, logp_N: Tensor, max_log_ratio: float) -> Tensor:
    """Return log(teacher / policy), bounded; 0 without a teacher, and where its likeliest tokens are known."""
    if batch.top_id_NK.shape[1]:
        return torch.zeros_like(logp_N)
    gap_N = log_ratio(batch.teacher_logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP), logp_N)
    return torch.where(batch.teacher_coef_N > 0, gap_N.clamp(-max_log_ratio, max_log_ratio), 0)


def token_loss(
    logp_N: Tensor,
    entropy_N: Tensor,
    batch: LossInputs,
    cfg: LossConfig,
    *,
    erc: ErcConfig | None,
    max_log_ratio: float,
    max_negative_kl: float | None = None,
) -> tuple[Tensor, TokenTerms]:
    """Return the loss of each token, before reduction, and the numbers behind it.

    Both are finite even for infinite log-probs; NaN stays NaN so that an error is noticed.
    """
    logp_N = logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP)
    # Detach, because ratio, value and weight are numbers: the gradient flows through `carry_N` alone.
    batch = _with_teacher_advantage(batch, logp_N.detach(), max_log_ratio)
    token = _unclipped(logp_N.detach(), batch, cfg, max_log_ratio)
    token = _apply_loss(token, logp_N.detach(), batch, cfg)
    if max_negative_kl is not None:
        token = _off_policy_masked(token, logp_N.detach(), batch, max_negative_kl, max_log_ratio)
    if erc is not None:
        token = _entropy_clipped(token, entropy_N.detach(), batch.old_entropy_N, erc)
    token = replace(
        token, surrogate_N=token.surrogate_N * batch.correction_N, weight_N=token.weight_N * batch.correction_N
    )
    carry_N = logp_N - logp_N.detach()  # 0; its gradient is that of logp
    # Negative, since the optimizer minimises and the objective of the papers is maximised.
    return -batch.advantage_N * (token.surrogate_N + token.weight_N * carry_N), token


def _unclipped(logp_N: Tensor, batch: LossInputs, cfg: LossConfig, max_log_ratio: float) -> TokenTerms:
    """Return the policy gradient without clipping, from which the losses start: value and weight are the ratio."""
    unbounded_N = _log_ratios(logp_N, batch)
    log_ratio_N = unbounded_N.clamp(-max_log_ratio, max_log_ratio)
    # The row's ratio is the geometric mean of its tokens' ratios, the same number for each of them. Its gradient by a
    # token's log-prob is itself over the row's length: `normalise = "sample"` divides by that.
    ratio_N = (row_mean(log_ratio_N, batch) if isinstance(cfg, GspoConfig) else log_ratio_N).exp()
    # Only a ratio that left the range in the direction of its advantage: PPO's min(r A, clip(r) A) is clipped there.
    low_N = (batch.advantage_N < 0) & (ratio_N < 1 - cfg.eps_low)
    high_N = (batch.advantage_N > 0) & (ratio_N > 1 + cfg.eps_high)
    return TokenTerms(
        surrogate_N=ratio_N,
        weight_N=ratio_N,
        log_ratio_N=log_ratio_N,
        ratio_N=ratio_N,
        low_N=low_N,
        high_N=high_N,
        clipped_N=low_N | high_N,
        dual_N=torch.zeros_like(low_N),
        erc_N=torch.zeros_like(low_N),
        masked_N=torch.zeros_like(low_N),
        bounded_N=unbounded_N.abs() > max_log_ratio,
        advantage_N=batch.advantage_N,
        teacher_log_ratio_N=_teacher_log_ratio(batch, logp_N, max_log_ratio),
    )


def _log_ratios(logp_N: Tensor, batch: LossInputs) -> Tensor:
    """Return log(new / old) of the tokens, finite but for NaN."""
    bound = _MAX_ABS_LOGP
    return log_ratio(logp_N.clamp(-bound, bound), batch.old_logp_N.clamp(-bound, bound))


def _apply_loss(token: TokenTerms, logp_N: Tensor, batch: LossInputs, cfg: LossConfig) -> TokenTerms:
    """Return the tokens with value and weight of this loss, all finite but for NaN."""
    match cfg:
        case GppoConfig():
            return _gppo(token, batch.advantage_N, cfg)
        case ClipConfig() | GspoConfig():
            return _clip(token, batch.advantage_N, cfg)
        case CispoConfig():
            return _cispo(token, logp_N, cfg)
        case DgpoConfig():
            return _dgpo(token, cfg)
        case AspoConfig():
            return _aspo(token, batch.advantage_N, cfg)
        case SapoConfig():
            return _sapo(token, batch.advantage_N, cfg)
        case TrmConfig():
            return _trm(token, batch, cfg)
        case M2poConfig():
            return _masked(
                token, is_leaving(token.log_ratio_N, batch) & (token.log_ratio_N.square() >= batch.m2_cutoff)
            )
        case DppoConfig():
            return _masked(token, is_leaving(token.log_ratio_N, batch) & (_divergence(logp_N, batch, cfg) > cfg.bound))
        case _:
            assert_never(cfg)


def _gppo(token: TokenTerms, advantage_N: Tensor, cfg: GppoConfig) -> TokenTerms:
    """Cap a clipped token's weight instead of removing its gradient; the betas scale its value and gradient.

    Klear-Reasoner equations 11 and 17, CE-GPPO equation 8.
    """
    weight_N = torch.where(token.high_N, cfg.beta_high * (1 + cfg.eps_high), token.ratio_N)
    weight_N = torch.where(token.low_N, cfg.beta_low * (1 - cfg.eps_low), weight_N)
    return _dual_clipped(replace(token, surrogate_N=weight_N, weight_N=weight_N), advantage_N, cfg.dual_clip)


def _clip(token: TokenTerms, advantage_N: Tensor, cfg: ClipConfig | GspoConfig) -> TokenTerms:
    """Take PPO's minimum of clipped and unclipped: a clipped token has the bound as its value and no gradient."""
    value_N = torch.where(token.low_N, 1 - cfg.eps_low, token.ratio_N)
    surrogate_N = torch.where(token.high_N, 1 + cfg.eps_high, value_N)
    weight_N = token.ratio_N.masked_fill(token.clipped_N, 0)
    return _dual_clipped(replace(token, surrogate_N=surrogate_N, weight_N=weight_N), advantage_N, cfg.dual_clip)


def _cispo(token: TokenTerms, logp_N: Tensor, cfg: CispoConfig) -> TokenTerms:
    """Weigh REINFORCE by the clipped ratio, without regard to the sign of the advantage (MiniMax-M1)."""
    weight_N = token.ratio_N.clamp(min=1 - cfg.eps_low if cfg.two_sided else None, max=1 + cfg.eps_high)
    # REINFORCE's surrogate is weight * logp, where PPO's is the ratio.
    return replace(token, surrogate_N=weight_N * logp_N, weight_N=weight_N, clipped_N=weight_N != token.ratio_N)


def _dgpo(token: TokenTerms, cfg: DgpoConfig) -> TokenTerms:
    """Let the weight of out-of-range tokens decay from the bound on, without a jump (DGPO, its published code)."""
    ratio_N = token.ratio_N
    below_N = ratio_N * (ratio_N / (1 - cfg.eps_low)) ** cfg.low_power
    above_N = ratio_N * ((1 + cfg.eps_high) / ratio_N) ** (1 / cfg.high_root)
    # `where` selects numbers: what the unused branch is for other tokens, even infinite, does not matter.
    weight_N = torch.where(token.low_N, below_N, torch.where(token.high_N, above_N, ratio_N))
    return replace(token, surrogate_N=weight_N, weight_N=weight_N)


def _aspo(token: TokenTerms, advantage_N: Tensor, cfg: AspoConfig) -> TokenTerms:
    """Weigh positive tokens by 1/r, so that the least likely are raised most; clip as PPO does, then cap (ASPO)."""
    flipped_N = torch.where(advantage_N > 0, -token.log_ratio_N, token.log_ratio_N).exp()
    dual_N = flipped_N > cfg.max_weight
    # The cap changes the weight and does not remove it, unlike the dual clip of the other losses.
    capped_N = flipped_N.clamp(max=cfg.max_weight)
    # A clipped token has the value at its bound: there a positive one weighs 1/r, a negative one r.
    value_N = torch.where(token.low_N, 1 - cfg.eps_low, capped_N)
    return replace(
        token,
        surrogate_N=torch.where(token.high_N, 1 / (1 + cfg.eps_high), value_N),
        weight_N=capped_N.masked_fill(token.clipped_N, 0),
        clipped_N=token.clipped_N | dual_N,
        dual_N=dual_N,
    )


def _sapo(token: TokenTerms, advantage_N: Tensor, cfg: SapoConfig) -> TokenTerms:
    """Weigh by the derivative of a sigmoid of the ratio, which is 1 at r = 1 and falls on both sides (SAPO).

    The weight does not depend on the clip range, which only the metrics read.
    """
    ratio_N = token.ratio_N
    tau_N = torch.full_like(ratio_N, cfg.tau_negative).masked_fill(advantage_N > 0, cfg.tau_positive)
    x_N = tau_N * (ratio_N - 1)
    gate_N = x_N.sigmoid()
    # The value is 4/tau s; its derivative by log(pi) is r times 4 s (1 - s), the weight.
    # sigmoid(-x) is 1 - sigmoid(x) without the cancellation at large x.
    return replace(token, surrogate_N=4 / tau_N * gate_N, weight_N=4 * ratio_N * gate_N * (-x_N).sigmoid())


def _trm(token: TokenTerms, batch: LossInputs, cfg: TrmConfig) -> TokenTerms:
    """Keep the rows all of whose tokens are in the trust region, unclipped, and mask the others whole (TRM).

    Masked rows still count in the mean's denominator. The divergence is k2, (log r)^2 / 2, an estimate of the KL
    divergence that sees changes in both directions.
    """
    return _masked(token, row_max(token.log_ratio_N.square() / 2, batch) > cfg.max_divergence)


def _masked(token: TokenTerms, masked_N: Tensor) -> TokenTerms:
    """Leave the policy gradient without clipping, and the masked tokens without value and gradient.

    They still count in the mean's denominator.
    """
    weight_N = token.ratio_N * ~masked_N  # a product, so that a NaN in a masked row stays one
    return replace(token, surrogate_N=weight_N, weight_N=weight_N, clipped_N=masked_N, masked_N=masked_N)


def is_leaving(log_ratio_N: Tensor, batch: LossInputs) -> Tensor:
    """Return whether the update of a token leads away from the old policy; PPO's clip concerns no other tokens."""
    advantage_N = batch.advantage_N
    return ((advantage_N > 0) & (log_ratio_N > 0)) | ((advantage_N < 0) & (log_ratio_N < 0))


def leaving_squares(logp_N: Tensor, batch: LossInputs, max_log_ratio: float) -> Tensor:
    """Return (log r)^2 of the tokens whose update leads away from the old policy, in the order of the tokens."""
    batch = _with_teacher_advantage(batch, logp_N, max_log_ratio)
    log_ratio_N = _log_ratios(logp_N, batch).clamp(-max_log_ratio, max_log_ratio)
    return log_ratio_N[is_leaving(log_ratio_N, batch)].square()


def m2_cutoff(squares_M: Tensor, max_mean: float) -> float:
    """Return a cutoff: as many of the smallest `squares_M` as have a mean of at most `max_mean` are below it.

    `squares_M` holds (log r)^2 of all M leaving tokens of a mini-batch (M2PO, algorithm 1); equal ones are masked
    together. Infinite if all may stay.
    """
    sorted_M = squares_M.double().sort().values
    means_M = sorted_M.cumsum(0) / torch.arange(1, len(sorted_M) + 1, device=sorted_M.device)
    # Means of an ascending sequence ascend, so those within the bound are the first ones. NaN is above every bound.
    num_kept = int((means_M <= max_mean).sum())
    if num_kept == len(sorted_M):
        return math.inf
    smallest_masked = sorted_M[num_kept]
    below_M = sorted_M[sorted_M < smallest_masked]
    largest_kept = below_M[-1] if len(below_M) else torch.zeros_like(smallest_masked)
    # Between both, so that the rounding of another forward pass moves no token to the other side.
    return float((largest_kept + smallest_masked) / 2)


def _divergence(logp_N: Tensor, batch: LossInputs, cfg: DppoConfig) -> Tensor:
    """Return the divergence of each token's two-way distribution: the sampled token, or any other (DPPO eq. 13, 14)."""
    old_logp_N = batch.old_logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP)
    if cfg.divergence == "tv":
        return (logp_N.exp() - old_logp_N.exp()).abs()
    # 1 - p, which rounding of the log-prob must not make negative; expm1 is accurate where p is near 1.
    rest_N, old_rest_N = (-torch.expm1(x_N).clamp(max=0) for x_N in (logp_N, old_logp_N))
    rest_ratio_N = (old_rest_N + _PROBABILITY_FLOOR) / (rest_N + _PROBABILITY_FLOOR)
    return old_logp_N.exp() * (old_logp_N - logp_N) + old_rest_N * rest_ratio_N.log()


def _off_policy_masked(
    token: TokenTerms, logp_N: Tensor, batch: LossInputs, max_negative_kl: float, max_log_ratio: float
) -> TokenTerms:
    """Mask negative tokens of rows that the policy has left: off-policy sequence masking (DeepSeek-V3.2, section 3.1).

    The row's mean of log(sampler / policy) estimates the KL divergence of the policy that sampled from the present one,
    with the sampler's own log-probs, so that it includes the mismatch between both engines.
    """
    gap_N = log_ratio(batch.sampler_logp_N.clamp(-_MAX_ABS_LOGP, _MAX_ABS_LOGP), logp_N)
    far_N = row_mean(gap_N.clamp(-max_log_ratio, max_log_ratio), batch) > max_negative_kl
    masked_N = (batch.advantage_N < 0) & far_N
    return replace(
        token,
        surrogate_N=token.surrogate_N * ~masked_N,
        weight_N=token.weight_N * ~masked_N,
        clipped_N=token.clipped_N | masked_N,
        masked_N=token.masked_N | masked_N,
    )


def _dual_clipped(token: TokenTerms, advantage_N: Tensor, bound: float | None) -> TokenTerms:
    """Apply the dual clip (arXiv 1912.09729): with A < 0 and a ratio above `bound`, value `bound` and no gradient."""
    if bound is None:
        return token
    # The one quadrant in which clip and gppo leave the weight unbounded.
    dual_N = (advantage_N < 0) & (token.ratio_N > bound)
    surrogate_N = torch.where(dual_N, bound, token.surrogate_N)
    weight_N = token.weight_N.masked_fill(dual_N, 0)
    return replace(token, surrogate_N=surrogate_N, weight_N=weight_N, clipped_N=token.clipped_N | dual_N, dual_N=dual_N)


def _entropy_clipped(token: TokenTerms, entropy_N: Tensor, old_entropy_N: Tensor, erc: ErcConfig) -> TokenTerms:
    """Remove the gradient, not the value, where new over old entropy is outside (low, high) (arXiv 2512.05591)."""
    ratio_N = (entropy_N + _ENTROPY_FLOOR) / (old_entropy_N + _ENTROPY_FLOOR)
    # Both comparisons are false for NaN, so the token keeps its gradient and the loss shows the error.
    erc_N = (ratio_N <= erc.low) | (ratio_N >= erc.high)
    return replace(token, weight_N=token.weight_N.masked_fill(erc_N, 0), erc_N=erc_N)


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
    """Return whether a token's weight depends on other tokens of its row and cannot be computed chunk by chunk."""
    return isinstance(cfg, GspoConfig | TrmConfig)


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


def row_mean(x_N: Tensor, batch: LossInputs) -> Tensor:
    """Return for each token the mean of the detached `x_N` over its row (collective call within the context)."""
    # One reduction gives sums and counts. In float64, because a row may have tens of thousands of tokens.
    both_N2 = torch.stack([x_N, torch.ones_like(x_N)], dim=1).double()
    here_R2 = both_N2.new_zeros(batch.num_rows, 2).index_add(0, batch.row_N, both_N2)
    # Context-parallel ranks hold other tokens of the same rows, so sums and counts are added before dividing.
    total_R, count_R = batch.cp_group.sum(here_R2).unbind(1)
    mean_R = total_R / count_R.clamp(min=1)  # rows of other micro-batches have no token here and are never looked up
    return mean_R.to(x_N.dtype)[batch.row_N]


def row_max(x_N: Tensor, batch: LossInputs) -> Tensor:
    """Return for each token the largest of the detached `x_N` in its row (collective call within the context)."""
    here_R = x_N.new_full((batch.num_rows,), -torch.inf).scatter_reduce(0, batch.row_N, x_N.detach(), reduce="amax")
    # Rows of other micro-batches stay at minus infinity and are never looked up.
    return batch.cp_group.max(here_R)[batch.row_N]
