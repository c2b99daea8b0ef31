"""Value and gradient of one token at old log-prob -1, and what may not happen at extremes."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_builders import train_batch

from klear_core.config.losses import (
    LOSS_KINDS,
    AspoConfig,
    BetaSchedule,
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
from klear_core.rl.losses import (
    LossInputs,
    TokenTerms,
    at_step,
    joins_tokens,
    k3,
    leaving_squares,
    m2_cutoff,
    row_max,
    row_mean,
    token_loss,
)

RATIOS = (0.25, 0.5, 0.9, 1.0, 1.2, 1.29, 1.5, 3.0, 12.0)
ALL_LOSSES: tuple[LossConfig, ...] = (
    *(kind() for kind in LOSS_KINDS),
    GppoConfig(beta_low=0.5, dual_clip=3),
    GppoConfig(preset="high_only"),
    ClipConfig(dual_clip=10),
    CispoConfig(two_sided=True),
    GspoConfig(dual_clip=3),
    DgpoConfig(low_power=16, high_root=16),
    AspoConfig(max_weight=1.5),
    SapoConfig(tau_positive=100, tau_negative=0.01),
    TrmConfig(max_divergence=0.01),
    DppoConfig(divergence="kl"),
)


def batch_of(
    old_logps: list[float],
    advantages: list[float],
    *,
    rows: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    row_N = torch.tensor(rows if rows is not None else list(range(len(old_logps))))
    return train_batch(torch.tensor(old_logps, dtype=dtype), torch.tensor(advantages, dtype=dtype), row_N=row_N)


def loss_and_grad(
    logps: list[float], batch: LossInputs, cfg: LossConfig, **options: object
) -> tuple[TokenTerms, list[float], list[float]]:
    logp_N = torch.tensor(logps, dtype=batch.old_logp_N.dtype, requires_grad=True)
    settings: dict[str, object] = {"erc": None, "max_log_ratio": 20.0} | options
    loss_N, token = token_loss(logp_N, torch.full_like(logp_N, torch.nan), batch, cfg, **settings)  # type: ignore[arg-type]
    (grad_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    return token, loss_N.tolist(), grad_N.tolist()


def one_token(ratio: float, advantage: float, cfg: LossConfig) -> tuple[float, float]:
    _, loss, grad = loss_and_grad([-1 + math.log(ratio)], batch_of([-1.0], [advantage]), cfg)
    return loss[0], grad[0]


def check_table(cfg: LossConfig, advantage: float, cells: list[tuple[float, float] | None]) -> None:
    for ratio, cell in zip(RATIOS, cells, strict=True):
        if cell is not None:
            assert one_token(ratio, advantage, cfg) == pytest.approx(cell, abs=6e-5), (ratio, cfg)


def same(*pairs: float) -> list[tuple[float, float] | None]:
    return [(p, p) for p in pairs]


def test_ppo_clip_vectors() -> None:
    cfg = ClipConfig(eps_low=0.2, eps_high=0.2)
    check_table(cfg, 1, [*same(-0.25, -0.5, -0.9, -1), None, (-1.2, 0), (-1.2, 0), (-1.2, 0), (-1.2, 0)])
    check_table(cfg, -1, [(0.8, 0), (0.8, 0), *same(0.9, 1, 1.2, 1.29, 1.5, 3, 12)])


def test_clip_higher_vectors() -> None:
    check_table(ClipConfig(), 1, [*same(-0.25, -0.5, -0.9, -1, -1.2), (-1.28, 0), (-1.28, 0), (-1.28, 0), (-1.28, 0)])
    check_table(ClipConfig(), -1, [(0.8, 0), (0.8, 0), *same(0.9, 1, 1.2, 1.29, 1.5, 3, 12)])


def test_gppo_vectors() -> None:
    check_table(GppoConfig(), 1, same(-0.25, -0.5, -0.9, -1, -1.2, -1.28, -1.28, -1.28, -1.28))
    check_table(GppoConfig(), -1, same(0.8, 0.8, 0.9, 1, 1.2, 1.29, 1.5, 3, 12))


def test_ce_gppo_scales_value_and_gradient_of_low_negative_tokens_only() -> None:
    cfg = GppoConfig(preset="ce_gppo")
    check_table(cfg, 1, same(-0.25, -0.5, -0.9, -1, -1.2, -1.2, -1.2, -1.2, -1.2))
    check_table(cfg, -1, same(0.4, 0.4, 0.9, 1, 1.2, 1.29, 1.5, 3, 12))


def test_high_only_is_gppo_above_and_silent_below() -> None:
    cfg = GppoConfig(preset="high_only")
    check_table(cfg, 1, same(-0.25, -0.5, -0.9, -1, -1.2, -1.28, -1.28, -1.28, -1.28))
    check_table(cfg, -1, same(0, 0, 0.9, 1, 1.2, 1.29, 1.5, 3, 12))


def test_dual_clip_caps_value_and_ends_the_gradient() -> None:
    check_table(GppoConfig(dual_clip=10), -1, [*same(0.8, 0.8, 0.9, 1, 1.2, 1.29, 1.5, 3), (10, 0)])
    check_table(GppoConfig(dual_clip=3), -1, [*same(0.8, 0.8, 0.9, 1, 1.2, 1.29, 1.5), None, (3, 0)])
    check_table(ClipConfig(dual_clip=10), -1, [(0.8, 0), (0.8, 0), *same(0.9, 1, 1.2, 1.29, 1.5, 3), (10, 0)])
    check_table(
        ClipConfig(dual_clip=10),
        1,
        [*same(-0.25, -0.5, -0.9, -1, -1.2), (-1.28, 0), (-1.28, 0), (-1.28, 0), (-1.28, 0)],
    )


@pytest.mark.parametrize(
    ("cfg", "clipped"),
    [
        (GppoConfig(dual_clip=10), [False, True, False, False, True, False, True]),
        (ClipConfig(), [False, True, False, False, True, False, False]),
        (CispoConfig(), [False, False, False, False, True, True, True]),
        (CispoConfig(two_sided=True), [True, True, False, False, True, True, True]),
    ],
)
def test_clipped_are_the_tokens_that_do_not_weigh_their_ratio(cfg: LossConfig, clipped: list[bool]) -> None:
    """Low and high are quadrants, whatever the loss does there."""
    ratios, advantages = [0.5, 0.5, 1.1, 1.1, 3.0, 3.0, 12.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    token, _, _ = loss_and_grad([-9 + math.log(r) for r in ratios], batch_of([-9.0] * 7, advantages), cfg)
    assert token.clipped_N.tolist() == clipped
    assert token.low_N.tolist() == [a < 0 and r < 1 for r, a in zip(ratios, advantages, strict=True)]
    assert token.high_N.tolist() == [a > 0 and r > 2 for r, a in zip(ratios, advantages, strict=True)]


CISPO_UPPER_GRADS = (0.25, 0.5, 0.9, 1, 1.2, 1.28, 1.28, 1.28, 1.28)
CISPO_BOTH_GRADS = (0.8, 0.8, 0.9, 1, 1.2, 1.28, 1.28, 1.28, 1.28)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_vectors(advantage: float) -> None:
    upper = (0.5966, 0.8466, 0.9948, 1, 0.9812, 0.9541, 0.7610, -0.1262, -1.9007)
    both = (1.9090, 1.3545, 0.9948, 1, 0.9812, 0.9541, 0.7610, -0.1262, -1.9007)
    pairs = [(advantage * v, -advantage * g) for v, g in zip(upper, CISPO_UPPER_GRADS, strict=True)]
    check_table(CispoConfig(), advantage, list(pairs))
    pairs = [(advantage * v, -advantage * g) for v, g in zip(both, CISPO_BOTH_GRADS, strict=True)]
    check_table(CispoConfig(two_sided=True), advantage, list(pairs))


def test_dgpo_vectors() -> None:
    """Below 0.8 the weight is r^2 / 0.8, above 1.2 the geometric mean of r and 1.2."""
    check_table(DgpoConfig(), 1, same(-0.25, -0.5, -0.9, -1, -1.2, -1.244186, -1.341641, -1.897367, -3.794733))
    check_table(DgpoConfig(), -1, same(0.078125, 0.3125, 0.9, 1, 1.2, 1.29, 1.5, 3, 12))


def test_dgpo_decays_faster_with_a_larger_power_and_slower_with_a_larger_root() -> None:
    cfg = DgpoConfig(low_power=2, high_root=3)
    assert one_token(0.5, -1, cfg)[1] == pytest.approx(0.5 * 0.625**2)
    assert one_token(1.5, 1, cfg)[1] == pytest.approx(-1.392477, abs=1e-6)  # -1.5 times the cube root of 0.8
    assert one_token(1.5, 1, DgpoConfig(high_root=1))[1] == pytest.approx(-1.2)  # gppo's bound
    assert one_token(0.5, -1, DgpoConfig(low_power=0))[1] == pytest.approx(0.5)  # the ratio


def test_aspo_vectors() -> None:
    clipped = (-1 / 1.2, 0)
    check_table(AspoConfig(), 1, [*same(-3, -2, -1 / 0.9, -1), None, clipped, clipped, clipped, clipped])
    check_table(AspoConfig(), -1, [(0.8, 0), (0.8, 0), *same(0.9, 1, 1.2, 1.29, 1.5), None, (3, 3)])


def test_aspo_caps_the_weight_of_both_signs_and_counts_it_as_dual_clip() -> None:
    ratios, advantages = [0.25, 0.25, 0.5, 1.5, 1.5, 4.0], [1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    token, _, grad = loss_and_grad([-9 + math.log(r) for r in ratios], batch_of([-9.0] * 6, advantages), AspoConfig())
    assert grad == pytest.approx([-3, 0, -2, 0, 1.5, 3])
    assert token.dual_N.tolist() == [True, False, False, False, False, True]
    assert token.low_N.tolist() == [False, True, False, False, False, False]
    assert token.high_N.tolist() == [False, False, False, True, False, False]
    assert token.clipped_N.tolist() == [True, True, False, True, False, True]


def test_sapo_vectors() -> None:
    """Values are 4 / tau times a sigmoid, weights r / cosh^2 of half its argument; tau is 1, and 1.05 if A < 0."""
    positive = {0.5: (-1.510163, -0.470007), 1.0: (-2, -1), 1.5: (-2.489837, -1.410022), 3.0: (-3.523188, -1.259923)}
    negative = {0.5: (1.415939, 0.467070), 1.0: (2 / 1.05, 1), 3.0: (3.393916, 1.166335)}
    check_table(SapoConfig(), 1, [positive.get(r) for r in RATIOS])
    check_table(SapoConfig(), -1, [negative.get(r) for r in RATIOS])
    assert one_token(12.0, 1.0, SapoConfig())[1] == pytest.approx(-48 * math.exp(-11), rel=1e-4)


def test_trm_masks_the_whole_row_of_a_token_that_left_the_trust_region() -> None:
    """(log r)^2 / 2 is at most 0.125, 2.645 and 2.42 in the three rows, and 2.5 is allowed."""
    gaps = [0.5, -0.2, 0.1, -2.3, 2.2, 0.0]
    batch = batch_of([-3.0] * 6, [1.0, 1.0, 1.0, 1.0, -1.0, -1.0], rows=[0, 0, 1, 1, 2, 2])
    token, loss, grad = loss_and_grad([-3 + gap for gap in gaps], batch, TrmConfig())
    weights = [math.exp(0.5), math.exp(-0.2), 0, 0, math.exp(2.2), 1]
    assert grad == pytest.approx([-w * a for w, a in zip(weights, batch.advantage_N.tolist(), strict=True)])
    assert loss == pytest.approx(grad)
    assert token.clipped_N.tolist() == [False, False, True, True, False, False]


def test_the_range_of_trm_is_that_of_its_divergence() -> None:
    cfg = TrmConfig(max_divergence=0.5 * math.log(2) ** 2)
    assert (1 - cfg.eps_low, 1 + cfg.eps_high) == pytest.approx((0.5, 2))


def test_the_largest_token_of_a_row_does_not_depend_on_other_rows() -> None:
    batch = batch_of([0.0] * 5, [1.0] * 5, rows=[3, 1, 3, 1, 1])
    assert row_max(torch.tensor([1.0, -5.0, 4.0, -2.0, -3.0]), batch).tolist() == [4, -2, 4, -2, -2]


@pytest.mark.parametrize(
    ("squares", "cutoff"),
    [
        ([0.16, 0.01, 0.09, 0.04], 0.065),  # means from the smallest on: 0.01, 0.025, 0.0467
        ([0.03, 0.05], math.inf),  # a mean at the bound is within it
        ([0.05], 0.025),
        ([0.01, 0.07, 0.07], 0.04),  # 0.01 and one 0.07 would be within the bound; equal ones go together
        ([], math.inf),
    ],
)
def test_m2po_cuts_between_the_last_token_that_fits_the_mean_and_the_next(squares: list[float], cutoff: float) -> None:
    assert m2_cutoff(torch.tensor(squares, dtype=torch.float64), 0.04) == pytest.approx(cutoff)


def test_m2po_masks_only_tokens_that_leave_and_the_rest_weigh_their_ratio() -> None:
    """Log-ratios 0.5 and 0.3 leave upwards, -0.4 downwards; -0.6 of a positive and 0.7 of a negative token return."""
    gaps, advantages = [0.5, 0.3, -0.6, -0.4, 0.7], [1.0, 1.0, 1.0, -1.0, -1.0]
    batch, logps = batch_of([-3.0] * 5, advantages), [-3 + gap for gap in gaps]
    squares_M = leaving_squares(torch.tensor(logps).double(), batch, 20.0)
    assert squares_M.tolist() == pytest.approx([0.25, 0.09, 0.16])
    batch = replace(batch, m2_cutoff=m2_cutoff(squares_M, 0.13))  # 0.09 and 0.16 have the mean 0.125
    token, loss, grad = loss_and_grad(logps, batch, M2poConfig(max_second_moment=0.13))
    assert token.masked_N.tolist() == [True, False, False, False, False]
    assert grad == pytest.approx([0, -math.exp(0.3), -math.exp(-0.6), math.exp(-0.4), math.exp(0.7)])
    assert loss == pytest.approx(grad)


def dppo_token(old: float, new: float, advantage: float, cfg: DppoConfig) -> tuple[bool, float]:
    token, _, grad = loss_and_grad([math.log(new)], batch_of([math.log(old)], [advantage]), cfg)
    return token.masked_N.item(), grad[0]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_masks_by_the_mass_that_moved_not_by_the_ratio(divergence: str) -> None:
    """The paper's section 4.2: 0.0001 to 0.01 moves little, 0.99 to 0.8 has a TV of 0.19 and a KL of 0.181."""
    cfg = DppoConfig(divergence=divergence)
    assert dppo_token(1e-4, 1e-2, 1.0, cfg) == (False, pytest.approx(-100))
    assert dppo_token(0.99, 0.8, -1.0, cfg) == (True, 0)
    assert dppo_token(0.99, 0.8, 1.0, cfg) == (False, pytest.approx(-0.8 / 0.99))  # the update leads back


