"""Compute the RL loss of a micro-batch: policy term, language-model term on positive samples, KL and entropy.

The advantage in the policy term is a token's own: that of the rewards, one number a row, plus that of the teacher
(on-policy distillation, `rl.distill`): log(teacher / policy) with a coefficient and a divisor of its own. The loss
clips or masks by their sum. Where the teacher's likeliest tokens are known, the teacher term is KL(teacher, policy)
over them, beside the policy term.

Each term is divided by counts of the mini-batch over all ranks, known beforehand, so that cutting the mini-batch into
micro-batches changes nothing.
A row is one sample. Axis letters: N loss tokens of a micro-batch, C tokens of one chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from klear_core.config.rl import EntropyTargetConfig, RlConfig
from klear_core.rl.losses import LossInputs, joins_tokens, k3, log_ratio, row_mean, token_loss
from klear_core.rl.sample_arrays import LearnerSample
from klear_core.rl.step_metrics import TokenStats
from klear_core.train.distributed import World
from klear_core.train.logps import HeadOutput, TokenLogps, TopTokens, fused_loss, token_logps
from klear_core.train.model import Head
from klear_core.train.packing import MicroBatch, PackedBatch
from klear_core.train.step import UpdateResult

_MIN_LOGP = -1e4  # replaces a log-prob of minus infinity, so that its loss is finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts of one mini-batch over all ranks, of rows and loss tokens."""

    num_rows: int
    num_loss_tokens: int
    num_positive_tokens: int
    num_teacher_rows: int
    """Rows with a teacher's log-probs."""
    num_teacher_tokens: int
    """Loss tokens of these rows."""

    @classmethod
    def of(cls, rows: Sequence[LearnerSample]) -> Denominators:
        """Count the rows of all ranks and their loss tokens."""
        lengths = [r.num_loss_tokens for r in rows]
        positive = sum(n for r, n in zip(rows, lengths, strict=True) if r.is_positive)
        with_teacher = [n for r, n in zip(rows, lengths, strict=True) if r.has_teacher]
        return cls(
            num_rows=len(rows),
            num_loss_tokens=sum(lengths),
            num_positive_tokens=positive,
            num_teacher_rows=len(with_teacher),
            num_teacher_tokens=sum(with_teacher),
        )


def make_loss_inputs(
    micro: MicroBatch,
    rows: Sequence[LearnerSample],
    old: TokenLogps | None,
    ref_logp_N: Tensor | None,
    denominators: Denominators,
    cfg: RlConfig,
) -> LossInputs:
    """Spread advantages and scales of rows over the micro-batch's loss tokens; `rows` is the complete mini-batch.

    Only the rows of the micro-batch are looked at: a mini-batch of thousands of rows has hundreds of micro-batches.

    `old` is of the learner before the RL step and `ref_logp_N` of the initial model; each is None where `cfg` needs
    none.
    """
    here = [rows[r] for r in micro.rows]
    counts = torch.tensor(micro.counts, dtype=torch.int64)

    def per_row(values: Sequence[float]) -> Tensor:
        # From one value per row in here to one per loss token; those are stored row after row.
        value_N = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
        return value_N.to(micro.target_N.device)

    sampler_logp_N = micro.gather({r: rows[r].sampler_logps for r in micro.rows})
    nan_N = torch.full_like(sampler_logp_N, torch.nan)
    old_logp_N = sampler_logp_N
    if cfg.old_logps == "learner":
        assert old is not None, "old_logps = 'learner' needs the learner's log-probs"
        old_logp_N = old.logp_N
    scales = [_policy_scale(r, denominators, cfg) for r in here]
    teacher_coefs = [_teacher_coef(r, denominators, cfg, scale) for r, scale in zip(here, scales, strict=True)]
    teacher_logp_N = torch.zeros_like(sampler_logp_N)
    if cfg.distill is not None and denominators.num_teacher_rows > 0:
        teacher_logp_N = micro.gather({r: _teacher_logps(rows[r]) for r in micro.rows})
    top_id_NK, top_logp_NK = _likeliest(micro, here)
    lm_scale = cfg.lm_coef / max(1, denominators.num_positive_tokens)  # a mini-batch may have no positive sample
    advantages = [r.advantage for r in here]
    lm_scales = [lm_scale * r.is_positive for r in here]
    batch = LossInputs(
        target_N=micro.target_N,
        row_N=micro.row_N,
        old_logp_N=old_logp_N,
        sampler_logp_N=sampler_logp_N,
        ref_logp_N=nan_N if ref_logp_N is None else ref_logp_N,
        old_entropy_N=nan_N if old is None else old.entropy_N,
        advantage_N=per_row(advantages),
        teacher_logp_N=teacher_logp_N,
        teacher_coef_N=per_row(teacher_coefs),
        top_id_NK=top_id_NK,
        top_logp_NK=top_logp_NK,
        correction_N=torch.ones_like(old_logp_N),
        scale_N=per_row(scales),
        lm_scale_N=per_row(lm_scales),
        num_rows=len(rows),
        cp_group=micro.cp_group,
    )
    # The sampler's log-probs as old ones already make the ratio span the mismatch; there is nothing to correct.
    if cfg.old_logps == "sampler":
        return batch
    return replace(batch, correction_N=mismatch_correction(batch, cfg))


