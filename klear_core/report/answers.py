"""Write the answer viewer: one page with every answer of one or several sets, whose texts load from files beside it.

The page works from a folder, without a server: browsers let a page opened from disk load scripts that lie beside it,
but not read other files, so that each chunk of texts is a script of one call. The page itself holds no text: 100,000
answers of 32,000 tokens are gigabytes. `index.js` has a few bytes per answer; a chunk is loaded when it is looked at.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from klear_core.config.evaluate import PLAIN_TEMPLATE
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.rejudge import mark_of
from klear_core.evaluate.answers.stored import AnswerSource, Generation, UnreadRow, in_template
from klear_core.evaluate.counts import AnswerCounts, AnswerSummary, Decoding
from klear_core.report.run.build import HERE, page_template, stylesheet
from klear_core.scores import NONE, interval_text, percent
from klear_core.types import CodeReference, CustomReference, MathReference, Reference, UnverifiableReference

PAGE = "answers.html"
DATA_FOLDER = "answers-data"
ALL_TEMPLATES = "*"
"""Value of `template` in the page's address that shows the answers to the questions in all wordings."""

_CHUNK_CHARS = 400_000
"""Characters of texts after which a chunk ends with the answers to the same request; a browser loads whole chunks."""
_TITLE_CHARS = 90
"""Characters of a question in the list of problems."""
_CONFIDENCE = 0.95
_COMMIT_EVERY = 2_000
"""Answers per transaction, whose pages are in memory until it ends."""
_COLUMNS = ("mark", "cut", "template", "source", "decoding", "sample", "tokens")
_LETTERS = {"right": "R", "wrong": "W", "no answer": "N", "not judged": "J", "no verdict": "-"}
"""One character for each mark, so that the marks of all answers are one text."""
_ENDS = {"length": "1", "stop": "0", "abort": "0", None: "?"}
"""1 for an answer that was cut off, 0 for one that was not, ? if the file does not say."""

_TABLES = """
CREATE TABLE answers (problem INTEGER, template INTEGER, decoding TEXT, sample INTEGER, source INTEGER,
                      mark TEXT, cut TEXT, tokens INTEGER, text TEXT, detail TEXT);
CREATE TABLE problems (number INTEGER PRIMARY KEY, question TEXT, reference TEXT);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The page that was written, and what it holds."""

    page: Path
    num_answers: int
    num_problems: int
    num_unread: int
    """Rows that could not be read as answers; they are not on the page."""


@dataclass(slots=True)
class _Stored:
    """Names and counts of problems and answers, which stay in memory; the texts are in the database."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    """Benchmark and id of each problem, as its first source names them."""
    numbers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of the problems by id."""
    foreign: set[int] = field(default_factory=set)
    """Numbers of those that a file of another program asked first."""
    named: dict[tuple[int, str, str], int] = field(default_factory=dict)
    """Numbers by source, and its own name of the benchmark and problem."""
    taken: set[tuple[int, int]] = field(default_factory=set)
    """Sources and problems that belong together: a source that asks a question in two benchmarks has two problems."""
    titles: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=lambda: [""])
    """Names of the prompt templates; the first is the question as it stands."""
    counts: dict[tuple[int, str, str, Decoding], AnswerCounts] = field(
        default_factory=lambda: defaultdict(AnswerCounts)
    )
    """By source, benchmark, template and decoding."""
    num_answers: int = 0
    num_unread: int = 0


def write_viewer(
    sources: Sequence[AnswerSource], folder: Path, *, title: str = "Answers", is_one_text: bool = False
) -> Viewer:
    """Write `answers.html` and its data to `folder`. `is_one_text`: the sources are judgements of the same answers.

    An earlier viewer there is replaced. Texts go through a database on disk, which brings the answers to one problem
    together; memory grows with the number of problems and by a few bytes per answer. Raise DataError if there is none.
    """
    data, temporary = folder / DATA_FOLDER, folder / (DATA_FOLDER + ".tmp")
    # An earlier viewer is replaced; any other folder of this name is somebody's own.
    if data.exists() and not (data / "index.js").is_file():
        raise ConfigError(f"{data}: exists and was not written by `klear answers`; name another folder")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    database = temporary / "order.sqlite"
    with closing(sqlite3.connect(database)) as db:
        stored = _store(sources, db)
        if not stored.num_answers:
            shutil.rmtree(temporary)
            raise DataError(f"{', '.join(s.origin for s in sources)}: no answer could be read")
        index = _write_chunks(db, temporary)
    database.unlink()
    index |= _described(sources, stored, title=title, is_one_text=is_one_text)
    (temporary / "index.js").write_text(f"klearIndex({json.dumps(index, separators=(',', ':'))});\n")
    shutil.copy(HERE / "answers.js", temporary / "viewer.js")
    shutil.rmtree(data, ignore_errors=True)
    temporary.rename(data)
    page = folder / PAGE
    page.write_text(page_template("answers.html.j2").render(title=title, css=stylesheet(), data=DATA_FOLDER))
    return Viewer(
        page=page, num_answers=stored.num_answers, num_problems=len(stored.problems), num_unread=stored.num_unread
    )


