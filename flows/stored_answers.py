"""`klear judge`, `klear rejudge`, `klear answers`: judge a file of answers, stored answers again, and show them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.curate_files import check_file_place, check_folder_place, folder_name, shown_progress
from flows.show import find_artifact
from klear_core.artifacts.manifest import InputRecord, Manifest, manifest_folder, read_manifest
from klear_core.artifacts.model_files import is_same_model
from klear_core.artifacts.store import LocalStore
from klear_core.config.load import apply_overrides, validate
from klear_core.config.settings import config_digest
from klear_core.config.verify import VerifyConfig
from klear_core.data.readers import SUFFIXES
from klear_core.errors import ArtifactError, ConfigError, DataError
from klear_core.evaluate.answers.inspect_logs import write_logs
from klear_core.evaluate.answers.judge_file import JudgeSummary, judge_file
from klear_core.evaluate.answers.layout_rows import Layout
from klear_core.evaluate.answers.layouts import foreign_answers
from klear_core.evaluate.answers.mapped_rows import AnswerPlaces, places_in
from klear_core.evaluate.answers.rejudge import CHANGES_FILE, RejudgeSummary, Rescored, check_folder, rejudge
from klear_core.evaluate.answers.stored import (
    REJUDGE_FILE,
    AnswerSource,
    CheckedAnswers,
    check_answers,
    evaluation_answers,
    in_template,
    is_evaluation,
    rejudged_answers,
)
from klear_core.evaluate.counts import AnswerSummary
from klear_core.prompts import NO_CLOSE_TAG
from klear_core.report.answers import ALL_TEMPLATES, shown_shares, write_viewer
from klear_core.scores import Estimate, points, range_text

_SHOWN_CHANGES = 8
_MAX_DETAIL = 60
_MAX_BAD_ROWS = 5


def judge(file: Path, overrides: list[str], *, out: Path | None, bare_code: bool) -> None:
    """Judge a file of answers and print the outcomes; DataError afterwards if rows are malformed or none was judged."""
    if out is not None:
        check_file_place("--out", out)
    verify = _with_overrides({}, overrides)
    console = Console(highlight=False)
    with shown_progress("judging") as show:
        summary = judge_file(
            file, verify, out=out, bare_code=bare_code, progress=lambda done, total: show(done, total or 0, "")
        )
    _show_judged(console, summary)
    if not summary.num_rows:
        raise DataError(f"{file}: has no row")
    if summary.bad_rows or not summary.outcomes:
        raise DataError(
            f"{file}: {len(summary.bad_rows):,} of its {summary.num_rows:,} rows do not fit and were not judged"
        )


def _show_judged(console: Console, summary: JudgeSummary) -> None:
    table = Table("outcome", "answers", box=None)
    for outcome, count in sorted(summary.outcomes.items()):
        table.add_row(outcome.value, f"{count:,}")
    if summary.bad_rows:
        table.add_row("not judged: does not fit", f"{len(summary.bad_rows):,}")
    table.add_row("[bold]rows[/]", f"[bold]{summary.num_rows:,}[/]")
    console.print(table)
    if summary.mean_score is not None:
        console.print(f"\nfull score {summary.num_full_score:,}, mean score {summary.mean_score:.4f}")
    for row in summary.bad_rows[:_MAX_BAD_ROWS]:
        console.print(f"[yellow]line {row.line}[/] {escape(row.reason)}")
    if len(summary.bad_rows) > _MAX_BAD_ROWS:
        console.print(f"and {len(summary.bad_rows) - _MAX_BAD_ROWS:,} more like these")
    for note in summary.notes:
        console.print(f"[yellow]note[/] {escape(note)}")


def find_answers(
    which: str, root: Path, layout: Layout | None = None, places: AnswerPlaces | None = None
) -> AnswerSource:
    """Return the stored answers that `which` names.

    It is a stage that scored a model or made one (its newest evaluation), a fingerprint, the folder of an evaluation or
    of `klear rejudge`, or a file or folder of answers that another program wrote.
    """
    path = Path(which)
    if (path / REJUDGE_FILE).is_file():
        return rejudged_answers(path)
    if is_evaluation(path):
        return evaluation_answers(path)
    is_told = layout is not None or places is not None  # a stage may be named beside such a folder
    if path.is_file() or path.name.endswith(SUFFIXES) or (is_told and path.is_dir()):
        return foreign_answers(path, layout=layout, places=places)
    # Names of stages come before folders of the working directory, which may be called `rl` as well.
    try:
        folder = find_artifact(which, root)
    except ArtifactError:
        if path.is_dir():
            return foreign_answers(path, layout=layout)
        raise
    return evaluation_answers(folder if is_evaluation(folder) else newest_evaluation(folder))


def newest_evaluation(model: Path) -> Path:
    """Return the newest evaluation of a model's artifact, or of the same model as a given one; ArtifactError if there
    is none."""
    found = _evaluations_of(model)
    if not found:
        raise ArtifactError(f"{model}: there is no evaluation of it in this workspace, so there are no answers")
    return max(found, key=lambda evaluation: evaluation.created_at).folder


def evaluations_of(model: Path) -> list[Path]:
    """Return all evaluations of a model: those of the run that made it first, and the newest first among these and
    among the others, which are of `klear evaluate`."""
    found = sorted(_evaluations_of(model), key=lambda evaluation: evaluation.created_at, reverse=True)
    return [evaluation.folder for evaluation in sorted(found, key=lambda evaluation: not evaluation.is_of_run)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    folder: Path
    created_at: datetime
    is_of_run: bool
    """It scored the artifact itself; `klear evaluate` scores the model's folder as a given one."""