def _policy_scale(row: LearnerSample, denominators: Denominators, cfg: RlConfig) -> float:
    """Return the factor of each of a row's tokens in the policy term."""
    num_rows, num_tokens = denominators.num_rows, denominators.num_loss_tokens
    return _scale(row.num_loss_tokens, num_rows, num_tokens, cfg.normalise, cfg.rollout.sampling.max_new_tokens)


def _teacher_coef(row: LearnerSample, denominators: Denominators, cfg: RlConfig, policy_scale: float) -> float:
    """Return the factor of log(teacher / policy) in the advantage of a row's tokens; 0 without a teacher."""
    if cfg.distill is None or not row.has_teacher:
        return 0.0
    num_rows, num_tokens = denominators.num_teacher_rows, denominators.num_teacher_tokens
    budget = cfg.rollout.sampling.max_new_tokens
    scale = _scale(row.num_loss_tokens, num_rows, num_tokens, cfg.distill.normalise, budget)
    # Over the policy term's scale, by which the loss of the summed advantages is multiplied at last.
    return cfg.distill.coef * scale / policy_scale


def _teacher_logps(row: LearnerSample) -> Sequence[float] | np.ndarray:
    return row.teacher_logps if row.has_teacher else np.zeros(row.num_tokens)


def _likeliest(micro: MicroBatch, here: Sequence[LearnerSample]) -> tuple[Tensor, Tensor]:
    """Return ids of the teacher's K likeliest tokens in place of each loss token, and log-probs among these K.

    K is 0 if no row has any.
    """
    num_top = max((len(row.top_ids) // row.num_loss_tokens for row in here), default=0)
    ids, logps, places, start = [], [], {}, 0
    for r, row in zip(micro.rows, here, strict=True):
        # A row without a teacher's log-probs has a weight of 0 for whatever stands here.
        num, empty = row.num_loss_tokens * num_top, np.zeros(0 if len(row.top_ids) else row.num_loss_tokens * num_top)
        ids.append(np.concatenate([row.top_ids, empty]).astype(np.int64))
        logps.append(np.concatenate([row.top_logps, empty]).astype(np.float32))
        assert len(ids[-1]) == num, "rows of one step have the same number of likeliest tokens"
        # The number of each token among the loss tokens of all rows in here.
        places[r] = start + np.cumsum(row.loss_mask) - 1
        start += row.num_loss_tokens
    at_N = micro.gather(places, torch.int64).cpu()
    id_NK, logp_NK = (
        torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).reshape(start, num_top))[at_N]
        for parts, dtype in ((ids, np.int64), (logps, np.float32))
    )
    return id_NK.to(micro.target_N.device), logp_NK.log_softmax(dim=1).to(micro.target_N.device)


def _scale(
    num_loss_tokens: int, all_rows: int, all_tokens: int, normalise: Literal["token", "sample", "budget"], budget: int
) -> float:
    """Return the factor of each token of a row with `num_loss_tokens`; `budget` is that of an answer."""
    match normalise:
        case "token":  # mean over all tokens: long rows count more
            return 1 / all_tokens
        case "sample":  # mean of row means: every row counts the same
            return 1 / (all_rows * num_loss_tokens)
        case "budget":  # a constant (Dr.GRPO): the length of answers has no influence
            return 1 / (all_rows * budget)


