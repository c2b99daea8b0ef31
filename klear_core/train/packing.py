"""Pack rows of tokens into micro-batches without padding; no row attends to another.

All rows of a micro-batch lie end to end in one packed sequence. Rows with the same prompt can share it: the packed
sequence then holds the prompt once, followed by the rest of each row. Attention is causal, so the prompt's states are
the same in all of them.

Axis letters: T tokens of the packed sequence, N loss tokens (flat, over all rows of the micro-batch).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from klear_core.train.balance import Item, Plan, RowWork, busy_share, distribute
from klear_core.train.context_parallel import ALONE, Context
from klear_core.types import TokenCounts, TokenRow

TOKENS_ALONE = RowWork()
"""Work by the number of tokens, for callers that do not know the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward and backward pass. Losses are computed for the N loss tokens only."""

    token_ids_1T: Tensor
    position_ids_1T: Tensor
    """Position of each token in its row."""
    cu_seqlens: Tensor
    """int32 [segments + 1]: cumulative lengths of the segments, each of which is a complete row, a shared prompt, or
    the rest of a row after a shared prompt."""
    group_bounds: Tensor
    """int32 [groups + 1], on the CPU: index of each prompt group's first segment. Every other segment of a group
    continues the first one: it attends to the first segment and to itself."""
    max_segment_len: int
    rows: tuple[int, ...]
    """Indices of the caller's rows in this micro-batch, in the order of the packed sequence."""
    counts: tuple[int, ...]
    """Number of loss tokens of each of these rows; the loss tokens are stored row after row."""
    predictor_N: Tensor
    """Index in the packed sequence of the hidden state that predicts each loss token: that of the token before it. The
    last state of a shared prompt predicts one token of each of its rows."""
    target_N: Tensor
    """Token id to predict."""
    row_N: Tensor
    """Index of the caller's row of each loss token."""
    column_N: Tensor
    """Position of each loss token in its row: `token_ids[row][column]` is the target."""
    cp_group: Context = ALONE
    """Context-parallel ranks that share this packed sequence. Fields with axis T or N, and `counts`, describe this
    rank's slice; `cu_seqlens`, `group_bounds`, `max_segment_len` and `rows` describe the full packed sequence."""

    @property
    def num_loss_tokens(self) -> int:
        """Return N."""
        return self.target_N.numel()

    def gather(
        self,
        values: Sequence[Sequence[float]] | Mapping[int, Sequence[float] | np.ndarray],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return one value per loss token, `values[row][column]`; `values` has one per token of the rows in here."""
        # float64, so that nothing but the cast to `dtype` rounds.
        arrays = [np.asarray(values[r], dtype=np.float64) for r in self.rows]
        flat = np.concatenate(arrays or [np.zeros(0)])  # an empty micro-batch has no rows, which numpy refuses
        lengths = [len(array) for array in arrays]
        # Where each row starts in `flat`, once for each of its loss tokens.
        starts_N = np.repeat(np.cumsum([0, *lengths])[:-1], self.counts)
        gathered_N = flat[starts_N + self.column_N.cpu().numpy()]
        return torch.as_tensor(gathered_N, dtype=dtype).to(self.target_N.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Micro-batches of one optimizer step on this rank, with counts over all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    """Count over all ranks, the divisor of a token-mean loss."""
    fill: float
    """Tokens of all rows over tokens computed, on all ranks: below 1 because of padding, above 1 if shared prompts save
    more."""
    busy: float
    """Mean share of the update in which a rank computes, by the work of its rows; the rest it waits for others."""


def pack(
    rows: Sequence[TokenRow],
    *,
    tokens_per_microbatch: int,
    shares_prompts: bool = False,
    device: torch.device | str = "cpu",
    rank: int = 0,
    num_ranks: int = 1,
    row_work: RowWork = TOKENS_ALONE,
    cp_group: Context = ALONE,
) -> PackedBatch:
    """Pack rows into micro-batches of about `tokens_per_microbatch` and return this rank's share.

    A row longer than that gets a micro-batch of its own. Several ranks get micro-batches of about the same work, by
    `row_work`, in each pass. Every rank gets the same number, some of them empty (one token, no loss), because sharded
    models make collective calls in every pass. A context-parallel group counts as one rank; each member gets its
    contiguous slice of the sequence.
    """
    planned = plan_rows(
        rows,
        tokens_per_microbatch=tokens_per_microbatch,
        shares_prompts=shares_prompts,
        num_ranks=num_ranks,
        row_work=row_work,
    )
    groups, items = planned.groups, planned.items
    micro_batches, lengths = [], []
    for bins in planned.bins:
        for chosen in bins:  # of all ranks, so that every rank reports the same fill
            lengths.append(_round_up(sum(items[i].num_tokens for i in chosen), cp_group.size))
        micro = _micro_batch([groups[i] for i in bins[rank]], rows, device, cp_group.size)
        micro_batches.append(_slice_sequence(micro, cp_group))
    num_tokens = sum(r.num_tokens for r in rows)
    num_loss_tokens = sum(r.num_loss_tokens for r in rows)
    return PackedBatch(
        micro_batches=tuple(micro_batches),
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        fill=num_tokens / max(1, sum(lengths)),
        busy=busy_share(planned.bins, items, num_ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Which rank computes which rows in which pass."""

    groups: list[_PromptGroup]
    items: list[Item]
    """Tokens and work of each group."""
    bins: Plan
    """Groups by pass and rank."""

    def rows_of(self, rank: int) -> list[int]:
        """Return the indices of a rank's rows."""
        return [row for bins in self.bins for i in bins[rank] for row in self.groups[i].rows]


def plan_rows(
    rows: Sequence[TokenRow], *, tokens_per_microbatch: int, shares_prompts: bool, num_ranks: int, row_work: RowWork
) -> RowPlan:
    """Return the plan of `pack`, which needs the counts of the rows and not their tokens.

    Every rank computes the same from the same counts, without communication.
    """
    groups = _prompt_groups(rows, tokens_per_microbatch) if shares_prompts else _single_rows(len(rows))
    items = [_item(group, rows, row_work) for group in groups]
    return RowPlan(
        groups=groups, items=items, bins=distribute(items, capacity=tokens_per_microbatch, num_ranks=num_ranks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptGroup:
    """Rows packed together, with their first `prompt_len` tokens stored once; it is 0 if there is only one row."""

    rows: tuple[int, ...]
    prompt_len: int


def _prompt_groups(rows: Sequence[TokenRow], capacity: int) -> list[_PromptGroup]:
    """Group rows with the same prompt, as many as fit into `capacity`, in the order of the prompts' first rows."""
    by_prompt: dict[Hashable, list[list[int]]] = {}
    for i, row in enumerate(rows):
        parts = by_prompt.setdefault(row.prompt_key, [[]])  # by tokens: equal prompts have equal states
        if parts[-1] and _packed_len([*parts[-1], i], row.num_prompt_tokens, rows) > capacity:
            # This part is full: store the prompt once more for the rows that follow.
            parts.append([])
        parts[-1].append(i)
    groups = []
    for parts in by_prompt.values():
        for part in parts:
            prompt_len = rows[part[0]].num_prompt_tokens if len(part) > 1 else 0
            groups.append(_PromptGroup(rows=tuple(part), prompt_len=prompt_len))
    return groups


def _single_rows(count: int) -> list[_PromptGroup]:
    return [_PromptGroup(rows=(i,), prompt_len=0) for i in range(count)]


def _item(group: _PromptGroup, rows: Sequence[TokenRow], row_work: RowWork) -> Item:
    """Return the tokens and the work of a group: those of its prompt, and of each row beyond its prompt."""
    work_of_prompt = row_work(group.prompt_len)
    work = work_of_prompt
    for i in group.rows:
        # A difference, because a row's own tokens attend to the prompt too: of n tokens and a prompt of p, n^2 - p^2.
        work += row_work(rows[i].num_tokens) - work_of_prompt
    return Item(num_tokens=_packed_len(group.rows, group.prompt_len, rows), work=work)


def _packed_len(members: Sequence[int], prompt_len: int, rows: Sequence[TokenRow]) -> int:
    return prompt_len + sum(rows[i].num_tokens - prompt_len for i in members)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple  # padding makes the slices of context-parallel ranks equal


def _micro_batch(
    groups: Sequence[_PromptGroup], rows: Sequence[TokenRow], device: torch.device | str, multiple: int
) -> MicroBatch:
    """Build one micro-batch whose T is a multiple of `multiple`; without groups it has one token and no loss."""
    if not groups:
        return _empty_micro_batch(device, multiple)
    builder = _SequenceBuilder()
    for group in groups:
        builder.add(group, rows)
    index = [i for group in groups for i in group.rows]
    padding = _round_up(builder.length, multiple) - builder.length
    # Padding is a separate group that no row attends to: attention kernels need every token to be in a segment.
    if padding:
        builder.add_segments([([0] * padding, 0)])
    # Positions of each row's loss tokens, counted within the row, so they do not depend on prompt sharing.
    columns = [np.flatnonzero(rows[i].loss_mask) for i in index]
    counts = [len(c) for c in columns]
    column_N = np.concatenate(columns)
    token_ids_T = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, _ in builder.segments])
    position_ids_T = np.concatenate([np.arange(first, first + len(tokens)) for tokens, first in builder.segments])
    targets = [np.asarray(rows[i].token_ids, dtype=np.int64)[c] for i, c in zip(index, columns, strict=True)]
    target_N = np.concatenate(targets)  # row after row, in the order of `index`, as all fields with axis N
    lengths = [len(tokens) for tokens, _ in builder.segments]
    return MicroBatch(
        token_ids_1T=torch.from_numpy(token_ids_T[None]).to(device),
        position_ids_1T=torch.from_numpy(position_ids_T[None]).to(device),
        # Attention kernels need int32 cumulative lengths on the device.
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device),
        group_bounds=torch.tensor([0, *np.cumsum(builder.group_sizes)], dtype=torch.int32),  # read on the CPU only
        max_segment_len=max(lengths),
        rows=tuple(index),
        counts=tuple(counts),
        predictor_N=torch.from_numpy(np.concatenate(builder.predictors)).to(device),
        target_N=torch.from_numpy(target_N).to(device),
        row_N=torch.from_numpy(np.repeat(np.array(index, dtype=np.int64), counts)).to(device),
        column_N=torch.from_numpy(column_N).to(device),
    )


