"""One rank in bf16 keeps what it computes with from forward to backward pass, and never longer than the weights that it was made from."""

import ctypes
import subprocess
import sys

import pytest
import torch
from tiny_models import ONE, packed, random_rows, tiny_folder

from klear_core.config.train import OptimConfig
from klear_core.sft.loop import sft_heads
from klear_core.train.distributed import parallelise
from klear_core.train.model import load_model
from klear_core.train.step import Updater


def losses_seen(folder, *, looks_between):
    """Of four updates, and by forward passes after each if it looks."""
    policy = parallelise(load_model(folder, device="cpu"), ONE, dtype="bfloat16", activation_checkpointing=False)
    updater = Updater(policy, OptimConfig(lr=3e-2), ONE, num_steps=4)
    rows = random_rows([20, 31, 12])
    batch = packed(rows)
    heads = sft_heads(batch.micro_batches, rows, "token")
    trained, seen = [], []
    for step in range(4):
        trained.append(updater.update(batch, heads, step=step).loss)
        if looks_between:
            with torch.no_grad():
                seen.append(policy(batch.micro_batches[0], heads[0]).loss.item())
    return trained, seen


def test_a_look_between_updates_sees_the_newest_weights_and_changes_nothing(tmp_path):
    folder = tiny_folder(tmp_path)
    try:
        plain, _ = losses_seen(folder, looks_between=False)
        trained, seen = losses_seen(folder, looks_between=True)
    finally:
        if torch.distributed.is_initialized():  # by `parallelise`
            torch.distributed.destroy_process_group()
    assert trained == plain
    assert seen[:-1] == trained[1:]  # what the next update starts from
    assert len(set(trained)) == 4


def test_kept_layers_are_not_computed_again_and_change_no_update(tmp_path):
    folder = tiny_folder(tmp_path)
    rows = random_rows([20, 31, 12])

    def updated(keep_layers):
        """The weights after an update, and how often the layers ran."""
        model = load_model(folder, device="cpu")
        policy = parallelise(model, ONE, dtype="float32", activation_checkpointing=True, keep_layers=keep_layers)
        layers, runs = list(policy.hf.base_model.layers), []
        for i, layer in enumerate(layers):
            # before and not after it: a layer is computed again only as far as its gradients need
            layer.mlp.register_forward_pre_hook(lambda *_, i=i: runs.append(i))
        batch = packed(rows)
        policy.train()
        Updater(policy, OptimConfig(lr=3e-2), ONE, num_steps=1).update(
            batch, sft_heads(batch.micro_batches, rows, "token"), step=0
        )
        return {name: weight.detach().clone() for name, weight in policy.named_parameters()}, runs, len(layers)

    every, runs, num_layers = updated(0)
    assert sorted(runs) == sorted(2 * list(range(num_layers)))
    kept, runs, _ = updated(num_layers - 1)
    assert sorted(runs) == sorted([0, *range(num_layers)])  # the first layer alone runs twice
    assert all(torch.equal(every[name], kept[name]) for name in every)


KEEPS = """
import resource, sys
import torch
from klear_core.train.distributed import keep_freed_memory

if sys.argv[1] == "keeps":
    keep_freed_memory()
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MiB: 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(touch() for _ in range(6)))  # by where the heap begins, the second may not fit in the first one's place
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no such setting")
def test_a_process_that_trains_uses_the_pages_again_that_it_has_freed():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", KEEPS, how], check=True, capture_output=True, text=True).stdout)
        for how in ("keeps", "as it was")
    }
    if faults["as it was"] < 2000:
        pytest.skip("this system gives pages of 2 MiB without being asked")
    assert faults["keeps"] < 2000