def _store(sources: Sequence[AnswerSource], db: sqlite3.Connection) -> _Stored:
    """Put all answers into the database, and count them."""
    # No journal and no syncing: the database is deleted when the page is written, so a crash loses nothing.
    db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _TABLES)
    stored = _Stored()
    for number, source in enumerate(sources):
        stored.templates += [name for name in source.templates if name not in stored.templates]
        for row in source.read():
            if isinstance(row, UnreadRow):
                stored.num_unread += 1
                continue
            _store_one(row, number, db, stored, is_foreign=source.verify is None)
            if stored.num_answers % _COMMIT_EVERY == 0:
                db.commit()  # a transaction's pages would stay in memory
    db.commit()
    db.execute("CREATE INDEX in_order ON answers (problem, template, decoding, sample, source)")
    return stored


def _store_one(row: Generation, source: int, db: sqlite3.Connection, stored: _Stored, *, is_foreign: bool) -> None:
    number, is_new = _number_of(row, source, stored, is_foreign=is_foreign)
    if is_new:
        # White space is collapsed; four times as many characters are enough for that.
        stored.titles.append(" ".join(row.question[: 4 * _TITLE_CHARS].split())[:_TITLE_CHARS])
        db.execute("INSERT INTO problems VALUES (?, ?, ?)", (number, _sqlite(row.question), _expected(row.reference)))
    verdict = row.verdict
    detail = ""
    if verdict is not None:
        is_partial = verdict.outcome == "scored" and verdict.score not in (0.0, 1.0)
        score = f"score {verdict.score:g}. " if is_partial else ""
        detail = score + verdict.detail
    template = stored.templates.index(row.template)
    place = (number, template, row.decoding, row.sample_idx, source)
    facts = (_LETTERS[mark_of(verdict)], _ENDS[row.finish_reason], row.num_tokens)
    db.execute(
        "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*place, *facts, _sqlite(row.response), _sqlite(detail)),
    )
    stored.counts[source, row.benchmark, row.template, row.decoding].add(row.problem_id, row.finish_reason, verdict)
    stored.num_answers += 1


def _number_of(row: Generation, source: int, stored: _Stored, *, is_foreign: bool) -> tuple[int, bool]:
    """Return the number of an answer's problem, and whether it is new.

    Other programs call benchmarks by other names, so that their problems are shared by their questions.
    """
    name = (source, row.benchmark, row.problem_id)
    if name in stored.named:
        return stored.named[name], False
    free = [number for number in stored.numbers[row.problem_id] if (source, number) not in stored.taken]
    same = [number for number in free if stored.problems[number][0] == row.benchmark]
    asked = [number for number in free if row.question and (is_foreign or number in stored.foreign)]
    number = next(iter([*same, *asked]), len(stored.problems))
    is_new = number == len(stored.problems)
    if is_new:
        stored.problems.append((row.benchmark, row.problem_id))
        stored.numbers[row.problem_id].append(number)
        if is_foreign and row.question:
            stored.foreign.add(number)
    stored.named[name] = number
    stored.taken.add((source, number))
    return number, is_new


def _sqlite(text: str) -> str:
    """Return a text that SQLite takes: half of a surrogate pair, which bytes that are not UTF-8 leave, is replaced."""
    return text.encode("utf-8", "replace").decode()


def _expected(reference: Reference) -> str:
    match reference:
        case MathReference():
            return " or ".join(reference.answers)
        case CodeReference():
            return f"{reference.num_tests:,} tests ({reference.test_kind})"
        case CustomReference():
            return f"judge {reference.judge}: {reference.value_json}"
        case UnverifiableReference():
            return f"none: {reference.why}"
        case _:
            assert_never(reference)