class _SequenceBuilder:
    """Builder of a packed sequence: segments end to end, each with its tokens and its first token's position."""

    def __init__(self) -> None:
        self.segments: list[tuple[Sequence[int] | np.ndarray, int]] = []
        self.group_sizes: list[int] = []
        self.predictors: list[np.ndarray] = []
        self.length = 0

    def add_segments(self, segments: list[tuple[Sequence[int] | np.ndarray, int]]) -> None:
        self.segments += segments
        self.group_sizes.append(len(segments))
        self.length += sum(len(tokens) for tokens, _ in segments)

    def add(self, group: _PromptGroup, rows: Sequence[TokenRow]) -> None:
        shared, members = group.prompt_len, [rows[i] for i in group.rows]
        segments = [(members[0].token_ids[:shared], 0)] if shared else []
        prompt_at, at = self.length, self.length + shared
        for row in members:
            assert len(row.loss_mask) == len(row.token_ids), (len(row.token_ids), len(row.loss_mask))
            assert not row.loss_mask[0], "nothing predicts the first token of a row"
            before = np.flatnonzero(row.loss_mask) - 1  # shift by one: the state before a token predicts it
            # That state lies in the shared prompt, or else in this row's segment, which starts at `at`.
            self.predictors.append(np.where(before < shared, prompt_at + before, at + before - shared))
            segments.append((row.token_ids[shared:], shared))
            at += len(row.token_ids) - shared
        self.add_segments(segments)