def mismatch_correction(batch: LossInputs, cfg: RlConfig) -> Tensor:
    """Return each token's factor: learner over sampler probability, at most `truncate_at`.

    It is 0 for sequences whose geometric mean of that ratio, or its inverse, is above `max_sequence_ratio`.
    """
    mismatch_N = log_ratio(batch.old_logp_N, batch.sampler_logp_N).clamp(-cfg.max_log_ratio, cfg.max_log_ratio)
    factor_N = torch.ones_like(mismatch_N) if cfg.truncate_at is None else mismatch_N.exp().clamp(max=cfg.truncate_at)
    most = cfg.mismatch.max_sequence_ratio
    if most is None:
        return factor_N
    # The mean of log-ratios is the log of their geometric mean; `abs` covers its inverse.
    return factor_N.masked_fill(row_mean(mismatch_N, batch).abs().exp() > most, 0)


def loss_head(batch: LossInputs, cfg: RlConfig, stats: TokenStats) -> Head[HeadOutput]:
    """Return the head to run the model with: it computes the micro-batch's summed loss and adds statistics to `stats`.

    `cfg.loss` is used without its schedule: the caller resolves scheduled betas.
    """

    def loss_fn(logp_C: Tensor, entropy_C: Tensor, where: slice) -> Tensor:
        logp_C = logp_C.clamp(min=_MIN_LOGP)
        part = batch.chunk(where)
        loss_C, token = token_loss(
            logp_C,
            entropy_C,
            part,
            cfg.loss,
            erc=cfg.erc,
            max_log_ratio=cfg.max_log_ratio,
            max_negative_kl=cfg.max_negative_kl,
        )
        stats.add(token, part, entropy_C.detach(), cfg.loss, truncate_at=cfg.truncate_at)
        if cfg.kl_coef > 0:
            loss_C = loss_C + cfg.kl_coef * _kl(part.ref_logp_N, logp_C, cfg.max_log_ratio)
        if cfg.entropy_coef > 0:
            loss_C = loss_C - cfg.entropy_coef * entropy_C  # minus: a bonus, which the optimizer is to raise
        # The language-model term is a negative log-likelihood over positive tokens, with a separate denominator.
        return loss_C * part.scale_N - part.lm_scale_N * logp_C

    def head(hidden_NH: Tensor, weight_VH: Tensor) -> HeadOutput:
        target_N, temperature = batch.target_N, cfg.rollout.sampling.temperature
        # The teacher's likeliest tokens: the gradient of KL(teacher, policy) over them is that of minus its
        # probabilities times the policy's log-probs.
        top_tokens = TopTokens(
            batch.top_id_NK, batch.teacher_coef_N[:, None] * batch.scale_N[:, None] * batch.top_logp_NK.exp()
        )
        # Token-wise losses form their gradient chunk by chunk in the forward pass, so logits are computed only once.
        if not joins_tokens(cfg.loss) and cfg.max_negative_kl is None:
            output = fused_loss(
                hidden_NH,
                weight_VH,
                target_N,
                loss_fn,
                temperature=temperature,
                need_entropy=True,
                top_tokens=top_tokens,
            )
            if output.top_weighted_logp_N is not None:
                stats.add_top_tokens(output.top_weighted_logp_N, batch)
            return output
        assert batch.top_id_NK.shape[1] == 0, "the settings allow likeliest tokens with token-wise losses alone"
        # A mean over a row needs all tokens of a row first; the backward pass computes the logits once more.
        logp_N, entropy_N = token_logps(hidden_NH, weight_VH, target_N, temperature=temperature)
        loss = loss_fn(logp_N, entropy_N, slice(None)).sum()
        return HeadOutput(loss, logp_N.detach(), entropy_N.detach())

    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonus:
    """State of an adaptive entropy bonus: its coefficient, and the one that the next RL step applies."""

    coef: float
    applied: float

    def after(self, entropy: float, cfg: EntropyTargetConfig) -> EntropyBonus:
        """Return the state after a step with this mean entropy e (arXiv 2505.22312, adaptive entropy control):

            coef   <- coef + delta if e < target, else coef - delta, within 0 and max_coef
            applied <- coef if e <= target, else 0

        The authors measure e before a step, on its rollouts; here it is that of the step before, which costs nothing.
        """
        moved = self.coef + (cfg.delta if entropy < cfg.target else -cfg.delta)
        coef = min(max(moved, 0.0), cfg.max_coef)
        return EntropyBonus(coef=coef, applied=coef if entropy <= cfg.target else 0.0)


