"""Show compared models problem by problem: matrix, changed problems, parts, lengths of answers, and a table as CSV."""

from __future__ import annotations

import csv
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean, quantiles

from klear_core.artifacts.records import read_shards
from klear_core.evaluate.counts import AnswerCounts, ProblemCounts, read_clusters
from klear_core.report.several.compared_runs import ComparedRun
from klear_core.scores import NONE, SAMPLES_FOLDER, interval_text, percent, points, visible
from klear_core.types import Difficulty, EvalSample

PROBLEMS_TABLE = "problems.csv"
_NUM_CHANGED = 12
"""Changed problems that the page lists; the table has all."""
_TITLE_CHARS = 110
_MAX_CLUSTERS = 20
"""More clusters than these (contests, templates) are no subjects that a reader would look through."""


@dataclass(slots=True)
class ProblemAnswers:
    """One model's sampled answers to one problem."""

    num_right: int = 0
    num_scored: int = 0
    num_tokens: int = 0

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.num_right / self.num_scored

    @property
    def text(self) -> str:
        """`3 of 4`."""
        return f"{self.num_right} of {self.num_scored}"


@dataclass(slots=True)
class BenchmarkAnswers:
    """One model's sampled answers to one benchmark; problems without a scored one are not there."""

    problems: dict[str, ProblemAnswers] = field(default_factory=lambda: defaultdict(ProblemAnswers))
    right_tokens: array[int] = field(default_factory=lambda: array("q"))
    wrong_tokens: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem as its stored answers describe it."""

    title: str
    difficulty: Difficulty
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswers:
    """An evaluated model of the runs; runs that share its evaluation share its row."""

    label: str
    tone: int
    """Number of the first run that has it."""
    maker: str
    evaluation: str
    """Fingerprint of the evaluation."""
    benchmarks: Mapping[str, BenchmarkAnswers]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """A model's row: SVG path data for each level of its shares, in units of one problem."""

    label: str
    tone: int
    score: str
    paths: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedProblem:
    """A problem whose share of right answers differs between runs, with each run's answers."""

    problem_id: str
    title: str
    change: str
    """Largest change to the first run, in points."""
    cells: tuple[tuple[int, str], ...]
    """Level and text of each run; level -1 without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Scores of the problems of one difficulty, subject or length, in each run."""

    split: str
    name: str
    num_problems: int
    cells: tuple[tuple[str, str], ...]
    """Score and interval of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a model's answers: mean of all; median and middle 80 % of right and of wrong ones."""

    label: str
    tone: int
    mean: str
    right: str
    wrong: str
    bars: tuple[tuple[str, float, float, float], ...]
    """Kind (`right`, `wrong`), and 10th, 50th and 90th percentile in percent of the longest on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkProblems:
    """All that the page shows of one benchmark's problems."""

    benchmark: str
    num_problems: int
    matrix: tuple[MatrixRow, ...]
    moves: tuple[str, ...]
    """For each later run, how many problems gained and lost, and how many of them by half of their answers or more."""
    changed: tuple[ChangedProblem, ...]
    num_changed: int
    parts: tuple[Part, ...]
    lengths: tuple[Lengths, ...]


def problem_views(
    runs: Sequence[ComparedRun], last: str, folder: Path, *, confidence: float
) -> list[BenchmarkProblems]:
    """Return what each benchmark's sampled answers say, problem by problem, and write it to `folder` as CSV.

    The matrix has all models; what compares runs has the model `last` of each.
    """
    models, problems = _read(runs)
    _write_table(models, problems, folder / PROBLEMS_TABLE)
    of_runs = [_model_of(run, last, models) for run in runs]
    views = []
    for benchmark, known in problems.items():
        answers = [
            model.benchmarks.get(benchmark, BenchmarkAnswers()) if model else BenchmarkAnswers() for model in of_runs
        ]
        changed = _changed(known, answers)
        views.append(
            BenchmarkProblems(
                benchmark=benchmark,
                num_problems=len(known),
                matrix=tuple(_matrix(benchmark, known, models)),
                moves=tuple(_moves(run.label, answers[0], own) for run, own in zip(runs[1:], answers[1:], strict=True)),
                changed=tuple(changed[:_NUM_CHANGED]),
                num_changed=len(changed),
                parts=tuple(_parts(known, answers, confidence=confidence)),
                lengths=tuple(_lengths(benchmark, models)),
            )
        )
    return views


# ---- reading ----


def _read(runs: Sequence[ComparedRun]) -> tuple[list[ModelAnswers], dict[str, dict[str, Problem]]]:
    """Return the models, last of each run first, and the problems of each benchmark that any of them answered."""
    models: list[ModelAnswers] = []
    problems: dict[str, dict[str, Problem]] = defaultdict(dict)
    seen = set[str]()
    makers = dict.fromkeys(model.maker for run in runs for model in reversed(run.models))
    for maker in makers:
        for tone, run in enumerate(runs):
            model = run.model(maker)
            if model is None or model.evaluation.name in seen:
                continue
            seen.add(model.evaluation.name)
            answers = _answers(model.evaluation, problems)
            name = model.evaluation.name
            models.append(ModelAnswers(label=run.label, tone=tone, maker=maker, evaluation=name, benchmarks=answers))
    return models, dict(problems)


