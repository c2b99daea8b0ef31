"""The whole loss of a mini-batch: a full-loss vector, each term by hand, and every cut of the batch alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rl_builders import random_samples, rl_config, sample, scored_samples

from klear_core.config.losses import LOSS_KINDS
from klear_core.config.rewards import GrpoAdvantage
from klear_core.config.rl import EntropyTargetConfig, MismatchConfig, RlConfig
from klear_core.rl.losses import LossInputs
from klear_core.rl.objective import Denominators, EntropyBonus, loss_head, make_loss_inputs
from klear_core.rl.rewards import advantages
from klear_core.rl.step_metrics import TokenStats
from klear_core.train.logps import TokenLogps
from klear_core.train.packing import MicroBatch, pack
from klear_core.types import TrainSample

VOCAB = 5
CPU = torch.device("cpu")


def batch_of(
    micro: MicroBatch,
    rows: list[TrainSample],
    cfg: RlConfig,
    *,
    old_logp_N: torch.Tensor | None = None,
    ref_logp_N: torch.Tensor | None = None,
) -> LossInputs:
    """Old log-probs are by default those of the rows, in float64."""
    old = None if old_logp_N is None else TokenLogps(old_logp_N, torch.full_like(old_logp_N, torch.nan))
    batch = make_loss_inputs(micro, rows, old, ref_logp_N, Denominators.of(rows), cfg)
    if old is not None:
        return batch
    return replace(batch, old_logp_N=micro.gather([r.sampler_logps for r in rows], torch.float64))


def loss_and_logp_grad(
    rows: list[TrainSample],
    logps: list[list[float]],
    cfg: RlConfig,
    *,
    old_logp_N: torch.Tensor | None = None,
    ref_logp_N: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, list[float]]:
    """Loss and its derivative by each token's log-prob; the "model" is a table of logits with two tokens, so that any log-prob can be had.

    With logits (x, 0) and target 0, logp = log sigmoid(x) and d logp / d x = 1 - p, which is divided out again.
    """
    (micro,) = pack(rows, tokens_per_microbatch=1 << 20).micro_batches
    logp_N = micro.gather([[0.0, 0.0, *row] for row in logps], torch.float64)
    x_N = (logp_N - torch.log1p(-logp_N.exp())).to(dtype).requires_grad_()
    hidden_NH = torch.stack([x_N, torch.zeros_like(x_N)], dim=1)
    batch = batch_of(micro, rows, cfg, old_logp_N=old_logp_N, ref_logp_N=ref_logp_N)
    out = loss_head(batch, cfg, TokenStats(CPU))(hidden_NH, torch.eye(2, dtype=dtype))
    (grad_N,) = torch.autograd.grad(out.loss, x_N)
    by_place = sorted(
        zip(micro.row_N.tolist(), micro.column_N.tolist(), (grad_N / (1 - logp_N.exp())).tolist(), strict=True)
    )
    return out.loss.item(), [g for _, _, g in by_place]


def three_responses() -> tuple[list[TrainSample], list[list[float]]]:
    """Rewards [1, 1, -1]; ratios are 1 but for 1.5 at the first token and 0.5 at the last response's second."""
    adv = advantages([[1, 1, -1]], GrpoAdvantage(std="sample"))[0]
    logps = [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6]]
    olds = [[-0.1 - math.log(1.5), -0.2], [-0.3], [-0.4, -0.5 - math.log(0.5), -0.6]]
    rows = [
        sample("p", [0] * len(o), o, advantage=a, is_positive=i < 2)
        for i, (o, a) in enumerate(zip(olds, adv, strict=True))
    ]
    return rows, logps


def test_full_loss_vector() -> None:
    rows, logps = three_responses()
    loss, grad = loss_and_logp_grad(rows, logps, rl_config(lm_coef=0.1))
    assert loss == pytest.approx(0.2432419, abs=2e-6)
    assert grad == pytest.approx([-0.156501, -0.129558, -0.129558, 0.19245, 0.15396, 0.19245], abs=2e-6)


def test_policy_part_and_language_model_part_of_the_vector() -> None:
    rows, logps = three_responses()
    policy, _ = loss_and_logp_grad(rows, logps, rl_config(lm_coef=0.0))
    both, _ = loss_and_logp_grad(rows, logps, rl_config(lm_coef=1.0))
    assert policy == pytest.approx(0.2232419, abs=2e-6)
    assert both - policy == pytest.approx(0.2, abs=1e-6)


