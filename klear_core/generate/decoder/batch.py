"""Keep the running batch of the torch engine: rows join and leave between decode steps, independent of each other.

The first `num_running` cache rows are active. When one ends, the last active row moves into its place, so no step
computes for finished rows. Keys and values of a prompt are stored once for all rows that answer it, in a slot of the
shared cache.

Axis letters: R allocated rows, B active rows, T positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from klear_core.generate.decoder.decode import NativeStep, RowState, draw, penalise, truncate_rows
from klear_core.generate.decoder.decoder import Decoder, KvCache, round_up
from klear_core.generate.engine import SamplingParams

MIN_ROWS = 4
"""Fewest rows of a decode step. With fewer, matrix products use another kernel that sums in another order, and a row's
bits depend on the batch size."""
PREFILL_TOKENS = 16_384
"""Most padded tokens of one prefill pass; bounds its memory."""
MIN_PRIVATE = 64
"""Positions in its private cache that a row gets from the start, unless its budget is smaller."""

OwnerT = TypeVar("OwnerT")


@dataclass(eq=False, slots=True, kw_only=True)
class BatchRow(Generic[OwnerT]):
    """One unfinished sample. `end` is the length, prompt included, at which its token budget is used up."""

    owner: OwnerT
    prompt_ids: tuple[int, ...]
    key: int
    params: SamplingParams
    end: int
    prefix_ids: tuple[int, ...] = ()
    """The first tokens, whose keys and values are in a shared slot."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (index of the first new token, version of the weights that sample from there on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRow(Generic[OwnerT]):
    """A finished sample with its new tokens, including the end token if there is one."""

    row: BatchRow[OwnerT]
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class Batch(Generic[OwnerT]):
    """Static tensors of up to `max_rows` rows. Not thread-safe: only one thread may use it."""

    def __init__(
        self, model: Decoder, native: NativeStep | None, *, stop_ids: Sequence[int], max_rows: int, version: int
    ) -> None:
        """Create an empty batch. `native` must be built for this model; without it, steps run as torch operations."""
        self.max_rows, self.version = max_rows, version
        self._model, self._native = model, native
        self._shared, self._private = self._new_cache(), self._new_cache()
        self._slots = PrefixSlots()
        self._state = RowState.empty(model.device)
        self._stop_ids = self._ints(stop_ids)
        self._rows: list[BatchRow[OwnerT]] = []
        self._is_truncated = self._is_penalised = False
        self._longest = 0
        """Index of the newest token of the longest active row."""
        self._longest_shared = self._longest_private = 0
        """Most positions that any active row has in a slot, and in its private cache."""

    @property
    def num_running(self) -> int:
        """Number of active rows."""
        return len(self._rows)

    @property
    def cached_positions(self) -> int:
        """Number of positions that the caches have room for, in all of their rows."""
        return sum(cache.num_rows * cache.length for cache in (self._shared, self._private))

    def add(self, rows: Sequence[BatchRow[OwnerT]]) -> None:
        """Start these rows. All but the last prompt token are prefilled, once for samples of the same prompt."""
        if not self._rows:
            self._release(rows)
        first, state = self.num_running, self._state
        self._rows += rows
        assert self.num_running <= self.max_rows, (self.num_running, self.max_rows)
        self._reserve(self.num_running, max(len(row.prompt_ids) for row in rows) + 1)  # and one new token
        new = slice(first, self.num_running)
        # the last prompt token is not prefilled: its decode step gives the first new token's logits
        state.position_R[new] = self._ints([len(row.prompt_ids) - 1 for row in rows])
        state.end_R[new] = self._ints([row.end for row in rows])
        state.keys_R[new] = self._ints([row.key for row in rows])
        state.temperature_R[new] = self._reals([row.params.temperature for row in rows])
        state.top_p_R[new] = self._reals([row.params.top_p for row in rows])
        state.top_k_R[new] = self._ints([row.params.top_k for row in rows])
        state.penalty_R[new] = self._reals([row.params.repetition_penalty for row in rows])
        for i, row in enumerate(rows, start=first):
            state.tokens_RT[i, : len(row.prompt_ids)] = self._ints(row.prompt_ids)
            row.marks.append((0, self.version))
            row.prefix_ids = row.prompt_ids[:-1]
        self._assign_slots(first)
        self._update_lengths()

    def step(self) -> list[EndedRow[OwnerT]]:
        """Decode one token for every active row; return the rows that ended with it, which have left the batch."""
        num_rows = max(self.num_running, MIN_ROWS)
        self._reserve(num_rows, self._longest + 2)  # the new token has index `_longest` + 1
        if num_rows > self.num_running:  # padding rows without an owner, to reach MIN_ROWS
            for tensor in (self._state.position_R, self._state.start_R, self._state.slot_R):
                tensor[self.num_running : num_rows] = 0
            self._state.penalty_R[self.num_running : num_rows] = 1  # unused rows hold 0, and logits / 0 is inf or NaN
        ended, are_stops = self._advance(num_rows)
        # every row has one token more
        self._longest += 1
        self._longest_private += 1
        if not ended:
            return []
        results = [self._result(i, is_stop=bool(is_stop)) for i, is_stop in zip(ended, are_stops, strict=True)]
        self._remove(ended)  # after the results are read, because rows move
        return results

    def unfinished(self, is_wanted: Callable[[OwnerT], bool]) -> Iterator[tuple[OwnerT, tuple[int, ...]]]:
        """Yield the owners that are wanted of the active rows, each with its new tokens so far."""
        for index, row in enumerate(self._rows):
            if is_wanted(row.owner):
                new = slice(len(row.prompt_ids), int(self._state.position_R[index]) + 1)
                yield row.owner, tuple(self._state.tokens_RT[index, new].tolist())

    def drop(self, is_unwanted: Callable[[OwnerT], bool]) -> None:
        """Stop the rows whose owner is unwanted, such as a cancelled request."""
        self._remove([i for i, row in enumerate(self._rows) if is_unwanted(row.owner)])

    def recompute_cache(self, version: int) -> None:
        """Recompute all keys and values after a weight update, in shared slots; further tokens are of this version."""
        self.version = version
        if self._native is not None:
            self._native.read_weights()
        for i, (row, position) in enumerate(zip(self._rows, self._state.position_R.tolist(), strict=False)):
            # tokens up to the newest keep their version; the next one has this index among the new tokens
            row.marks.append((position + 1 - len(row.prompt_ids), version))
            # without the newest token, whose key and value the next step computes
            row.prefix_ids = tuple(self._state.tokens_RT[i, :position].tolist())
        self._slots = PrefixSlots()  # empty: the old slots are of the old weights
        self._assign_slots(0)
        self._update_lengths()

    def _assign_slots(self, first: int) -> None:
        """Assign shared slots to rows from `first` on, and prefill the prefixes that no slot holds yet."""
        prefixes = [row.prefix_ids for row in self._rows[first:]]
        # before `acquire`, after which a slot is assigned to every prefix
        missing = {ids for ids in prefixes if ids not in self._slots}
        slots = [self._slots.acquire(ids) for ids in prefixes]
        slot_of = dict(zip(prefixes, slots, strict=True))
        lengths = [len(ids) for ids in prefixes]
        self._state.start_R[first : self.num_running] = self._ints(lengths)
        self._state.slot_R[first : self.num_running] = self._ints(slots)
        self._shared.reserve(
            _grown(self._shared.num_rows, self._slots.num_slots, most=self.max_rows),
            _grown(self._shared.length, max(lengths, default=0), most=self._model.shape.max_len),
        )
        # sorted for a fixed order, shortest first for little padding; an empty prefix needs no prefill
        for chunk in _chunks(sorted(missing - {()}, key=lambda ids: (len(ids), ids))):
            width = round_up(len(chunk[-1]))
            # padded on the right with token 0, whose keys and values are never attended to
            tokens_BT = self._ints([ids + (0,) * (width - len(ids)) for ids in chunk])
            self._model.prefill(tokens_BT, self._shared, self._ints([slot_of[ids] for ids in chunk]))

    def _advance(self, num_rows: int) -> tuple[list[int], list[int]]:
        """Append a token to each row.

        Returns the active rows that are done, and for each of them 1 if an end token ended it, else 0.
        """
        state, native = self._state, self._native
        if native is None:
            index_B, positions_B = torch.arange(num_rows, device=self._model.device), state.position_R[:num_rows]
            tokens_B = state.tokens_RT[index_B, positions_B]
            places = state.places(
                num_rows, longest_shared=self._longest_shared, longest_private=self._longest_private + 1
            )
            logits_BV = self._model.decode(tokens_B, places, self._shared, self._private)
        else:
            logits_BV = native.decode(state, num_rows, self._shared, self._private)
        if self._is_penalised:
            seen_BL = self._seen(state.position_R[:num_rows], self._longest + 1)
            logits_BV = penalise(logits_BV, seen_BL, state.penalty_R[:num_rows])
        if native is None:
            return self._draw(logits_BV, num_rows)
        # the C code samples from all finite logits, so truncate first; torch's `draw` truncates by itself
        if self._is_truncated:
            logits_BV = truncate_rows(logits_BV, state.decoding(num_rows))
        return native.draw(logits_BV, state, self._stop_ids, num_running=self.num_running)

    def _draw(self, logits_BV: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        state = self._state
        positions_B, index_B = state.position_R[:num_rows], torch.arange(num_rows, device=self._model.device)
        tokens_B, logps_B = draw(logits_BV, positions_B, state.decoding(num_rows), is_truncated=self._is_truncated)
        # in place on a view of the row state: advances the rows themselves
        positions_B += 1
        state.tokens_RT[index_B, positions_B] = tokens_B
        state.logps_RT[index_B, positions_B] = logps_B
        is_stop_B = torch.isin(tokens_B, self._stop_ids)
        # position + 1 is the row's length
        has_ended_B = is_stop_B | (positions_B + 1 >= state.end_R[:num_rows])
        ended = has_ended_B[: self.num_running].nonzero()[:, 0]
        return ended.tolist(), is_stop_B[ended].tolist()

    def _seen(self, positions_B: Tensor, length: int) -> Tensor:
        """Return the token ids that each row already holds, padded with the row's first, which is there anyway."""
        tokens_BT = self._state.tokens_RT[: len(positions_B), :length]
        is_past_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) <= positions_B[:, None]
        return torch.where(is_past_BT, tokens_BT, tokens_BT[:, :1])

    def _result(self, index: int, *, is_stop: bool) -> EndedRow[OwnerT]:
        row = self._rows[index]
        new = slice(len(row.prompt_ids), int(self._state.position_R[index]) + 1)
        token_ids = tuple(self._state.tokens_RT[index, new].tolist())
        # a version holds until the next mark, the last one until the end
        ends = [start for start, _ in row.marks[1:]] + [len(token_ids)]
        versions: list[int] = []
        for (start, version), end in zip(row.marks, ends, strict=True):
            versions += [version] * (end - start)
        return EndedRow(
            row=row,
            token_ids=token_ids,
            logps=tuple(self._state.logps_RT[index, new].tolist()),
            versions=tuple(versions),
            finish_reason="stop" if is_stop else "length",
        )

    def _remove(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        num_left = self.num_running - len(indices)
        gone = set(indices)
        for i in indices:
            self._slots.release(self._rows[i].prefix_ids)
        # move the last active rows into the holes, so that active rows stay first and without gaps
        holes = [i for i in indices if i < num_left]
        movers = [i for i in range(num_left, self.num_running) if i not in gone]
        if holes:
            holes_R, movers_R = self._ints(holes), self._ints(movers)
            self._move(movers_R, holes_R)
            for hole, mover in zip(holes, movers, strict=True):
                self._rows[hole] = self._rows[mover]
        del self._rows[num_left:]
        self._update_lengths()

    def _move(self, source_R: Tensor, target_R: Tensor) -> None:
        if self._native is not None:
            self._native.move(self._private, self._state, source_R, target_R, length=self._longest_private)
        else:
            self._private.move(source_R, target_R, length=self._longest_private)
            self._state.move(source_R, target_R)

    def _update_lengths(self) -> None:
        # read back from the device, so only when rows change; `step` counts up in between
        positions_B, starts_B = self._state.position_R[: self.num_running], self._state.start_R[: self.num_running]
        self._longest = _largest(positions_B)
        self._longest_shared = _largest(starts_B)
        self._longest_private = _largest(positions_B - starts_B)
        self._is_truncated = any(row.params.top_p < 1 or row.params.top_k > 0 for row in self._rows)
        self._is_penalised = any(row.params.repetition_penalty != 1 for row in self._rows)

    def _new_cache(self) -> KvCache:
        # the C code computes in float32 between the products of any dtype
        dtype = self._model.dtype if self._native is None else torch.float32
        return KvCache(self._model.shape, dtype=dtype, device=self._model.device)

    def _release(self, rows: Sequence[BatchRow[OwnerT]]) -> None:
        """Free an empty batch's caches where these rows need less than half of their positions.

        Every row of a cache has room for the longest one: after a single prompt of 4,096 tokens, 96 short ones of a
        model of 135 million parameters would take 18 GB.
        """
        if self._shared.length > 2 * round_up(max(len(row.prompt_ids) for row in rows)):
            self._shared, self._slots = self._new_cache(), PrefixSlots()
        if self._private.length > 2 * round_up(max(MIN_PRIVATE, *(row.end - len(row.prompt_ids) + 1 for row in rows))):
            self._private = self._new_cache()

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for rows of this many tokens, and for one more position in each row's private cache."""
        num_rows = _grown(self._private.num_rows, max(num_rows, MIN_ROWS), most=max(self.max_rows, MIN_ROWS))
        num_private = self._private.length
        if self._longest_private >= num_private:
            # the most positions of its private cache that any row can come to need
            budget = max(row.end - len(row.prefix_ids) for row in self._rows)
            num_private = _grown(num_private, max(self._longest_private + 1, min(budget, MIN_PRIVATE)), most=budget)
        self._private.reserve(num_rows, num_private)
        self._state.reserve(
            num_rows, _grown(self._state.tokens_RT.shape[1], num_tokens, most=self._model.shape.max_len)
        )

    def _ints(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _reals(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._model.device)


def _largest(count_B: Tensor) -> int:
    """Return the largest count, 0 without rows."""
    return int(count_B.max()) if len(count_B) else 0


def _grown(room: int, needed: int, *, most: int) -> int:
    """Return the size to grow to: at least double, because growing copies, but no more than can ever be needed."""
    return room if needed <= room else max(needed, min(most, 2 * room))


def _chunks(prefixes: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield prefixes, shortest first, in chunks of at most PREFILL_TOKENS after padding."""
    chunk: list[tuple[int, ...]] = []
    for ids in prefixes:
        if chunk and round_up(len(ids)) * (len(chunk) + 1) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(ids)
    if chunk:
        yield chunk


# ---- slots ----
# Assign slots of the shared KV cache to prefixes, and count their readers.


class PrefixSlots:
    """Maps a prefix's token ids to the slot with its keys and values, with a count of the rows that read it."""

    def __init__(self) -> None:
        self.num_slots = 0
        """Number of slots that exist: the most that were ever in use at once."""
        self._held: dict[tuple[int, ...], int] = {}
        self._num_readers: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []

    def __contains__(self, ids: tuple[int, ...]) -> bool:
        return ids in self._held

    def acquire(self, ids: tuple[int, ...]) -> int:
        """Return the slot of these tokens and add a reader. If no slot holds them, return a free one, to be filled."""
        if ids not in self._held:
            # one row more in the shared cache, for which the caller makes room
            if not self._free:
                self._free.append(self.num_slots)
                self.num_slots += 1
            self._held[ids], self._num_readers[ids] = self._free.pop(), 0
        self._num_readers[ids] += 1
        return self._held[ids]

    def release(self, ids: tuple[int, ...]) -> None:
        """Remove a reader; the last one frees the slot."""
        self._num_readers[ids] -= 1
        if not self._num_readers[ids]:
            del self._num_readers[ids]
            self._free.append(self._held.pop(ids))
