"""Turn teacher traces into rows of tokens, and plan the rows of each step.

Rows are kept on disk, because 1.5 million of them need not fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from klear_core.artifacts.manifest import LedgerStep, check_yield
from klear_core.config.settings import YieldLimits
from klear_core.config.train import SftConfig
from klear_core.errors import DataError
from klear_core.prompts import THINK_OPEN, continuation, encode_all, opening_of, prompt_text, render_response
from klear_core.seeding import seed_for
from klear_core.types import SftExample, TeacherTrace

if TYPE_CHECKING:
    Tokenizer = Any

Overlong = Literal["drop", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A trace that gives no row, with the reason."""

    reason: str


def make_examples(
    traces: Sequence[TeacherTrace], tokenizer: Tokenizer, *, max_tokens: int, overlong: Overlong
) -> list[SftExample | Unusable]:
    """Render prompt and response as sampling will see them, one result per trace.

    The loss is on thinking, answer and the end of the turn, not on the prompt. A trace that ran out of tokens is learnt
    as far as it goes, without an end of the turn. A `<think>` that the chat template opens is part of the prompt.
    """
    opening = opening_of(tokenizer)
    # Encoded apart, because sampling gets the prompt's tokens alone: no token may lie across the border.
    prompts = encode_all(tokenizer, [prompt_text(tokenizer, t.question) for t in traces])
    responses = encode_all(tokenizer, [continuation(_response_text(t), opening) for t in traces])
    examples: list[SftExample | Unusable] = []
    for trace, prompt_ids, response_ids in zip(traces, prompts, responses, strict=True):
        # Only a teacher that stopped by itself shows where to stop.
        end = (tokenizer.eos_token_id,) if trace.finish_reason == "stop" else ()
        token_ids = prompt_ids + response_ids + end
        if not trace.reasoning.strip() and not trace.answer.strip():
            examples.append(Unusable(reason="empty"))
        # The end of the turn in mid-text would teach the model to stop there.
        elif tokenizer.eos_token_id in response_ids:
            examples.append(Unusable(reason="end_token_in_text"))
        # A cut row whose prompt fills it has no loss token, and so no gradient.
        elif len(token_ids) > max_tokens and (overlong == "drop" or len(prompt_ids) >= max_tokens):
            examples.append(Unusable(reason="overlong"))
        else:
            token_ids = token_ids[:max_tokens]
            loss_mask = (False,) * len(prompt_ids) + (True,) * (len(token_ids) - len(prompt_ids))
            examples.append(SftExample(problem_id=trace.problem_id, token_ids=token_ids, loss_mask=loss_mask))
    return examples


def _response_text(trace: TeacherTrace) -> str:
    if trace.finish_reason != "stop" and not trace.answer.strip():
        return f"{THINK_OPEN}\n{trace.reasoning}"  # cut off while thinking: no end of thinking, no answer
    return render_response(trace.reasoning, trace.answer)


class TokenStore:
    """Read the rows of a run from one memory-mapped file, each when its step needs it."""

    def __init__(self, folder: Path) -> None:
        index = np.load(folder / "index.npz")
        tokens = folder / "tokens.bin"
        is_empty = tokens.stat().st_size == 0  # numpy cannot map an empty file
        self._tokens = np.zeros(0, dtype=np.uint32) if is_empty else np.memmap(tokens, dtype=np.uint32, mode="r")
        self._ends = index["ends"]
        self._prompt_lens = index["prompt_lens"]
        self.problem_ids: list[str] = index["problem_ids"].tolist()
        self.sources: list[str] = index["sources"].tolist()
        self.ledger = LedgerStep.model_validate_json((folder / "ledger.json").read_text())
        lost = folder / "example_lost.txt"
        self.example_lost = lost.read_text() if lost.is_file() else ""
        """The first trace that gave no row, with the reason; empty if there is none."""

    def __len__(self) -> int:
        return len(self.problem_ids)

    def __getitem__(self, row: int) -> SftExample:
        # `ends` are cumulative: a row begins where the one before it ends.
        start, end, prompt_len = (
            int(self._ends[row - 1]) if row else 0,
            int(self._ends[row]),
            int(self._prompt_lens[row]),
        )
        token_ids = tuple(self._tokens[start:end].tolist())
        loss_mask = (False,) * prompt_len + (True,) * (end - start - prompt_len)
        return SftExample(problem_id=self.problem_ids[row], token_ids=token_ids, loss_mask=loss_mask)


