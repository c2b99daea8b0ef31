"""`klear compare`, `klear champion`, `klear publish`, `klear rl replay`: what is done with finished runs."""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.curate_files import check_folder_place, folder_name
from flows.servers import check_tracking
from flows.show import find_artifact, path_of
from flows.stored_answers import evaluations_of, newest_evaluation, score_table
from klear_core.artifacts.hub import require_token, upload
from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.model_files import CARD
from klear_core.artifacts.remote_paths import store_of
from klear_core.artifacts.run_history import RunHistory
from klear_core.artifacts.store import LocalStore
from klear_core.config.load import explained, toml_value
from klear_core.config.losses import GPPO_PRESETS, LOSS_KINDS, GppoConfig, LossConfig
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.rl import RlConfig
from klear_core.config.settings import expanded
from klear_core.config.stage import ReportJob, RlJob
from klear_core.errors import ArtifactError, ConfigError
from klear_core.evaluate.answers.stored import is_evaluation
from klear_core.evaluate.compare.gate import GatePolicy, GateVerdict, gate, read_policy, take_look
from klear_core.evaluate.compare.promotion import Decision, read_decision, short_name
from klear_core.report.publish import published_artifact, write_data, write_model
from klear_core.report.run.final_table import decision_lines
from klear_core.report.several.compared_runs import read_run
from klear_core.report.several.comparison import COMPARISON_PAGE, DifferenceCell, RunComparison, ScoreRow, compare_runs
from klear_core.train.base_model import model_folder
from klear_core.train.gguf_files import GgufDtype
from tasks.mlflow_database import database_file
from tasks.model_registry import Registry, Version, folder_of, open_registry
from tasks.resources import learner_ranks
from tasks.tracking import tracking_uri

if TYPE_CHECKING:
    from klear_core.rl.replay import LossEffect

_STYLES = {"better": "green", "worse": "red"}
_MAX_SETTINGS = 12


def compare(which: Sequence[str], *, root: Path, out: Path | None) -> None:
    """Compare runs, each named as `klear runs` prints it, by an artifact, or by its workspace (the newest run)."""
    if len(which) < 2:
        raise ConfigError(f"klear compare {' '.join(which)}: name at least two runs")
    if out is not None:
        check_folder_place("--out", out)  # first: it reads nothing
    folders = [_find_report(name, root) for name in which]
    repeated = [folder for i, folder in enumerate(folders) if folder in folders[:i]]
    if repeated:
        raise ConfigError(f"klear compare {' '.join(which)}: two of these are one run, {repeated[0].name}")
    folder = out or root / "compared" / folder_name([folder.name[:8] for folder in folders])
    check_folder_place("--out", folder)
    comparison = compare_runs([read_run(report) for report in folders], folder)
    console = Console(highlight=False, soft_wrap=True)
    show_comparison(console, comparison)
    console.print(f"\npage     {folder / COMPARISON_PAGE}", markup=False)
    if comparison.viewer is not None:
        console.print(f"answers  {comparison.viewer.page}#show=flipped", markup=False)


def show_comparison(console: Console, comparison: RunComparison) -> None:
    """Print scores of sampled answers with their differences, and the settings that differ; the page has all."""
    for row in comparison.rows:
        if row.decoding == "sampled":
            console.print(_comparison_table(row, comparison))
            for run, cell in zip(comparison.runs, row.cells, strict=True):
                if cell is not None and cell.templates:
                    console.print(f"  templates, {escape(run.label)}: {cell.templates}")
                if cell is not None and cell.chosen:
                    console.print(f"  [yellow]chosen on this benchmark[/], {escape(run.label)}: {escape(cell.chosen)}")
    if comparison.stages_of_some:
        console.print(
            f"[dim]stages that not all runs have, without their settings:[/] {escape(comparison.stages_of_some)}"
        )
    for setting in comparison.settings[:_MAX_SETTINGS]:
        console.print(f"[dim]{escape(setting.key)}[/] {escape(' | '.join(setting.values))}")
    if len(comparison.settings) > _MAX_SETTINGS:
        console.print(f"and {len(comparison.settings) - _MAX_SETTINGS} more settings that differ; the page has all")