def test_the_bound_of_dppo_is_on_the_divergence() -> None:
    """From 0.5 to 0.75: TV 0.25, KL log(2 / sqrt 3) = 0.1438."""
    for divergence, value in (("tv", 0.25), ("kl", math.log(2 / math.sqrt(3)))):
        bounds = (value + 1e-6, value - 1e-6)
        masked = [dppo_token(0.5, 0.75, 1.0, DppoConfig(divergence=divergence, max_divergence=b))[0] for b in bounds]
        assert masked == [False, True]


def test_rows_that_the_policy_left_keep_only_their_positive_tokens() -> None:
    """Mean log(sampler / policy) is 0.6, 0.6 and -0.9: the third row became likelier. The old policy is another."""
    gaps = [-1.0, -0.2, -1.0, -0.2, 0.9, 0.9]
    batch = replace(
        batch_of([-3.0] * 6, [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], rows=[0, 0, 1, 1, 2, 2]),
        sampler_logp_N=torch.full((6,), -4.0, dtype=torch.float64),
    )
    token, loss, grad = loss_and_grad([-4 + gap for gap in gaps], batch, ClipConfig(), max_negative_kl=0.5)
    assert token.masked_N.tolist() == [True, True, False, False, False, False]
    assert loss[:2] == grad[:2] == [0, 0]
    assert grad[2:] == pytest.approx([-math.exp(-2.0), -math.exp(-1.2), math.exp(-0.1), math.exp(-0.1)])
    assert not loss_and_grad([-4 + gap for gap in gaps], batch, ClipConfig(), max_negative_kl=0.61)[0].masked_N.any()


