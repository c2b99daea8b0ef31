"""Write the comparison of runs: one page with problems, scores, paired differences, curves, cost and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from klear_core.config.evaluate import PLAIN_TEMPLATE
from klear_core.config.settings import DifferentSetting
from klear_core.errors import DataError
from klear_core.evaluate.answers.stored import evaluation_answers
from klear_core.evaluate.compare.paired import PairedDifference, paired_difference
from klear_core.evaluate.counts import AnswerCounts, AnswerSummary, Decoding
from klear_core.evaluate.stats.intervals import t_interval
from klear_core.evaluate.stats.significance import corrected_by_question, detectable_by
from klear_core.report import charts
from klear_core.report.answers import PAGE as ANSWERS_PAGE
from klear_core.report.answers import Viewer, shown_shares, write_viewer
from klear_core.report.run.build import page_template, stylesheet
from klear_core.report.run.claims import floor_note, too_few_changed
from klear_core.report.run.warnings import chosen_on
from klear_core.report.several.compared_runs import (
    ComparedRun,
    CostRow,
    StageCharts,
    cost_rows,
    named_by_settings,
    paired_by_content,
    seed_groups,
    settings_in_common,
    stage_charts,
    stages_of_some,
)
from klear_core.report.several.problems import PROBLEMS_TABLE, BenchmarkProblems, problem_views
from klear_core.scores import NONE, interval_text, p_value, percent, points, range_text, spread_text

COMPARISON_PAGE = "comparison.html"
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCell:
    """One run's score on one benchmark, and the shares of answers that were cut off, without an answer or unjudged."""

    value: str
    interval: str
    cut_off: str
    no_answer: str
    not_judged: str
    score: float | None
    rerun: str
    """Interval over other samples of these problems; empty with one answer per problem."""
    templates: str = ""
    """Scores in other prompt templates and their spread; empty if there is none."""
    chosen: str = ""
    """Why the score is marked as one that the model was chosen by; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceCell:
    """A later run's paired difference to the first; without numbers if the two cannot be paired."""

    run: int
    standing: str
    """`better`, `worse`, `not_shown`, or why the two cannot be paired."""
    is_paired: bool = False
    value: str = NONE
    interval: str = ""
    """Interval over other problems of this kind."""
    rerun: str = ""
    p: str = ""
    """p-value, corrected for all differences of the page."""
    num_problems: int = 0
    num_fixed: int = 0
    num_broken: int = 0
    could_see: str = ""
    """Change that such data shows in 4 of 5 cases, before the correction; empty if none."""
    notes: tuple[str, ...] = ()
    """Reservations about the interval and the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One model's scores in all runs, on one benchmark and in one decoding."""

    benchmark: str
    maker: str
    decoding: Decoding
    cells: tuple[ScoreCell | None, ...]
    differences: tuple[DifferenceCell, ...]

    @property
    def range(self) -> str:
        """Lowest and highest score over the runs, in percent; empty if fewer than two have one."""
        values = [100 * cell.score for cell in self.cells if cell and cell.score is not None]
        return f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRow:
    """The scores of runs that differ in their seed alone, on one benchmark and in one decoding."""

    label: str
    benchmark: str
    maker: str
    decoding: Decoding
    scores: tuple[str, ...]
    mean: str
    interval: str
    """Student's t over the runs; empty with two, of which it says nothing."""
    spread: str
    """Standard deviation in points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """All data of the page."""

    runs: tuple[ComparedRun, ...]
    rows: tuple[ScoreRow, ...]
    seeds: tuple[SeedRow, ...]
    problems: tuple[BenchmarkProblems, ...]
    curves: tuple[StageCharts, ...]
    costs: tuple[CostRow, ...]
    settings: tuple[DifferentSetting, ...]
    """Settings that differ, without those of stages that not all runs have."""
    stages_of_some: str
    """Stages that not all runs have, with the runs that have them; empty if there is none."""
    viewer: Viewer | None
    """Page with the answers of the runs' last models; None if they have none."""
    last: str
    """The model whose answers the viewer shows."""


