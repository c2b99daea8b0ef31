"""Turn prompt sources into training problems. Nothing is filtered by accuracy, and drops are counted by reason."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from klear_core.artifacts.manifest import LedgerStep, ReasonCounts, StageSummary, check_yield
from klear_core.artifacts.store import SCRATCH
from klear_core.config.curate import CurateConfig, DecontaminateConfig, ExecutorConfig, LocalExecutorConfig
from klear_core.config.data import FileSource
from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.data.benchmarks import CONTEST_IDS, read_benchmarks, read_by_problem
from klear_core.data.curation.decontaminate import Decontaminator, Protected, counts_by_rule
from klear_core.data.curation.merge import NEAR, NOT_SELECTED, REPEAT, STAYS, merge
from klear_core.data.curation.read import TAGS, ReadBlocks, save_guard
from klear_core.data.curation.segment import Segments, open_segments
from klear_core.data.curation.selection import SELECT, check_selection, left_out
from klear_core.data.curation.solutions import FAILING, OpenJudges, SolutionCheck, check_solutions, judges_here
from klear_core.data.curation.work_plan import Plan, Progress, Tasks, make_plan, save_plan
from klear_core.data.curation.write import (
    DROPPED,
    LEAKS,
    LEAKS_PAGE,
    PROBLEMS,
    ROWS,
    LeakCounts,
    Shards,
    State,
    WriteDropped,
    WriteProblems,
    leaks_in,
    num_drops,
    open_state,
    write_leaks,
)
from klear_core.data.formats.fields import READ
from klear_core.data.sources import check_questions, check_sources, read_contest_questions, source_name
from klear_core.errors import DataError
from klear_core.metrics import SILENT, Telemetry
from klear_core.types import Dropped

_SMALL_BYTES = 8 << 20
"""Size of sources, in bytes, below which starting other processes takes longer than curating in one."""

RunTasks = Callable[[str, Tasks, int], None]


def curate(
    cfg: CurateConfig,
    *,
    workdir: Path,
    benchmarks: Path | None = None,
    verify: VerifyConfig | None = None,
    open_judges: OpenJudges = judges_here,
    seed: int = 0,
    telemetry: Telemetry = SILENT,
) -> StageSummary:
    """Write `problems/*.parquet` and `dropped/*.parquet`: read, limit length, dedup, decontaminate, select and shuffle.

    `rows/*.parquet` names the source row of each problem, in the same order. `leaks/*.parquet` and `leaks.html` show
    every prompt that any decontamination rule would drop. Published programs are judged by `verify` (None: its
    defaults), on the machines of `open_judges`, and those that fail are listed in `failing_solutions/*.parquet`.

    Blocks of the sources are read in parallel, and their results are kept under `workdir/scratch`, from which a killed
    curation resumes. Raise DataError if a source has too few usable rows or no problem is left.
    """
    check_curation(cfg)
    protected = list(protected_questions(cfg.decontaminate, benchmarks))
    plan = make_plan(cfg, protected, seed=seed)
    folder = workdir / SCRATCH
    num_phrases = _prepare(folder, plan, protected)
    run = _runner(plan, folder, telemetry)
    run("reading", ReadBlocks(folder=folder, key=plan.key), len(plan.blocks))
    segments = open_segments(folder / "blocks")
    warnings = [*left_out(cfg), *_check_floors(plan, segments)]
    merge(plan, segments, folder, run)
    state = open_state(folder)
    leaks = write_leaks(folder / "written", leaks_in(state), rows_per_shard=cfg.runtime.rows_per_shard)
    ledger = _ledger(state, leaks)
    if not len(state.merged.kept):
        reasons = {reason: n for step in ledger for reason, n in step.dropped.items()}
        raise DataError(f"curation left no problem of {ledger[0].num_in} rows: {reasons}")
    problems = Shards(num_rows=len(state.merged.kept), rows_per_shard=cfg.runtime.rows_per_shard)
    dropped = Shards(num_rows=int(num_drops(state).sum()), rows_per_shard=cfg.runtime.rows_per_shard)
    run("writing", WriteProblems(folder=folder, shards=problems), problems.num_tasks)
    run("dropping", WriteDropped(folder=folder, shards=dropped), dropped.num_tasks)
    checked = SolutionCheck()
    if cfg.runtime.check_solutions:
        checked = check_solutions(state, folder / "written", verify or VerifyConfig(), telemetry, open_judges)
    _publish(folder, workdir)
    telemetry.progress(1, 1, "done")
    notes = _notes(plan, ledger, len(protected), num_phrases)
    counts = {"rows": ledger[0].num_in, "problems": problems.num_rows, "protected_questions": len(protected)}
    notes = [*warnings, *state.merged.notes, *notes, *checked.notes]
    return StageSummary(counts=counts, ledger=(*ledger, *checked.ledger), notes=tuple(notes))


def check_curation(cfg: CurateConfig) -> None:
    """Raise ConfigError if a source or a protected question set is missing or unreadable; only first rows are read."""
    check_sources(cfg.sources)
    check_selection(cfg)
    for source in cfg.decontaminate.also:
        check_questions(source)


def protected_questions(cfg: DecontaminateConfig, benchmarks: Path | None) -> Iterator[Protected]:
    """Yield the questions to keep out of training: those of the benchmarks artifact, and the sets in `also`."""
    contest_ids = read_by_problem(benchmarks / CONTEST_IDS) if benchmarks else {}
    for name, problem in read_benchmarks(benchmarks) if benchmarks else ():
        contest = contest_ids.get(problem.problem_id, "")
        yield Protected(benchmark=name, question_id=problem.problem_id, question=problem.question, contest_id=contest)
    for source in cfg.also:
        yield from _also_protected(source)


def _also_protected(source: FileSource) -> Iterator[Protected]:
    for number, question in enumerate(read_contest_questions(source), 1):
        if isinstance(question, Dropped):
            raise DataError(
                f"{source.path}: a question that is to be kept out of training cannot be read: {question.detail}"
            )
        text, contest = question
        yield Protected(benchmark=source_name(source), question_id=f"row {number}", question=text, contest_id=contest)


def _prepare(folder: Path, plan: Plan, protected: Sequence[Protected]) -> int:
    """Write what all processes need, and delete what was made by another plan.

    Return the number of word n-grams that occur in too many protected questions to drop a prompt.
    """
    key_file = folder / "key"
    if not key_file.exists() or key_file.read_text() != plan.key:
        # The key goes first: half of a folder, left by a kill while it is deleted, must not pass for a whole one.
        key_file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        guard = Decontaminator(plan.cfg.decontaminate, protected)
        save_guard(guard, folder / "guard.pickle")
        (folder / "num_phrases").write_text(str(len(guard.common_phrases)))
        key_file.write_text(plan.key)
    # The settings of the executor are no part of the key.
    save_plan(plan, folder / "plan.pickle")
    shutil.rmtree(folder / "reading", ignore_errors=True)  # unfinished blocks of a killed attempt
    return int((folder / "num_phrases").read_text())


def _runner(plan: Plan, folder: Path, telemetry: Telemetry) -> RunTasks:
    def run(name: str, tasks: Tasks, num_tasks: int) -> None:
        run_tasks(
            name,
            tasks,
            num_tasks,
            executor=plan.cfg.runtime.executor,
            folder=folder / "executor",
            is_small=plan.num_bytes < _SMALL_BYTES,
            on_done=lambda done: telemetry.progress(done, max(1, num_tasks), name),
        )

    return run


def _publish(folder: Path, workdir: Path) -> None:
    """Move the result to its place; tables of an earlier attempt are replaced."""
    # From here on the folder is not whole any more. Without its key, a curation that is killed now is made again; with
    # it, tables that were moved and blocks that are half deleted would count as done.
    (folder / "key").unlink()
    for table in (PROBLEMS, ROWS, DROPPED, LEAKS, FAILING, LEAKS_PAGE):
        target, written = workdir / table, folder / "written" / table
        if target.is_dir():
            shutil.rmtree(target)
        if table != FAILING or written.exists():  # no problem has a published solution
            written.replace(target)
    shutil.rmtree(folder)


def _check_floors(plan: Plan, segments: Segments) -> Iterator[str]:
    """Yield warnings about sources of which few rows could be used; raise DataError if too few could be."""
    for number, source in enumerate(plan.sources):
        lost: Counter[str] = Counter()
        parts = [part for part in segments.parts if part.source == number]
        for part in parts:
            lost.update(part.lost)
        num_rows = sum(part.num_rows for part in parts)
        yield from check_yield(
            LedgerStep.of(READ, "row", num_in=num_rows, dropped=lost),
            f"rows of source {source.name!r} can be used",
            plan.cfg.runtime.read,
            key="curate.runtime.read",
            remedy="Repair the file, or name its row_schema",
            example=next((part.example for part in parts if part.example), ""),
        )


def _ledger(state: State, leaks: LeakCounts) -> tuple[LedgerStep, ...]:
    plan, merged, drops = state.plan, state.merged, ReasonCounts()
    rows, clean, kept = Counter[str](), Counter[str](), Counter[str]()
    tags = np.zeros(len(TAGS), dtype=np.int64)
    for part, own in state.segments.each():
        name = plan.sources[part.source].name
        outcome_N = merged.outcome_N[own]
        rows[name] += part.num_rows
        kept[name] += int((outcome_N == STAYS).sum())
        clean[name] += int(((outcome_N == STAYS) | (outcome_N == NOT_SELECTED)).sum())
        for reason, n in part.lost.items():
            drops.count(READ, reason, n)
        drops.count("length", "question_too_long", part.too_long)
        if part.num_candidates:
            tags += np.bincount(part.column("tag")[outcome_N == STAYS], minlength=len(TAGS))
    drops.count("dedup", "repeated_question", int((merged.outcome_N == REPEAT).sum()))
    drops.count("dedup", "near_duplicate", int((merged.outcome_N == NEAR).sum()))
    for reason, n in leaks.num_dropped.items():
        drops.count("decontaminate", reason, n)
    for drop in state.not_selected():
        drops.count(SELECT, drop.reason)
    read_of = {f"rows_of_{name}": n for name, n in rows.items()}
    clean_of = {f"kept_of_{name}": clean[name] for name in rows}
    kept_of = {f"kept_of_{name}": kept[name] for name in rows}
    noted = {
        READ: read_of,
        "dedup": merged.noted,
        "decontaminate": clean_of | counts_by_rule(leaks.num_by_rules),
        SELECT: kept_of,
    }
    units = {READ: "row", "length": "problem", "dedup": "problem", "decontaminate": "problem"}
    if plan.cfg.select.is_on:
        units[SELECT] = "problem"
    ledger = drops.ledger(units, num_in=rows.total(), noted=noted)
    num_kept = len(merged.kept)
    assert ledger[-1].num_out == num_kept, (ledger[-1].num_out, num_kept)
    by_tag = {tag.value: n for tag, n in zip(TAGS, tags.tolist(), strict=True) if n}
    return (
        *ledger,
        LedgerStep.of("difficulty", "problem", num_in=num_kept, dropped={}, noted=dict(sorted(by_tag.items()))),
    )


def _notes(plan: Plan, ledger: Sequence[LedgerStep], num_protected: int, num_phrases: int) -> list[str]:
    kept = next(step for step in reversed(ledger) if step.step in (SELECT, "decontaminate")).noted
    empty = [source.name for source in plan.sources if not kept.get(f"kept_of_{source.name}")]
    notes = [f"source {name}: no row was left after curation" for name in empty]
    if not num_protected:
        notes.append("there is no benchmark, so no prompt was compared with benchmark questions")
    if num_phrases:
        notes.append(
            f"{num_phrases} word n-grams occur in so many benchmark questions that no prompt was dropped for them"
        )
    return notes


# ---- tasks ----
# Run numbered tasks: in this process if there is little to do, else by the executor that the settings name.


def run_tasks(
    name: str,
    tasks: Tasks,
    num_tasks: int,
    *,
    executor: ExecutorConfig,
    folder: Path,
    is_small: bool,
    on_done: Progress,
) -> None:
    """Run the tasks 0 to `num_tasks - 1`, except those that are done. The executor keeps its notes under `folder`.

    Raise the KlearError of a task that failed; ResourceError if its process died.
    """
    missing = [task for task in range(num_tasks) if not tasks.is_done(task)]
    on_done(num_tasks - len(missing))
    if not missing:
        return
    workers = num_workers(executor) if isinstance(executor, LocalExecutorConfig) else 0
    if isinstance(executor, LocalExecutorConfig) and (is_small or min(workers, len(missing)) == 1):
        for number, task in enumerate(missing, 1):
            tasks(task)
            on_done(num_tasks - len(missing) + number)
        return
    from klear_core.data.curation.executors import run_on_executor

    run_on_executor(name, tasks, num_tasks, executor=executor, workers=workers, folder=folder, on_done=on_done)


def num_workers(executor: LocalExecutorConfig) -> int:
    """Return the number of processes: as configured, or one for each core that this process may use."""
    if executor.workers is not None:
        return executor.workers
    return usable_cpus()