def test_gppo_keeps_gradient_where_clip_drops_it() -> None:
    assert one_token(1.5, 1.0, ClipConfig())[1] == 0.0
    assert one_token(1.5, 1.0, GppoConfig())[1] == pytest.approx(-1.28)


def test_gppo_weight_is_bounded_where_the_straight_through_form_grows() -> None:
    assert one_token(12.0, 1.0, GppoConfig())[1] == pytest.approx(
        -1.28
    )  # clip(r) - r detached, plus r, would pull with 12


@pytest.mark.parametrize("cfg", ALL_LOSSES)
def test_on_policy_every_loss_pulls_with_weight_exactly_one(cfg: LossConfig) -> None:
    _, _, grad = loss_and_grad([-0.7, -2.5], batch_of([-0.7, -2.5], [1.5, -0.5]), cfg)
    assert grad == [-1.5, 0.5]


def test_gspo_clips_whole_sequences_by_their_mean_log_ratio() -> None:
    batch = batch_of([-1.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0], rows=[0, 0, 1, 1])
    cfg = GspoConfig(eps_low=0.2, eps_high=0.28)
    # Row 0: log-ratios 1 and -0.6, mean 0.2: ratio exp(0.2) = 1.2214 stays inside. Row 1: mean -0.5: 0.6065, below 0.8.
    token, loss, grad = loss_and_grad([0.0, -1.6, -1.0, -2.0], batch, cfg)
    assert loss == pytest.approx([-1.2214, -1.2214, 0.8, 0.8], abs=1e-4)
    assert grad == pytest.approx([-1.2214, -1.2214, 0, 0], abs=1e-4)
    assert token.low_N.tolist() == [False, False, True, True]


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    old_logps, logps = [-1.0, -2.0, -0.5], [-1.1, -1.8, -0.55]
    logp_N = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    ratio = (logp_N - torch.tensor(old_logps, dtype=torch.float64)).mean().exp()
    (expected_N,) = torch.autograd.grad(-3 * 0.7 * ratio, logp_N)  # each of three tokens carries the sequence's term
    _, _, grad = loss_and_grad(
        logps, batch_of(old_logps, [0.7] * 3, rows=[0, 0, 0]), GspoConfig(eps_low=0.5, eps_high=0.5)
    )
    assert grad == pytest.approx(expected_N.tolist())