def _write_chunks(db: sqlite3.Connection, folder: Path) -> dict[str, object]:
    """Write the texts in chunks, problem by problem, and return the index of all answers in the same order."""
    starts: list[int] = []
    """Number of the first answer of each problem."""
    chunk_starts: list[int] = []
    columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
    chunk = _Chunk()
    problem, group, last_text = -1, None, ""
    for number, row in enumerate(_in_order(db)):
        is_new_problem, is_new_group = row.problem != problem, row.group != group
        # a chunk must not end within a group: there, a text may refer to the equal one before it, of another source
        if chunk.num_chars >= _CHUNK_CHARS and is_new_group:
            chunk.write(folder, len(chunk_starts) - 1)
            chunk = _Chunk()
        if not chunk.texts:
            chunk_starts.append(number)
        if is_new_problem:
            starts.append(number)
            question, expected = db.execute(
                "SELECT question, reference FROM problems WHERE number = ?", (row.problem,)
            ).fetchone()
            chunk.add_problem(row.problem, question, expected)
        is_same_text = not is_new_group and row.text == last_text
        chunk.add(None if is_same_text else row.text, row.detail)
        problem, group, last_text = row.problem, row.group, row.text
        for name, column in columns.items():
            column.append(getattr(row, name))
    chunk.write(folder, len(chunk_starts) - 1)
    # These columns have one character per answer, so that a text of them is the smallest JSON.
    packed: dict[str, object] = {name: "".join(map(str, columns[name])) for name in ("mark", "cut", "decoding")}
    return packed | {
        "source": columns["source"],
        "template": columns["template"] if any(columns["template"]) else [],
        "sample": columns["sample"],
        "tokens": columns["tokens"],
        "starts": starts,
        "chunkStarts": chunk_starts,
    }


@dataclass(frozen=True, slots=True)
class _AnswerRow:
    """An answer as the database holds it."""

    problem: int
    template: int
    decoding: str
    sample: int
    source: int
    mark: str
    cut: str
    tokens: int | None
    text: str
    detail: str

    @property
    def group(self) -> tuple[int, int, str, int]:
        """The problem, template, decoding and number that answers of several sources share."""
        return (self.problem, self.template, self.decoding, self.sample)


def _in_order(db: sqlite3.Connection) -> Iterator[_AnswerRow]:
    for row in db.execute(
        "SELECT problem, template, substr(decoding, 1, 1), sample, source, mark, cut, tokens, text, detail "
        "FROM answers ORDER BY problem, template, decoding, sample, source"
    ):
        yield _AnswerRow(*row)


@dataclass(slots=True)
class _Chunk:
    """Texts that one file will hold."""

    texts: list[list[str | None]] = field(default_factory=list)
    problems: dict[int, list[str]] = field(default_factory=dict)
    num_chars: int = 0

    def add(self, text: str | None, detail: str) -> None:
        """Add an answer; a text of None means that it equals the text of the answer before it."""
        self.texts.append([text, detail])
        self.num_chars += len(text or "") + len(detail)

    def add_problem(self, number: int, question: str, expected: str) -> None:
        """Add a problem; it is in the chunk of its first answer."""
        self.problems[number] = [question, expected]
        self.num_chars += len(question) + len(expected)

    def write(self, folder: Path, number: int) -> None:
        """Write the chunk as a script of one call; all but ASCII is escaped, so that no text can end the script."""
        content = json.dumps({"texts": self.texts, "problems": self.problems}, separators=(",", ":"))
        (folder / f"{number:06d}.js").write_text(f"klearChunk({number},{content});\n")


def _described(sources: Sequence[AnswerSource], stored: _Stored, *, title: str, is_one_text: bool) -> dict[str, object]:
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in stored.problems))
    numbers = {name: i for i, name in enumerate(benchmarks)}
    rows = []
    for (source, benchmark, template, decoding), counts in stored.counts.items():
        summary = counts.summary(confidence=_CONFIDENCE, decoding=decoding)
        rows.append([benchmark, sources[source].name, in_template(decoding, template), *shown_shares(summary)])
    origins = [
        {"name": source.name, "origin": source.origin, "templates": dict(source.templates)} for source in sources
    ]
    ids = [problem_id for _, problem_id in stored.problems]
    of = [numbers[benchmark] for benchmark, _ in stored.problems]
    return {
        "title": title,
        "sources": origins,
        "isOneText": is_one_text,
        "benchmarks": benchmarks,
        "ids": ids,
        "of": of,
        "titles": stored.titles,
        "templates": [PLAIN_TEMPLATE, *stored.templates[1:]],
        "shares": rows,
    }


def shown_shares(summary: AnswerSummary) -> list[str]:
    """Return the cells of a row: problems, answers, score, interval, cut off, no answer, not judged."""
    num, score = summary.num_answers, summary.score
    value = percent(score.value) if score else NONE
    interval = interval_text(score.new_problems) if score else ""
    cut = "not recorded" if summary.num_truncated is None else percent(summary.num_truncated / num)
    is_judged = summary.num_without_verdict < num
    no_answer = percent(summary.num_no_answer / num) if is_judged else NONE
    not_judged = percent((summary.num_unscored + summary.num_without_verdict) / num)
    return [f"{summary.num_problems:,}", f"{num:,}", value, interval, cut, no_answer, not_judged]