def test_without_a_correct_sample_the_language_model_part_is_zero() -> None:
    rows, logps = [sample("p", [0], [-1.0])], [[-1.0]]
    assert loss_and_logp_grad(rows, logps, rl_config(lm_coef=1.0))[0] == pytest.approx(-1.0)


@pytest.mark.parametrize(("normalise", "expected"), [("token", 1.4), ("sample", 2.0), ("budget", 7 / 16)])
def test_normalisation_vector(normalise: str, expected: float) -> None:
    """Token losses [1, 1, 1, 1] and [3]; the budget is 8 tokens for each of two rows."""
    rows = [sample("a", [0] * 4, [-1.0] * 4, advantage=-1.0), sample("b", [0], [-1.0], advantage=-3.0)]
    loss, _ = loss_and_logp_grad(rows, [[-1.0] * 4, [-1.0]], rl_config(normalise=normalise))
    assert loss == pytest.approx(expected, rel=1e-6)


def test_kl_term_is_k3_of_the_reference() -> None:
    rows = [sample("p", [0, 0], [-1.0, -1.0], advantage=0.0)]
    ref_logp_N = torch.tensor([-1.0, -1.5])
    loss, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]], rl_config(kl_coef=2.0), ref_logp_N=ref_logp_N)
    assert loss == pytest.approx(2.0 * (math.exp(-0.5) - 1 + 0.5) / 2, rel=1e-5)
    assert grad == pytest.approx([0, 1 - math.exp(-0.5)], rel=1e-5)


@pytest.mark.parametrize(("dtype", "gap", "rel"), [(torch.float64, 1e-6, 1e-6), (torch.float32, 1e-3, 1e-3)])
def test_kl_term_and_its_gradient_are_right_where_policy_and_reference_hardly_differ(
    dtype: torch.dtype, gap: float, rel: float
) -> None:
    """k3 is half the gap squared, but for its cube; what is left of it in float32 comes from the rounding of the log-prob itself."""
    rows = [sample("p", [0], [-1.0], advantage=0.0)]
    ref_logp_N = torch.tensor([-1.0 + gap], dtype=dtype)
    loss, grad = loss_and_logp_grad(rows, [[-1.0]], rl_config(kl_coef=1.0), ref_logp_N=ref_logp_N, dtype=dtype)
    assert loss == pytest.approx(gap**2 / 2 + gap**3 / 6, rel=rel, abs=0)
    assert grad == pytest.approx([-math.expm1(gap)], rel=rel, abs=0)


def test_entropy_bonus_is_the_mean_entropy() -> None:
    rows = [sample("p", [0], [math.log(0.5)], advantage=0.0)]
    loss, _ = loss_and_logp_grad(rows, [[math.log(0.5)]], rl_config(entropy_coef=0.1))
    assert loss == pytest.approx(-0.1 * math.log(2))


def test_the_adaptive_entropy_bonus_by_hand() -> None:
    """Target 0.2, delta 0.005, at most 0.012: it rises below the target, falls at it or above, and is off above it."""
    cfg = EntropyTargetConfig(max_coef=0.012)
    bonus = EntropyBonus(coef=0.0, applied=0.0)
    found = []
    for entropy in (0.1, 0.19, 0.15, 0.3, 0.2, 0.25, 0.1):
        bonus = bonus.after(entropy, cfg)
        found.append((bonus.coef, bonus.applied))
    expected = [(0.005, 0.005), (0.01, 0.01), (0.012, 0.012), (0.007, 0), (0.002, 0.002), (0, 0), (0.005, 0.005)]
    assert found == [pytest.approx(pair) for pair in expected]


def test_truncated_importance_weights_scale_tokens_up_to_the_cap() -> None:
    rows = [sample("p", [0, 0], [-1.0 - math.log(3), -1.0 - math.log(0.5)])]
    cfg = rl_config(old_logps="learner", mismatch=MismatchConfig(truncate_at=2.0))
    loss, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]], cfg, old_logp_N=torch.tensor([-1.0, -1.0]))
    assert grad == pytest.approx([-2.0 / 2, -0.5 / 2], rel=1e-5)
    assert loss == pytest.approx(-1.25, rel=1e-5)