def test_only_sequence_losses_join_tokens() -> None:
    assert [kind for kind in LOSS_KINDS if joins_tokens(kind())] == [GspoConfig, TrmConfig]


def test_clipped_sides_are_told_apart() -> None:
    batch = batch_of([-1.0] * 5, [1.0, -1.0, 1.0, -1.0, -1.0])
    logps = [-1 + math.log(r) for r in (1.5, 0.5, 0.5, 1.5, 12.0)]
    token, _, _ = loss_and_grad(logps, batch, GppoConfig(dual_clip=10))
    assert token.high_N.tolist() == [True, False, False, False, False]
    assert token.low_N.tolist() == [False, True, False, False, False]
    assert token.dual_N.tolist() == [False, False, False, False, True]


def test_erc_keeps_values_and_removes_gradients_of_moved_entropies() -> None:
    old, new = [0.5, 0.5, 0.5, 0.0, 0.5], [0.5, 0.53, 0.47, 0.0, 0.524]
    batch = replace(batch_of([-1.0] * 5, [1.0] * 5), old_entropy_N=torch.tensor(old, dtype=torch.float64))
    logp_N = batch.old_logp_N.clone().requires_grad_()
    loss_N, _ = token_loss(
        logp_N, torch.tensor(new, dtype=torch.float64), batch, GppoConfig(), erc=ErcConfig(), max_log_ratio=20
    )
    (grad_N,) = torch.autograd.grad(loss_N.mean(), logp_N)
    assert loss_N.mean().item() == pytest.approx(-1.0)
    assert grad_N.tolist() == pytest.approx([-0.2, 0, 0, -0.2, -0.2])


