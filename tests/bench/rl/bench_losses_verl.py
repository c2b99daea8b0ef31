"""Our losses, mismatch corrections and advantages against verl's, on the same ragged rows: values, and the gradient of every token.

verl is no dependency of ours, and only pure functions of it are called, so it can stand beside the environment:
`pip install --no-deps --target FOLDER verl tensordict pyvers omegaconf codetiming antlr4-python3-runtime==4.9.3`, then
`PYTHONPATH=FOLDER klear bench losses_verl`.

Where verl means something else on purpose, and what is compared instead:

- its `vanilla` always has the dual clip (3 by default); we have none by default. Without it, its bound is put out of reach;
- it clamps a log-ratio to +-20 where the gradient flows, so tokens beyond stop pulling; ours keep the bounded weight. None is here;
- its `cispo` is two-sided; with `clip_ratio_low = 1` its lower bound is 0, which is our one-sided default;
- it has no GPPO. With betas of 1 GPPO has the value of `vanilla`, and its gradient, with that of `cispo` where `vanilla` has none;
- its `gpg` is plain REINFORCE: the gradient that all of ours must have on-policy. Its value is another number;
- a sequence that `seq_mean_k1` rejects leaves verl's denominators; ours keep it there. Compared are the factors of the tokens;
- its `grpo` has the sample std only: our population form is compared after a factor of sqrt((G-1)/G);
- its groups of one keep their reward (ours: RLOO, Dr.GRPO and the population form give 0). There are none here;
- its `reinforce_plus_plus_baseline` takes the variance over tokens, with Bessel's correction, so long answers count more. Ours
  is over answers: the two are the same for answers of one length, but for sqrt((n-1)/n) with n tokens. So compared;
- ERC, sequence-level dual clip, the betas of GPPO, `dgpo`, `aspo`, `trm`, `m2po` and `max_negative_kl` have no counterpart
  there. Nor have its `clip_cov`, `kl_cov`, `geo_mean` and `dro` one here. Its `dppo_*` have REINFORCE's value; not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klear_core.config.evaluate import SamplingConfig
from klear_core.config.losses import CispoConfig, ClipConfig, GppoConfig, GspoConfig, LossConfig, SapoConfig
from klear_core.config.rewards import AdvantageConfig, BatchAdvantage, GrpoAdvantage, RlooAdvantage
from klear_core.config.rl import MismatchConfig, RlConfig, RolloutConfig
from klear_core.errors import ConfigError
from klear_core.rl.losses import token_loss
from klear_core.rl.objective import Denominators, make_loss_inputs, mismatch_correction
from klear_core.rl.rewards import advantages
from klear_core.train.logps import TokenLogps
from klear_core.train.packing import pack
from klear_core.types import TrainSample

NUM_ROWS, PROMPT_LEN, MAX_LEN, BUDGET = 48, 3, 40, 64
NUM_GROUPS, GROUP = 16, 8
NO_DUAL_CLIP = 1e30
BOUND = 1e-5

Pulls = tuple[float, Tensor]
"""A loss and its gradient with respect to each token's log-prob, rows by response tokens, 0 in the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The same loss in both libraries' words."""

    name: str
    loss: LossConfig
    verl: str
    """Name in verl's registry of policy losses."""
    settings: dict[str, float] = field(default_factory=dict)
    """Of verl's actor."""
    normalise: str = "token"
    mode: str = "token-mean"
    """verl's name of the same normalisation."""


EPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
WIDE = EPS | {"clip_ratio_c": NO_DUAL_CLIP}
BY_ROW = {"normalise": "sample", "mode": "seq-mean-token-mean"}
SEQUENCE = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
CASES = (
    Case(name="clip_token_mean", loss=ClipConfig(), verl="vanilla", settings=WIDE),
    Case(name="clip_sample_mean", loss=ClipConfig(), verl="vanilla", settings=WIDE, **BY_ROW),
    Case(
        name="clip_budget",
        loss=ClipConfig(),
        verl="vanilla",
        settings=WIDE,
        normalise="budget",
        mode="seq-mean-token-sum-norm",
    ),
    Case(name="clip_dual_3", loss=ClipConfig(dual_clip=3), verl="vanilla", settings=EPS | {"clip_ratio_c": 3.0}),
    Case(name="gspo", loss=GspoConfig(eps_low=0.05, eps_high=0.08), verl="gspo", settings=SEQUENCE, **BY_ROW),
    Case(name="gspo_token_mean", loss=GspoConfig(eps_low=0.05, eps_high=0.08), verl="gspo", settings=SEQUENCE),
    Case(name="sapo", loss=SapoConfig(), verl="sapo", settings={"tau_pos": 1.0, "tau_neg": 1.05}, **BY_ROW),
    Case(name="cispo_two_sided", loss=CispoConfig(two_sided=True), verl="cispo", settings=EPS),
    Case(name="cispo_one_sided", loss=CispoConfig(), verl="cispo", settings=EPS | {"clip_ratio_low": 1.0}),
)
GPPO = Case(name="gppo", loss=GppoConfig(), verl="vanilla", settings=WIDE)
ADVANTAGES: tuple[tuple[str, AdvantageConfig, str, dict[str, bool], float], ...] = (
    ("grpo_sample_std", GrpoAdvantage(std="sample"), "grpo", {}, 1.0),
    ("grpo_population_std", GrpoAdvantage(), "grpo", {}, math.sqrt((GROUP - 1) / GROUP)),
    ("dr_grpo", GrpoAdvantage(std="none"), "grpo", {"norm_adv_by_std_in_grpo": False}, 1.0),
    ("rloo", RlooAdvantage(), "rloo", {}, 1.0),
    (
        "reinforce_pp_baseline",
        BatchAdvantage(),
        "reinforce_plus_plus_baseline",
        {},
        math.sqrt(1 - 1 / (NUM_GROUPS * GROUP * MAX_LEN)),
    ),
)
"""Our name and settings, verl's name and settings, and the factor between the two (see above)."""


def measure() -> list[dict[str, object]]:
    """The largest gap of each loss, its gradient, the corrections and the advantages, relative to the largest number of its kind."""
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as e:
        raise ConfigError(
            f"this benchmark needs verl and a few packages that it imports ({e}); its docstring says how to get them"
        ) from e
    batch = _Batch(torch.Generator().manual_seed(0))
    gaps = []
    for case in CASES:
        gaps += _compare(case.name, _klear(batch, case), _verl(core_algos, batch, case, case.verl))
    gaps += _compare("gppo", _klear(batch, GPPO), _verl_gppo(core_algos, batch))
    gaps += _on_policy(core_algos)
    gaps += _corrections(batch)
    gaps += [_advantage_gap(core_algos, *case) for case in ADVANTAGES]
    entries = [(f"losses/{name}", gap, "relative", f"<= {BOUND:g}", gap <= BOUND) for name, gap in gaps]
    entries += [
        (f"losses/tokens/{name}", share, "of tokens", ">= 0.02", share >= 0.02) for name, share in batch.shares()
    ]
    versions = {"torch": torch.__version__, "verl": version("verl")}
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


