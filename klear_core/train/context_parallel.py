"""Split rows of tokens over several ranks (context parallelism). Only attention and sums over rows need other ranks.

The scheme is DeepSpeed-Ulysses (arXiv 2309.14509): before attention an all-to-all gives each rank all tokens of some
heads; after attention a second one returns each rank's tokens with all heads. Therefore any attention kernel can be
used, and all ranks do equal work whatever the rows.

Axis letters: B rows, T tokens of the packed sequence, S = T/C tokens of one rank, C ranks, K query heads, G key and
value heads, J heads (of any kind) that one rank attends with, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Ranks that share the same rows; this one holds slice `rank` of `size`.

    All of them must make the same calls in the same order.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    """Process group of these ranks; None if there is only one."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over these ranks, detached from the graph (collective call)."""
        values = values.detach()
        if self.size == 1:
            return values
        total = values.clone()  # all_reduce overwrites its argument
        dist.all_reduce(total, group=self.group)
        return total

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over these ranks, detached from the graph (collective call)."""
        values = values.detach()
        if self.size == 1:
            return values
        largest = values.clone()  # all_reduce overwrites its argument
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def gather_tokens(self, query_BKSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of this rank's heads (collective call).

        Query heads stay on one rank with the key head of their group.
        """
        if self.size == 1:
            return query_BKSD, key_BGSD, value_BGSD
        num_query, num_key = query_BKSD.shape[1], key_BGSD.shape[1]
        assert num_query % self.size == 0, (num_query, self.size)  # checked early by TrainRuntime.check_attention_heads
        # Repeat key heads until C divides their number. The lcm divides K too, so groups of query heads stay equal.
        repeats = math.lcm(num_key, self.size) // num_key
        if repeats > 1:
            # Neighbouring copies, so that each stays beside its query heads; autograd sums their gradients.
            key_BGSD, value_BGSD = (x.repeat_interleave(repeats, dim=1) for x in (key_BGSD, value_BGSD))
        # Concatenate queries, keys and values along J for one collective call instead of three.
        parts_BCJSD = [_in_parts(x, self.size) for x in (query_BKSD, key_BGSD, value_BGSD)]
        # The receiving rank's axis goes first: all_to_all_single sends slice c of axis 0 to rank c.
        sent_CBJSD = torch.cat(parts_BCJSD, dim=2).movedim(1, 0)
        received_CBJSD: Tensor = _AllToAll.apply(sent_CBJSD, self.group)  # type: ignore[no-untyped-call]
        # Axis 0 is now the sender, which holds token slice c: C just before S restores the order of tokens.
        received_BJTD = received_CBJSD.permute(1, 2, 0, 3, 4).flatten(2, 3)
        query_BJTD, key_BJTD, value_BJTD = torch.split(received_BJTD, [p.shape[2] for p in parts_BCJSD], dim=1)
        return query_BJTD, key_BJTD, value_BJTD

    def gather_heads(self, out_BTJD: Tensor) -> Tensor:
        """Reverse `gather_tokens`: return attention's output for this rank's tokens, all heads (collective call)."""
        if self.size == 1:
            return out_BTJD
        sent_CBSJD = _in_parts(out_BTJD, self.size).movedim(1, 0)
        received_CBSJD: Tensor = _AllToAll.apply(sent_CBSJD, self.group)  # type: ignore[no-untyped-call]
        # Sender c computed head block c: C just before J restores the order of heads.
        return received_CBSJD.permute(1, 2, 0, 3, 4).flatten(2, 3)


ALONE = Context()
"""Context of a rank that shares its rows with no other."""


def _in_parts(x: Tensor, num_parts: int) -> Tensor:
    """Split axis 1 into `num_parts` equal, contiguous parts, on a new axis 1."""
    return x.reshape(x.shape[0], num_parts, -1, *x.shape[2:])


class _AllToAll(torch.autograd.Function):
    """Send part c of axis 0 to rank c, which stores it under the sender's rank.

    The operation is its own transpose, so the gradient takes the same exchange.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    sent = x.contiguous()  # the axes were permuted; the call sends raw memory
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