def test_an_entropy_that_is_not_a_number_has_not_moved() -> None:
    """A fault of one token's entropy is not counted as clipping and takes away no gradient."""
    batch = replace(batch_of([-1.0] * 3, [1.0] * 3), old_entropy_N=torch.tensor([torch.nan, 0.5, 0.5]).double())
    token, _, grad = loss_and_grad([-1.0] * 3, batch, GppoConfig(), erc=ErcConfig())  # the new entropies are NaN
    assert token.erc_N.tolist() == [False] * 3
    assert grad == [-1.0] * 3


def test_a_chunk_of_a_batch_cuts_every_tensor_of_its_tokens() -> None:
    batch = batch_of([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0])
    chunk = batch.chunk(slice(1, 3))
    per_token = [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)]
    assert len(per_token) == 14
    for name in per_token:
        torch.testing.assert_close(getattr(chunk, name), getattr(batch, name)[1:3], equal_nan=True)
    assert (chunk.num_rows, chunk.cp_group) == (batch.num_rows, batch.cp_group)


def test_mismatch_factor_scales_value_and_gradient() -> None:
    correction_N = torch.tensor([0.5, 0.0], dtype=torch.float64)
    scaled = replace(batch_of([-1.0, -1.0], [1.0, 1.0]), correction_N=correction_N)
    _, loss, grad = loss_and_grad([-1.0, -1.0], scaled, GppoConfig())
    assert loss == [-0.5, 0.0]
    assert grad == [-0.5, 0.0]


