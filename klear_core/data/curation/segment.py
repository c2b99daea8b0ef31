"""Store the candidates of a few thousand rows on disk, with flat arrays of the values that are compared.

A segment is a folder:
- `*.npy`: one array for each number or list of numbers of a candidate
- `texts.arrow`: question and place of each candidate, for random access
- `groups/*.parquet`: the candidates, in one file for each group of the shuffled result
- `drops.parquet`: rows that are no candidates; `leaks.parquet`: candidates that overlap with a benchmark
- `counts.json`

Axis letters: B bands, N candidates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.curate import DedupConfig
from klear_core.data.candidates import Candidate, DroppedRow
from klear_core.data.curation.decontaminate import Leak
from klear_core.data.curation.near_duplicates import NearTable, Ranks
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.sketch import Numbers, Ragged, hash_of
from klear_core.types import MathReference

if TYPE_CHECKING:
    import pyarrow as pa

# ---- dedup ----
# Find repeated questions by exact match after normalisation; the first one in order of rank stays.


def exact_key(candidate: Candidate, tokens: Sequence[str], cfg: DedupConfig) -> bytes:
    """Return 16 bytes that candidates with the same question share; `tokens` are those of the question."""
    text = " ".join(tokens) if cfg.normalise else ""
    text = text or candidate.question  # normalisation may leave nothing (no word or sign): compare the raw text
    # surrogatepass: JSON escapes can produce lone surrogates, which plain UTF-8 refuses to encode.
    return hashlib.blake2b(f"{candidate.domain}\x1f{text}".encode(errors="surrogatepass"), digest_size=16).digest()


def keys_array(keys: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Return keys as an array of two columns."""
    return np.frombuffer(b"".join(keys), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def first_with_key(keys_N2: npt.NDArray[np.uint64]) -> Ranks:
    """Return for each candidate the first one in order of rank that has the same key, which may be itself."""
    order_N = np.lexsort((keys_N2[:, 1], keys_N2[:, 0]))  # stable: ascending ranks for one key
    in_order_N2 = keys_N2[order_N]
    is_new_N = np.append(True, (in_order_N2[1:] != in_order_N2[:-1]).any(axis=1))[: len(order_N)]
    first_N: Ranks = np.empty(len(order_N), dtype=np.int64)
    first_N[order_N] = order_N[is_new_N][np.cumsum(is_new_N) - 1]
    return first_N


@dataclass(frozen=True, slots=True, eq=False)
class WrittenAnswers:
    """Hashes of the normalised answers of candidates, to find repeats with another answer."""

    hashes: Ragged
    is_math_N: npt.NDArray[np.bool_]
    """False for code, where two test sets of one problem may differ without a contradiction."""

    def __getitem__(self, index: int) -> frozenset[int] | None:
        return frozenset(self.hashes[index].tolist()) if self.is_math_N[index] else None


def written_answers(candidate: Candidate) -> frozenset[int] | None:
    """Return hashes of the normalised answers; None if the reference is no list of answers."""
    if not isinstance(candidate.reference, MathReference):
        return None
    return frozenset(hash_of(" ".join(tokens_of(a)) or a) for a in candidate.reference.answers)


def contradict(one: frozenset[int] | None, other: frozenset[int] | None) -> bool:
    """Return whether the answers to one question differ, compared as text."""
    return one is not None and other is not None and one.isdisjoint(other)


# ---- segment ----


_HASH_BITS = 63
"""Number of bits of a `seed_for` value, by which candidates are shuffled."""
_GROUP_BITS = 23
"""Number of the hash's upper bits that decide the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDrop:
    """A row that became no candidate."""

    at: int
    """Number of the row in its segment, from 0."""
    drop: DroppedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLeak:
    """A candidate that overlaps with a benchmark question."""

    index: int
    """Number of the candidate in its segment."""
    leak: Leak


def groups_of(order_N: Numbers, num_groups: int) -> Numbers:
    """Return the group of the shuffled result that each candidate is in, by the hash that it is sorted by."""
    upper_N = order_N >> np.uint64(_HASH_BITS - _GROUP_BITS)
    groups: Numbers = (upper_N * np.uint64(num_groups)) >> np.uint64(_GROUP_BITS)
    return groups.astype(np.int64)


def write_segment(
    folder: Path,
    candidates: Sequence[Candidate],
    columns: Mapping[str, Numbers | Ragged],
    *,
    num_groups: int,
) -> None:
    """Write the candidates of a segment and their columns, among which are `order` and `at`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in columns.items():
        if isinstance(column, Ragged):
            np.save(folder / f"{name}.npy", column.values)
            np.save(folder / f"{name}_ends.npy", column.ends)
        else:
            np.save(folder / f"{name}.npy", column)
    _write_texts(folder / "texts.arrow", candidates)
    order = columns["order"]
    assert not isinstance(order, Ragged)
    group_N = groups_of(order, num_groups)
    for group in np.unique(group_N).tolist():
        members = np.flatnonzero(group_N == group).tolist()
        write_shard(folder / "groups" / f"{group:04d}.parquet", (candidates[i] for i in members))


def write_rest(
    folder: Path, drops: Sequence[PlacedDrop], leaks: Sequence[PlacedLeak], counts: Mapping[str, object]
) -> None:
    """Write a segment's other files: drop records, leaks and counts."""
    if drops:
        write_shard(folder / "drops.parquet", drops)
    if leaks:
        write_shard(folder / "leaks.parquet", leaks)
    (folder / "counts.json").write_text(json.dumps(counts))


class Segment:
    """A segment on disk. Arrays are mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: dict[str, Numbers] = {}
        counts = json.loads((folder / "counts.json").read_text())
        self.source = int(counts["source"])
        """Index of the source in the plan."""
        self.num_rows = int(counts["num_rows"])
        self.num_candidates = int(counts["num_candidates"])
        self.num_drops = int(counts["num_drops"])
        """Rows that became no candidate."""
        self.lost: dict[str, int] = counts["lost"]
        """Rows that could not be read, by reason."""
        self.too_long = int(counts["too_long"])
        self.example: str = counts["example"]
        """The first of the rows that could not be read, with the reason."""

    def column(self, name: str) -> Numbers:
        """Return an array with one number or row for each candidate."""
        if name not in self._columns:
            self._columns[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return self._columns[name]

    def lists(self, name: str) -> Ragged:
        """Return lists of numbers, one for each candidate."""
        return Ragged(self.column(name), self.column(f"{name}_ends"))

    @cached_property
    def near_table(self) -> NearTable:
        """Return the sketches."""
        return NearTable(
            shingles=self.lists("shingles"),
            band_keys_BN=self.column("bands"),
            facts_N=self.column("facts"),
            num_facts_N=self.column("num_facts"),
            asked=self.lists("asked"),
            told=self.lists("told"),
        )

    @cached_property
    def answers(self) -> WrittenAnswers:
        """Return the answers of math problems."""
        return WrittenAnswers(self.lists("answers"), self.column("is_math"))

    @cached_property
    def texts(self) -> pa.RecordBatch:
        """Return the columns `question` and `row` of all candidates, mapped into memory."""
        import pyarrow as pa

        with pa.memory_map(str(self.folder / "texts.arrow")) as source:
            return pa.ipc.open_file(source).get_batch(0)

    def question(self, index: int) -> str:
        """Return the question of a candidate."""
        return str(self.texts.column("question")[index].as_py())

    def row(self, index: int) -> str:
        """Return the place of a candidate in its source."""
        return str(self.texts.column("row")[index].as_py())

    def problem_id(self, index: int) -> str:
        """Return the id that a candidate's problem has."""
        return f"{int(self.column('problem_id')[index]):016x}"

    def drops(self) -> list[PlacedDrop]:
        """Return the rows that became no candidate, in order."""
        return read_shard(self.folder / "drops.parquet", PlacedDrop) if self.num_drops else []

    def leaks(self) -> list[PlacedLeak]:
        """Return the candidates that overlap with a benchmark question, in order."""
        file = self.folder / "leaks.parquet"
        return read_shard(file, PlacedLeak) if file.exists() else []

    def in_group(self, group: int, places: Sequence[int]) -> list[Candidate]:
        """Return candidates of one group, by their places in it."""
        return read_shard(self.folder / "groups" / f"{group:04d}.parquet", Candidate, rows=places)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """All segments of a curation. Candidates are numbered over all of them, in order of rank."""

    parts: tuple[Segment, ...]
    starts: Ranks
    """Number of the first candidate of each segment, and of all at the end."""

    @property
    def num_candidates(self) -> int:
        """Return the number of candidates in all segments."""
        return int(self.starts[-1])

    def column(self, name: str) -> Numbers:
        """Return a column of all candidates, copied into memory."""
        return np.concatenate([part.column(name) for part in self.parts if part.num_candidates])

    def near_tables(self) -> list[NearTable]:
        """Return the sketches of all candidates."""
        return [part.near_table for part in self.parts if part.num_candidates]

    def place(self, candidate: int) -> tuple[Segment, int]:
        """Return the segment of a candidate, and its index there."""
        number = int(np.searchsorted(self.starts, candidate, side="right")) - 1
        return self.parts[number], candidate - int(self.starts[number])

    def each(self) -> Iterator[tuple[Segment, slice]]:
        """Yield each segment with the range of its candidates."""
        for part, start, stop in zip(self.parts, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield part, slice(start, stop)


def open_segments(blocks: Path) -> Segments:
    """Return the segments of all blocks in a folder."""
    parts = tuple(Segment(folder) for block in sorted(blocks.iterdir()) for folder in sorted(block.iterdir()))
    return Segments(parts, np.cumsum([0, *(part.num_candidates for part in parts)]))


def _write_texts(file: Path, candidates: Sequence[Candidate]) -> None:
    import pyarrow as pa

    questions = pa.array([candidate.question for candidate in candidates], pa.large_string())
    rows = pa.array([candidate.row for candidate in candidates], pa.large_string())
    batch = pa.record_batch([questions, rows], names=["question", "row"])
    with pa.ipc.new_file(str(file), batch.schema) as writer:
        writer.write_batch(batch)
