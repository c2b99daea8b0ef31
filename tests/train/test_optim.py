"""Schedule, groups and clipping, by hand."""

import pytest
import torch
from torch import nn

from klear_core.config.train import OptimConfig
from klear_core.train.step import apply_update, grad_norm, lr_at, make_optimizer


def test_warmup_climbs_in_equal_steps_to_the_peak():
    cfg = OptimConfig(lr=1.0, warmup_steps=4)
    assert [lr_at(s, cfg, 100) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_starts_at_the_peak_is_halfway_in_the_middle_and_ends_on_the_floor():
    cfg = OptimConfig(lr=8e-5, min_lr_ratio=0.5)
    assert lr_at(0, cfg, 101) == pytest.approx(8e-5)
    assert lr_at(50, cfg, 101) == pytest.approx(6e-5)
    assert lr_at(100, cfg, 101) == pytest.approx(4e-5)


def test_cosine_begins_after_the_warmup():
    cfg = OptimConfig(lr=1.0, min_lr_ratio=0.0, warmup_steps=10)
    assert lr_at(9, cfg, 21) == 1.0
    assert lr_at(10, cfg, 21) == 1.0
    assert lr_at(15, cfg, 21) == pytest.approx(0.5)
    assert lr_at(20, cfg, 21) == pytest.approx(0.0)


def test_a_schedule_of_one_step_uses_the_peak():
    assert lr_at(0, OptimConfig(lr=1.0, min_lr_ratio=0.1), 1) == 1.0


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 2)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight  # tied


def test_decay_is_on_matrices_alone():
    model = Small()
    decayed, plain = make_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1)).param_groups
    assert [p.shape for p in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in plain["params"]] == [(4, 3), (3,), (3,), (2,)]
    assert plain["weight_decay"] == 0.0


def test_first_adam_step_moves_by_the_rate_and_decays_first():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    model(torch.tensor([[3.0]])).sum().backward()
    apply_update(model, optimizer, lr=0.1, norm=grad_norm(model), max_grad_norm=100.0)
    assert model.weight.item() == pytest.approx(
        2.0 * (1 - 0.1 * 0.5) - 0.1, abs=1e-6
    )  # decoupled decay, then lr * sign
    assert model.weight.grad is None


def test_moments_exist_before_the_first_step():
    optimizer = make_optimizer(nn.Linear(2, 2), OptimConfig(lr=1.0))
    assert [s["step"].item() for s in optimizer.state.values()] == [0.0, 0.0]


def test_norm_is_over_all_parameters_and_clipping_scales_all_alike():
    model = Small()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.norm.bias.grad[0] = 3.0
    model.linear.bias.grad[1] = 4.0
    norm = grad_norm(model)
    assert norm.item() == 5.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.linear.bias[1].item()
    apply_update(model, optimizer, lr=1.0, norm=norm, max_grad_norm=1.0)
    assert before - model.linear.bias[1].item() == pytest.approx(0.8, abs=1e-5)