def test_a_sequence_too_far_from_its_sampler_is_masked_whole_and_still_counted() -> None:
    """Learner over sampler: exp(0.5) = 1.65 and exp(-0.5), one over that, are too far; exp(0.3) = 1.35 and exp(-0.3) are not."""
    sampler_logps = {"a": (-1.0, -2.0), "b": (-0.5, -0.5), "c": (-1.3, -1.3), "d": (-0.7, -0.7)}
    rows = [sample(name, [0, 0], logps) for name, logps in sampler_logps.items()]
    cfg = rl_config(old_logps="learner", mismatch=MismatchConfig(max_sequence_ratio=1.5))
    _, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]] * 4, cfg, old_logp_N=torch.full((8,), -1.0))
    assert grad == pytest.approx([0, 0, 0, 0, *[-1 / 8] * 4], rel=1e-5)


def test_infinite_log_probs_of_old_and_reference_stay_finite() -> None:
    rows = [sample("p", [0, 0, 0], [-math.inf, -1.0, -1.0], is_positive=True)]
    old_logp_N, ref_logp_N = torch.tensor([-math.inf, -1.0, -1e30]), torch.tensor([-1.0, -math.inf, -1.0])
    cfg = rl_config(old_logps="learner", kl_coef=0.1, lm_coef=0.1)
    loss, grad = loss_and_logp_grad(rows, [[-1.0] * 3], cfg, old_logp_N=old_logp_N, ref_logp_N=ref_logp_N)
    assert math.isfinite(loss)
    assert all(math.isfinite(g) for g in grad)


def micro_losses(
    rows: list[TrainSample], micro_batches: tuple[MicroBatch, ...], cfg: RlConfig
) -> tuple[float, torch.Tensor, TokenStats]:
    """Summed loss and the gradient by a head weight, over micro-batches whose hidden states depend on the token alone."""
    weight_VH = torch.linspace(-1, 1, 256 * 4, dtype=torch.float64).reshape(256, 4).sin().requires_grad_()
    table = torch.linspace(-2, 2, 256 * 4, dtype=torch.float64).reshape(256, 4).cos()
    stats = TokenStats(CPU)
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        head = loss_head(batch_of(micro, rows, cfg), cfg, stats)
        total = total + head(table[micro.token_ids_1T.flatten()[micro.predictor_N]], weight_VH).loss
    (grad_VH,) = torch.autograd.grad(total, weight_VH)
    return total.item(), grad_VH, stats


@pytest.mark.parametrize("kind", [cls().kind for cls in LOSS_KINDS])
@pytest.mark.parametrize("normalise", ["token", "sample", "budget"])
def test_loss_gradient_and_statistics_do_not_depend_on_micro_batches(kind: str, normalise: str) -> None:
    rows = random_samples(9, logp=-5.4)
    cfg = rl_config(loss={"kind": kind}, normalise=normalise, lm_coef=0.1)
    whole = micro_losses(rows, pack(rows, tokens_per_microbatch=1 << 20).micro_batches, cfg)
    single = micro_losses(rows, pack(rows, tokens_per_microbatch=1).micro_batches, cfg)
    assert whole[0] == pytest.approx(single[0], rel=1e-9)
    torch.testing.assert_close(whole[1], single[1], rtol=1e-6, atol=1e-12)
    assert whole[2].metrics() == pytest.approx(single[2].metrics(), rel=1e-5)


@pytest.mark.parametrize("kind", [cls().kind for cls in LOSS_KINDS])
@pytest.mark.parametrize("normalise", ["token", "sample", "budget"])
def test_distillation_does_not_depend_on_micro_batches(kind: str, normalise: str) -> None:
    rows = scored_samples(9)
    cfg = rl_config(loss={"kind": kind}, lm_coef=0.1, distill={"coef": 0.7, "normalise": normalise})
    whole = micro_losses(rows, pack(rows, tokens_per_microbatch=1 << 20).micro_batches, cfg)
    single = micro_losses(rows, pack(rows, tokens_per_microbatch=1).micro_batches, cfg)
    assert whole[0] == pytest.approx(single[0], rel=1e-9)
    torch.testing.assert_close(whole[1], single[1], rtol=1e-6, atol=1e-12)
    assert whole[2].metrics() == pytest.approx(single[2].metrics(), rel=1e-5)
    assert "rl/distill/kl" in whole[2].metrics()


