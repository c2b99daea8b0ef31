"""Load benchmarks, and check before training that the judge can use their references."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep, Manifest, StageSummary, read_manifest, yield_text
from klear_core.artifacts.records import read_shards, shard_name, write_shard
from klear_core.artifacts.store import SCRATCH
from klear_core.config.curate import DifficultyConfig
from klear_core.config.data import BenchmarkConfig
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.verify import CodeConfig, MathConfig
from klear_core.data.candidates import Candidate, problem_from, with_stored_tests
from klear_core.data.formats.fields import READ
from klear_core.data.sources import check_source, read_source
from klear_core.errors import ConfigError, DataError, SandboxError
from klear_core.metrics import Telemetry
from klear_core.seeding import seed_for
from klear_core.types import CodeReference, Dropped, MathReference, Problem, Reference, UnverifiableReference
from klear_core.verify import JudgePool, faulty_references, has_test_program
from klear_core.verify.blame import unusable_tests
from klear_core.verify.code.program import reference_fault
from klear_core.verify.math.rules import usable_references

CONTEST_IDS = "contest_ids.json"
"""File of the artifact: contest id by problem id, of the problems that have one."""
CLUSTERS = "clusters.json"
"""File of the artifact: cluster by problem id, of the problems that have one."""
_READ = "read_"
"""Prefix of a benchmark's ledger step; the benchmark's name follows."""


def prepare_benchmarks(
    benchmarks: Sequence[BenchmarkConfig], *, seed: int, runtime: BenchmarksRuntime, workdir: Path, telemetry: Telemetry
) -> StageSummary:
    """Write `<name>/00000-of-00001.parquet` for each benchmark.

    Raise DataError if a row cannot be read, a question is repeated, or the number of rows is not the expected one.
    Otherwise a score over a different set of problems would look like the published score. Raise it too if the judge
    can use too few references. The message names the bad rows of all benchmarks.
    """
    check_benchmarks(benchmarks)
    ledger: list[LedgerStep] = []
    notes: list[str] = []
    errors: list[str] = []
    contest_ids: dict[str, str] = {}
    clusters: dict[str, str] = {}
    with JudgePool(runtime.verify) as judges:
        for i, benchmark in enumerate(benchmarks):
            telemetry.progress(i, len(benchmarks), benchmark.name)
            try:
                outside = _Outside()
                read = _in_window(benchmark, read_source(benchmark.source, seed=seed), outside)
                rows = with_stored_tests(read, workdir / SCRATCH / f"{benchmark.name}.tests")
                candidates, num_left = _part_of(benchmark, _candidates_of(benchmark, rows, outside), seed=seed)
                problems = [problem_from(candidate, DifficultyConfig()) for candidate in candidates]
                check = check_references(problems, judges, runtime.max_unscored_rate, benchmark=benchmark.name)
            except DataError as e:
                errors.append(str(e))
                continue
            write_shard(workdir / benchmark.name / shard_name(0, 1), problems)
            ledger.append(_ledger_step(benchmark.name, len(problems), outside.num_rows, num_left, check))
            notes += check.notes
            contest_ids |= {c.problem_id: c.contest_id for c in candidates if c.contest_id}
            clusters |= {c.problem_id: c.cluster for c in candidates if c.cluster}
    if errors:
        raise DataError("\n".join(errors))
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / CONTEST_IDS).write_text(json.dumps(contest_ids, indent=1, sort_keys=True))
    if clusters:
        (workdir / CLUSTERS).write_text(json.dumps(clusters, indent=1, sort_keys=True))
    telemetry.progress(len(benchmarks), len(benchmarks), "done")
    counts = {"benchmarks": len(benchmarks), "problems": sum(step.num_out for step in ledger)}
    return StageSummary(counts=counts, ledger=tuple(ledger), notes=tuple(dict.fromkeys(notes)))


def _part_of(benchmark: BenchmarkConfig, candidates: list[Candidate], *, seed: int) -> tuple[list[Candidate], int]:
    """Return the part of a benchmark that the seed draws, in its order, and the number of problems left out."""
    if benchmark.num_problems is None or benchmark.num_problems >= len(candidates):
        return candidates, 0
    drawn = sorted(candidates, key=lambda c: seed_for(seed, "benchmarks/part", c.problem_id))
    part = {candidate.problem_id for candidate in drawn[: benchmark.num_problems]}
    return [c for c in candidates if c.problem_id in part], len(candidates) - len(part)


def _ledger_step(
    benchmark: str, num_problems: int, num_outside: int, num_left: int, check: ReferenceCheck
) -> LedgerStep:
    # A problem with a bad reference stays in its benchmark: its answers are counted as unscored.
    counts = {"outside_window": num_outside, "not_in_part": num_left}
    dropped = {reason: n for reason, n in counts.items() if n}
    num_rows = num_problems + num_outside + num_left
    return LedgerStep.of(_READ + benchmark, "problem", num_in=num_rows, dropped=dropped, noted=check.counts)


def recheck_references(artifact: Path, runtime: BenchmarksRuntime) -> None:
    """Check the references in a benchmarks artifact, unless it was made with these settings of the judge.

    Raise DataError as `prepare_benchmarks` does.
    """
    made_with = read_manifest(artifact).config.get("runtime")
    present = runtime.model_dump(mode="json", exclude={"expected_rows", "known"})
    if isinstance(made_with, dict) and made_with.items() >= present.items():
        return
    suite: dict[str, list[Problem]] = {}
    for name, problem in read_benchmarks(artifact):
        suite.setdefault(name, []).append(problem)
    errors: list[str] = []
    with JudgePool(runtime.verify) as judges:
        for name, problems in suite.items():
            try:
                check_references(problems, judges, runtime.max_unscored_rate, benchmark=name)
            except DataError as e:
                errors.append(str(e))
    if errors:
        raise DataError("\n".join(errors))


def num_rows(manifest: Manifest) -> dict[str, int]:
    """Return the number of problems of each benchmark in an artifact, by benchmark name."""
    return {step.step.removeprefix(_READ): step.num_out for step in manifest.ledger}


def load_benchmark(benchmark: BenchmarkConfig, *, seed: int) -> list[Problem]:
    """Return the problems of one benchmark, in source order; raise DataError as `prepare_benchmarks` does."""
    outside = _Outside()
    rows = _in_window(benchmark, read_source(benchmark.source, seed=seed), outside)
    candidates, _ = _part_of(benchmark, _candidates_of(benchmark, rows, outside), seed=seed)
    return [problem_from(candidate, DifficultyConfig()) for candidate in candidates]


@dataclass(slots=True)
class _Outside:
    """Number and days of the rows outside of a benchmark's window."""

    num_rows: int = 0
    first: date = date.max
    last: date = date.min

    def add(self, day: date) -> None:
        """Count a row of a contest of this day."""
        self.num_rows += 1
        self.first, self.last = min(self.first, day), max(self.last, day)

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.first} to {self.last} are outside" if self.num_rows else ""


