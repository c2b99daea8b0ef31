"""Turn teacher traces into rows of tokens: render, mask and count them.

Rows are kept on disk, because 1.5 million of them need not fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from klear_core.artifacts.floors import Share, check_floor
from klear_core.artifacts.ledger import LedgerStep
from klear_core.config.settings import Floor
from klear_core.prompts import THINK_OPEN, continuation, encode_all, opening_of, prompt_text, render_response
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


def check_store(store: TokenStore, floor: Floor, *, max_tokens: int) -> tuple[str, ...]:
    """Return the warning about traces that gave no row, if they are many.

    Raise DataError if they are too many or all.
    """
    what = f"traces give a training row (sft.max_tokens = {max_tokens})"
    share = Share(what=what, num_in=store.ledger.num_in, lost=store.ledger.dropped, example=store.example_lost)
    remedy = "If they are overlong, raise sft.max_tokens, or cut them: --set sft.overlong=cut"
    return check_floor(share, floor, key="sft.runtime.rows", remedy=remedy)


def _stream(
    traces: Iterable[TeacherTrace], tokenizer: Tokenizer, *, max_tokens: int, overlong: Overlong
) -> Iterator[tuple[TeacherTrace, SftExample | Unusable]]:
    """Yield each trace with its row or reason; batches are large enough for all cores and small enough for memory."""
    source = iter(traces)
    while batch := list(islice(source, 512)):
        yield from zip(batch, make_examples(batch, tokenizer, max_tokens=max_tokens, overlong=overlong), strict=True)
