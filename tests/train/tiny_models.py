"""Small model folders and rows for the tests of train and sft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.distributed import World
from klear_core.train.logps import HeadOutput, fused_loss
from klear_core.train.model import Head
from klear_core.train.packing import PackedBatch, pack
from klear_core.types import SftExample

ONE = World(rank=0, size=1, device=torch.device("cpu"))
TINY = TinyModelConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    max_position_embeddings=64,
)


def tiny_base(workdir: Path, *, seed: int = 0) -> Path:
    """A base artifact; its model folder is `model_folder(...)` of it."""
    workdir.mkdir(parents=True, exist_ok=True)
    prepare_base(TINY, seed=seed, workdir=workdir, telemetry=NullTelemetry())
    return workdir


def tiny_folder(workdir: Path, *, seed: int = 0) -> Path:
    return model_folder(tiny_base(workdir, seed=seed))


def random_rows(lengths: Sequence[int], *, prompt: int = 3, seed: int = 0) -> list[SftExample]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, n in enumerate(lengths):
        ids = tuple(torch.randint(0, 256, (n,), generator=generator).tolist())
        rows.append(SftExample(problem_id=f"p{i}", token_ids=ids, loss_mask=(False,) * prompt + (True,) * (n - prompt)))
    return rows


def packed(rows: Sequence[SftExample], tokens: int = 1 << 20, *, shares_prompts: bool = False) -> PackedBatch:
    return pack(rows, tokens_per_microbatch=tokens, shares_prompts=shares_prompts)


def nll_heads(batch: PackedBatch, scale: float) -> list[Head[HeadOutput]]:
    """A head for each micro-batch: the negative log-likelihood of its loss tokens, times `scale`."""

    def head(target_N: torch.Tensor) -> Head[HeadOutput]:
        return lambda h, w: fused_loss(h, w, target_N, lambda logp, _entropy, _at: -scale * logp)

    return [head(micro.target_N) for micro in batch.micro_batches]


def rows_of_groups(group_sizes: Sequence[int], *, prompt: int = 5, seed: int = 0) -> list[SftExample]:
    """Each group has a prompt of its own and answers of 1, 4, 7, ... tokens; the groups' rows take turns, as a shuffled batch's do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (count,), generator=generator).tolist())

    prompts = [draw(prompt + g) for g in range(len(group_sizes))]
    places = sorted((i, g) for g, size in enumerate(group_sizes) for i in range(size))
    rows = [(f"p{g}", prompts[g], draw(1 + 3 * i)) for i, g in places]
    return [
        SftExample(problem_id=name, token_ids=p + a, loss_mask=(False,) * len(p) + (True,) * len(a))
        for name, p, a in rows
    ]
