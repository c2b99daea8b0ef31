"""One rank in bf16 keeps what it computes with from forward to backward pass, and never longer than the weights that it was made from."""

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
        trained.append(updater.step(batch, heads, step=step).loss)
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