def _in_window(
    benchmark: BenchmarkConfig, rows: Iterable[Candidate | Dropped], outside: _Outside
) -> Iterator[Candidate | Dropped]:
    """Yield the rows of the benchmark's window, and count the others."""
    for row in rows:
        if benchmark.window is None or isinstance(row, Dropped):
            yield row
            continue
        day = _contest_day(benchmark, row)
        if day in benchmark.window:
            yield row
        else:
            outside.add(day)


def _contest_day(benchmark: BenchmarkConfig, row: Candidate) -> date:
    try:
        return date.fromisoformat(row.contest_date[:10])
    except ValueError as e:
        found = f"contest_date {row.contest_date!r}" if row.contest_date else "no contest_date"
        raise DataError(
            f"benchmark {benchmark.name}: {row.row} has {found}, so it may be outside of the window "
            f"{benchmark.window}; give rows a date, or name the file as a benchmark of your own, without a window"
        ) from e


def _candidates_of(
    benchmark: BenchmarkConfig, rows: Iterable[Candidate | Dropped], outside: _Outside
) -> list[Candidate]:
    candidates: dict[str, Candidate] = {}
    rows_by_id: dict[str, str] = {}
    unusable: list[Dropped] = []
    for row in rows:
        if not isinstance(row, Candidate):
            unusable.append(row)
            continue
        if isinstance(row.reference, UnverifiableReference):
            detail = f"{row.question[:60]!r}: {row.reference.why}"
            unusable.append(Dropped(problem_id=row.problem_id, step=READ, reason="unverifiable", detail=detail))
            continue
        if row.problem_id in candidates:
            raise DataError(
                f"benchmark {benchmark.name}: the question {row.question[:100]!r} comes twice; "
                "remove one of the two rows"
            )
        _refuse_repeated_id(benchmark, row, rows_by_id)
        candidates[row.problem_id] = row
    if unusable:
        lost = Counter(row.reason for row in unusable)
        read = LedgerStep.of(READ, "row", num_in=len(candidates) + len(unusable), dropped=lost)
        text = yield_text(read, f"rows of benchmark {benchmark.name} can be used")
        raise DataError(f"{text}. A benchmark must be whole: {listed([row.detail for row in unusable])}")
    _check_count(benchmark, len(candidates), outside)
    return list(candidates.values())