class _Batch:
    """Ragged answers with advantages of both signs, some 0; ratios lie far inside and far outside every range."""

    def __init__(self, generator: torch.Generator) -> None:
        lengths = [1 + (7 * i) % MAX_LEN for i in range(NUM_ROWS)]
        self.mask_BT = torch.arange(MAX_LEN) < torch.tensor(lengths)[:, None]
        self.old_BT = -2 + torch.randn(
            NUM_ROWS, MAX_LEN, generator=generator
        )  # padding is no zero: whoever reads it is found out
        drift_B1 = 0.1 * torch.randn(NUM_ROWS, 1, generator=generator)
        self.new_BT = self.old_BT + drift_B1 + 0.8 * torch.randn(NUM_ROWS, MAX_LEN, generator=generator)
        self.sampler_BT = self.old_BT + drift_B1 + 0.3 * torch.randn(NUM_ROWS, MAX_LEN, generator=generator)
        self.advantage_B = torch.randn(NUM_ROWS, generator=generator).round(decimals=1)
        self.rows = [self._row(i, n) for i, n in enumerate(lengths)]
        (self.micro,) = pack(self.rows, tokens_per_microbatch=1 << 20).micro_batches

    def _row(self, i: int, length: int) -> TrainSample:
        return TrainSample(
            problem_id=str(i),
            token_ids=(1,) * (PROMPT_LEN + length),
            loss_mask=(False,) * PROMPT_LEN + (True,) * length,
            sampler_logps=(0.0,) * (PROMPT_LEN + length),
            advantage=self.advantage_B[i].item(),
            is_positive=False,
            oldest_version=0,
        )

    def flat(self, x_BT: Tensor) -> Tensor:
        """Laid out as the micro-batch's loss tokens."""
        return x_BT[self.micro.row_N, self.micro.column_N - PROMPT_LEN]

    def square(self, x_N: Tensor) -> Tensor:
        """And back, with 0 in the padding."""
        x_BT = torch.zeros(NUM_ROWS, MAX_LEN)
        x_BT[self.micro.row_N, self.micro.column_N - PROMPT_LEN] = x_N
        return x_BT

    def shares(self) -> list[tuple[str, float]]:
        """How many tokens put each case of a clipped loss to the test."""
        ratio_N = self.flat(self.new_BT - self.old_BT).exp()
        advantage_N = self.flat(self.advantage_B[:, None].expand_as(self.mask_BT))
        below_N, above_N = ratio_N < 1 - EPS["clip_ratio_low"], ratio_N > 1 + EPS["clip_ratio_high"]
        found = {
            "positive_below": below_N & (advantage_N > 0),
            "negative_below": below_N & (advantage_N < 0),
            "inside": ~(below_N | above_N),
            "positive_above": above_N & (advantage_N > 0),
            "negative_above": above_N & (advantage_N < 0),
            "beyond_dual_clip": (ratio_N > 3) & (advantage_N < 0),
        }
        return [(name, is_N.double().mean().item()) for name, is_N in found.items()]


def _config(case: Case) -> RlConfig:
    rollout = RolloutConfig(sampling=SamplingConfig(max_new_tokens=BUDGET))
    settings = {
        "loss": case.loss,
        "normalise": case.normalise,
        "lm_coef": 0.0,
        "old_logps": "sampler",
        "rollout": rollout,
    }
    return RlConfig.model_validate(settings)


def _klear(batch: _Batch, case: Case) -> Pulls:
    cfg, micro = _config(case), batch.micro
    old_N = batch.flat(batch.old_BT)
    nan_N = torch.full_like(old_N, torch.nan)
    inputs = make_loss_inputs(micro, batch.rows, None, None, Denominators.of(batch.rows), cfg)
    logp_N = batch.flat(batch.new_BT).requires_grad_()
    # The sampler's log-probs of the rows play no part here: the old ones are the batch's own.
    inputs = replace(inputs, old_logp_N=old_N)
    loss_N, _ = token_loss(logp_N, nan_N, inputs, cfg.loss, erc=None, max_log_ratio=cfg.max_log_ratio)
    loss = (loss_N * inputs.scale_N).sum()
    (grad_N,) = torch.autograd.grad(loss, logp_N)
    return loss.item(), batch.square(grad_N)


def _verl(core_algos: Any, batch: _Batch, case: Case, name: str) -> Pulls:
    from verl.workers.config import ActorConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **case.settings)
    if case.mode == "seq-mean-token-sum-norm":
        actor.global_batch_info["loss_scale_factor"] = BUDGET
    logp_BT = batch.new_BT.clone().requires_grad_()
    advantage_BT = batch.advantage_B[:, None].expand(NUM_ROWS, MAX_LEN)
    loss_of = core_algos.get_policy_loss_fn(name)
    loss, _ = loss_of(batch.old_BT, logp_BT, advantage_BT, batch.mask_BT.float(), loss_agg_mode=case.mode, config=actor)
    (grad_BT,) = torch.autograd.grad(loss, logp_BT)
    return loss.item(), grad_BT