def _find_report(which: str, root: Path) -> Path:
    """Return the folder of the report's artifact that `which` names; a model or another artifact means its newest."""
    workspace = path_of(which)
    if (workspace / "artifacts").is_dir():
        return find_artifact("report", workspace).absolute()
    records = RunHistory.of(root).records()
    by_id = [run for run in records if run.run_id.startswith(which)]
    if len(by_id) > 1:
        raise ConfigError(f"{which!r} begins the ids of {len(by_id)} runs; give more of it")
    by_name = by_id or [run for run in records if run.name == which]
    # A run that failed has a page too, which is no artifact.
    pages = [Path(run.report).parent for run in by_name if run.report]
    finished = [page.name for page in pages if page.parent.name == ReportJob.kind]
    if by_name and not finished:
        run = by_name[0]
        raise ArtifactError(f"{which}: run {run.run_id[:8]} ({run.state}) has no report of its end, to compare it by")
    if finished:
        which = f"{ReportJob.kind}/{finished[0]}"
    artifact = find_artifact(which, root).absolute()
    own = read_manifest(artifact)
    if own.kind == ReportJob.kind:
        return artifact
    reports = []
    for folder in LocalStore(artifact.parents[1]).folders(ReportJob.kind):
        manifest = read_manifest(folder)
        if any((record.kind, record.fingerprint) == (own.kind, own.fingerprint) for record in manifest.inputs):
            reports.append((manifest.created_at, folder))
    if not reports:
        raise ArtifactError(f"{artifact}: is no report of a run, and no report here has it")
    return max(reports)[1]


def _comparison_table(row: ScoreRow, comparison: RunComparison) -> Table:
    table = score_table(f"{row.benchmark}, {row.maker}", "run")
    differences = {d.run: d for d in row.differences}
    for i, (run, cell) in enumerate(zip(comparison.runs, row.cells, strict=True)):
        if cell is not None:
            score = f"{cell.value}\n[dim]{cell.interval}[/]"
            change = _change(differences.get(i))
            table.add_row(escape(run.label), score, cell.cut_off, cell.no_answer, cell.not_judged, change)
    return table


def _change(difference: DifferenceCell | None) -> str:
    if difference is None:
        return ""
    if not difference.is_paired:
        return f"[dim]{difference.standing}[/]"
    style = _STYLES.get(difference.standing, "yellow")
    note = ", not shown" if difference.standing == "not_shown" else ""
    on = f"{difference.num_problems:,} shared problems"  # runs of other seeds may share a few of many
    notes = "".join(f"\n{each}" for each in difference.notes)
    return f"[{style}]{difference.value}[/]\n[dim]{difference.interval}{note}\n{on}{notes}[/]"


# ---- klear gate ----


_GATE_STATUS: Mapping[GateVerdict, int] = {"passed": 0, "failed": 1, "inconclusive": 3}
_MARKS: Mapping[GateVerdict, str] = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "inconclusive": "[yellow]?[/]"}


def gate_evaluations(old: str, new: str, policy: Path | None, *, is_json: bool, root: Path) -> int:
    """Print the verdict on the evaluation `new` against `old`, and return its exit status.

    Raise ConfigError, whose status no verdict has, if there is none: an evaluation is missing or damaged, or both are
    the same.
    """
    rule = read_policy(policy) if policy else GatePolicy()
    try:
        before, after = (_evaluation_named(name, root) for name in (old, new))
        result = gate(rule, after, before, take=lambda: take_look(rule, after, before, record=root / "gates"))
    except ArtifactError as error:
        raise ConfigError(str(error)) from error
    if is_json:
        Console().print_json(result.model_dump_json())
        return _GATE_STATUS[result.verdict]
    console = Console(highlight=False, soft_wrap=True)
    for check in result.checks:
        verdict: GateVerdict = "passed" if check.is_passed else "inconclusive" if check.is_inconclusive else "failed"
        console.print(f"{_MARKS[verdict]} {escape(check.name)}: {escape(check.text)}")
    at = f", look {result.look} of {len(rule.looks)}" if len(rule.looks) > 1 else ""
    console.print(f"{_MARKS[result.verdict]} {result.verdict}: {after.name[:8]} against {before.name[:8]}{at}")
    return _GATE_STATUS[result.verdict]


