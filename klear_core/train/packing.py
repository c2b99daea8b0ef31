"""Rows of tokens become micro-batches without padding, and without a row ever seeing another.

All rows of a micro-batch lie end to end in one line. Rows with the same prompt can share it: then it lies there once, before what
comes after it in each of these rows. A prompt sees only itself, so its states are the same in all of them.

Axis letters: T tokens of the line, N loss tokens (flat, over all rows of the micro-batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from klear_core.train.context import ALONE, Context


class Row(Protocol):
    """What can be packed: `loss_mask[i]` says whether token i is learnt; the first token never is, for nothing predicts it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and response."""

    @property
    def loss_mask(self) -> Sequence[bool]:
        """As long as `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass sees. Losses live on N, the loss tokens alone: padding and prompts are not in it."""

    token_ids_1T: Tensor
    position_ids_1T: Tensor
    """A token's place in its row."""
    bounds: Tensor
    """int32 [segments + 1], where segments of the line begin and end: whole rows, shared prompts, and what follows these."""
    families: Tensor
    """int32 [families + 1], on the CPU: where families of segments begin and end. A family's first segment is a prefix of its others."""
    max_segment_len: int
    rows: tuple[int, ...]
    """Which of the caller's rows lie here, in this order."""
    counts: tuple[int, ...]
    """Loss tokens of each of these rows; they lie on N one row after the other."""
    select_N: Tensor
    """Where in the line the hidden state lies that predicts each loss token (the one before it). A shared prompt's last has many."""
    target_N: Tensor
    """Token id to be predicted."""
    row_N: Tensor
    """The caller's row that each loss token belongs to."""
    column_N: Tensor
    """The token's place in its row: `token_ids[row][column]` is the target."""
    context: Context = ALONE
    """Who has the other columns of the line and their loss tokens. Segments and `rows` are those of the whole."""

    @property
    def num_loss_tokens(self) -> int:
        """N."""
        return self.target_N.numel()

    def gather(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of the caller's rows, one for each token, laid out as the loss tokens are: `values[row][column]` on N."""
        flat = np.concatenate([np.asarray(values[r], dtype=np.float64) for r in self.rows] or [np.zeros(0)])
        lengths = [len(values[r]) for r in self.rows]
        starts_N = np.repeat(np.cumsum([0, *lengths])[:-1], self.counts)
        return torch.as_tensor(flat[starts_N + self.column_N.cpu().numpy()], dtype=dtype).to(self.target_N.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One optimizer step's micro-batches of this rank, and the counts over all ranks."""

    micros: tuple[MicroBatch, ...]
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    """Over all ranks: what a token-mean loss divides by."""
    fill: float
    """Tokens of all rows over tokens computed, over all ranks: below 1 by padding, above 1 by what shared prompts save."""


def pack(
    rows: Sequence[Row],
    *,
    tokens_per_microbatch: int,
    shares_prompts: bool = False,
    device: torch.device | str = "cpu",
    rank: int = 0,
    num_ranks: int = 1,
    context: Context = ALONE,
) -> PackedBatch:
    """Cut rows into micro-batches of about `tokens_per_microbatch` (a longer row gets its own) and take this rank's share.

    Every rank gets as many micro-batches as any other, empty ones (one token, no loss) where there are too few, because
    sharded models communicate in every pass. A context counts as one rank here, and each of its members gets its columns.
    """
    families = _families(rows, tokens_per_microbatch) if shares_prompts else [_Family(rows=(i,), prompt_len=0) for i in range(len(rows))]
    sizes = [_line_len(f.rows, f.prompt_len, rows) for f in families]
    bins = _best_fit(sizes, tokens_per_microbatch)
    areas = [_round_up(sum(sizes[f] for f in bin_), context.size) for bin_ in bins]
    mine = _share(areas, num_ranks)[rank]
    num_micros = max(len(s) for s in _share(areas, num_ranks))
    micros = [_micro_batch([families[f] for f in bins[b]], rows, device, context.size) for b in mine]
    micros += [_empty_micro_batch(device, context.size)] * (num_micros - len(micros))
    num_tokens = sum(len(r.token_ids) for r in rows)
    return PackedBatch(
        micros=tuple(_columns_of(micro, context) for micro in micros),
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_loss_tokens=sum(sum(r.loss_mask) for r in rows),
        fill=num_tokens / max(1, sum(areas)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Rows that lie together, their first `prompt_len` tokens once for all; a row on its own shares none."""

    rows: tuple[int, ...]
    prompt_len: int


def _families(rows: Sequence[Row], capacity: int) -> list[_Family]:
    """Rows of the same prompt together, as far as they fit into `capacity`; in the order of their first rows."""
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
    for i, row in enumerate(rows):
        prompt = _prompt(row)
        groups = by_prompt.setdefault(prompt, [[]])
        if groups[-1] and _line_len([*groups[-1], i], len(prompt), rows) > capacity:
            groups.append([])
        groups[-1].append(i)
    families = [(tuple(group), len(prompt)) for prompt, groups in by_prompt.items() for group in groups]
    return [_Family(rows=members, prompt_len=size if len(members) > 1 else 0) for members, size in families]


def _prompt(row: Row) -> tuple[int, ...]:
    """What comes before the first loss token."""
    return tuple(row.token_ids[: list(row.loss_mask).index(True)]) if any(row.loss_mask) else tuple(row.token_ids)


def _line_len(members: Sequence[int], prompt_len: int, rows: Sequence[Row]) -> int:
    return prompt_len + sum(len(rows[i].token_ids) - prompt_len for i in members)


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that still takes it; ties go to the earlier item and bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[item]]
        if fitting:
            best = min(fitting, key=lambda b: (room[b], b))
            bins[best].append(item)
            room[best] -= lengths[item]
        else:
            bins.append([item])
            room.append(capacity - lengths[item])
    return bins


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _share(areas: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Bins to ranks, largest first to the rank with the least so far."""
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for b in sorted(range(len(areas)), key=lambda b: (-areas[b], b)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shares[rank].append(b)
        loads[rank] += areas[b]
    return shares


def _micro_batch(families: Sequence[_Family], rows: Sequence[Row], device: torch.device | str, multiple: int) -> MicroBatch:
    """T is a multiple of `multiple`: the padding is a family of its own, for kernels leave no token out."""
    line = _Line()
    for family in families:
        line.add(family, rows)
    index = [i for family in families for i in family.rows]
    padding = _round_up(line.length, multiple) - line.length
    if padding:
        line.add_segments([([0] * padding, 0)])
    columns = [np.flatnonzero(rows[i].loss_mask) for i in index]
    counts = [len(c) for c in columns]
    column_N = np.concatenate(columns)
    token_ids_T = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, _ in line.segments])
    position_ids_T = np.concatenate([np.arange(first, first + len(tokens)) for tokens, first in line.segments])
    target_N = np.concatenate([np.asarray(rows[i].token_ids, dtype=np.int64)[c] for i, c in zip(index, columns, strict=True)])
    lengths = [len(tokens) for tokens, _ in line.segments]
    return MicroBatch(
        token_ids_1T=torch.from_numpy(token_ids_T[None]).to(device),
        position_ids_1T=torch.from_numpy(position_ids_T[None]).to(device),
        bounds=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device),
        families=torch.tensor([0, *np.cumsum(line.family_sizes)], dtype=torch.int32),
        max_segment_len=max(lengths),
        rows=tuple(index),
        counts=tuple(counts),
        select_N=torch.from_numpy(np.concatenate(line.selects)).to(device),
        target_N=torch.from_numpy(target_N).to(device),
        row_N=torch.from_numpy(np.repeat(np.array(index, dtype=np.int64), counts)).to(device),
        column_N=torch.from_numpy(column_N).to(device),
    )


class _Line:
    """Segments end to end: the tokens of each, and the place of its first one in its row."""

    def __init__(self) -> None:
        self.segments: list[tuple[Sequence[int], int]] = []
        self.family_sizes: list[int] = []
        self.selects: list[np.ndarray] = []
        self.length = 0

    def add_segments(self, segments: list[tuple[Sequence[int], int]]) -> None:
        self.segments += segments
        self.family_sizes.append(len(segments))
        self.length += sum(len(tokens) for tokens, _ in segments)

    def add(self, family: _Family, rows: Sequence[Row]) -> None:
        shared, members = family.prompt_len, [rows[i] for i in family.rows]
        segments = [(members[0].token_ids[:shared], 0)] if shared else []
        prompt_at, at = self.length, self.length + shared
        for row in members:
            assert len(row.loss_mask) == len(row.token_ids), (len(row.token_ids), len(row.loss_mask))
            assert not row.loss_mask[0], "nothing predicts the first token of a row"
            before = np.flatnonzero(row.loss_mask) - 1  # the state before a token predicts it
            self.selects.append(np.where(before < shared, prompt_at + before, at + before - shared))
            segments.append((row.token_ids[shared:], shared))
            at += len(row.token_ids) - shared
        self.add_segments(segments)


def _columns_of(micro: MicroBatch, context: Context) -> MicroBatch:
    """What one rank of a context computes: a run of the line's columns, as long as any other's, and the loss tokens predicted there."""
    if context.size == 1:
        return micro
    width = micro.token_ids_1T.shape[1] // context.size
    first = context.rank * width
    here_N = (micro.select_N >= first) & (micro.select_N < first + width)
    place_N = torch.arange(len(micro.rows)).repeat_interleave(torch.tensor(micro.counts, dtype=torch.int64))
    counts = place_N[here_N.cpu()].bincount(minlength=len(micro.rows))
    return replace(
        micro,
        token_ids_1T=micro.token_ids_1T[:, first : first + width],
        position_ids_1T=micro.position_ids_1T[:, first : first + width],
        counts=tuple(counts.tolist()),
        select_N=(micro.select_N - first)[here_N],
        target_N=micro.target_N[here_N],
        row_N=micro.row_N[here_N],
        column_N=micro.column_N[here_N],
        context=context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneToken:
    token_ids: tuple[int, ...] = (0,)
    loss_mask: tuple[bool, ...] = (False,)


def _empty_micro_batch(device: torch.device | str, multiple: int) -> MicroBatch:
    micro = _micro_batch([_Family(rows=(0,), prompt_len=0)], [_OneToken()], device, multiple)
    return replace(micro, rows=(), counts=())
