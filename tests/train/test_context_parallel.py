"""Ranks that share rows: how the packed sequence is cut, and that the ranks of a context together compute what one process does."""

from functools import partial

import pytest
import torch
from gloo_ranks import run_ranks
from pydantic import ValidationError
from tiny_models import TINY, random_rows, rows_of_groups, tiny_base, tiny_folder
from torch.nn.functional import scaled_dot_product_attention

from klear_core.config.train import OptimConfig, SftConfig, SftRuntime, TrainRuntime
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.sft.loop import sft_heads, train_sft
from klear_core.train.context_parallel import ALONE, Context
from klear_core.train.distributed import full_weights, parallelise
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.train.step import Updater


def slices(rows, size, **how):
    """The only micro-batch as each rank of a context gets it."""
    cut = [pack(rows, tokens_per_microbatch=1 << 20, cp_group=Context(rank=r, size=size), **how) for r in range(size)]
    return [batch.micro_batches[0] for batch in cut]


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_slices_side_by_side_are_the_line_and_no_loss_token_is_lost_or_doubled(shares_prompts, size):
    rows = random_rows([9, 14, 5]) + rows_of_groups([3, 2])
    whole = pack(rows, tokens_per_microbatch=1 << 20, shares_prompts=shares_prompts).micro_batches[0]
    parts = slices(rows, size, shares_prompts=shares_prompts)
    num_columns = whole.token_ids_1T.shape[1]
    for name in ("token_ids_1T", "position_ids_1T"):
        joined = torch.cat([getattr(p, name) for p in parts], dim=1)
        assert torch.equal(joined[:, :num_columns], getattr(whole, name))
    assert len({p.token_ids_1T.shape for p in parts}) == 1
    told = [torch.stack([m.row_N, m.column_N, m.target_N], dim=1).tolist() for m in (whole, *parts)]
    assert sorted(token for part in told[1:] for token in part) == sorted(told[0])


def test_a_loss_token_lies_where_the_state_before_it_is():
    """Row 1 2 3 4 in two slices: token 3 is the second slice's first, but it is predicted by token 2, in the first."""
    first, second = slices(random_rows([4], prompt=1), 2)
    assert (first.column_N.tolist(), first.predictor_N.tolist()) == ([1, 2], [0, 1])
    assert (second.column_N.tolist(), second.predictor_N.tolist()) == ([3], [0])
    assert (first.counts, second.counts) == ((2,), (1,))


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_values_of_rows_follow_their_tokens_into_the_slices(shares_prompts):
    rows = random_rows([9, 14, 5]) + rows_of_groups([3])
    values = [[100.0 * r + i for i in range(len(row.token_ids))] for r, row in enumerate(rows)]
    for part in slices(rows, 3, shares_prompts=shares_prompts):
        assert part.gather(values).tolist() == (100 * part.row_N + part.column_N).tolist()


def test_padding_of_a_line_is_a_row_of_its_own():
    """Five tokens for four ranks: the kernel is told of three more, for what it leaves out stays uninitialised."""
    part = slices(random_rows([5]), 4)[3]
    assert part.cu_seqlens.tolist() == [0, 5, 8]
    assert part.token_ids_1T.shape == (1, 2)


def test_padding_counts_as_waste():
    assert pack(random_rows([5]), tokens_per_microbatch=8, cp_group=Context(size=4)).fill == 5 / 8


def test_a_rank_without_rows_has_a_token_of_each_empty_line():
    micro = pack([], tokens_per_microbatch=8, cp_group=Context(rank=1, size=2)).micro_batches
    assert micro == ()
    share = pack(random_rows([5]), tokens_per_microbatch=8, rank=1, num_ranks=2, cp_group=Context(rank=1, size=2))
    (empty,) = share.micro_batches
    assert empty.token_ids_1T.shape == (1, 1)
    assert (empty.num_loss_tokens, empty.max_segment_len) == (0, 1)


def test_a_sum_over_a_context_is_detached_with_one_rank_as_with_several():
    assert not ALONE.sum(torch.ones(2, requires_grad=True)).requires_grad


def test_contexts_must_fill_the_world():
    with pytest.raises(ValidationError, match="context_parallel 2 does not divide num_workers 3"):
        TrainRuntime(num_workers=3, context_parallel=2)


def test_heads_must_be_shared_out_evenly():
    with pytest.raises(
        ConfigError, match=r"context_parallel = 4 does not divide the 6 attention heads of here; allowed: 1, 2, 3, 6"
    ):
        TrainRuntime(num_workers=4, context_parallel=4).check_attention_heads(6, "here")