def _evaluation_named(which: str, root: Path) -> Path:
    """Return the folder of an evaluation, or of the newest one of a model."""
    artifact = find_artifact(which, root)
    return artifact if is_evaluation(artifact) else newest_evaluation(artifact)


# ---- klear champion, klear rollback ----


def show_champion(name: str, *, root: Path) -> None:
    """Print the champion, the decision that made it so, and all versions. ConfigError if there is none."""
    registry = _registry(name, root)
    champion = registry.champion()
    if champion is None:
        raise ConfigError(
            f"{name!r} has no champion: a run whose profile has [promote] makes one, if its model passes the rule"
        )
    console = Console(highlight=False, soft_wrap=True)
    promotion = champion.promotion
    console.print(f"[bold]{name}, version {champion.number}[/]  {short_name(promotion.model)}", highlight=False)
    if champion.rollback is not None:
        console.print("[yellow]a rollback of this version was begun and not finished: repeat `klear rollback`[/]")
    model, scores = folder_of(promotion.model_uri), folder_of(promotion.evaluation_uri)
    console.print(f"model    {model}\nscores   {scores}", markup=False)
    decision = folder_of(promotion.decision_uri)
    console.print(f"decided  {champion.promoted_at} in run {promotion.run}, {decision}", markup=False)
    for line in _evidence(folder_of(promotion.decision_uri)):
        console.print(line)
    console.print()
    for version in registry.versions():
        console.print(_line(version, champion))


def roll_back(name: str, *, root: Path, why: str, by: str) -> None:
    """Give the alias back to the former champion and say so. ConfigError if there is none, or no reason is given."""
    if not why.strip():
        raise ConfigError('klear rollback --why "": a reason is needed, for the record')
    lost, has = _registry(name, root).roll_back(by=by or getpass.getuser(), why=why.strip())
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"version {has.number} ({short_name(has.promotion.model)}) is champion of {name!r} again; "
        f"version {lost.number} ({short_name(lost.promotion.model)}) was rolled back"
    )


def _registry(name: str, root: Path) -> Registry:
    workspace = WorkspaceConfig(root=str(root))
    file = database_file(tracking_uri(workspace))
    if file is not None and not file.is_file():
        raise ConfigError(
            f"{file}: no such database, so {name!r} has no champion; --root names the workspace of a run, or "
            "MLFLOW_TRACKING_URI the server that it was tracked by"
        )
    check_tracking(workspace)
    return open_registry(workspace, name)


def _evidence(folder: Path) -> list[Text]:
    try:
        decision: Decision = read_decision(folder)
    except ArtifactError as e:
        return [Text(f"the evidence is gone: {e}", style="yellow")]
    return decision_lines(decision, with_all=True)


def _line(version: Version, champion: Version) -> Text:
    """Describe a version: its model, when it became champion in whose place, and what came of it."""
    promotion = version.promotion
    over = "" if promotion.over is None else f" in place of version {promotion.over}"
    text = f"version {version.number}  {short_name(promotion.model)}  "
    text += (
        f"promoted {version.promoted_at}{over}" if version.promoted_at else "never promoted: its run was ended before"
    )
    if version.rollback is not None:
        text += f"; {version.rollback.sentence}"
    return Text(text, style="bold" if version.number == champion.number else "dim")