def smooth_surrogate(log_ratio: torch.Tensor, logp: torch.Tensor, advantage: float, cfg: LossConfig) -> torch.Tensor:
    """Functions whose true derivative is the gradient that each loss promises, away from its bounds."""
    ratio = log_ratio.exp()
    if isinstance(cfg, CispoConfig):
        return -advantage * ratio.detach().clamp(1 - cfg.eps_low if cfg.two_sided else 0, 1 + cfg.eps_high) * logp
    if isinstance(cfg, SapoConfig):
        tau = cfg.tau_positive if advantage > 0 else cfg.tau_negative
        return -advantage * 4 / tau * (tau * (ratio - 1)).sigmoid()
    if isinstance(cfg, AspoConfig):
        # As its code has it: the clipped ratio carries the gradient, divided twice by itself as a number.
        clipped = ratio.clamp(max=1 + cfg.eps_high) if advantage > 0 else ratio.clamp(min=1 - cfg.eps_low)
        flipped = clipped / clipped.detach() ** 2 if advantage > 0 else clipped
        capped = flipped.detach() > cfg.max_weight
        return -advantage * (cfg.max_weight * logp if capped else flipped)
    if isinstance(cfg, DgpoConfig):
        low, high = 1 - cfg.eps_low, 1 + cfg.eps_high
        if advantage < 0 and ratio < low:
            return -advantage * ratio * (ratio.detach() / low) ** cfg.low_power
        if advantage > 0 and ratio > high:
            return -advantage * ratio * (high / ratio.detach()) ** (1 / cfg.high_root)
        return -advantage * ratio
    if isinstance(cfg, ClipConfig):
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high) * advantage)
    raise AssertionError(cfg)