@dataclass(slots=True)
class _Index:
    """Lengths and origins of the rows of a store that is being built."""

    lens: list[int] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)
    problem_ids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, example: SftExample, *, source: str) -> None:
        """Add the next row."""
        self.lens.append(len(example.token_ids))
        # One number stands for the mask: a prompt without loss, then a response with it.
        self.prompt_lens.append(example.loss_mask.index(True))
        self.problem_ids.append(example.problem_id)
        self.sources.append(source)

    def write(self, path: Path) -> None:
        """Write the index at once, by a rename."""
        temporary = path.with_suffix(".tmp.npz")  # savez would append .npz to any other suffix
        np.savez(
            temporary,
            ends=np.cumsum(self.lens),
            prompt_lens=np.array(self.prompt_lens),
            problem_ids=np.array(self.problem_ids),
            sources=np.array(self.sources),
        )
        temporary.replace(path)


def build_store(
    traces: Iterable[TeacherTrace], tokenizer: Tokenizer, folder: Path, *, max_tokens: int, overlong: Overlong
) -> TokenStore:
    """Tokenise all traces into `folder`, or reuse the store that a killed run had finished.

    `check_store` then decides whether there are enough rows.
    """
    if (folder / "index.npz").is_file():  # it is written last, so the store is complete
        return TokenStore(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dropped: Counter[str] = Counter()
    num_in = num_cut = num_unended = 0
    example_lost = ""
    index = _Index()
    with (folder / "tokens.bin").open("wb") as f:
        # Tokens go to disk as they come; only the index is held in memory.
        for trace, example in _stream(traces, tokenizer, max_tokens=max_tokens, overlong=overlong):
            num_in += 1
            if isinstance(example, Unusable):
                dropped[example.reason] += 1
                example_lost = (
                    example_lost or f"problem {trace.problem_id}, sample {trace.sample_idx}: {example.reason}"
                )
                continue
            f.write(np.array(example.token_ids, dtype=np.uint32).tobytes())  # 4 bytes a token, as TokenStore maps it
            index.add(example, source=trace.source)
            num_unended += trace.finish_reason != "stop"
            # A complete trace without its end token was cut at `max_tokens`.
            num_cut += trace.finish_reason == "stop" and example.token_ids[-1] != tokenizer.eos_token_id
    noted = {"cut": num_cut, "taught_without_end": num_unended}
    ledger = LedgerStep(
        step="tokenise", unit="trace", num_in=num_in, num_out=len(index.lens), dropped=dict(dropped), noted=noted
    )
    (folder / "ledger.json").write_text(ledger.model_dump_json())
    (folder / "example_lost.txt").write_text(example_lost)
    # The index marks the store as complete, so it comes last.
    index.write(folder / "index.npz")
    return TokenStore(folder)


def check_store(store: TokenStore, floor: YieldLimits, *, max_tokens: int) -> tuple[str, ...]:
    """Return the warning about traces that gave no row, if they are many.

    Raise DataError if they are too many or all.
    """
    what = f"traces give a training row (sft.max_tokens = {max_tokens})"
    remedy = "If they are overlong, raise sft.max_tokens, or cut them: --set sft.overlong=cut"
    return check_yield(store.ledger, what, floor, key="sft.runtime.rows", remedy=remedy, example=store.example_lost)


def _stream(
    traces: Iterable[TeacherTrace], tokenizer: Tokenizer, *, max_tokens: int, overlong: Overlong
) -> Iterator[tuple[TeacherTrace, SftExample | Unusable]]:
    """Yield each trace with its row or reason; batches are large enough for all cores and small enough for memory."""
    source = iter(traces)
    while batch := list(islice(source, 512)):
        yield from zip(batch, make_examples(batch, tokenizer, max_tokens=max_tokens, overlong=overlong), strict=True)


# ---- order ----
# Choose the rows of each training step: held-out problems, source weights, a new permutation every epoch.
#
# The choice depends on the seed and the step only.


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Row numbers for training and for validation. All rows of a problem are in the same part."""

    train: tuple[int, ...]
    validation: tuple[int, ...]


def split_rows(problem_ids: Sequence[str], *, frac: float, max_rows: int, seed: int) -> Split:
    """Hold out about `frac` of the problems, at most `max_rows` rows: complete problems, lowest id hash first."""
    # Draw in [0, 1) from the id alone, so that a problem's draw does not change when others are added.
    draws = {p: seed_for(seed, "sft/validation", p) / 2**63 for p in set(problem_ids)}
    # Complete problems: with one trace of a problem in training, its other traces would validate too well.
    rows_of: dict[str, list[int]] = {}
    for row, problem_id in enumerate(problem_ids):
        rows_of.setdefault(problem_id, []).append(row)
    validation: list[int] = []
    drawn = [p for p in draws if draws[p] < frac]
    # By draw, so that a lower `max_rows` holds out a subset, whatever the order of the rows.
    for problem_id in sorted(drawn, key=lambda p: draws[p]):
        if len(validation) + len(rows_of[problem_id]) > max_rows:
            break
        validation += rows_of[problem_id]
    held_out = set(validation)
    train = [r for r in range(len(problem_ids)) if r not in held_out]
    return Split(train=tuple(train), validation=tuple(sorted(validation)))


class RowOrder:
    """Cuts the stream of training rows into steps; epochs follow without a gap.

    Raise DataError if there are no rows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        sources: Sequence[str],
        *,
        source_weights: Mapping[str, float],
        num_epochs: int,
        rows_per_step: int,
        seed: int,
    ) -> None:
        by_source: dict[str, list[int]] = {}
        for row in rows:
            by_source.setdefault(sources[row], []).append(row)
        # Sort by name, because `_epoch` draws from one generator source by source.
        self._by_source = {source: np.array(by_source[source]) for source in sorted(by_source)}
        self._source_weights = source_weights
        self._rows_per_step = rows_per_step
        self._seed = seed
        self.rows_per_epoch = len(self._epoch(0)) if rows else 0
        if not self.rows_per_epoch:
            raise DataError(
                f"nothing to train on: source_weights {dict(source_weights)} leave none of {len(rows)} rows "
                f"that are not held out"
            )
        self.num_rows = self.rows_per_epoch * num_epochs
        self.num_steps = -(-self.num_rows // rows_per_step)  # rounded up: the last step takes what is left
        self._cached_epoch = lru_cache(maxsize=2)(self._epoch)  # a step can span two epochs

    def step(self, step: int) -> list[int]:
        """Return the row numbers of one step; the last step may be smaller."""
        places = range(step * self._rows_per_step, min((step + 1) * self._rows_per_step, self.num_rows))
        return [int(self._cached_epoch(i // self.rows_per_epoch)[i % self.rows_per_epoch]) for i in places]

    def num_distinct(self, num_steps: int) -> int:
        """Return the number of rows that occur at least once in the first `num_steps` steps."""
        end = min(num_steps * self._rows_per_step, self.num_rows)
        seen: set[int] = set()
        # A row can occur several times: in other epochs, or in one by its source's weight.
        for first in range(0, end, self.rows_per_epoch):
            seen.update(self._cached_epoch(first // self.rows_per_epoch)[: end - first].tolist())
        return len(seen)

    def _epoch(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return each source's rows as often as its weight says, shuffled together. All epochs have the same length."""
        # Seeded by epoch, so that a resumed run finds its place without drawing the epochs before.
        rng = np.random.default_rng(seed_for(self._seed, "sft/order", epoch))
        parts = []
        for source, rows in self._by_source.items():
            weight = self._source_weights.get(source, 1.0)
            # A weight of 2.3 takes all rows twice, and a random 30 % of them once more.
            parts += [rows] * int(weight)
            parts.append(rng.permutation(rows)[: round((weight - int(weight)) * len(rows))])
        return rng.permutation(np.concatenate(parts))


# ---- plan ----
# Plan a fine-tuning run: the rows that are held out, the rows of each step, and the number of steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The rows of a run. It depends on rows, settings and seed alone, so all ranks and a resumed run agree on it."""

    split: Split
    order: RowOrder
    num_steps: int
    """Steps to train for: all of `order`, or `max_steps` if that is less."""

    def ledger(self) -> tuple[LedgerStep, ...]:
        """Return the counts of rows that are held out, and of those that are never trained on, by setting."""
        num_rows, held_out = len(self.split.train), {"validation": len(self.split.validation)}
        hold_out = LedgerStep.of("hold_out", "row", num_in=num_rows + held_out["validation"], dropped=held_out)
        return hold_out, self._weighed()

    def _weighed(self) -> LedgerStep:
        """Count the rows that are trained on at least once, and the others by the setting that excludes them."""
        num_rows = len(self.split.train)
        # Without `max_steps` all of `order` is trained on, so what that lacks is left out by source_weights.
        num_wanted, num_seen = self.order.num_distinct(self.order.num_steps), self.order.num_distinct(self.num_steps)
        dropped = {"source_weights": num_rows - num_wanted, "max_steps": num_wanted - num_seen}
        return LedgerStep.of("weigh", "row", num_in=num_rows, dropped={k: n for k, n in dropped.items() if n})


def plan_training(cfg: SftConfig, store: TokenStore, *, seed: int) -> TrainingPlan:
    """Split the rows and order those to train on. Raise DataError if none are left."""
    split = split_rows(store.problem_ids, frac=cfg.validation_frac, max_rows=cfg.max_validation_rows, seed=seed)
    order = RowOrder(
        split.train,
        store.sources,
        source_weights=cfg.source_weights,
        num_epochs=cfg.num_epochs,
        rows_per_step=cfg.rows_per_step,
        seed=seed,
    )
    # The learning rate's schedule ends with these steps, too, and not with the epochs.
    num_steps = min(order.num_steps, cfg.max_steps or order.num_steps)
    return TrainingPlan(split=split, order=order, num_steps=num_steps)