def _refuse_repeated_id(benchmark: BenchmarkConfig, row: Candidate, rows_by_id: dict[str, str]) -> None:
    """Raise DataError if an earlier row has the id of this one; else remember the id."""
    if not row.stated_id:
        return
    if row.stated_id in rows_by_id:
        raise DataError(
            f"benchmark {benchmark.name}: {rows_by_id[row.stated_id]} and {row.row} have the id {row.stated_id!r} and "
            "different questions, so files of two benchmarks may be mixed; give them different ids, or remove the id"
        )
    rows_by_id[row.stated_id] = row.row


def _check_count(benchmark: BenchmarkConfig, num_rows: int, outside: _Outside) -> None:
    """Raise DataError, with the benchmark and both numbers, unless it has the expected number of rows."""
    name, expected = benchmark.name, benchmark.expected_rows
    where = "its source" if benchmark.window is None else f"its window {benchmark.window}"
    more = f"; {outside}" if outside.num_rows else ""
    if expected is not None and num_rows != expected:
        known = KNOWN_BENCHMARKS.get(benchmark.known)
        whose = f" ({', '.join(filter(None, (known.title, known.note)))})" if known else ""
        raise DataError(f"benchmark {name}: expected_rows is {expected}{whose}, but {where} has {num_rows} rows{more}")
    if not num_rows:
        raise DataError(f"benchmark {name}: {where} has no rows{more}")


