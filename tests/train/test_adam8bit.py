"""Moments in 8 bits (torchao): a quarter of the memory, nearly the same updates. `make test-adam8bit` runs this."""

import os
from functools import partial

import pytest
import torch
from gloo_ranks import run_ranks
from tiny_models import ONE, nll_heads, random_rows
from torch import nn

from klear_core.config.train import CheckpointConfig, OptimConfig, TinyModelConfig, TrainRuntime
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import full_weights, load_policy
from klear_core.train.packing import pack
from klear_core.train.step import Updater, apply_update, make_optimizer

if os.environ.get("KLEAR_REQUIRE_TORCHAO") != "1":
    pytest.importorskip("torchao", reason="torchao is not installed; make test-adam8bit installs and tests it")

NEAR = 2e-2
"""Of a loss after 12 updates at 4e-3, relative; seen: 2e-3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Large enough that a half of each matrix is quantised: 4,096 values or more."""
    workdir = tmp_path_factory.mktemp("base")
    prepare_base(
        TinyModelConfig(num_layers=1, intermediate_size=256), seed=0, workdir=workdir, telemetry=NullTelemetry()
    )
    return model_folder(workdir)


def config(kind):
    return OptimConfig(kind=kind, lr=4e-3, warmup_steps=2, weight_decay=0.1)


def begin(folder, kind, world):
    policy = load_policy(folder, world, dtype="float32", activation_checkpointing=False)
    return policy, Updater(policy, config(kind), world, num_steps=12)


def train(policy, updater, steps):
    losses = []
    for s in steps:
        world = updater.world
        batch = pack(random_rows([40, 30], seed=s % 3), tokens_per_microbatch=99, rank=world.rank, num_ranks=world.size)
        losses.append(updater.update(batch, nll_heads(batch, 1 / batch.num_loss_tokens), step=s).loss)
    return losses


def test_a_matrix_has_moments_of_one_byte_and_the_first_update_is_that_of_adamw():
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    updated, states = [], []
    for kind in ("adamw", "adamw_8bit"):
        model = nn.Linear(128, 64)
        with torch.no_grad():
            model.weight.copy_(matrix)
            model.bias.zero_()
        optimizer = make_optimizer(model, OptimConfig(kind=kind, lr=0.5, weight_decay=0.1))
        model(matrix[:5]).square().sum().backward()
        apply_update(model, optimizer, lr=1e-2, norm=torch.tensor(1.0), max_grad_norm=1.0)
        updated.append(model.weight.detach())
        states.append(optimizer.state)
    torch.testing.assert_close(updated[1], updated[0], atol=1e-6, rtol=1e-5)
    weight, bias = states[1].values()
    assert weight["exp_avg"].codes.dtype == weight["exp_avg_sq"].codes.dtype == torch.uint8
    assert weight["exp_avg"].codes.numel() == matrix.numel()
    assert weight["exp_avg"].scale.numel() == matrix.numel() / 256
    assert bias["exp_avg"].dtype == torch.float32  # 64 values


@pytest.fixture(scope="module")
def plain(folder):
    return train(*begin(folder, "adamw", ONE), range(12))


def test_training_ends_near_that_with_moments_in_float32(folder, plain):
    losses = train(*begin(folder, "adamw_8bit", ONE), range(12))
    assert losses[-1] < 0.8 * losses[0]
    assert losses[:2] == pytest.approx(plain[:2], rel=1e-5)
    assert losses == pytest.approx(plain, rel=NEAR)
    assert losses != plain


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_run_resumes_bit_for_bit(folder, tmp_path, is_asynchronous):
    policy, updater = begin(folder, "adamw_8bit", ONE)
    kept = Checkpoints(tmp_path, CheckpointConfig(asynchronous=is_asynchronous), ONE)
    train(policy, updater, range(3))
    kept.save(3, policy, updater.optimizer, {})
    whole = train(policy, updater, range(3, 6))
    kept.wait()
    resumed, updater = begin(folder, "adamw_8bit", ONE)
    assert kept.load_latest(resumed, updater.optimizer) == (3, {})
    assert train(resumed, updater, range(3, 6)) == whole
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), resumed.parameters(), strict=True))


def on_ranks(folder, checkpoints, world, telemetry):
    policy, updater = begin(folder, "adamw_8bit", world)
    kept = Checkpoints(checkpoints, CheckpointConfig(), world)
    losses = train(policy, updater, range(6))
    kept.save(6, policy, updater.optimizer, {})
    losses += train(policy, updater, range(6, 12))
    resumed, updater = begin(folder, "adamw_8bit", world)
    kept.load_latest(resumed, updater.optimizer)
    train(resumed, updater, range(6, 12))
    return losses, full_weights(policy), full_weights(resumed)


@pytest.mark.slow
def test_two_ranks_train_near_one_and_resume(folder, plain, tmp_path):
    runtime = TrainRuntime(device="cpu", num_workers=2)
    losses, weights, resumed = run_ranks(partial(on_ranks, folder, tmp_path), runtime, NullTelemetry())
    assert losses == pytest.approx(plain, rel=NEAR)
    torch.testing.assert_close(resumed, weights, atol=0, rtol=0)