def test_distillation_moves_a_token_by_the_log_ratio_of_teacher_and_policy() -> None:
    """No reward, ratios of 1: A = log teacher - log policy = (0.5, -0.2), with coefficient 2, over two tokens."""
    rows = [sample("p", [0, 0], [-1.0, -1.0], advantage=0.0, teacher=[-0.5, -1.2])]
    _, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]], rl_config(distill={"coef": 2.0}))
    assert grad == pytest.approx([-2 * 0.5 / 2, 2 * 0.2 / 2], rel=1e-5)
    _, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]], rl_config())
    assert grad == pytest.approx([0, 0])  # not asked for


def test_distillation_looks_at_the_present_policy_and_is_clipped_as_the_loss_says() -> None:
    """Ratios 2 and 1/2 against the sampler. The first token's A = -0.5 + 1 > 0 is above the range: GPPO weighs it 1.28.
    The second's A = -1.5 + 1 < 0 is below: 0.8. The third is where the teacher is: nothing, whatever the sampler had."""
    logps = [-1.0, -1.0, -1.0]
    olds = [-1.0 - math.log(2), -1.0 + math.log(2), -3.0]
    rows = [sample("p", [0] * 3, olds, advantage=0.0, teacher=[-0.5, -1.5, -1.0])]
    loss, grad = loss_and_logp_grad(rows, [logps], rl_config(distill={}))
    assert grad == pytest.approx([-0.5 * 1.28 / 3, 0.5 * 0.8 / 3, 0], rel=1e-5)
    assert loss == pytest.approx(-0.5 * 1.28 / 3 + 0.5 * 0.8 / 3, rel=1e-5)


def test_each_term_has_its_own_divisor() -> None:
    """Rewards: over all 5 tokens. Distillation: over the 3 of the scored row alone (token), or 1 row x 3 (sample), or 1 x 8
    (budget). Language model: over the positive row's 2. Both advantages are 1, and so are the ratios."""
    rows = [
        sample("a", [0] * 3, [-1.0] * 3, advantage=1.0, teacher=[0.0] * 3),
        sample("b", [0] * 2, [-1.0] * 2, advantage=1.0, is_positive=True),
    ]
    logps = [[-1.0] * 3, [-1.0] * 2]
    for normalise, divisor in (("token", 3), ("sample", 3), ("budget", 8)):
        cfg = rl_config(distill={"normalise": normalise}, lm_coef=0.5)
        _, grad = loss_and_logp_grad(rows, logps, cfg)
        assert grad == pytest.approx([-1 / 5 - 1 / divisor] * 3 + [-1 / 5 - 0.5 / 2] * 2, rel=1e-5)


def test_a_reward_of_opposite_sign_is_weighed_against_the_teacher_before_the_clip() -> None:
    """A = 1 - 1.5 = -0.5 at a ratio of 2: a negative token above the range, which GPPO leaves its ratio."""
    rows = [sample("p", [0], [-1.0 - math.log(2)], advantage=1.0, teacher=[-2.5])]
    _, grad = loss_and_logp_grad(rows, [[-1.0]], rl_config(distill={}))
    assert grad == pytest.approx([0.5 * 2], rel=1e-5)


def test_a_teacher_that_rules_a_token_out_stays_finite() -> None:
    rows = [sample("p", [0, 0], [-1.0, -1.0], advantage=0.0, teacher=[-math.inf, -1e30])]
    cfg = rl_config(distill={}, max_log_ratio=20)
    _, grad = loss_and_logp_grad(rows, [[-1.0, -1.0]], cfg)
    assert grad == pytest.approx([20 / 2, 20 / 2])