# ---- klear publish ----


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def publish(
    which: str,
    to: str,
    *,
    root: Path,
    licence: str,
    is_private: bool,
    gguf: GgufDtype | None = None,
    data: Sequence[str] = (),
) -> None:
    """Write the model that `which` names to a folder; upload it if `to` is a name on the Hub.

    What the stages in `data` made for it is written beside it as a data set, `<to>-data`.
    """
    repo = _hub_id(to)  # first, like the checks of token and folder: nothing has been read or written yet
    if repo:
        require_token(repo)
    else:
        check_folder_place("--to", expanded(to))
    there = published_artifact(path_of(which))
    artifact = find_artifact(which if there is None else f"{there.kind}/{there.fingerprint}", root).absolute()
    try:
        model = model_folder(artifact)
    except ArtifactError as e:
        raise ArtifactError(f"{e}; name a stage that makes a model, or its fingerprint") from e
    folder = root / "published" / repo.replace("/", "--") if repo else expanded(to)
    console = Console(highlight=False, soft_wrap=True)
    name, data_folder = repo.partition("/")[2] or folder.name, folder.with_name(f"{folder.name}-data")
    written = [write_data(artifact, data, data_folder, name=data_folder.name)] if data else []
    scores = evaluations_of(artifact)
    written.append(write_model(artifact, model, scores, folder, name=name, licence=licence, gguf=gguf))
    for published in written:
        for warning in published.warnings:
            console.print(f"[yellow]warning[/] {escape(warning)}")
        size = f"{published.num_bytes / 1e6:,.1f} MB"
        console.print(f"folder   {published.folder}  ({size})\ncard     {published.folder / CARD}", markup=False)
    if repo:
        message = f"Klear {artifact.parent.name}/{read_manifest(artifact).fingerprint}"
        if data:
            address = upload(data_folder, f"{repo}-data", is_private=is_private, message=message, repo_type="dataset")
            console.print(f"uploaded {address}")
        console.print(f"uploaded {upload(folder, repo, is_private=is_private, message=message)}")


def _hub_id(to: str) -> str:
    """Return `to` if it is a name on the Hub, `owner/name`; empty if it is a folder, which may be `./owner/name`."""
    if not _HUB_ID.fullmatch(to):
        return ""
    if Path(to).parent.exists():
        raise ConfigError(
            f"--to {to}: a name on the Hub, or a folder in {Path(to).parent}/? For a folder, write ./{to}"
        )
    return to


# ---- klear rl replay ----


_TABLE_WIDTH = 120
"""Characters that the table needs, with the name of a loss that has one or two settings."""
_BETWEEN_SETTINGS = re.compile(r",(?![^{\[]*[}\]])")
"""A comma that is not inside the braces or brackets of a value."""
_LEGEND = """\
value, gradient: means over the mini-batches; cosine: of the change of all weights with that of the run's loss
A>0, A<0: tokens of that advantage that are clipped, decayed or masked, of all tokens; F: mean weight of theirs
KL: from the old policy to the new, KL(old, new), nats per token; entropy: change of the mean, nats"""


def replay_step(step: int, which: str, given: Sequence[str], *, root: Path, num_workers: int | None) -> None:
    """Print a table with one row per loss: `given` ones (`clip`, `dgpo,high_root=3`), or all at their defaults."""
    folder = find_artifact(which, root)
    manifest = read_manifest(folder)
    job = _job_of(folder, manifest)
    cfg = job.rl
    if num_workers is not None:
        # Validated, which a copy is not: the number must fit the other settings, such as context_parallel.
        runtime = cfg.runtime.model_dump() | {"num_workers": num_workers}
        cfg = _validated(cfg.model_dump() | {"runtime": runtime}, origin=f"--workers {num_workers}")
    losses = {text: parse_loss(text) for text in given} or _other_losses(cfg.loss)

    from klear_core.rl.replay import Replay, replay  # torch takes seconds, and wrong input is an error before

    model = _model_of(folder, manifest)
    asked = Replay(cfg=cfg, seed=job.seed, model=model, folder=folder, step=step, losses=losses)
    with learner_ranks(cfg.runtime, model) as run_ranks:
        found = replay(asked, run_ranks)
    # A file has no width to fit, and in a narrow terminal a wrapped line is better than numbers without digits.
    console = Console(highlight=False, width=max(_TABLE_WIDTH, Console().width))
    console.print(f"RL step {step} of {manifest.stage} {manifest.fingerprint[:8]}: {found.num_samples} answers")
    console.print(_effects_table({f"{cfg.loss.kind} (the run's)": found.own} | found.others))
    if found.left_out:
        names = ", ".join(found.left_out)
        console.print(f"left out: {names}; they look at whole answers, which a teacher's likeliest tokens are not")
        console.print("learnt with (rl_teacher.top_k)")
    console.print(_LEGEND, style="dim")
    console.print(_comparison(found.difference))