def _answers(evaluation: Path, problems: Mapping[str, dict[str, Problem]]) -> Mapping[str, BenchmarkAnswers]:
    found: dict[str, BenchmarkAnswers] = defaultdict(BenchmarkAnswers)
    clusters = read_clusters(evaluation)
    for sample in read_shards(evaluation / SAMPLES_FOLDER, EvalSample):
        if sample.decoding != "sampled" or not sample.verdict.outcome.counts_for_model:
            continue
        benchmark = found[sample.benchmark]
        answers = benchmark.problems[sample.problem_id]
        answers.num_right += sample.verdict.is_correct
        answers.num_scored += 1
        answers.num_tokens += sample.num_tokens
        tokens = benchmark.right_tokens if sample.verdict.is_correct else benchmark.wrong_tokens
        tokens.append(sample.num_tokens)
        if sample.problem_id not in problems[sample.benchmark]:
            title = visible(" ".join(sample.question[: 4 * _TITLE_CHARS].split())[:_TITLE_CHARS])
            cluster = clusters.get(sample.benchmark, {}).get(sample.problem_id, "")
            known = Problem(title=title, difficulty=sample.difficulty, cluster=cluster)
            problems[sample.benchmark][sample.problem_id] = known
    return found


def _model_of(run: ComparedRun, maker: str, models: Sequence[ModelAnswers]) -> ModelAnswers | None:
    """Return the run's model of this stage, which an earlier run may share; None if it has none."""
    model = run.model(maker)
    return next((one for one in models if model and one.evaluation == model.evaluation.name), None)


def _write_table(models: Sequence[ModelAnswers], problems: Mapping[str, Mapping[str, Problem]], path: Path) -> None:
    """Write a row for each problem, with right and scored answers and mean tokens of each model."""
    names = [f"{model.label}: {model.maker}" for model in models]
    columns = ["benchmark", "problem_id", "question", "difficulty", "cluster"]
    columns += [f"{name}, {what}" for name in names for what in ("right", "answers", "mean tokens")]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for benchmark, known in problems.items():
            for problem_id, problem in known.items():
                row: list[object] = [benchmark, problem_id, problem.title, problem.difficulty, problem.cluster]
                for model in models:
                    found = (
                        model.benchmarks[benchmark].problems.get(problem_id) if benchmark in model.benchmarks else None
                    )
                    mean = round(found.num_tokens / found.num_scored, 1) if found else ""
                    row += [found.num_right, found.num_scored, mean] if found else ["", "", ""]
                table.writerow(row)


# ---- matrix ----


def level_of(share: float) -> int:
    """Return 0 for no right answer, 5 for right ones alone, and 1 to 4 for the quarters between."""
    if share in (0.0, 1.0):
        return 5 if share else 0
    return 1 + min(3, int(4 * share))


def _matrix(benchmark: str, known: Mapping[str, Problem], models: Sequence[ModelAnswers]) -> Iterable[MatrixRow]:
    """Yield a row for each model; the columns are the problems, those that most models fail first."""
    scored = [model for model in models if model.benchmarks.get(benchmark)]
    shares: dict[str, list[float]] = defaultdict(list)
    for model in scored:
        for problem_id, answers in model.benchmarks[benchmark].problems.items():
            shares[problem_id].append(answers.share)
    order = sorted(known, key=lambda problem_id: (fmean(shares[problem_id]), problem_id))
    for model in scored:
        own = model.benchmarks[benchmark].problems
        levels = [level_of(own[i].share) if i in own else -1 for i in order]
        score = percent(fmean(answers.share for answers in own.values()))
        yield MatrixRow(
            label=f"{model.label}: {model.maker}", tone=model.tone, score=score, paths=tuple(_paths(levels))
        )


def _paths(levels: Sequence[int]) -> Iterable[tuple[int, str]]:
    """Yield a path for each level, in which neighbours of one level are one rectangle: a row may have thousands."""
    parts: dict[int, list[str]] = defaultdict(list)
    start = 0
    for level, run in groupby(levels):
        width = len(list(run))
        parts[level].append(f"M{start} 0h{width}v1h-{width}z")
        start += width
    for level in sorted(parts):
        if level >= 0:
            yield level, "".join(parts[level])


# ---- changed problems ----


def _moves(label: str, first: BenchmarkAnswers, own: BenchmarkAnswers) -> str:
    changes = [own.problems[i].share - first.problems[i].share for i in own.problems.keys() & first.problems.keys()]
    words = []
    for name, found in (("gained", [c for c in changes if c > 0]), ("lost", [-c for c in changes if c < 0])):
        num_large = sum(change >= 0.5 for change in found)
        words.append(f"{len(found):,} {name} ({num_large:,} by half of the answers or more)")
    num_same = sum(change == 0 for change in changes)
    return f"{label}: {', '.join(words)}, {num_same:,} as before"