@pytest.mark.parametrize(
    "cfg",
    [ClipConfig(), CispoConfig(), CispoConfig(two_sided=True), SapoConfig(), AspoConfig(), DgpoConfig(low_power=2)],
)
@pytest.mark.parametrize("advantage", [1.3, -0.4])
def test_gradient_is_that_of_the_textbook_form(cfg: LossConfig, advantage: float) -> None:
    for ratio in (0.3, 0.75, 0.85, 1.1, 1.4, 7.0):
        logp = torch.tensor(-1 + math.log(ratio), dtype=torch.float64, requires_grad=True)
        (expected,) = torch.autograd.grad(smooth_surrogate(logp + 1, logp, advantage, cfg), logp)
        assert one_token(ratio, advantage, cfg)[1] == pytest.approx(expected.item())


def test_inside_the_range_gppo_passes_finite_differences() -> None:
    for ratio in (0.85, 1.0, 1.2):
        low, high = (
            one_token(ratio * math.exp(-1e-6), 0.7, GppoConfig())[0],
            one_token(ratio * math.exp(1e-6), 0.7, GppoConfig())[0],
        )
        assert one_token(ratio, 0.7, GppoConfig())[1] == pytest.approx((high - low) / 2e-6, rel=1e-5)


ANY_LOGP = st.one_of(
    st.floats(allow_nan=False, width=32), st.sampled_from([0.0, -0.0, -104.0, -1e4, -math.inf, math.inf, 89.0])
)


@given(logp=ANY_LOGP, old=ANY_LOGP, advantage=st.floats(-1e3, 1e3, width=32), which=st.sampled_from(ALL_LOSSES))
def test_every_finite_or_infinite_input_gives_finite_loss_and_gradient(
    logp: float, old: float, advantage: float, which: LossConfig
) -> None:
    _, loss, grad = loss_and_grad([logp], batch_of([old], [advantage], dtype=torch.float32), which)
    assert math.isfinite(loss[0])
    assert math.isfinite(grad[0])


@pytest.mark.parametrize("cfg", ALL_LOSSES)
@pytest.mark.parametrize("ratio", [math.exp(-25), 0.3, 0.9, 1.1, 4.0, math.exp(25)])
@pytest.mark.parametrize("advantage", [0.7, -1.3])
def test_the_gradient_is_weight_times_advantage(cfg: LossConfig, ratio: float, advantage: float) -> None:
    token, _, grad = loss_and_grad([-40 + math.log(ratio)], batch_of([-40.0], [advantage]), cfg)
    assert grad == pytest.approx((-token.weight_N * advantage).tolist(), rel=1e-12)
    assert 0 <= token.weight_N.item() <= math.exp(20) * (1 + 1e-9)


@pytest.mark.parametrize("cfg", ALL_LOSSES)
def test_a_nan_is_not_hidden(cfg: LossConfig) -> None:
    _, loss, _ = loss_and_grad([math.nan], batch_of([-1.0], [1.0]), cfg)
    assert math.isnan(loss[0])


def test_log_ratios_beyond_the_bound_are_counted() -> None:
    token, _, _ = loss_and_grad(
        [-0.1, -30.0, -1.0], batch_of([-30.0, -0.1, -1.0], [1.0] * 3), GppoConfig(), max_log_ratio=20.0
    )
    assert token.bounded_N.tolist() == [True, True, False]


def exact_k3(log_ratio: float) -> float:
    """With sixty digits."""
    with localcontext() as context:
        context.prec = 60
        x = Decimal(log_ratio)
        return float(x.exp() - 1 - x)