def parse_loss(text: str) -> LossConfig:
    """Return the loss that `kind` or `kind,key=value,...` names; ConfigError if it is none."""
    kind, *pairs = _BETWEEN_SETTINGS.split(text)
    settings: dict[str, object] = {"kind": kind.strip()}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--loss {text!r}: expected kind,key=value, for example gppo,beta_low=0.25")
        settings[key.strip()] = toml_value(value.strip())
    return _validated({"loss": settings}, origin=f"--loss {text!r}").loss


def _validated(settings: Mapping[str, object], *, origin: str) -> RlConfig:
    try:
        return RlConfig.model_validate(settings)
    except ValidationError as e:
        raise ConfigError(f"{origin}: {explained(e, RlConfig)}") from e


def _other_losses(own: LossConfig) -> dict[str, LossConfig]:
    """Return every kind with its defaults, gppo with each of its presets, but not the run's own loss."""
    losses: dict[str, LossConfig] = {f"gppo,preset={name}": parse_loss(f"gppo,preset={name}") for name in GPPO_PRESETS}
    for cls in LOSS_KINDS:
        if cls is not GppoConfig:
            losses[cls().kind] = cls()
    return {name: loss for name, loss in losses.items() if loss != own}


def _job_of(folder: Path, manifest: Manifest) -> RlJob:
    if manifest.kind != RlJob.kind:
        raise ArtifactError(f"{folder}: an artifact of kind {manifest.kind}; only rl stages have steps to replay")
    try:
        return RlJob.model_validate(manifest.config)
    except ValidationError as e:
        raise ArtifactError(f"{folder}: its settings are not of this version of Klear: {explained(e, RlJob)}") from e


def _model_of(folder: Path, manifest: Manifest) -> Path:
    """Return the folder of the model that the stage began with, in the same store."""
    (model,) = [record for record in manifest.inputs if record.role == "model"]
    found = store_of(folder).find(model.kind, model.fingerprint)
    if found is None:
        raise ArtifactError(f"{model.kind}/{model.fingerprint}: the model that {manifest.stage} began with is gone")
    return found.path


def _effects_table(rows: Mapping[str, LossEffect]) -> Table:
    table = Table(box=None)
    table.add_column("loss", overflow="fold")  # a long name gives way, and no number does
    for header in ("value", "gradient", "cosine", "A>0", "A<0", "F, A>0", "F, A<0", "KL", "entropy"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, effect in rows.items():
        table.add_row(escape(name), *_cells(effect.metrics, effect.cosine, effect.kl, effect.entropy_change))
    return table


def _cells(metrics: Mapping[str, float], cosine: float, kl: float, entropy_change: float) -> list[str]:
    """Return the cells of one loss; a dash where there is no number, as after a step whose updates were skipped."""

    def shown(name: str, form: str) -> str:
        return form.format(metrics[name]) if name in metrics else "-"

    return [
        shown("rl/loss/mean", "{:.4f}"),
        shown("rl/grad/norm", "{:.3f}"),
        "-" if math.isnan(cosine) else f"{cosine:.4f}",
        shown("rl/clip/positive_frac", "{:.2%}"),
        shown("rl/clip/negative_frac", "{:.2%}"),
        shown("rl/weight/positive", "{:.3f}"),
        shown("rl/weight/negative", "{:.3f}"),
        f"{kl:.3g}",
        f"{entropy_change:+.4f}",
    ]


def _comparison(difference: float) -> str:
    if difference == 0:
        return "The run's loss gave every metric as it was logged, to the bit."
    if math.isinf(difference):
        return "[yellow]The run's loss gave other metrics than were logged: the code is another than the run's.[/]"
    return (
        f"The run's loss gave the metrics that were logged, but for {difference:.1e} of one of them: "
        "rounding differs on other devices and with other numbers of processes."
    )
