"""Divide the sources of a curation into blocks. The division depends on the data alone, not on the machine."""

from __future__ import annotations

import hashlib
import json
import pickle
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from klear_core.artifacts.files import is_pattern, matching_files
from klear_core.config.curate import CurateConfig
from klear_core.config.data import (
    DatasetsSource,
    FileSource,
    GeneratedSource,
    GymSource,
    HubSource,
    ProceduralSource,
    PuzzleSource,
    Source,
)
from klear_core.config.settings import result_settings
from klear_core.data.candidates import Candidate
from klear_core.data.curation.decontaminate import Protected
from klear_core.data.curation.near_duplicates import first_fact
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.segment import exact_key
from klear_core.data.curation.selection import sources_to_read
from klear_core.data.datafiles import DataFile, data_files, spans_of
from klear_core.data.sources import FirstRow, Piece, first_row, read_source, source_name

# ---- templates ----
# Find the fixed opening and ending that a source puts around its questions, from the first rows of the source.


SAMPLE_SIZE = 200
"""Rows of a source that its templates are learned from."""
_MIN_WORDS = 4
"""Shorter openings and endings are common in questions (`what is the`)."""
_MIN_WORDS_WITH_FACTS = 15
"""Shorter templates hold no number, operator or decisive word: those could be the problem's (`work modulo 7`)."""
_MIN_ROWS = 3
_MIN_SHARE = 0.25
"""Share of the sample that must have a template."""
_MIN_REST = 3
"""Least number of tokens that a question must have without its template; else it is compared with it."""

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """The openings and endings of a source's questions, longest first."""

    openings: tuple[Tokens, ...]
    endings: tuple[Tokens, ...]

    def bare(self, tokens: Sequence[str]) -> Sequence[str]:
        """Return a question's tokens without its opening and ending, unless nearly nothing would be left."""
        if not self.openings and not self.endings:
            return tokens
        start = next((len(t) for t in self.openings if tuple(tokens[: len(t)]) == t), 0)
        end = next((len(t) for t in self.endings if tuple(tokens[-len(t) :]) == t), 0)
        rest = tokens[start : len(tokens) - end]
        return rest if len(rest) >= _MIN_REST else tokens


def templates_of(sample: Sequence[Sequence[str]]) -> Templates:
    """Return the templates in a sample of one source's tokenised questions."""
    openings = [_before_first_fact(opening) for opening in _common_openings(sample)]
    reversed_endings = _common_openings([tokens[::-1] for tokens in sample])
    endings = [_after_last_fact(ending[::-1]) for ending in reversed_endings]
    return Templates(openings=_longest_first(openings), endings=_longest_first(endings))


def _common_openings(questions: Iterable[Sequence[str]]) -> list[Tokens]:
    """Return the longest common openings of all groups of questions that begin alike, if the group is large enough."""
    groups: dict[Tokens, list[Sequence[str]]] = defaultdict(list)
    num_questions = 0
    for tokens in questions:
        num_questions += 1
        groups[tuple(tokens[:_MIN_WORDS])].append(tokens)
    needed = max(_MIN_ROWS, _MIN_SHARE * num_questions)
    return [_common_opening(group) for group in groups.values() if len(group) >= needed]


def _common_opening(questions: Sequence[Sequence[str]]) -> Tokens:
    # In sorted order, the prefix that the first and the last share is common to all between them.
    first, last = min(map(tuple, questions)), max(map(tuple, questions))
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def _before_first_fact(opening: Tokens) -> Tokens:
    return opening if len(opening) >= _MIN_WORDS_WITH_FACTS else opening[: first_fact(opening)]


def _after_last_fact(ending: Tokens) -> Tokens:
    while len(ending) < _MIN_WORDS_WITH_FACTS and (fact := first_fact(ending)) < len(ending):
        ending = ending[fact + 1 :]
    return ending