def _evaluations_of(model: Path) -> list[_Evaluation]:
    own = read_manifest(model)
    store = model.absolute().parents[1]
    found = []
    for folder in LocalStore(store).folders():
        if not is_evaluation(folder):
            continue
        manifest = read_manifest(folder)
        scored = next((r for r in manifest.inputs if r.role == "model" and _is_of(own, r, store)), None)
        if scored is not None:
            is_of_run = _is_itself(own, scored)
            found.append(_Evaluation(folder=folder, created_at=manifest.created_at, is_of_run=is_of_run))
    return found


def _is_itself(model: Manifest, scored: InputRecord) -> bool:
    return (model.kind, model.fingerprint) == (scored.kind, scored.fingerprint)


def _is_of(model: Manifest, scored: InputRecord, store: Path) -> bool:
    """Return whether the model that an evaluation scored is this one."""
    if _is_itself(model, scored):
        return True
    folder = manifest_folder(store, scored)  # None if the artifact was deleted
    return folder is not None and is_same_model(model, read_manifest(folder))


def rejudge_answers(
    which: str,
    overrides: Sequence[str],
    *,
    root: Path,
    layout: Layout | None,
    fields: str = "",
    out: Path | None,
    num_samples: int | None = None,
) -> None:
    """Judge stored answers again, print what changed, and write the answers with both verdicts and their page.

    With `num_samples`, raise DataError first if a problem has fewer.
    """
    if out is not None:
        check_folder_place("--out", out)
    source = find_answers(which, root, layout, places_in(fields) if fields else None)
    verify = _judge_settings(source, overrides)
    if _is_foreign(source) or num_samples is not None:
        checked = check_answers(source, num_samples=num_samples, judges={judge.name for judge in verify.all_judges})
        _show_notes(checked)
    if source.verify is not None and config_digest(source.verify) == config_digest(verify):
        same = (
            "the settings are those that these answers were judged with; verdicts change only if the judge's code did"
        )
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[yellow]note[/] {same}")
    folder = out or root / "rejudged" / folder_name([_as_file_name(source), config_digest(verify)[:8]])
    check_folder_place("--out", folder)
    check_folder(folder)
    console = Console(highlight=False, soft_wrap=True)
    with shown_progress("judging") as show:
        summary = rejudge(source, verify, folder, progress=lambda done: show(done, 0, ""))
    before = "judged before" if source.verify else "stated by the file"
    pair = [rejudged_answers(folder, which="before", name=before), rejudged_answers(folder, name="judged again")]
    has_before = any(b.before.num_without_verdict < b.before.num_answers for b in summary.benchmarks)
    viewer = write_viewer(
        pair if has_before else pair[1:], folder, title=f"{source.name}, judged again", is_one_text=True
    )
    show_rejudged(console, summary)
    page = f"{viewer.page}{_flipped_view(source) if has_before else ''}"
    console.print(f"\nanswers  {page}\nchanges  {folder / CHANGES_FILE}", markup=False)
    if summary.num_unread:
        raise DataError(f"{source.origin}: {summary.num_unread:,} rows could not be read, and are in no count")