def test_the_gap_to_the_teacher_is_a_metric_of_the_scored_tokens() -> None:
    rows = [sample("a", [0], [-1.0], teacher=[-1.5]), sample("b", [0], [-1.0])]
    stats = micro_losses(rows, pack(rows, tokens_per_microbatch=1 << 20).micro_batches, rl_config(distill={}))[2]
    unscored = [replace(row, teacher_logps=()) for row in rows]
    without = micro_losses(unscored, pack(rows, tokens_per_microbatch=1 << 20).micro_batches, rl_config(distill={}))[2]
    # the policy's log-prob of the token, from the table of `micro_losses`
    weight_VH = torch.linspace(-1, 1, 256 * 4, dtype=torch.float64).reshape(256, 4).sin()
    hidden_H = torch.linspace(-2, 2, 256 * 4, dtype=torch.float64).reshape(256, 4).cos()[2]
    logp = torch.log_softmax(weight_VH @ hidden_H, 0)[0].item()
    assert stats.metrics()["rl/distill/kl"] == pytest.approx(logp + 1.5, rel=1e-5)
    assert "rl/distill/kl" not in without.metrics()


def with_tops(row: TrainSample, num_top: int = 3) -> TrainSample:
    """A scored row with the teacher's likeliest tokens in place of each."""
    if not row.has_teacher:
        return row
    num = row.num_loss_tokens
    ids = tuple((7 * i + k) % 250 for i in range(num) for k in range(num_top))
    return replace(row, top_ids=ids, top_logps=tuple(-1.0 - (i % 5) / 3 for i in range(len(ids))))


@pytest.mark.parametrize("normalise", ["token", "sample", "budget"])
def test_the_distance_to_the_teachers_distribution_does_not_depend_on_micro_batches(normalise: str) -> None:
    rows = [with_tops(row) for row in scored_samples(9)]
    cfg = rl_config(lm_coef=0.1, distill={"coef": 0.7, "normalise": normalise})
    whole = micro_losses(rows, pack(rows, tokens_per_microbatch=1 << 20).micro_batches, cfg)
    single = micro_losses(rows, pack(rows, tokens_per_microbatch=1).micro_batches, cfg)
    assert whole[0] == pytest.approx(single[0], rel=1e-6)
    torch.testing.assert_close(whole[1], single[1], rtol=1e-5, atol=1e-10)
    assert whole[2].metrics() == pytest.approx(single[2].metrics(), rel=1e-5)


def test_the_gradient_towards_a_teachers_distribution_is_the_difference_of_both() -> None:
    """Policy 3/4, 1/4; teacher 1/2, 1/2: dKL/dz = policy - teacher, whatever token was sampled and without a ratio."""
    row = sample("p", [0], [-9.0], advantage=0.0, teacher=[math.log(0.5)])
    row = replace(row, top_ids=(0, 1), top_logps=(math.log(0.5),) * 2)
    (micro,) = pack([row], tokens_per_microbatch=1 << 20).micro_batches
    logits = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64, requires_grad=True)
    cfg, stats = rl_config(distill={"coef": 2.0}), TokenStats(CPU)
    loss_head(batch_of(micro, [row], cfg), cfg, stats)(logits, torch.eye(2, dtype=torch.float64)).loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist()[0] == pytest.approx([2 * 0.25, 2 * -0.25])
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert stats.metrics()["rl/distill/kl"] == pytest.approx(kl)


def test_statistics_by_hand() -> None:
    rows, logps = three_responses()
    (micro,) = pack(rows, tokens_per_microbatch=1 << 20).micro_batches
    logp_N = micro.gather([[0.0, 0.0, *row] for row in logps], torch.float64)
    x_N = logp_N - torch.log1p(-logp_N.exp())
    cfg, stats = rl_config(), TokenStats(CPU)
    loss_head(batch_of(micro, rows, cfg), cfg, stats)(
        torch.stack([x_N, torch.zeros_like(x_N)], dim=1), torch.eye(2, dtype=torch.float64)
    )
    metrics = stats.metrics()
    assert metrics["rl/ratio/mean"] == pytest.approx(1.0)
    assert (metrics["rl/ratio/min"], metrics["rl/ratio/max"]) == pytest.approx((0.5, 1.5))
    assert (metrics["rl/clip/low_frac"], metrics["rl/clip/high_frac"]) == pytest.approx((1 / 6, 1 / 6))
    good, bad = 0.57735, 1.1547
    pulls = [1.28 * good, good, good, bad, 0.8 * bad, bad]
    assert metrics["rl/clip/pull_frac"] == pytest.approx((pulls[0] + pulls[4]) / sum(pulls), rel=1e-5)