GAPS = [1e-12, 1e-8, 3e-7, 9.99e-6, 1.001e-5, 1e-4, 3e-3, 0.1, 1.0, 5.0, 20.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_right_from_the_smallest_gap_to_the_largest(dtype: torch.dtype) -> None:
    gap_N = torch.tensor([sign * gap for gap in GAPS for sign in (1, -1)], dtype=dtype)
    assert k3(gap_N).tolist() == pytest.approx([exact_k3(gap) for gap in gap_N.tolist()], rel=1e-9, abs=0)


def test_the_gradient_of_k3_is_the_ratio_less_one() -> None:
    gap_N = torch.tensor([sign * gap for gap in GAPS for sign in (1, -1)], dtype=torch.float64, requires_grad=True)
    (grad_N,) = torch.autograd.grad(k3(gap_N).sum(), gap_N)
    assert grad_N.tolist() == pytest.approx([math.expm1(gap) for gap in gap_N.tolist()], rel=1e-9, abs=0)


@given(st.floats(-30, 30))
def test_k3_is_never_negative(gap: float) -> None:
    for dtype in (torch.float32, torch.float64):
        assert k3(torch.tensor([gap, gap * 1e-7], dtype=dtype)).min() >= 0
    assert k3(torch.zeros(1)).item() == 0


def test_the_mean_of_a_long_row_is_that_of_its_tokens() -> None:
    """A float32 sum that has reached 1 takes no 1e-8 any more."""
    x_N = torch.full((1 << 17,), 1e-8)
    x_N[0] = 1.0
    batch = batch_of([0.0] * len(x_N), [1.0] * len(x_N))
    batch = replace(batch, row_N=torch.zeros(len(x_N), dtype=torch.int64), num_rows=1)
    wanted = (1 + (len(x_N) - 1) * float(x_N[1])) / len(x_N)
    assert row_mean(x_N, batch)[0].item() == pytest.approx(wanted, rel=1e-7)


def test_betas_move_in_a_line_and_stay() -> None:
    cfg = GppoConfig(preset="high_only", schedule=BetaSchedule(start_step=10, end_step=20, beta_low=0.5, beta_high=1.0))
    betas = [(at_step(cfg, s).beta_low, at_step(cfg, s).beta_high) for s in (0, 10, 15, 20, 99)]  # type: ignore[union-attr]
    assert betas == [(0, 1), (0, 1), (0.25, 1), (0.5, 1), (0.5, 1)]


def test_a_schedule_without_length_is_a_jump() -> None:
    cfg = GppoConfig(
        preset="high_only", schedule=BetaSchedule(start_step=585, end_step=585, beta_low=0.5, beta_high=1.0)
    )
    assert [at_step(cfg, s).beta_low for s in (584, 585)] == [0, 0.5]  # type: ignore[union-attr]


def test_presets_name_their_betas_and_betas_their_preset() -> None:
    assert (GppoConfig().beta_low, GppoConfig().beta_high) == (1, 1)
    assert GppoConfig(beta_low=0).preset == "high_only"
    assert GppoConfig(eps_high=0.2).preset == "paper"
    assert GppoConfig(beta_low=0.3).preset == "custom"
    assert GppoConfig.model_validate(GppoConfig(preset="high_only").model_dump()) == GppoConfig(beta_low=0)


def test_the_preset_of_ce_gppo_has_its_clip_range() -> None:
    cfg = GppoConfig(preset="ce_gppo")
    assert (cfg.beta_low, cfg.beta_high, cfg.eps_low, cfg.eps_high) == (0.5, 1, 0.2, 0.2)
    assert GppoConfig(beta_low=0.5, eps_high=0.2) == cfg
    assert GppoConfig(beta_low=0.5).preset == "custom"
    with pytest.raises(ValueError, match=r"eps_high=0\.28 contradicts preset 'ce_gppo', where it is 0\.2"):
        GppoConfig(preset="ce_gppo", eps_high=0.28)


def test_a_preset_that_contradicts_its_betas_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta_low=0\.25 contradicts preset 'paper'"):
        GppoConfig(preset="paper", beta_low=0.25)