def _slice_sequence(micro: MicroBatch, cp_group: Context) -> MicroBatch:
    """Return this rank's part of a micro-batch: a contiguous slice of tokens, and the loss tokens predicted there."""
    if cp_group.size == 1:
        return micro
    width = micro.token_ids_1T.shape[1] // cp_group.size  # T was padded to a multiple
    first = cp_group.rank * width
    # A token belongs to the rank with the state that predicts it; the token itself may lie in the next rank's slice.
    here_N = (micro.predictor_N >= first) & (micro.predictor_N < first + width)
    # Index into `rows` of each loss token, to count those that remain of each row. On the CPU, as `counts` is.
    index_N = torch.arange(len(micro.rows)).repeat_interleave(torch.tensor(micro.counts, dtype=torch.int64))
    counts = index_N[here_N.cpu()].bincount(minlength=len(micro.rows))
    # Positions go with the tokens: queries and keys are rotated (RoPE) before ranks exchange them.
    return replace(
        micro,
        token_ids_1T=micro.token_ids_1T[:, first : first + width],
        position_ids_1T=micro.position_ids_1T[:, first : first + width],
        counts=tuple(counts.tolist()),
        predictor_N=(micro.predictor_N - first)[here_N],
        target_N=micro.target_N[here_N],
        row_N=micro.row_N[here_N],
        column_N=micro.column_N[here_N],
        cp_group=cp_group,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneToken(TokenCounts):
    token_ids: tuple[int, ...] = (0,)
    loss_mask: tuple[bool, ...] = (False,)


def _empty_micro_batch(device: torch.device | str, multiple: int) -> MicroBatch:
    # The placeholder token of an empty micro-batch belongs to no caller row.
    micro = _micro_batch([_PromptGroup(rows=(0,), prompt_len=0)], [_OneToken()], device, multiple)
    return replace(micro, rows=(), counts=())
