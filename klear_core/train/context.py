"""Context parallelism: several ranks compute one row, each a slice of its tokens. Only attention and sums over rows join the slices.

The scheme is DeepSpeed-Ulysses (arXiv 2309.14509): before attention the ranks trade tokens for heads, all of them for some
of these, and after it they trade back. So every attention kernel serves, and all ranks do the same work whatever the rows.

Axis letters: B rows, T tokens of the whole line, S = T/C those of one rank, C ranks, K query heads, G key and value heads,
J heads of any kind that one rank attends with, D head size.
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
    """The ranks that share rows with this one, which holds slice `rank` of `size`. They make the same calls in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """Their process group; None where there is one rank."""

    def sum(self, values: Tensor) -> Tensor:
        """Added up over the ranks; detached numbers, nothing flows back."""
        if self.size == 1:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def trade_tokens(self, query_BKSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's tokens with all heads become all tokens with this rank's heads; grouped heads stay with their group."""
        if self.size == 1:
            return query_BKSD, key_BGSD, value_BGSD
        num_query, num_key = query_BKSD.shape[1], key_BGSD.shape[1]
        assert num_query % self.size == 0, (num_query, self.size)  # TrainRuntime.check_heads has refused it
        repeats = math.lcm(num_key, self.size) // num_key  # 1 unless the ranks cannot share the key heads out evenly
        if repeats > 1:
            key_BGSD, value_BGSD = (x.repeat_interleave(repeats, dim=1) for x in (key_BGSD, value_BGSD))
        parts_BCJSD = [_in_parts(x, self.size) for x in (query_BKSD, key_BGSD, value_BGSD)]
        theirs_CBJSD = torch.cat(parts_BCJSD, dim=2).movedim(1, 0)
        mine_CBJSD: Tensor = _AllToAll.apply(theirs_CBJSD, self.group)  # type: ignore[no-untyped-call]
        mine_BJTD = mine_CBJSD.permute(1, 2, 0, 3, 4).flatten(2, 3)
        query_BJTD, key_BJTD, value_BJTD = torch.split(mine_BJTD, [p.shape[2] for p in parts_BCJSD], dim=1)
        return query_BJTD, key_BJTD, value_BJTD

    def trade_heads(self, out_BTJD: Tensor) -> Tensor:
        """The way back, for what attention made of them: all tokens with this rank's heads become its tokens with all heads."""
        if self.size == 1:
            return out_BTJD
        theirs_CBSJD = _in_parts(out_BTJD, self.size).movedim(1, 0)
        mine_CBSJD: Tensor = _AllToAll.apply(theirs_CBSJD, self.group)  # type: ignore[no-untyped-call]
        return mine_CBSJD.permute(1, 2, 0, 3, 4).flatten(2, 3)


ALONE = Context()
"""A rank that has its rows for itself."""


def _in_parts(x: Tensor, num_parts: int) -> Tensor:
    """Axis 1 cut into equal runs."""
    return x.reshape(x.shape[0], num_parts, -1, *x.shape[2:])


class _AllToAll(torch.autograd.Function):
    """Part c of axis 0 goes to rank c, and lies there under the sender's rank. It is its own transpose."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    sent = x.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got
