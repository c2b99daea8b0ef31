"""What the running batch keeps of each row, as tensors. R: all rows there is room for, B: rows at work, T: positions of a row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klear_core.generate.qwen3.model import Places
from klear_core.generate.qwen3.sampling import Decoding


@dataclass(slots=True, kw_only=True)
class RowState:
    """What the decode step reads and writes of each row, as tensors with room for R rows."""

    position_R: Tensor
    """Index of the newest token, the one whose key and value are not in the cache yet."""
    start_R: Tensor
    """How many positions lie in the shared cache: those from there on are the row's own."""
    slot_R: Tensor
    """Row of the shared cache."""
    end_R: Tensor
    tokens_RT: Tensor
    logps_RT: Tensor
    keys_R: Tensor
    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    penalty_R: Tensor

    @staticmethod
    def empty(device: torch.device) -> RowState:
        """No rows yet."""
        long = torch.zeros(0, dtype=torch.int64, device=device)
        real = torch.zeros(0, device=device)
        return RowState(
            position_R=long,
            start_R=long,
            slot_R=long,
            end_R=long,
            tokens_RT=long[:, None],
            logps_RT=real[:, None],
            keys_R=long,
            temperature_R=real,
            top_p_R=real,
            top_k_R=long,
            penalty_R=real,
        )

    def reserve(self, num_rows: int, length: int) -> None:
        """Room for at least this many rows and positions; contents stay."""
        room = self.tokens_RT.shape
        if num_rows <= room[0] and length <= room[1]:
            return
        num_rows, length = max(num_rows, room[0]), max(length, room[1])
        for name, old in zip((f.name for f in fields(self)), self.tensors(), strict=True):
            new = old.new_zeros((num_rows, length)[: old.dim()])
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, name, new)

    def move(self, source_R: Tensor, target_R: Tensor) -> None:
        """Copy whole rows."""
        for tensor in self.tensors():
            tensor[target_R] = tensor[source_R]

    def places(self, num_rows: int, *, longest_shared: int, longest_own: int) -> Places:
        """Where the first rows are."""
        return Places(
            positions_B=self.position_R[:num_rows],
            starts_B=self.start_R[:num_rows],
            slots_B=self.slot_R[:num_rows],
            longest_shared=longest_shared,
            longest_own=longest_own,
        )

    def decoding(self, num_rows: int) -> Decoding:
        """How to sample for the first rows."""
        return Decoding(
            keys_B=self.keys_R[:num_rows],
            temperature_B=self.temperature_R[:num_rows],
            top_p_B=self.top_p_R[:num_rows],
            top_k_B=self.top_k_R[:num_rows],
        )

    def tensors(self) -> list[Tensor]:
        """All of them; the first axis is the row."""
        return [getattr(self, f.name) for f in fields(self)]