def _changed(known: Mapping[str, Problem], answers: Sequence[BenchmarkAnswers]) -> list[ChangedProblem]:
    """Return the problems on which a later run differs from the first, the largest changes first."""
    sized: list[tuple[float, float, str]] = []
    for problem_id in known:
        first = answers[0].problems.get(problem_id)
        others = [own.problems[problem_id].share for own in answers[1:] if problem_id in own.problems]
        if first is None or not others:
            continue
        changes = [share - first.share for share in others]
        sized.append((max(changes, key=abs), fmean(changes), problem_id))
    # Few answers make many changes of one size: of these, those that more runs share come first.
    sized = [found for found in sized if found[0]]
    sized.sort(key=lambda found: (-abs(found[0]), -abs(found[1]), found[2]))
    rows = []
    for change, _, problem_id in sized:
        cells = [_cell(own.problems.get(problem_id)) for own in answers]
        row = ChangedProblem(
            problem_id=problem_id, title=known[problem_id].title, change=points(change), cells=tuple(cells)
        )
        rows.append(row)
    return rows


def _cell(answers: ProblemAnswers | None) -> tuple[int, str]:
    return (level_of(answers.share), answers.text) if answers else (-1, NONE)


# ---- parts ----


def _parts(known: Mapping[str, Problem], answers: Sequence[BenchmarkAnswers], *, confidence: float) -> Iterable[Part]:
    """Yield the parts of each split that has more than one: difficulty, subject, length of the answers."""
    splits: dict[str, Callable[[str], str]] = {
        "difficulty": lambda i: str(known[i].difficulty),
        "subject": lambda i: known[i].cluster or "none stated",
        "length of answers": _third_by_length(known, answers),
    }
    for split, part_of in splits.items():
        by_name: dict[str, list[str]] = defaultdict(list)
        for problem_id in known:
            by_name[part_of(problem_id)].append(problem_id)
        if not 1 < len(by_name) <= _MAX_CLUSTERS:
            continue
        for name in _in_order(split, by_name):
            part = {problem_id: known[problem_id] for problem_id in by_name[name]}
            cells = [_score(part, own, confidence=confidence) for own in answers]
            yield Part(split=split, name=name, num_problems=len(by_name[name]), cells=tuple(cells))


_THIRDS = ("shortest third", "middle third", "longest third")


def _third_by_length(known: Mapping[str, Problem], answers: Sequence[BenchmarkAnswers]) -> Callable[[str], str]:
    """Return which third a problem is in by the mean length of the runs' answers to it."""

    def length(problem_id: str) -> float:
        found = [own.problems[problem_id] for own in answers if problem_id in own.problems]
        return fmean(one.num_tokens / one.num_scored for one in found) if found else 0.0

    order = sorted(known, key=lambda problem_id: (length(problem_id), problem_id))
    third = {problem_id: _THIRDS[3 * place // len(order)] for place, problem_id in enumerate(order)}
    return lambda problem_id: third[problem_id]


def _in_order(split: str, names: Iterable[str]) -> list[str]:
    order = {"difficulty": [str(level) for level in Difficulty], "length of answers": list(_THIRDS)}
    return sorted(names, key=lambda name: (order[split].index(name) if split in order else 0, name))


def _score(part: Mapping[str, Problem], answers: BenchmarkAnswers, *, confidence: float) -> tuple[str, str]:
    counts = AnswerCounts()
    for problem_id, problem in part.items():
        found = answers.problems.get(problem_id)
        if found:
            # Problems of one subject alone are taken as independent; others depend on each other within theirs.
            counts.problems[problem_id] = ProblemCounts(
                cluster=problem.cluster, num_scored=found.num_scored, num_correct=found.num_right
            )
    score = counts.score(confidence=confidence)
    return (percent(score.value), interval_text(score.new_problems)) if score else (NONE, "")


# ---- lengths ----


def _lengths(benchmark: str, models: Sequence[ModelAnswers]) -> Iterable[Lengths]:
    scored = [(model, model.benchmarks[benchmark]) for model in models if benchmark in model.benchmarks]
    longest = max(
        (_spread(tokens)[2] for _, own in scored for tokens in (own.right_tokens, own.wrong_tokens)), default=0
    )
    for model, own in scored:
        bars = []
        for kind, tokens in (("right", own.right_tokens), ("wrong", own.wrong_tokens)):
            if tokens and longest:
                low, middle, high = (round(100 * value / longest, 2) for value in _spread(tokens))
                bars.append((kind, low, middle, high))
        everything = own.right_tokens + own.wrong_tokens
        yield Lengths(
            label=f"{model.label}: {model.maker}",
            tone=model.tone,
            mean=f"{fmean(everything):,.0f}",
            right=_spread_text(own.right_tokens),
            wrong=_spread_text(own.wrong_tokens),
            bars=tuple(bars),
        )


def _spread(tokens: Sequence[int]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentile; zeros without a value."""
    if len(tokens) < 2:
        return (float(tokens[0]),) * 3 if tokens else (0.0, 0.0, 0.0)
    tenths = quantiles(tokens, n=10, method="inclusive")
    return tenths[0], tenths[4], tenths[8]


def _spread_text(tokens: Sequence[int]) -> str:
    if not tokens:
        return NONE
    low, middle, high = _spread(tokens)
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"