def _verl_gppo(core_algos: Any, batch: _Batch) -> Pulls:
    value, clipped_BT = _verl(core_algos, batch, GPPO, "vanilla")
    _, kept_BT = _verl(core_algos, batch, GPPO, "cispo")
    return value, torch.where(clipped_BT == 0, kept_BT, clipped_BT)


def _compare(name: str, ours: Pulls, theirs: Pulls) -> list[tuple[str, float]]:
    value_gap = abs(ours[0] - theirs[0]) / abs(theirs[0])
    return [(f"value_gap/{name}", value_gap), (f"grad_gap/{name}", _gap(ours[1], theirs[1]))]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _on_policy(core_algos: Any) -> list[tuple[str, float]]:
    """With the old policy's log-probs as the new ones every loss is REINFORCE."""
    batch = _Batch(torch.Generator().manual_seed(1))
    batch.new_BT = batch.old_BT
    _, plain_BT = _verl(core_algos, batch, GPPO, "gpg")
    return [
        (f"on_policy_grad_gap/{c.name}", _gap(_klear(batch, c)[1], plain_BT))
        for c in (GPPO, *CASES)
        if c.normalise == "token"
    ]


def _corrections(batch: _Batch) -> list[tuple[str, float]]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    gap_BT, mask_BT = batch.old_BT - batch.sampler_BT, batch.mask_BT.float()
    truncated_BT, _ = compute_rollout_correction_weights(gap_BT, mask_BT, rollout_is="token", rollout_is_threshold=1.2)
    kept_BT, _ = compute_rollout_rejection_mask(
        gap_BT, mask_BT, rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.1}_1.1"
    )
    kept = kept_BT.sum().item() / mask_BT.sum().item()
    assert 0.1 < kept < 0.9, kept  # else there would be nothing to see
    cases = {
        "truncated": (MismatchConfig(truncate_at=1.2), truncated_BT),
        "masked": (MismatchConfig(max_sequence_ratio=1.1), kept_BT),
    }
    return [
        (f"correction_gap/{name}", _gap(_correction(batch, cfg), theirs_BT)) for name, (cfg, theirs_BT) in cases.items()
    ]


def _correction(batch: _Batch, mismatch: MismatchConfig) -> Tensor:
    cfg = RlConfig(mismatch=mismatch)
    old_N, sampler_N = batch.flat(batch.old_BT), batch.flat(batch.sampler_BT)
    inputs = make_loss_inputs(
        batch.micro, batch.rows, TokenLogps(old_N, old_N), old_N, Denominators.of(batch.rows), cfg
    )
    inputs = replace(inputs, sampler_logp_N=sampler_N)
    return batch.square(mismatch_correction(inputs, cfg))


def _advantage_gap(
    core_algos: Any, name: str, cfg: AdvantageConfig, verl: str, settings: dict[str, bool], factor: float
) -> tuple[str, float]:
    """Rewards of many kinds, a group of equal ones among them; verl's come from answers of `MAX_LEN` tokens, reward on the last."""
    generator = torch.Generator().manual_seed(2)
    rewards_PG = torch.randint(-1, 2, (NUM_GROUPS, GROUP), generator=generator) + torch.rand(
        NUM_GROUPS, GROUP, generator=generator
    )
    rewards_PG[0] = 1.0
    rewards_PG = rewards_PG.double()
    token_rewards = torch.zeros(NUM_GROUPS * GROUP, MAX_LEN, dtype=torch.float64)
    token_rewards[:, -1] = rewards_PG.flatten()
    index = np.repeat(np.arange(NUM_GROUPS), GROUP)
    estimate: Callable[..., tuple[Tensor, Tensor]] = core_algos.get_adv_estimator_fn(verl)
    theirs, _ = estimate(
        token_level_rewards=token_rewards, response_mask=torch.ones_like(token_rewards), index=index, **settings
    )
    ours: Sequence[Sequence[float]] = advantages(rewards_PG.tolist(), cfg)
    return f"advantage_gap/{name}", _gap(factor * torch.tensor(ours, dtype=torch.float64).flatten(), theirs[:, 0])