def _flipped_view(source: AnswerSource) -> str:
    """Return the part of the page's address that shows flipped answers, those to prompt templates among them."""
    return f"#show=flipped&template={ALL_TEMPLATES}" if source.templates else "#show=flipped"


def show_rejudged(console: Console, summary: RejudgeSummary) -> None:
    """Print the scores under both judgements with their shares, and the first answers that changed."""
    for part in summary.benchmarks:
        console.print(_scores(part, summary))
        for change, count in part.changes.items():
            console.print(f"  {change}: {count:,}")
        if not part.changes and part.before.num_without_verdict < part.before.num_answers:
            console.print("  no verdict changed")
    if summary.first_changes:
        console.print(_changes(summary))
    missing_tag = sum(NO_CLOSE_TAG in c.detail_after for c in summary.first_changes)
    has_few_answers = any(2 * b.after.num_no_answer > b.after.num_answers for b in summary.benchmarks)
    if missing_tag or (has_few_answers and summary.verify_after.tags != "none"):
        console.print(
            "[yellow]note[/] many answers lack </think>: for models that write no think tags, "
            "add --set verify.tags=none"
        )
    for line in summary.notes:
        console.print(f"[yellow]note[/] {escape(line)}")


def view_answers(
    which: Sequence[str],
    *,
    root: Path,
    layout: Layout | None,
    fields: str = "",
    out: Path | None,
    inspect: Path | None = None,
) -> None:
    """Write the page with all answers of the sources that `which` names, or Inspect's logs, and print where it is."""
    if out is not None:
        check_folder_place("--out", out)
    places = places_in(fields) if fields else None
    sources = _distinct([find_answers(name, root, layout, places) for name in which])
    for source in sources:
        if _is_foreign(source):
            _show_notes(check_answers(source))
    if inspect is not None:
        check_folder_place("--inspect", inspect)
        for source in sources:
            for log in write_logs(source, inspect):
                Console(highlight=False, soft_wrap=True).print(f"log      {log}", markup=False)
        return
    title = ", ".join(source.name for source in sources)
    folder = out or root / "answers" / folder_name([_as_file_name(source) for source in sources])
    check_folder_place("--out", folder)
    viewer = write_viewer(sources, folder, title=title)
    console = Console(highlight=False, soft_wrap=True)
    counts = f"{viewer.num_answers:,} answers to {viewer.num_problems:,} problems"
    console.print(f"{counts}\nanswers  {viewer.page}", markup=False)
    if viewer.num_unread:
        raise DataError(f"{viewer.num_unread:,} rows could not be read, and are not on the page")


def _is_foreign(source: AnswerSource) -> bool:
    """Return whether another program wrote the answers; those of an evaluation of ours were checked when it ended."""
    return source.verify is None


def _show_notes(checked: CheckedAnswers) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in checked.notes:
        console.print(f"[yellow]note[/] {escape(line)}")


