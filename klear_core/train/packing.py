"""Rows of tokens become micro-batches without padding waste, and without a row ever seeing another.

Axis letters: B rows of a micro-batch, T tokens, N loss tokens (flat, over all rows of the micro-batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from klear_core.train.context import ALONE, Context

Layout = Literal["varlen", "padded"]
"""`varlen`: all rows end to end in one line, for kernels that take row bounds; `padded`: rows of similar length side by side."""

BUCKET_COST = 200
"""What one more micro-batch costs, in padded tokens: Python and kernel launches (measured on one CPU core, 152k parameters)."""


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

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    """Restart at 0 in every row."""
    bounds: Tensor | None
    """varlen: int32 [rows + 1], where rows begin and end in the line; None in the padded layout."""
    max_row_len: int
    rows: tuple[int, ...]
    """Which of the caller's rows lie here, in this order."""
    counts: tuple[int, ...]
    """Loss tokens of each of these rows; they lie on N one row after the other."""
    select_N: Tensor
    """Index into the flattened B*T of the hidden state that predicts each loss token (the one before it)."""
    target_N: Tensor
    """Token id to be predicted."""
    row_N: Tensor
    """The caller's row that each loss token belongs to."""
    column_N: Tensor
    """The token's place in its row: `token_ids[row][column]` is the target."""
    context: Context = ALONE
    """Who has the other columns of B*T and their loss tokens. `bounds`, `max_row_len` and `rows` are those of the whole."""

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
    """Real tokens over tokens computed, over all ranks; 1 is no waste."""


def pack(
    rows: Sequence[Row],
    *,
    layout: Layout,
    tokens_per_microbatch: int,
    device: torch.device | str = "cpu",
    rank: int = 0,
    num_ranks: int = 1,
    context: Context = ALONE,
) -> PackedBatch:
    """Cut rows into micro-batches of about `tokens_per_microbatch` (a longer row gets its own) and take this rank's share.

    Every rank gets as many micro-batches as any other, empty ones (one token, no loss) where there are too few, because
    sharded models communicate in every pass. A context counts as one rank here, and each of its members gets its columns.
    """
    lengths = [len(r.token_ids) for r in rows]
    bins = _best_fit(lengths, tokens_per_microbatch) if layout == "varlen" else _buckets(lengths, tokens_per_microbatch)
    areas = [_area(bin_, lengths, layout, context.size) for bin_ in bins]
    mine = _share(areas, num_ranks)[rank]
    num_micros = max(len(s) for s in _share(areas, num_ranks))
    micros = [_micro_batch([rows[i] for i in bins[b]], bins[b], layout, device, context.size) for b in mine]
    micros += [_empty_micro_batch(layout, device, context.size)] * (num_micros - len(micros))
    return PackedBatch(
        micros=tuple(_columns_of(micro, context) for micro in micros),
        num_rows=len(rows),
        num_tokens=sum(lengths),
        num_loss_tokens=sum(sum(r.loss_mask) for r in rows),
        fill=sum(lengths) / max(1, sum(areas)),
    )


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that still takes it; ties go to the earlier row and bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[row]]
        if fitting:
            best = min(fitting, key=lambda b: (room[b], b))
            bins[best].append(row)
            room[best] -= lengths[row]
        else:
            bins.append([row])
            room.append(capacity - lengths[row])
    return bins


