"""The whole RL loss of a micro-batch: policy term, language-model term on positive samples, KL and entropy. N: loss tokens.

Each term is divided by counts of the whole mini-batch, known beforehand, so that cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klear_core.config.rl import MismatchConfig, RlConfig
from klear_core.rl.losses import TrainBatch, joins_tokens, k3, log_ratio, row_mean, token_loss
from klear_core.rl.metrics import TokenStats
from klear_core.train.logps import HeadOutput, fused_loss, token_logps
from klear_core.train.model import Head
from klear_core.train.packing import MicroBatch
from klear_core.types import TrainSample

_MIN_LOGP = -1e4  # a log-prob of minus infinity still has a finite loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """One micro-batch laid out for its loss."""

    target_N: Tensor
    """Token ids, long."""
    batch: TrainBatch
    sampler_logp_N: Tensor
    """As the sampler reported them."""
    ref_logp_N: Tensor
    """Of the frozen initial model; NaN without a KL term."""
    scale_N: Tensor
    """What a token's policy, KL and entropy terms count in the mini-batch's mean."""
    lm_scale_N: Tensor
    """Alpha over the mini-batch's tokens of positive samples on these tokens, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts of one mini-batch over all ranks."""

    num_rows: int
    num_tokens: int
    num_positive_tokens: int

    @classmethod
    def of(cls, rows: Sequence[TrainSample]) -> Denominators:
        """Count loss tokens."""
        lengths = [sum(r.loss_mask) for r in rows]
        positive = sum(n for r, n in zip(rows, lengths, strict=True) if r.is_positive)
        return cls(num_rows=len(rows), num_tokens=sum(lengths), num_positive_tokens=positive)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPolicy:
    """What the policy before the step said of a micro-batch's tokens; NaN where it was not asked."""

    logp_N: Tensor
    """The old log-probs that ratios are taken against."""
    sampler_logp_N: Tensor
    entropy_N: Tensor
    ref_logp_N: Tensor


def make_targets(micro: MicroBatch, rows: Sequence[TrainSample], old: OldPolicy, counts: Denominators, cfg: RlConfig) -> Targets:
    """Lay out the rows' advantages and scales on the micro-batch's loss tokens; `rows` are those of the whole mini-batch."""

    def per_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=micro.target_N.device)[micro.row_N]

    batch = TrainBatch(
        old_logp_N=old.logp_N,
        old_entropy_N=old.entropy_N,
        advantage_N=per_row([r.advantage for r in rows]),
        correction_N=torch.ones_like(old.logp_N),
        row_N=micro.row_N,
        num_rows=len(rows),
        context=micro.context,
    )
    if cfg.old_logps == "learner":
        batch = replace(batch, correction_N=mismatch_correction(batch, old.sampler_logp_N, cfg.mismatch, max_log_ratio=cfg.max_log_ratio))
    lm_scale = cfg.lm_coef / max(1, counts.num_positive_tokens)
    return Targets(
        target_N=micro.target_N,
        batch=batch,
        sampler_logp_N=old.sampler_logp_N,
        ref_logp_N=old.ref_logp_N,
        scale_N=per_row([_scale(sum(r.loss_mask), counts, cfg) for r in rows]),
        lm_scale_N=per_row([lm_scale * r.is_positive for r in rows]),
    )


def _scale(num_tokens: int, counts: Denominators, cfg: RlConfig) -> float:
    match cfg.normalise:
        case "token":
            return 1 / counts.num_tokens
        case "sample":
            return 1 / (counts.num_rows * num_tokens)
        case "budget":
            return 1 / (counts.num_rows * cfg.rollout.sampling.max_new_tokens)


def mismatch_correction(batch: TrainBatch, sampler_logp_N: Tensor, cfg: MismatchConfig, *, max_log_ratio: float) -> Tensor:
    """Factor of each token: learner over sampler probability, cut at `truncate_at`; 0 for sequences too far apart on the whole."""
    gap_N = log_ratio(batch.old_logp_N, sampler_logp_N).clamp(-max_log_ratio, max_log_ratio)
    factor_N = torch.ones_like(gap_N) if cfg.truncate_at is None else gap_N.exp().clamp(max=cfg.truncate_at)
    if cfg.max_sequence_ratio is None:
        return factor_N
    return factor_N.masked_fill(row_mean(gap_N, batch).abs().exp() > cfg.max_sequence_ratio, 0)


def head_of(targets: Targets, cfg: RlConfig, stats: TokenStats) -> Head[HeadOutput]:
    """The head to run the model with: the summed loss of the micro-batch, with statistics added to `stats` on the way.

    `cfg.loss` is taken as it is: betas that follow a schedule are resolved by the caller.
    """

    def loss_fn(logp_C: Tensor, entropy_C: Tensor, where: slice) -> Tensor:
        logp_C = logp_C.clamp(min=_MIN_LOGP)
        batch = targets.batch.chunk(where)
        token = token_loss(logp_C, entropy_C, batch, cfg.loss, erc=cfg.erc, max_log_ratio=cfg.max_log_ratio)
        scale_C = targets.scale_N[where]
        stats.add(token, batch, entropy_C.detach(), scale_C, cfg.loss, truncate_at=cfg.mismatch.truncate_at)
        loss_C = token.loss_N
        if cfg.kl_coef > 0:
            loss_C = loss_C + cfg.kl_coef * _kl(targets.ref_logp_N[where], logp_C, cfg.max_log_ratio)
        if cfg.entropy_coef > 0:
            loss_C = loss_C - cfg.entropy_coef * entropy_C
        return loss_C * scale_C - targets.lm_scale_N[where] * logp_C

    def head(hidden_NH: Tensor, weight_VH: Tensor) -> HeadOutput:
        target_N, temperature = targets.target_N, cfg.rollout.sampling.temperature
        if not joins_tokens(cfg.loss):
            return fused_loss(hidden_NH, weight_VH, target_N, loss_fn, temperature=temperature, need_entropy=True)
        logp_N, entropy_N = token_logps(hidden_NH, weight_VH, target_N, temperature=temperature)
        loss = loss_fn(logp_N, entropy_N, slice(None)).sum()
        return HeadOutput(loss, logp_N.detach(), entropy_N.detach())

    return head


def _kl(ref_logp_N: Tensor, logp_N: Tensor, max_log_ratio: float) -> Tensor:
    """The k3 estimate of KL(policy, reference), with r = reference over policy."""
    gap_N = (ref_logp_N.double() - logp_N.double()).clamp(-max_log_ratio, max_log_ratio)
    return k3(gap_N).to(logp_N.dtype)
