"""Training with weights, gradients and moments in host memory computes what it computes without; 8-bit moments come near."""

from functools import partial

import pytest
import torch
from gloo_ranks import run_ranks
from pydantic import ValidationError
from tiny_models import ONE, nll_heads, random_rows, tiny_folder

from klear_core.config.train import CheckpointConfig, LoraConfig, OptimConfig, TrainRuntime
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import full_weights, load_policy
from klear_core.train.model import Adapters
from klear_core.train.packing import pack
from klear_core.train.step import Updater

CASES = {"float32": None, "bfloat16": None, "bfloat16 with adapters": Adapters(cfg=LoraConfig(rank=4), seed=1)}


def begin(folder, case, world, *, cpu_offload):
    policy = load_policy(
        folder,
        world,
        dtype=case.split()[0],
        activation_checkpointing=True,
        cpu_offload=cpu_offload,
        adapters=CASES[case],
    )
    return policy, Updater(policy, OptimConfig(lr=1e-2, weight_decay=0.1), world, num_steps=4)


def train(policy, updater, steps):
    losses = []
    for s in steps:
        world = updater.world
        batch = pack(random_rows([9, 20, 14], seed=s), tokens_per_microbatch=24, rank=world.rank, num_ranks=world.size)
        losses.append(updater.update(batch, nll_heads(batch, 1 / batch.num_loss_tokens), step=s).loss)
    return losses


def both_ways(folder, checkpoints, world, telemetry):
    """Losses and weights of each case: as usual, offloaded, and offloaded from a checkpoint of the usual one."""
    seen = {}
    for number, case in enumerate(CASES):
        policy, updater = begin(folder, case, world, cpu_offload=False)
        kept = Checkpoints(checkpoints / str(number), CheckpointConfig(), world)
        losses = train(policy, updater, range(2))
        kept.save(2, policy, updater.optimizer, {})
        plain = losses + train(policy, updater, range(2, 4)), full_weights(policy)
        policy, updater = begin(folder, case, world, cpu_offload=True)
        offloaded = train(policy, updater, range(4)), full_weights(policy)
        policy, updater = begin(folder, case, world, cpu_offload=True)
        kept.load_latest(policy, updater.optimizer)
        resumed = losses + train(policy, updater, range(2, 4)), full_weights(policy)
        seen[case] = plain, offloaded, resumed
    return seen


@pytest.mark.slow
def test_two_ranks_that_offload_train_the_same_weights(tmp_path):
    body = partial(both_ways, tiny_folder(tmp_path / "base"), tmp_path)
    seen = run_ranks(body, TrainRuntime(device="cpu", num_workers=2), NullTelemetry())
    for plain, *others in seen.values():
        for other in others:
            assert other[0] == pytest.approx(plain[0], abs=1e-6)
            torch.testing.assert_close(other[1], plain[1], atol=1e-6, rtol=0)


def test_one_cpu_rank_has_nothing_to_offload(tmp_path):
    with pytest.raises(ValidationError, match="cpu_offload = true, but one CPU rank has everything in host memory"):
        TrainRuntime(device="cpu", cpu_offload=True)
    assert TrainRuntime(device="cpu", num_workers=2, cpu_offload=True).cpu_offload
    with pytest.raises(ConfigError, match="one CPU rank has everything in host memory already"):
        begin(tiny_folder(tmp_path), "float32", ONE, cpu_offload=True)
