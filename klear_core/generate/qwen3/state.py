"""Hold the running batch's state of each row as tensors. R: allocated rows, B: active rows, T: positions of a row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klear_core.generate.qwen3.model import Places
from klear_core.generate.qwen3.sampling import Decoding


@dataclass(slots=True, kw_only=True)
class RowState:
    """Values of each row that the decode step reads and writes, with room for R rows."""

    position_R: Tensor
    """Index of the newest token, the one whose key and value are not in the cache yet."""
    start_R: Tensor
    """Number of positions in the shared cache; later ones are in the row's private cache."""
    slot_R: Tensor
    """Row of the shared cache."""
    end_R: Tensor
    """Length, prompt included, at which the row's token budget is used up."""
    tokens_RT: Tensor
    logps_RT: Tensor
    """Log-prob of each new token, at the index of the token; unused on the prompt."""
    keys_R: Tensor
    """Key of each row's random draws; see `Decoding`."""
    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    penalty_R: Tensor

    @staticmethod
    def empty(device: torch.device) -> RowState:
        """Return a state without rows."""
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
        """Make room for at least this many rows and positions; contents are kept."""
        room = self.tokens_RT.shape
        if num_rows <= room[0] and length <= room[1]:
            return
        num_rows, length = max(num_rows, room[0]), max(length, room[1])
        for field in fields(self):
            old: Tensor = getattr(self, field.name)
            # (R,) or (R, T): a tensor of one axis takes the number of rows alone
            # zeros, because a decode step may read rows that nobody owns: token 0 exists, and temperature 0 is greedy
            new = old.new_zeros((num_rows, length)[: old.dim()])
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, field.name, new)

    def move(self, source_R: Tensor, target_R: Tensor) -> None:
        """Copy rows."""
        # no row is both source and target
        for tensor in self.tensors():
            tensor[target_R] = tensor[source_R]

    def places(self, num_rows: int, *, longest_shared: int, longest_private: int) -> Places:
        """Return the cache positions of the first rows, as views."""
        return Places(
            positions_B=self.position_R[:num_rows],
            starts_B=self.start_R[:num_rows],
            slots_B=self.slot_R[:num_rows],
            longest_shared=longest_shared,
            longest_private=longest_private,
        )

    def decoding(self, num_rows: int) -> Decoding:
        """Return the sampling parameters of the first rows, as views."""
        return Decoding(
            keys_B=self.keys_R[:num_rows],
            temperature_B=self.temperature_R[:num_rows],
            top_p_B=self.top_p_R[:num_rows],
            top_k_B=self.top_k_R[:num_rows],
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors; the first axis of each is the row."""
        return [getattr(self, f.name) for f in fields(self)]