def _kl(ref_logp_N: Tensor, logp_N: Tensor, max_log_ratio: float) -> Tensor:
    """Return the k3 estimate of KL(policy, initial model): r is initial model over policy, on the policy's tokens."""
    # Subtract in float64: k3 is about half the square of a small gap. The result goes back to the loss's dtype.
    gap_N = (ref_logp_N.double() - logp_N.double()).clamp(-max_log_ratio, max_log_ratio)
    return k3(gap_N).to(logp_N.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Input of one optimizer step: samples of all ranks, this rank's packed share, and its inputs by micro-batch."""

    samples: Sequence[LearnerSample]
    packed: PackedBatch
    inputs: tuple[LossInputs, ...]


def update_metrics(
    minibatches: Sequence[MiniBatch],
    results: Sequence[UpdateResult],
    stats: TokenStats,
    world: World,
    *,
    max_log_ratio: float,
) -> dict[str, float]:
    """Return metrics of the applied updates (collective call); only the update counts if none was applied."""
    token_metrics = stats.all_reduce(world).metrics()
    applied = [(m, r) for m, r in zip(minibatches, results, strict=True) if r.is_applied]
    metrics = {"rl/optim/updates": float(len(applied)), "rl/optim/skipped": float(len(results) - len(applied))}
    # `is_applied` comes from sums over all ranks, so all return here or none does: `_mismatch` below is collective.
    if not applied:
        return metrics
    # Each is a mini-batch mean: per-rank sums, divided by global counts, then summed over ranks.
    losses = [r.loss for _, r in applied]
    norms = [r.grad_norm for _, r in applied]
    sizes = [m.packed.num_tokens for m, _ in applied]
    fills = [m.packed.fill for m, _ in applied]
    busy = [m.packed.busy for m, _ in applied]
    metrics |= {
        "rl/loss/mean": sum(losses) / len(losses),
        "rl/grad/norm": sum(norms) / len(norms),
        "rl/grad/max": max(norms),
        "rl/optim/lr": applied[0][1].lr,  # one rate for all updates of an RL step
        "rl/batch/tokens": float(sum(sizes)),
        "rl/batch/fill": sum(fills) / len(fills),
        "rl/batch/busy": sum(busy) / len(busy),
    }
    first, result = applied[0]
    return metrics | token_metrics | _mismatch(first, result, world, bound=max_log_ratio)


def _mismatch(first: MiniBatch, result: UpdateResult, world: World, *, bound: float) -> dict[str, float]:
    """Return how far the log-probs of sampler and learner differ on the first applied mini-batch (collective call).

    Before that update the learner still has the weights with which the RL step began. With stale samples, the
    change of the policy since they were sampled is part of the difference.
    """
    # Log-ratio learner/sampler in float64: k3 is about gap^2/2, and float32 would round so small a value to 0.
    gaps = []
    for output, batch in zip(result.outputs, first.inputs, strict=True):
        gaps.append(log_ratio(output.logp_N.double(), batch.sampler_logp_N.double()))
    gap_N = torch.cat(gaps).clamp(-bound, bound)
    k3_sum = world.sum(k3(gap_N).sum()).item()
    largest = world.max(torch.cat([gap_N.abs(), gap_N.new_zeros(1)]).max())  # this rank may have no token
    return {"rl/mismatch/k3": k3_sum / first.packed.num_loss_tokens, "rl/mismatch/max": largest.item()}


def staleness(samples: Sequence[LearnerSample], *, version: int) -> dict[str, float]:
    """Return by how many policy versions the samples are older than `version`; nothing without samples."""
    ages = [version - s.oldest_version for s in samples]
    if not ages:
        return {}
    return {"rl/staleness/mean": sum(ages) / len(ages), "rl/staleness/max": float(max(ages))}