def _buckets(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The cheapest cut of the rows, sorted by length, into padded batches; cost = padded tokens + BUCKET_COST each."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    sizes = np.array([lengths[i] for i in order])
    cost = np.zeros(len(order) + 1)
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        count = np.arange(end, 0, -1)  # rows in the last bucket if it starts at 0, 1, ..., end - 1
        padded = count * sizes[end - 1]
        total = np.where((padded <= capacity) | (count == 1), cost[:end] + padded + BUCKET_COST, np.inf)
        cut[end] = int(total.argmin())
        cost[end] = total[cut[end]]
    bins: list[list[int]] = []
    end = len(order)
    while end > 0:
        bins.append(order[cut[end] : end])
        end = int(cut[end])
    return bins[::-1]


def _area(bin_: Sequence[int], lengths: Sequence[int], layout: Layout, multiple: int) -> int:
    if layout == "varlen":
        return _round_up(sum(lengths[i] for i in bin_), multiple)
    return len(bin_) * _round_up(max(lengths[i] for i in bin_), multiple)


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


def _micro_batch(rows: Sequence[Row], index: Sequence[int], layout: Layout, device: torch.device | str, multiple: int) -> MicroBatch:
    """T is a multiple of `multiple`: in the varlen layout the padding is a row of its own, for kernels leave no token out."""
    lengths = np.array([len(r.token_ids) for r in rows])
    longest = int(lengths.max())
    total = int(lengths.sum())
    shape = (1, _round_up(total, multiple)) if layout == "varlen" else (len(rows), _round_up(longest, multiple))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if layout == "varlen" else np.arange(len(rows)) * shape[1]
    token_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    columns = []
    for row, start in zip(rows, starts, strict=True):
        assert len(row.loss_mask) == len(row.token_ids), (len(row.token_ids), len(row.loss_mask))
        assert not row.loss_mask[0], "nothing predicts the first token of a row"
        token_ids.reshape(-1)[start : start + len(row.token_ids)] = row.token_ids
        position_ids.reshape(-1)[start : start + len(row.token_ids)] = np.arange(len(row.token_ids))
        columns.append(np.flatnonzero(row.loss_mask))
    column_N = np.concatenate(columns)
    counts = [len(c) for c in columns]
    place_N = np.repeat(starts, counts) + column_N
    bounds = np.unique([*starts, total, shape[1]]).astype(np.int32) if layout == "varlen" else None
    return MicroBatch(
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        position_ids_BT=torch.from_numpy(position_ids).to(device),
        bounds=None if bounds is None else torch.from_numpy(bounds).to(device),
        max_row_len=max(longest, shape[1] - total),
        rows=tuple(index),
        counts=tuple(counts),
        select_N=torch.from_numpy(place_N - 1).to(device),  # the state before a token predicts it
        target_N=torch.from_numpy(token_ids.reshape(-1)[place_N]).to(device),
        row_N=torch.from_numpy(np.repeat(np.array(index, dtype=np.int64), counts)).to(device),
        column_N=torch.from_numpy(column_N).to(device),
    )


def _columns_of(micro: MicroBatch, context: Context) -> MicroBatch:
    """What one rank of a context computes: equal runs of columns in every row of B*T, and the loss tokens predicted there."""
    if context.size == 1:
        return micro
    num_columns = micro.token_ids_BT.shape[1]
    width = num_columns // context.size
    first = context.rank * width
    line_N, column_N = micro.select_N // num_columns, micro.select_N % num_columns
    here_N = (column_N >= first) & (column_N < first + width)
    place_N = torch.arange(len(micro.rows)).repeat_interleave(torch.tensor(micro.counts, dtype=torch.int64))
    counts = place_N[here_N.cpu()].bincount(minlength=len(micro.rows))
    return replace(
        micro,
        token_ids_BT=micro.token_ids_BT[:, first : first + width],
        position_ids_BT=micro.position_ids_BT[:, first : first + width],
        counts=tuple(counts.tolist()),
        select_N=(line_N * width + column_N - first)[here_N],
        target_N=micro.target_N[here_N],
        row_N=micro.row_N[here_N],
        column_N=micro.column_N[here_N],
        context=context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneToken:
    token_ids: tuple[int, ...] = (0,)
    loss_mask: tuple[bool, ...] = (False,)


def _empty_micro_batch(layout: Layout, device: torch.device | str, multiple: int) -> MicroBatch:
    micro = _micro_batch([_OneToken()], [0], layout, device, multiple)
    return MicroBatch(**{f: getattr(micro, f) for f in micro.__slots__} | {"rows": (), "counts": ()})
