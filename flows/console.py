"""Print to the terminal: the plan, the result of a run, and the table of `klear judge`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from flows.own_server import is_temporary_server
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from flows.result import PipelineResult
    from klear_core.artifacts.manifest import ArtifactRef
    from klear_core.artifacts.store import CheckedBy
    from klear_core.evaluate.judge_file import JudgeSummary
    from klear_core.pipeline.plan import StagePlan
    from klear_core.report.inputs import ReportInputs

_MAX_BAD_ROWS = 5


def show_plan(
    config: PipelineConfig,
    chosen: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    checked_by: CheckedBy = "size",
    with_config: bool = False,
    is_exact: bool = False,
) -> None:
    """Print which of the chosen stages (None: all) would run or be reused and why, their cost, and what is missing.

    `checked_by` says how artifacts are compared with their manifests; `with_config` adds all settings, with defaults;
    `is_exact` measures the memory of trainings on fake tensors.
    """
    from flows.costs import show_costs
    from klear_core.config.settings import config_digest
    from klear_core.pipeline.detectable import detectable_lines
    from klear_core.pipeline.exposure import exposures
    from klear_core.pipeline.plan import plan_stages
    from klear_core.pipeline.preflight import problems_with

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{config.name}[/] seed {config.seed}, config {config_digest(config)}, valid")
    missing = problems_with(config, chosen, again=again)
    try:
        plans = plan_stages(config, chosen, again=again, checked_by=checked_by)
    except ConfigError as e:
        if not missing:
            raise  # else the reason is one of those shown below
        console.print(f"[yellow]which stages would run cannot be told yet:[/] {escape(str(e))}")
        plans = []
    if plans:
        console.print(_plan_table(plans))
    show_costs(console, config, chosen, is_exact=is_exact)
    for line in detectable_lines(config):
        console.print(f"[dim]scores:[/] {escape(line)}")
    for exposure in exposures(config):
        console.print(f"[yellow]scores:[/] {escape(exposure.warning)}")
    for problem in missing:
        console.print(f"[yellow]before you run:[/] {escape(problem)}")
    if with_config:
        console.print_json(config.model_dump_json())


def _plan_table(plans: Sequence[StagePlan]) -> Table:
    table = Table("stage", "does", "artifact", "why", box=None)
    for plan in plans:
        does = f"[red]{plan.action}[/]" if plan.action == "damaged" else plan.action
        table.add_row(plan.stage, does, plan.fingerprint[:8], escape(plan.why))
    return table


def show_result(config: PipelineConfig, result: PipelineResult, *, num_made: int) -> None:
    """Print the scores, warnings, the report's path, and commands to inspect the run and ask its model."""
    from flows.find import name_of
    from klear_core.report.product import product_of
    from klear_core.report.read import read_facts
    from klear_core.report.terminal import score_table

    console = Console(highlight=False, soft_wrap=True)
    facts = read_facts(_report_inputs(config, result))
    console.print()
    console.print(score_table(facts, with_claims=result.report is not None))
    if num_made == 0:
        console.print("\nall stages reused: nothing has changed since the last run")
    console.print()
    if result.report is not None:
        console.print(f"report   {escape(str(_short(result.report)))}")
    root = escape(shlex.quote(config.workspace.root))  # in commands to copy
    api_url = os.environ.get("PREFECT_API_URL", "")
    if not api_url or is_temporary_server(api_url):  # the user's own server shows the run already
        console.print(
            f"open     klear ui --root {root}      Prefect on http://127.0.0.1:4200, MLflow on http://127.0.0.1:5000"
        )
    trained = [stage.name for stage in facts.stages if stage.stage.job.training() is not None]
    shown = trained[0] if trained else list(result.refs)[-1]
    console.print(f"inspect  klear show {shown} --root {root}")
    product = product_of(facts)
    if product is not None:
        stage = product.stage.name
        which = name_of(result.refs[stage].path, stage, product.root)
        console.print(f"model    {escape(str(product.folder))}")
        console.print(f"ask it   {escape(product.command(which))}")


def _short(path: Path) -> Path:
    """Return the path relative to the working directory if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _report_inputs(config: PipelineConfig, result: PipelineResult) -> ReportInputs:
    from klear_core.config.jobs import ReportJob
    from tasks.report_inputs import report_inputs
    from tasks.run_info import RunInfo

    info = RunInfo(
        workspace=config.workspace,
        run_id=result.flow_run_id,
        run_name=config.name,
        stage="",
        started_at=datetime.now(UTC),
    )
    return report_inputs(info, ReportJob.of(config), _refs_to_show(config, result))


def _refs_to_show(config: PipelineConfig, result: PipelineResult) -> Mapping[str, ArtifactRef]:
    """Return the run's artifacts without its report; if it scored a model, and made no report, add all scores."""
    from klear_core.pipeline.fingerprints import fingerprints_of
    from klear_core.pipeline.graph import stages_of
    from klear_core.pipeline.workspace import open_store

    stages, store = stages_of(config), open_store(config.workspace)
    refs = {stage.name: result.refs[stage.name] for stage in stages if stage.name in result.refs and not stage.job.page}
    evaluations = [stage.name for stage in stages if stage.job.scores_model]
    if result.report is not None or refs.keys().isdisjoint(evaluations):
        return refs
    try:
        ids = fingerprints_of(stages, config.workspace)
    except ConfigError:  # another stage's source is missing, so fingerprints of its scores are unknown
        return refs
    for name in evaluations:
        own = ids[name]
        if name in refs or store.damage(own.kind, own.fingerprint):
            continue
        found = store.find(own.kind, own.fingerprint)
        if found is not None:
            refs[name] = found
    return refs


def judge(file: Path, overrides: list[str], *, out: Path | None, bare_code: bool) -> None:
    """Judge a file of answers and print the outcomes; DataError afterwards if rows are malformed or none was judged."""
    from flows.out_place import check_file_place
    from klear_core.config.load import apply_override, validate
    from klear_core.evaluate.judge_file import judge_file

    if out is not None:
        check_file_place("--out", out)
    settings: dict[str, object] = {}
    for override in overrides:
        # Any other setting would be valid, too, because the whole config is validated, and would change nothing.
        if not override.startswith("verify."):
            raise ConfigError(f"--set {override!r}: this command takes only verify.* settings")
        settings = apply_override(settings, override)
    config = validate(settings, origin="--set")
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("judging", total=None)
        summary = judge_file(
            file,
            config.verify,
            out=out,
            bare_code=bare_code,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
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