def _longest_first(templates: Iterable[Tokens]) -> tuple[Tokens, ...]:
    long_enough = {template for template in templates if len(template) >= _MIN_WORDS}
    return tuple(sorted(long_enough, key=lambda template: (-len(template), template)))


# ---- plan ----


_FORMAT = 5
"""Version of the files in the working folder; those of another version are not used."""
_BLOCK_BYTES = 16 << 20
_MAX_BLOCKS = 160
"""About the largest number of blocks; for more data, blocks are larger than `_BLOCK_BYTES`."""
_GROUP_BYTES = 8 << 20
_MAX_GROUPS = 96
_PACKED_RATIO = 4
"""Ratio of the size of rows in memory to that of a compressed file or a table."""
_PROCEDURAL_ROW_BYTES = 100
_SAMPLED_ROWS = 10_000
"""First rows of a source that are read to learn its templates from their distinct questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of one source, which is read by one task."""

    source: int
    """Index of the source."""
    pieces: tuple[Piece, ...]
    """The rows; none for a generated source, which is one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """Facts about a source that are known before its rows are read."""

    source: Source
    name: str
    first: FirstRow | None
    templates: Templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All work on the rows of a curation."""

    cfg: CurateConfig
    seed: int
    sources: tuple[SourcePlan, ...]
    blocks: tuple[Block, ...]
    num_groups: int
    """Parts of the shuffled result."""
    num_bytes: int
    key: str
    """Hash of everything that the result depends on, and of the files' sizes and times of change."""


