"""The GPU side of training: the variable-length kernel and a bf16 step, against float32 or float64."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from gloo_ranks import run_ranks
from tiny_models import random_rows, tiny_base

from klear_core.config.train import CheckpointConfig, OptimConfig, TrainRuntime
from klear_core.metrics import NullTelemetry
from klear_core.sft.loop import sft_heads
from klear_core.train.base_model import model_folder
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import full_weights, load_policy, parallelise
from klear_core.train.kernels import fused
from klear_core.train.kernels.fused import kernels
from klear_core.train.logps import token_logps
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.train.step import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tiny_base(tmp_path_factory.mktemp("base")))


def logps_of(policy, rows):
    found = {}
    for micro in pack(rows, tokens_per_microbatch=1 << 16, device="cuda").micro_batches:
        out = policy(micro, lambda h, w, m=micro: token_logps(h, w, m.target_N))
        found.update(zip(micro.rows, out.logp_N.detach().split(micro.counts), strict=True))
    return [found[i] for i in range(len(rows))]


def test_rows_in_one_line_have_the_log_probs_that_they_have_alone(folder):
    policy = load_model(folder, device="cuda", dtype="bfloat16")
    rows = random_rows([5, 31, 12, 48, 7])
    together = logps_of(policy, rows)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i], logps_of(policy, [row])[0], atol=2e-2, rtol=0)


def test_the_varlen_kernel_agrees_with_float32_segment_by_segment(folder):
    rows = random_rows([5, 31, 12, 48, 7])
    half = logps_of(load_model(folder, device="cuda", dtype="bfloat16"), rows)
    full = logps_of(load_model(folder, device="cuda"), rows)
    for a, b in zip(half, full, strict=True):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0)


def hidden_and_gradients(folder, dtype, *, is_fused):
    """The hidden states of all loss tokens, and the gradient of a weighted sum of them by every parameter of the layers."""
    policy = load_model(folder, device="cuda", dtype=dtype)
    if not is_fused:
        for module in policy.hf.modules():
            if type(module).__module__ == fused.__name__:
                module.__class__ = type(module).__base__
    (micro,) = pack(random_rows([5, 31, 12, 48, 7]), tokens_per_microbatch=1 << 16, device="cuda").micro_batches
    hidden_NH = policy(micro, lambda hidden_NH, _weight: hidden_NH)
    weights = torch.randn(hidden_NH.shape, generator=torch.Generator().manual_seed(1)).to(hidden_NH)
    (hidden_NH * weights).sum().backward()
    return [hidden_NH.detach(), *(p.grad for p in policy.hf.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_compiled_layers_are_those_of_transformers(folder, dtype, rounding):
    found, wanted = (hidden_and_gradients(folder, dtype, is_fused=is_fused) for is_fused in (True, False))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= rounding * b.norm()
    assert all(k.is_compiled for k in (kernels().norm, kernels().gate, kernels().rotate))


def train(folder, checkpoints, world, telemetry):
    policy = parallelise(
        load_model(folder, device=world.device), world, dtype="bfloat16", activation_checkpointing=True
    )
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=8)
    rows = random_rows([20, 31, 12])
    losses = []
    for step in range(8):
        batch = pack(rows, tokens_per_microbatch=40, device=world.device)
        losses.append(updater.update(batch, sft_heads(batch.micro_batches, rows, "token"), step=step).loss)
    kept = Checkpoints(checkpoints, CheckpointConfig(asynchronous=True), world)
    kept.save(8, policy, updater.optimizer, {})
    kept.wait()
    assert kept.load_latest(policy, updater.optimizer) == (8, {})
    return losses, {p.dtype for p in policy.parameters()}


def test_bf16_steps_lower_the_loss_and_keep_float32_weights(folder, tmp_path):
    losses, dtypes = run_ranks(partial(train, folder, tmp_path), TrainRuntime(device="cuda"), NullTelemetry())
    assert losses[-1] < 0.8 * losses[0]
    assert dtypes == {torch.float32}


def train_from_host(folder, cpu_offload, world, telemetry):
    policy = load_policy(folder, world, dtype="bfloat16", activation_checkpointing=True, cpu_offload=cpu_offload)
    places = {p.device.type for p in policy.parameters()}
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=4)
    batch = pack(random_rows([20, 31, 12]), tokens_per_microbatch=40, device=world.device)
    heads = sft_heads(batch.micro_batches, random_rows([20, 31, 12]), "token")
    losses = [updater.update(batch, heads, step=step).loss for step in range(4)]
    return losses, places, {name: weight.device.type for name, weight in full_weights(policy).items()}


def test_weights_in_host_memory_train_as_on_the_gpu(folder):
    (kept, on_gpu, _), (offloaded, on_host, exported) = (
        run_ranks(partial(train_from_host, folder, is_on), TrainRuntime(device="cuda"), NullTelemetry())
        for is_on in (False, True)
    )
    assert offloaded == pytest.approx(kept, rel=1e-3)
    assert (on_gpu, on_host, set(exported.values())) == ({"cuda"}, {"cpu"}, {"cpu"})


def train_together(folder, world, telemetry):
    policy = parallelise(
        load_model(folder, device=world.device), world, dtype="bfloat16", activation_checkpointing=True
    )
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=4)
    rows = random_rows([20, 31, 12])
    share = {"rank": world.data_rank, "num_ranks": world.num_data_ranks, "cp_group": world.cp_group}
    batches = [pack(rows, tokens_per_microbatch=40, device=world.device, **share) for _ in range(4)]
    return [
        updater.update(batch, sft_heads(batch.micro_batches, rows, "token"), step=step).loss
        for step, batch in enumerate(batches)
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device, two are needed")
def test_two_gpus_that_share_rows_train_as_one(folder):
    one = run_ranks(partial(train_together, folder), TrainRuntime(device="cuda"), NullTelemetry())
    two = run_ranks(
        partial(train_together, folder), TrainRuntime(device="cuda", num_workers=2, context_parallel=2), NullTelemetry()
    )
    assert two == pytest.approx(one, rel=2e-2)