def _judge_settings(source: AnswerSource, overrides: Sequence[str]) -> VerifyConfig:
    """Return the settings that the stored verdicts were made with, or the defaults, with the overrides."""
    stored = source.verify or VerifyConfig()
    return _with_overrides({"verify": stored.model_dump(mode="json")}, overrides)


def _with_overrides(settings: Mapping[str, object], overrides: Sequence[str]) -> VerifyConfig:
    """Return the judge settings of a config with the overrides; ConfigError if one sets anything else."""
    for override in overrides:
        # Any other setting would be valid, too, because the whole config is validated, and would change nothing.
        if not override.startswith("verify."):
            raise ConfigError(f"--set {override!r}: this command takes only verify.* settings")
    return validate(apply_overrides(settings, overrides), origin="--set").verify


def _as_file_name(source: AnswerSource) -> str:
    path = Path(source.origin)
    name = f"{source.name}-{path.name[:8]}" if source.layout == "klear" and is_evaluation(path) else source.name
    return re.sub(r"[^\w.=-]+", "_", name)


def _distinct(sources: Sequence[AnswerSource]) -> list[AnswerSource]:
    """Return the sources with names that differ.

    Evaluations of one name also have the start of their fingerprint, files of one name their folder, and what is still
    alike its number.
    """
    num_of = Counter(source.name for source in sources)
    places = [_place(source) for source in sources]
    num_at = Counter((source.name, place) for source, place in zip(sources, places, strict=True))
    named = []
    for i, (source, place) in enumerate(zip(sources, places, strict=True), start=1):
        is_unique = num_of[source.name] == 1
        mark = place if num_at[source.name, place] == 1 else f"{place} ({i})"
        named.append(source if is_unique else replace(source, name=f"{source.name} {mark}"))
    return named


def _place(source: AnswerSource) -> str:
    """Return the start of a fingerprint, or the name of the folder that a file of another program is in."""
    path = Path(source.origin).absolute()
    return path.parent.name if _is_foreign(source) else path.name[:8]


def _scores(part: Rescored, summary: RejudgeSummary) -> Table:
    what = escape(in_template(part.benchmark, part.template))
    title = f"{what}, {part.decoding}: {part.before.num_problems:,} problems"
    table = score_table(title, "judged", "answers")
    if part.before.num_without_verdict < part.before.num_answers:
        table.add_row("before" if summary.verify_before else "by the file", *_cells(part.before), "")
    change = _change(part.difference) if part.changes else ""
    table.add_row("again", *_cells(part.after), change)
    return table


def score_table(title: str, first: str, *more: str) -> Table:
    """Return a table without rows for scores of answers; `more` are columns of numbers before them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
    table.add_column(first)
    for name in (*more, "score", "cut off", "no answer", "not judged", "change, points"):
        table.add_column(name, justify="right")
    return table


def _cells(summary: AnswerSummary) -> list[str]:
    _, num_answers, score, interval, *others = shown_shares(summary)
    return [num_answers, f"{score}\n[dim]{interval}[/]", *others]


def _change(difference: Estimate | None) -> str:
    if difference is None:
        return ""
    return f"{points(difference.value)}\n[dim]{range_text(difference.new_problems)}[/]"


def _changes(summary: RejudgeSummary) -> Table:
    num_changed = sum(sum(part.changes.values()) for part in summary.benchmarks)
    shown = summary.first_changes[:_SHOWN_CHANGES]
    title = f"{num_changed:,} verdicts changed; the first {len(shown)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for name in ("problem", "answer", "before", "again", "why"):
        table.add_column(name)
    for change in shown:
        answer = "greedy" if change.decoding == "greedy" else f"sample {change.sample_idx}"
        answer = in_template(answer, change.template)
        detail = change.detail_after[:_MAX_DETAIL]
        table.add_row(escape(change.problem_id[:8]), answer, change.before, change.after, escape(detail))
    return table