def check_benchmarks(benchmarks: Sequence[BenchmarkConfig]) -> None:
    """Raise ConfigError if two benchmarks share a name, or a source is missing or its first rows cannot be read."""
    names = [b.name for b in benchmarks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two benchmarks are called {name!r}; their scores could not be told apart")
    for benchmark in benchmarks:
        check_source(benchmark.source)


def read_by_problem(path: Path) -> dict[str, str]:
    """Return the content of `CONTEST_IDS` or `CLUSTERS` by problem id; problems without one are left out."""
    if not path.exists():  # a folder without benchmarks, or of an earlier version
        return {}
    found: dict[str, str] = json.loads(path.read_text())
    return found


def read_benchmarks(artifact: Path) -> Iterator[tuple[str, Problem]]:
    """Yield (benchmark name, problem) for all problems of a benchmarks artifact, in order of benchmark names."""
    for shard in sorted(artifact.glob("*/*.parquet")):
        for problem in read_shards(shard.parent, Problem):
            yield shard.parent.name, problem


# ---- reference check ----
# Check before training that the judge can use the references of problems, one by one or those of a benchmark.


_PLAIN_ANSWER = re.compile(r"-?\w[\w.,/ -]{0,60}")
"""Numbers and words, which are most answers and can always be read."""
_NO_VALUE = re.compile(r"\\l?dots|[\s?!'\"`$#@~;:.,_|\\]+")
"""Punctuation alone; a sign (`<`) or brackets (`\\{\\}`) may be an answer."""
_SIGN_ALONE = re.compile(r"[-\u2010-\u2015\u2212]{1,3}")
_SHOWN_ELSEWHERE = (
    "solution explanation answer proof figure image picture diagram graph table text note comment above below attached "
    "attachment work detail page textbook"
)
_NO_ANSWER = (
    r"(?:please |answer |solution |as )?(?:is )?"
    r"(?:see|refer to|given|shown|explained|contained|found|described|as|in) ?"
    r"(?:in |on )?(?:the )?(?:attached |full |above |below |official )?"
    rf"(?:{_SHOWN_ELSEWHERE.replace(' ', '|')})s?(?: above| below| for details| pdf| file)?",
    rf"(?:solution|answer) in (?:the )?(?:{_SHOWN_ELSEWHERE.replace(' ', '|')})|as (?:shown|above|below|explained)",
    r"n\s*/\s*a|n\.a|tbd|to ?do|\?+|null|nan",
    r"(?:answer |solution )?(?:not |un)(?:applicable|available|given|provided|known)",
    r"no (?:answer|solution) (?:is )?(?:given|provided|available)|no answer|(?:the )?(?:answer|solution|response)s?:?",
    r"(?:the )?(?:answer |solution |proof )?(?:is )?left (?:as an exercise )?(?:to|for) the reader",
    r"omitted|var(?:y|ies)",
    r"(?:(?:the )?(?:answer|response|solution|result)s?)? ?(?:will|may|can|could|should|might) vary",
    r"(?:answer|response)s? var(?:y|ies)|(?:the )?(?:solution|answer|proof) (?:is )?omitted",
    r"(?:the )?proofs?(?: (?:by|using|of|is|completed?|required|follows|below|above|question|problem|needed).*)?",
    r"prove (?:it|this|that .*|the .*)|this is a proof(?: (?:question|problem))?",
    r"(?:the )?(?:statement|claim) is pro(?:ved|ven)",
    r"[\w-]+\.(?:png|jpe?g|gif|svg|pdf)",
    r"(?:voir|cf|siehe|ver|véase|vedi|см|смотри)\.? (?:la |die |el |le |l')?"
    r"(?:solution|corrigé|figure|lösung|abbildung|solución|figura|soluzione|решение|рисунок)",
    r"(?:démonstration|preuve|demostración|demostrar|beweis|dimostrazione|доказательство|доказано|доказать|показать|証明(?:略)?)",
    r"(?:答案|证明|證明|解)?(?:略|从略|从略|见解析|見解析|详见解析|见解答|详见解答|见详解|见证明|见图|如图)|解析|暂无(?:答案)?|未知|无答案",
    r"proven|proved|to be proved|q\.?\s*e\.?\s*d|\[?(?:image|figure|picture|diagram|graph|img)s?\]?",
)
_STANDS_FOR_NONE = re.compile("|".join(_NO_ANSWER), re.I)
"""Texts in the place of an answer that no response can equal; `None` and `undefined` are answers."""
_IMAGE = re.compile(
    r"!\[[^\]]*\]\([^()]*\)|<img\b[^<>]*>|\\includegraphics\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\[asy\].*?\[/asy\]"
    r"|\\begin\{tikzpicture\}.*?\\end\{tikzpicture\}|data:image/\S+|(?:https?://|www\.)\S+",
    re.I | re.S,
)
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|boxed|emph)\s*(?=\{)|[{}$*]")
_OPEN_END = re.compile(r"[\w})\]]\s*[=^_/]\s*$|\\(?:[dt]?frac|sqrt|[dt]?binom)\s*$|\\[dt]?frac\s*\{[^{}]*\}\s*$")
"""The end of an expression that lacks its last part; a sign at the end may be meant (`\\mathbb{R}^+`)."""
_SHOWN = 20
"""Number of bad rows that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCheck:
    """Counts by reason of the references that the judge cannot use, and notes for the report."""

    counts: dict[str, int]
    notes: tuple[str, ...]


def why_unreadable(reference: Reference, *, math: MathConfig, code: CodeConfig) -> str:
    """Return why the judge can never use a reference, whatever the answer; empty if it can. Nothing is run."""
    match reference:
        case MathReference(answers=answers):
            if all(map(stands_for_none, answers)):
                return f"it states no answer: {answers[0]!r:.100}"
            if any(map(_PLAIN_ANSWER.fullmatch, answers)):
                return ""
            usable = usable_references(answers, math)
            if not usable:
                return f"empty, unbalanced, or longer than {math.max_answer_chars} characters: {answers[0]!r:.100}"
            if all(_NO_VALUE.fullmatch(one) or _OPEN_END.search(one) for one in usable):
                return f"cannot be read as math: {answers[0]!r:.100}"
            return ""
        case CodeReference():
            return reference_fault(reference, code) or ""
        case _:
            return ""


def stands_for_none(answer: str) -> bool:
    """Return whether a text in the place of an answer states none: `See solution`, `N/A`, `-`, `Proof`, an image."""
    if not answer.strip():
        return False  # empty, which is said elsewhere
    text = " ".join(_WRAPPERS.sub(" ", _IMAGE.sub(" ", answer)).split()).strip(" .,;:!")
    if not text or _SIGN_ALONE.fullmatch(text):
        return True
    return _STANDS_FOR_NONE.fullmatch(text.strip("()[] .")) is not None


def check_references(
    problems: Sequence[Problem], judges: JudgePool, max_unscored_rate: float, *, benchmark: str
) -> ReferenceCheck:
    """Find the references that the judge cannot use, by judging an answer of our own to each problem.

    Raise DataError if they are so many that evaluation would stop, or all of them, so that it could score no answer.
    Without a sandbox the references' own programs are not tried, and a note says so.
    """
    notes, can_run_tests = _prepare(problems, judges, benchmark)
    faults = faulty_references(problems, judges, run_tests=can_run_tests)
    counts = dict(Counter(str(verdict.outcome) for _, verdict in faults))
    judged = LedgerStep.of("check_references", "problem", num_in=len(problems), dropped=counts)
    text = yield_text(judged, f"references of benchmark {benchmark} can be judged")
    which = listed([f"problem {p.problem_id} ({p.question[:60]!r}): {v.outcome}: {v.detail}" for p, v in faults])
    if len(faults) > max_unscored_rate * len(problems) or judged.num_out == 0:
        raise DataError(
            f"{text}; evaluation would stop after all the training, for evaluate.max_unscored_rate is "
            f"{max_unscored_rate:g}. Repair or remove these rows, or raise that setting: {which}"
        )
    if faults:
        notes += (f"{text}; answers to the others will be in no score: {which}",)
    partial: list[str] = []
    for problem in problems if can_run_tests else ():
        if has_test_program(problem.reference):
            partial += unusable_tests(problem, judges.try_reference(problem).result())
    if partial:
        whose = f"{len(partial)} references of benchmark {benchmark} have tests that cannot be used"
        notes += (f"{whose}; their answers are judged by the others: {listed(partial)}",)
    return ReferenceCheck(counts=counts, notes=notes)


def listed(items: Sequence[str]) -> str:
    """Return the items in one line, and the number of those that are too many to show."""
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "; ".join([*items[:_SHOWN], *more])


def _prepare(problems: Sequence[Problem], judges: JudgePool, benchmark: str) -> tuple[tuple[str, ...], bool]:
    """Return notes on the sandbox, and whether the references' own programs can be run."""
    tested = [problem for problem in problems if has_test_program(problem.reference)]
    try:
        if tested:
            judges.check_sandbox()
        return judges.notes if tested else (), True
    except SandboxError as e:
        return (f"benchmark {benchmark}: the test programs of {len(tested)} problems were not tried: {e}",), False
