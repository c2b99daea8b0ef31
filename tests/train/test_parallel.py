"""Two gloo ranks on the CPU are one process, in loss, gradient norm, weights and checkpoints."""

import io
import logging
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny_models import ONE, nll_heads, packed, random_rows, tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM

from klear_core.config.train import CheckpointConfig, OptimConfig, TrainRuntime
from klear_core.metrics import NullTelemetry
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import full_weights, load_policy, parallelise
from klear_core.train.logps import fused_loss
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.train.step import RankPaces, Updater, product_ms

ROWS = [random_rows([9, 30, 14, 22, 5], seed=s) for s in range(3)] + [
    random_rows([12])
]  # at last one rank has nothing to do


def train(folder, checkpoints, num_steps, dtype, world, telemetry):
    """Up to `num_steps` steps from the newest checkpoint on; what rank 0 saw."""
    policy = load_policy(folder, world, dtype=dtype, activation_checkpointing=dtype == "bfloat16")
    updater = Updater(policy, OptimConfig(lr=1e-2, weight_decay=0.1), world, num_steps=4)
    kept = Checkpoints(checkpoints, CheckpointConfig(asynchronous=True), world)
    first, _ = kept.load_latest(policy, updater.optimizer) or (0, {})
    seen = []
    for s in range(first, num_steps):
        batch = pack(ROWS[s], tokens_per_microbatch=60, rank=world.rank, num_ranks=world.size)
        result = updater.update(batch, nll_heads(batch, 1 / batch.num_loss_tokens), step=s)
        seen.append((result.loss, result.grad_norm))
    kept.save(num_steps, policy, updater.optimizer, {})
    kept.wait()
    return seen, full_weights(policy)


def run(folder, checkpoints, *, num_workers, num_steps=4, dtype="float32"):
    body = partial(train, folder, checkpoints, num_steps, dtype)
    return run_ranks(body, TrainRuntime(device="cpu", num_workers=num_workers), NullTelemetry())


ROUNDING = 5e-5
"""Half a percent of one update (lr 1e-2). Ranks add up rows in another order, and AdamW divides by gradients near zero."""


def assert_same(a, b, atol):
    torch.testing.assert_close(torch.tensor(a[0]), torch.tensor(b[0]), atol=atol, rtol=0)
    assert a[1].keys() == b[1].keys()
    torch.testing.assert_close(a[1], b[1], atol=atol, rtol=0)


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path):
    folder = tiny_folder(tmp_path / "base")
    one = run(folder, tmp_path / "one", num_workers=1)
    two = run(folder, tmp_path / "two", num_workers=2)
    assert_same(one, two, ROUNDING)


@pytest.mark.slow
def test_a_run_saved_by_two_ranks_goes_on_with_one_and_back(tmp_path):
    folder = tiny_folder(tmp_path / "base")
    whole = run(folder, tmp_path / "whole", num_workers=1)
    run(folder, tmp_path / "cut", num_workers=2, num_steps=1)
    run(folder, tmp_path / "cut", num_workers=1, num_steps=2)
    seen, weights = run(folder, tmp_path / "cut", num_workers=2)
    assert_same((whole[0][2:], whole[1]), (seen, weights), ROUNDING)


@pytest.mark.slow
def test_bfloat16_computes_near_float32_and_keeps_float32_weights(tmp_path):
    folder = tiny_folder(tmp_path / "base")
    (full, _), (half, weights) = (
        run(folder, tmp_path / d, num_workers=1, num_steps=1, dtype=d) for d in ("float32", "bfloat16")
    )
    assert half[0][0] == pytest.approx(full[0][0], rel=1e-2)
    assert half[0][0] != full[0][0]
    assert {w.dtype for w in weights.values()} == {torch.float32}