def compare_runs(runs: Sequence[ComparedRun], folder: Path) -> RunComparison:
    """Compare runs, the first being the reference; write `comparison.html` and an answer viewer to `folder`.

    Raise DataError for fewer than two runs.
    """
    if len(runs) < 2:
        raise DataError(f"a comparison needs at least two runs, not {len(runs)}")
    named = paired_by_content(named_by_settings(runs))
    folder.mkdir(parents=True, exist_ok=True)
    last = _last_common(named)
    rows = _rows(named)
    comparison = RunComparison(
        runs=tuple(named),
        rows=tuple(rows),
        seeds=tuple(_seed_rows(named, rows)),
        problems=tuple(problem_views(named, last, folder, confidence=CONFIDENCE)),
        curves=tuple(stage_charts(named)),
        costs=tuple(cost_rows(named)),
        settings=tuple(settings_in_common(named, absent=NONE)),
        stages_of_some=stages_of_some(named),
        viewer=_viewer(named, last, folder),
        last=last,
    )
    page = page_template("comparison.html.j2").render(
        page=comparison,
        css=stylesheet(),
        charts=charts,
        answers=ANSWERS_PAGE,
        table=PROBLEMS_TABLE,
        confidence=percent(CONFIDENCE, 0),
    )
    temporary = folder / (COMPARISON_PAGE + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(folder / COMPARISON_PAGE)
    return comparison


def _last_common(runs: Sequence[ComparedRun]) -> str:
    """Return the last model that every run has; empty if there is none."""
    first, *others = runs
    for model in reversed(first.models):
        if all(run.model(model.maker) for run in others):
            return model.maker
    return ""


def _rows(runs: Sequence[ComparedRun]) -> list[ScoreRow]:
    """Return a row for each benchmark, model and decoding that at least one run has, last model first."""
    # The last model comes first, because it is what runs are compared for.
    makers = dict.fromkeys(model.maker for run in runs for model in reversed(run.models))
    keys: dict[tuple[str, str, Decoding], None] = {}
    for maker in makers:
        for run in runs:
            model = run.model(maker)
            for benchmark, decoding in model.counts if model else ():
                keys[benchmark, maker, decoding] = None
    benchmarks = [benchmark for benchmark, _, _ in keys]
    by_benchmark = sorted(keys, key=lambda key: benchmarks.index(key[0]))  # in the order of their first rows
    counts = [_counts(runs, *key) for key in by_benchmark]
    found = [
        _differences(own, _same_as_first(runs, maker), decoding)
        for own, (_, maker, decoding) in zip(counts, by_benchmark, strict=True)
    ]
    p_values: list[float] = []
    questions: list[tuple[str, str, int]] = []
    for (benchmark, maker, _), differences in zip(by_benchmark, found, strict=True):
        tested = {i: each.p for i, each in differences.items() if isinstance(each, PairedDifference)}
        p_values += tested.values()
        questions += [(benchmark, maker, i) for i in tested]
    # The correction is over all questions of the page; its results come in the order of `p_values`.
    corrected = iter(corrected_by_question(p_values, questions))
    rows = []
    for (benchmark, maker, decoding), own, differences in zip(by_benchmark, counts, found, strict=True):
        cells = []
        for i, difference in differences.items():
            if isinstance(difference, PairedDifference):
                cells.append(_difference(i, difference, next(corrected)))
            else:
                cells.append(DifferenceCell(run=i, standing=difference))
        scores: list[ScoreCell | None] = []
        for run, each in zip(runs, own, strict=True):
            if each is None:
                scores.append(None)
                continue
            # Templates are sampled only: there are no greedy answers to them.
            templates = _templates(run, maker, benchmark) if decoding == "sampled" else ""
            scores.append(
                _cell(each.summary(confidence=CONFIDENCE, decoding=decoding), templates, _chosen(run, maker, benchmark))
            )
        row = ScoreRow(
            benchmark=benchmark, maker=maker, decoding=decoding, cells=tuple(scores), differences=tuple(cells)
        )
        rows.append(row)
    return rows


def _seed_rows(runs: Sequence[ComparedRun], rows: Sequence[ScoreRow]) -> list[SeedRow]:
    """Return the scores of each group of runs that differ in their seed alone, with the mean over seeds."""
    found = []
    for label, group in seed_groups(runs):
        for row in rows:
            # Runs that share a model are one run of it: its score twice would say that seeds do not matter.
            models = {model.evaluation.name: i for i in reversed(group) if (model := runs[i].model(row.maker))}
            own = [row.cells[i] for i in sorted(models.values())]
            values = [cell.score for cell in own if cell is not None and cell.score is not None]
            if len(values) < 2:
                continue
            ends = t_interval(values, bounds=(0.0, 1.0), confidence=CONFIDENCE) if len(values) > 2 else None
            seeded = SeedRow(
                label=label,
                benchmark=row.benchmark,
                maker=row.maker,
                decoding=row.decoding,
                scores=tuple(percent(value) for value in values),
                mean=percent(fmean(values)),
                interval=interval_text(ends) if ends else "",
                spread=f"{100 * stdev(values):.1f}",
            )
            found.append(seeded)
    return found


def _counts(runs: Sequence[ComparedRun], benchmark: str, maker: str, decoding: Decoding) -> list[AnswerCounts | None]:
    """Return each run's counts of one model's answers; None where it has none."""
    found: list[AnswerCounts | None] = []
    for run in runs:
        model = run.model(maker)
        found.append(model.counts.get((benchmark, decoding)) if model else None)
    return found


def _same_as_first(runs: Sequence[ComparedRun], maker: str) -> frozenset[int]:
    """Return the numbers of the later runs that have the very evaluation of the first run's model."""
    names: list[str] = []
    for run in runs:
        model = run.model(maker)
        # An artifact's folder is named by its fingerprint, whatever workspace it is in.
        names.append(model.evaluation.name if model and model.evaluation else "")
    return frozenset(i for i, name in enumerate(names) if i and name and name == names[0])


def _differences(
    counts: Sequence[AnswerCounts | None], same: frozenset[int], decoding: Decoding
) -> dict[int, PairedDifference | Literal["same model", "no problem in common"]]:
    """Return the differences of later runs to the first, by the run's number, or why there is none."""
    first = counts[0]
    differences: dict[int, PairedDifference | Literal["same model", "no problem in common"]] = {}
    for i, own in enumerate(counts[1:], start=1):
        if i in same and own == first:
            differences[i] = "same model"
        elif first is not None and own is not None:
            found = paired_difference(first, own, confidence=CONFIDENCE, decoding=decoding)
            differences[i] = found or "no problem in common"
    return differences


def _templates(run: ComparedRun, maker: str, benchmark: str) -> str:
    """Return a model's scores in other prompt templates with their spread; empty if it has none."""
    model = run.model(maker)
    report = model.reports.get(benchmark) if model else None
    spread = report.template_spread if report else None
    if report is None or spread is None:
        return ""
    scores = [(PLAIN_TEMPLATE, report.avg), *((template.name, template.avg) for template in report.templates)]
    listed = ", ".join(f"{name} {percent(score.value)}" for name, score in scores)
    return f"{listed}; {spread_text(spread)}"


def _chosen(run: ComparedRun, maker: str, benchmark: str) -> str:
    """Return why a model's score is marked as one that it was chosen by; empty if it is not."""
    model = run.model(maker)
    artifact = model.artifact if model else None
    return chosen_on(artifact).get(benchmark, "") if artifact else ""


def _cell(summary: AnswerSummary, templates: str, chosen: str) -> ScoreCell:
    _, _, value, interval, cut_off, no_answer, not_judged = shown_shares(summary)
    score = summary.score
    rerun = interval_text(score.rerun) if score and score.rerun else ""
    return ScoreCell(
        value=value,
        interval=interval,
        rerun=rerun,
        cut_off=cut_off,
        no_answer=no_answer,
        not_judged=not_judged,
        score=score.value if score else None,
        templates=templates,
        chosen=chosen,
    )


def _difference(run: int, found: PairedDifference, p_corrected: float) -> DifferenceCell:
    # The test alone decides, never an interval. The sum avoids 1 - 0.95, which is rounded up.
    standing = "not_shown"
    if p_corrected + CONFIDENCE < 1:
        standing = "better" if found.value > 0 else "worse"
    return DifferenceCell(
        run=run,
        value=points(found.value),
        interval=range_text(found.new_problems),
        rerun=range_text(found.rerun) if found.rerun else "",
        p=p_value(p_corrected).removeprefix("p ").removeprefix("= "),
        standing=standing,
        num_problems=found.num_problems,
        num_fixed=found.num_fixed,
        num_broken=found.num_broken,
        is_paired=True,
        could_see=_could_see(found),
        notes=_notes(found),
    )


def _could_see(found: PairedDifference) -> str:
    num = found.num_clusters or found.num_problems
    change = detectable_by(found.new_problems, num, confidence=CONFIDENCE)
    return "" if change is None else f"{100 * change:.1f}"


def _notes(found: PairedDifference) -> tuple[str, ...]:
    assert found.num_changed is not None, "only files of earlier versions lack it"
    too_few = too_few_changed(
        found.num_changed, found.num_problems, num_clusters=found.num_clusters, confidence=CONFIDENCE
    )
    notes = (too_few, floor_note(found.num_problems) if found.floor_binds else "")
    return tuple(note for note in notes if note)


def _viewer(runs: Sequence[ComparedRun], maker: str, folder: Path) -> Viewer | None:
    sources = []
    for run in runs:
        model = run.model(maker)
        if model is not None:
            sources.append(evaluation_answers(model.evaluation, name=run.label))
    return write_viewer(sources, folder, title=f"Answers of {maker}") if sources else None