def make_plan(cfg: CurateConfig, protected: Iterable[Protected], *, seed: int) -> Plan:
    """Return the plan of a curation. Files are scanned for line ends; only first rows are parsed.

    Raise ConfigError or DataError as `read_source` does.
    """
    sources = sources_to_read(cfg)
    files = {i: data_files(s) for i, s in enumerate(sources) if not isinstance(s, GeneratedSource)}
    num_bytes = sum(_size(source, files.get(i, ())) for i, source in enumerate(sources))
    block_bytes = max(_BLOCK_BYTES, num_bytes // _MAX_BLOCKS)
    plans = tuple(_source_plan(source, files.get(i, ()), cfg, seed) for i, source in enumerate(sources))
    blocks = tuple(
        Block(source=i, pieces=pieces)
        for i, source in enumerate(sources)
        for pieces in _divided(source, files.get(i, ()), block_bytes)
    )
    stats = [(file.label, *_stat(file.path)) for of_source in files.values() for file in of_source]
    stats += [(str(file), *_stat(file)) for source in sources for file in _looked_up(source)]
    parts = [_FORMAT, result_settings(cfg), cfg.runtime.rows_per_shard, seed, stats]
    parts.append([asdict(p) for p in protected])
    parts.append([(asdict(p.templates), p.first and asdict(p.first)) for p in plans])
    return Plan(
        cfg=cfg,
        seed=seed,
        sources=plans,
        blocks=blocks,
        num_groups=min(_MAX_GROUPS, 1 + num_bytes // _GROUP_BYTES),
        num_bytes=num_bytes,
        key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
    )


def save_plan(plan: Plan, file: Path) -> None:
    """Write the plan to a file, from which worker processes read it."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(plan))
    temporary.replace(file)


def load_plan(file: Path) -> Plan:
    """Return a plan that another process of this curation has written."""
    plan = pickle.loads(file.read_bytes())  # noqa: S301  the curation's own file
    assert isinstance(plan, Plan), file
    return plan


def _source_plan(source: Source, files: Sequence[DataFile], cfg: CurateConfig, seed: int) -> SourcePlan:
    first = None if isinstance(source, GeneratedSource) else first_row(source, files)
    templates = Templates(openings=(), endings=())
    if cfg.dedup.near.enabled:
        templates = templates_of(list(islice(_distinct(source, cfg, seed), SAMPLE_SIZE)))
    return SourcePlan(source=source, name=source_name(source), first=first, templates=templates)


def _distinct(source: Source, cfg: CurateConfig, seed: int) -> Iterator[list[str]]:
    """Yield the tokens of the distinct questions among a source's first rows."""
    seen: set[bytes] = set()
    for row in islice(read_source(source, seed=seed), _SAMPLED_ROWS):
        if not isinstance(row, Candidate) or len(row.question) > cfg.max_question_chars:
            continue
        tokens = tokens_of(row.question)
        key = exact_key(row, tokens, cfg.dedup)
        if key not in seen:
            seen.add(key)
            yield tokens


def _divided(source: Source, files: Sequence[DataFile], num_bytes: int) -> list[tuple[Piece, ...]]:
    """Return the pieces of each block of a source."""
    if isinstance(source, GeneratedSource):
        return [()]
    left = source.limit
    blocks: list[tuple[Piece, ...]] = []
    for file in files:
        if left is not None and left <= 0:
            break
        spans = spans_of(file.path, label=file.label, num_bytes=num_bytes, limit=left)
        if spans is None and source.limit is not None:
            # The number of rows of this file is unknown until it is read, and so is where the limit falls in later
            # files: one block reads them all.
            return [tuple(Piece(path=f.path, label=f.label, span=None) for f in files)]
        if left is not None:
            left -= sum(span.num_rows for span in spans or ())
        if spans is None:
            blocks.append((Piece(path=file.path, label=file.label, span=None),))
        else:
            blocks += [(Piece(path=file.path, label=file.label, span=span),) for span in spans]
    return _joined(blocks, num_bytes)


def _joined(blocks: Sequence[tuple[Piece, ...]], num_bytes: int) -> list[tuple[Piece, ...]]:
    """Join neighbouring blocks as long as a joined block has at most `num_bytes`."""
    joined: list[tuple[Piece, ...]] = []
    size = num_bytes
    for pieces in blocks:
        own = sum(_piece_bytes(piece) for piece in pieces)
        if size + own <= num_bytes:
            joined[-1] += pieces
            size += own
        else:
            joined.append(pieces)
            size = own
    return joined


def _piece_bytes(piece: Piece) -> int:
    return piece.span.num_bytes if piece.span else _unpacked_size(piece.path)


def _size(source: Source, files: Sequence[DataFile]) -> int:
    """Return the size of a source's rows in memory, roughly."""
    match source:
        case (
            ProceduralSource(num_problems=num_problems)
            | PuzzleSource(num_problems=num_problems)
            | GymSource(num_problems=num_problems)
        ):
            return _PROCEDURAL_ROW_BYTES * num_problems
        case FileSource() | HubSource() | DatasetsSource():
            return sum(_unpacked_size(file.path) for file in files)


def _unpacked_size(path: Path) -> int:
    is_packed = path.suffix in (".gz", ".zst", ".parquet")
    return (_PACKED_RATIO if is_packed else 1) * path.stat().st_size


def _looked_up(source: Source) -> Iterator[Path]:
    """Yield the files in which a source's questions are looked up."""
    if isinstance(source, GeneratedSource):
        return
    for path in source.lookup.values():
        found = matching_files(path) if is_pattern(path) else sorted(Path(path).rglob("*")) or [Path(path)]
        yield from (file for file in found if file.is_file())


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


# ---- tasks ----
# Define the interface between the phases of a curation and the executors that run them: numbered tasks.


Progress = Callable[[int], None]
"""Takes the number of tasks that are done."""


class Tasks(ABC):
    """Numbered tasks that can run in any order, in other processes, and again after a kill."""

    @abstractmethod
    def is_done(self, task: int) -> bool:
        """Return whether the result of a task is there."""

    @abstractmethod
    def do(self, task: int) -> None:
        """Do a task; its result appears whole or not at all."""

    def __call__(self, task: int) -> None:
        """Do a task, unless it is done."""
        if not self.is_done(task):
            self.do(task)