def load(folder, world, telemetry):
    """All weights, all buffers of rank 1, and the largest share of the weights that any rank has."""
    policy = load_policy(folder, world, dtype="float32", activation_checkpointing=False)
    distinct = {id(p): p for p in policy.parameters()}.values()
    share = sum(p.to_local().numel() for p in distinct) / sum(p.numel() for p in distinct)
    boxes = [None, None]
    dist.all_gather_object(boxes, dict(policy.named_buffers()))
    is_tied = policy.hf.get_output_embeddings().weight is policy.hf.get_input_embeddings().weight
    return full_weights(policy), boxes[1], world.max(torch.tensor(share)).item(), is_tied


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_rank_has_its_share_of_what_the_first_has_read(tmp_path, is_tied):
    folder = tiny_folder(tmp_path)
    if not is_tied:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, tie_word_embeddings=False)).save_pretrained(
            folder
        )
    whole = load_model(folder, device="cpu")
    weights, buffers, share, stays_tied = run_ranks(
        partial(load, folder), TrainRuntime(device="cpu", num_workers=2), NullTelemetry()
    )
    torch.testing.assert_close(weights, full_weights(whole), atol=0, rtol=0)
    torch.testing.assert_close(buffers, dict(whole.named_buffers()), atol=0, rtol=0)
    assert share == pytest.approx(0.5, abs=0.05)
    assert stays_tied is is_tied


def skip_on_both_ranks(folder, world, telemetry):
    """The loss of rank 1 alone is infinite in the first step; how many ranks applied each step, and whether the first changed a weight."""
    policy = load_policy(folder, world, dtype="float32", activation_checkpointing=False)
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=2)
    batch = pack(ROWS[0], tokens_per_microbatch=60, rank=world.rank, num_ranks=world.size)
    before = {name: weight.clone() for name, weight in full_weights(policy).items()}
    num_applied = []
    for factor in (float("inf") if world.rank == 1 else 1.0, 1.0):
        result = updater.update(batch, nll_heads(batch, factor), step=0)
        num_applied.append(world.sum(torch.tensor(float(result.is_applied))).item())
        if len(num_applied) == 1:
            is_untouched = all(torch.equal(before[name], weight) for name, weight in full_weights(policy).items())
    return num_applied, is_untouched


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_is_applied_on_none(tmp_path):
    runtime = TrainRuntime(device="cpu", num_workers=2)
    assert run_ranks(partial(skip_on_both_ranks, tiny_folder(tmp_path)), runtime, NullTelemetry()) == ([0.0, 2.0], True)


def test_activation_checkpointing_computes_layers_again_to_the_same_gradient(tmp_path):
    folder, calls, gradients = tiny_folder(tmp_path), [0, 0], []
    for is_on in (False, True):
        policy = parallelise(load_model(folder, device="cpu"), ONE, dtype="float32", activation_checkpointing=is_on)

        def count(*_, is_on=is_on):
            calls[is_on] += 1

        policy.hf.base_model.layers[0].self_attn.register_forward_pre_hook(count)
        (micro,) = packed(ROWS[0]).micro_batches
        policy(micro, lambda h, w, m=micro: fused_loss(h, w, m.target_N, lambda lp, _e, _at: -lp)).loss.backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert calls == [1, 2]
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=0)


def _paces(world, _telemetry):
    """Rank 1 takes three times as long as the others, from the second step on."""
    steps = iter([1.0, 3.0, 3.0, 3.0, 3.0] if world.rank == 1 else [1.0] * 5)
    paces = RankPaces(world, "rl/speed", lambda _device: next(steps))
    stream = io.StringIO()
    logging.getLogger("klear_core").addHandler(logging.StreamHandler(stream))
    return [paces.measure() for _ in range(5)], stream.getvalue()


@pytest.mark.slow
def test_a_rank_that_is_slow_for_three_steps_is_named_once():
    metrics, told = run_ranks(_paces, TrainRuntime(num_workers=2, device="cpu"), NullTelemetry())
    assert metrics[0] == {"rl/speed/rank_ms": 1.0, "rl/speed/slowest_rank_ms": 1.0}
    assert metrics[1:] == [{"rl/speed/rank_ms": 1.0, "rl/speed/slowest_rank_ms": 3.0}] * 4
    assert told.count("\n") == 1
    assert told.startswith(
        f"rank 1 on {socket.gethostname()} is slow, and all wait for it: a matrix product takes it 3.0"
    )


def test_the_probe_of_a_rank_takes_time():
    assert 0 < product_ms(torch.device("cpu")) < 60_000