def test_sft_refuses_too_few_heads_before_it_reads_a_trace(tmp_path):
    cfg = SftConfig(runtime=SftRuntime(device="cpu", num_workers=4, context_parallel=4))
    base = tiny_base(tmp_path / "base")
    with pytest.raises(ConfigError, match=f"does not divide the {TINY.num_heads} attention heads"):
        train_sft(cfg, model=base, traces=tmp_path / "none", seed=0, workdir=tmp_path, telemetry=NullTelemetry())


def attend(num_heads, num_kv_heads, dtype, world, telemetry):
    """Attention and its gradients through the context, from each rank's slice of the same sequence, put together again."""
    g = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(2, n, 12, 4, generator=g, dtype=torch.float64).to(dtype)
        for n in (num_heads, num_kv_heads, num_kv_heads)
    ]
    seed = torch.randn(2, 12, num_heads, 4, generator=g, dtype=torch.float64).to(dtype)
    width = 12 // world.cp_group.size
    here = slice(world.cp_group.rank * width, (world.cp_group.rank + 1) * width)
    leaves = [x[:, :, here].clone().requires_grad_() for x in qkv]
    q, k, v = world.cp_group.gather_tokens(*leaves)
    out = world.cp_group.gather_heads(
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    )
    grads = torch.autograd.grad(out, leaves, seed[:, here])
    whole = [torch.zeros(2, 12, num_heads, 4, dtype=dtype)] + [torch.zeros_like(x) for x in qkv]
    whole[0][:, here] = out.detach()
    for full, part in zip(whole[1:], grads, strict=True):
        full[:, :, here] = part
    return [world.cp_group.sum(x) for x in whole]


def attend_all(cases, world, telemetry):
    return [attend(*case, world, telemetry) for case in cases]


@pytest.mark.slow
def test_traded_attention_is_attention_however_many_key_heads_there_are():
    """One key head for all, one for two query heads, one for three of six on two ranks, one for each; and half precision."""
    cases = [
        (2, 1, torch.float64),
        (4, 2, torch.float64),
        (6, 2, torch.float64),
        (6, 3, torch.float64),
        (4, 4, torch.bfloat16),
    ]
    one = run_ranks(partial(attend_all, cases), TrainRuntime(device="cpu"), NullTelemetry())
    two = run_ranks(
        partial(attend_all, cases), TrainRuntime(device="cpu", num_workers=2, context_parallel=2), NullTelemetry()
    )
    for a, b, (_, _, dtype) in zip(one, two, cases, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12 if dtype == torch.float64 else 1e-2, rtol=0)


STEPS = [random_rows([9, 30, 14, 22, 5]), rows_of_groups([3, 4]), random_rows([12]), random_rows([61])]
"""At last there is less than a rank has room for, and a row of twice the tokens of a micro-batch."""


def train(folder, shares_prompts, checkpointing, world, telemetry):
    """A step on each of STEPS: loss and gradient norm of each, and the weights after all."""
    policy = parallelise(
        load_model(folder, device=world.device), world, dtype="float32", activation_checkpointing=checkpointing
    )
    updater = Updater(policy, OptimConfig(lr=1e-2, weight_decay=0.1), world, num_steps=len(STEPS))
    seen = []
    for step, rows in enumerate(STEPS):
        share = {"rank": world.data_rank, "num_ranks": world.num_data_ranks, "cp_group": world.cp_group}
        batch = pack(rows, tokens_per_microbatch=31, shares_prompts=shares_prompts, **share)
        result = updater.update(batch, sft_heads(batch.micro_batches, rows, "sample"), step=step)
        seen.append((result.loss, result.grad_norm))
    return torch.tensor(seen), full_weights(policy)


def train_all(folder, cases, world, telemetry):
    return [train(folder, *case, world, telemetry) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 4])
def test_contexts_train_as_one_process(tmp_path, num_workers):
    """Four workers are two contexts, so that on a step with one micro-batch one context has nothing but its share of the passes."""
    body = partial(train_all, tiny_folder(tmp_path / "base"), [(False, True), (True, False)])
    one = run_ranks(body, TrainRuntime(device="cpu"), NullTelemetry())
    several = run_ranks(body, TrainRuntime(device="cpu", num_workers=num_workers, context_parallel=2), NullTelemetry())
    torch.testing.assert_close(several, one, atol=1e-5, rtol=0)
