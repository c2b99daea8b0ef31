"""`klear disk` and `klear gc`: show what takes space in a workspace and its store, and collect what nothing needs."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.environment import prefect_home
from flows.runs import ShownRun, list_runs
from klear_core.artifacts.garbage import (
    Ages,
    Item,
    bytes_in,
    empty_trash,
    in_trash,
    leftovers,
    move_to_trash,
    reached,
    reports_of_failures,
    results_without_artifact,
    take_back,
    unreached,
)
from klear_core.artifacts.index import Entry, catalog
from klear_core.artifacts.manifest import ArtifactId, Manifest, read_manifest
from klear_core.artifacts.object_store import manifest_in_store
from klear_core.artifacts.run_history import RunHistory, collection_lock
from klear_core.artifacts.shared_garbage import (
    SharedItem,
    collect,
    empty_shared_trash,
    finished_work,
    unreached_seals,
    unreferenced_objects,
)
from klear_core.artifacts.store import LocalStore
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.stage import PromoteJob
from klear_core.errors import ArtifactError, ConfigError, reporting
from klear_core.train.base_model import pointed_folder

_MAX_SHOWN = 20
_MLFLOW_GC_S = 600.0
_JUST_ENDED = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of a collection: what it keeps."""

    last: int = 10
    """Number of runs, the newest, whose artifacts are kept."""
    ages: Ages = field(default_factory=Ages)


def roots_of(root: Path, entries: Mapping[str, Entry], runs: Sequence[ShownRun], rules: Rules) -> dict[str, str]:
    """Return the artifacts to keep with all they were made from, each with the reason.

    ConfigError or ResourceError if what must be kept cannot be found out: then nothing may be collected.
    """
    unreadable = RunHistory.of(root).unreadable()
    if unreadable:
        raise ConfigError(
            f"{len(unreadable)} runs were recorded by another version of Klear (the first is {unreadable[0]}), so what "
            "they need is not known; use that version, or delete their folders under history/"
        )
    roots: dict[str, str] = {}
    for name in _champions(root, entries):
        roots.setdefault(name, "champion, or the one to roll back to")
    for i, run in enumerate(runs):
        why = ""
        if run.record.is_live:
            why = f"run {run.record.run_id[:8]} is {run.record.state}"
        elif run.pin:
            why = f"run {run.record.run_id[:8]} is pinned: {run.pin}"
        elif datetime.now(UTC) - run.record.updated_at < _JUST_ENDED:
            why = f"run {run.record.run_id[:8]} ended less than an hour ago"  # its command may still show the result
        elif i < rules.last:
            why = f"run {run.record.run_id[:8]} is one of the last {rules.last}"
        if why:
            for stage in run.record.stages:
                roots.setdefault(f"{stage.kind}/{stage.fingerprint}", why)
    return roots


def _with_given_models(root: Path, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries; one that only points to a model of this workspace has the model's artifact as an input.

    Its manifest has none: a model that is given by its folder is known by its content.
    """
    artifacts = (root / "artifacts").resolve()
    found = dict(entries)
    for name, entry in entries.items():
        pointed = pointed_folder(artifacts / name)
        if pointed is not None and pointed.resolve().is_relative_to(artifacts):
            given = "/".join(pointed.resolve().relative_to(artifacts).parts[:2])
            found[name] = replace(entry, inputs=(*entry.inputs, given))
    return found


def _champions(root: Path, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield model, evaluation and decision of each registered model's champion and of the version before it.

    MLflow is asked only if a decision of this workspace, or of its shared store, promoted a model. Other nodes may have
    another MLflow: a decision of theirs that this one does not know is kept, with the model and scores that it is of.
    """
    decisions: dict[str, list[str]] = defaultdict(list)
    for entry in entries.values():
        if entry.counts.get("promoted"):
            decisions[_registered_model(root, entry)].append(entry.name)
    for name in sorted(decisions):
        from tasks.model_registry import open_registry

        registry = open_registry(WorkspaceConfig(root=str(root)), name)
        versions = {version.number: version for version in registry.versions()}
        champion = registry.champion()
        kept = [champion] if champion else []
        over = champion.promotion.over if champion else None
        while over is not None and over in versions:
            kept.append(versions[over])
            over = versions[over].promotion.over if versions[over].rollback else None
        for version in kept:
            yield from (version.promotion.model, version.promotion.evaluation, version.promotion.decision)
        known = {version.promotion.decision for version in versions.values()}
        yield from (one for one in decisions[name] if one not in known and not (root / "artifacts" / one).is_dir())


def _registered_model(root: Path, entry: Entry) -> str:
    promote = _manifest_of(root, entry).result_config.get("promote")
    name = promote.get("registered_model") if isinstance(promote, dict) else None
    if entry.kind != PromoteJob.kind or not isinstance(name, str):
        raise ArtifactError(f"{entry.name}: promoted a model, and names no registered model")
    return name


def _manifest_of(root: Path, entry: Entry) -> Manifest:
    """Return the manifest of an artifact of this workspace, or of one that only the shared store has."""
    folder, bucket = root / "artifacts" / entry.name, RunHistory.of(root).bucket
    if folder.is_dir() or bucket is None:
        return read_manifest(folder)
    found = manifest_in_store(bucket, ArtifactId(kind=entry.kind, fingerprint=entry.fingerprint))
    if found is None:
        raise ArtifactError(f"{entry.name}: is no longer in {bucket.url}")
    return found[0]


# ---- klear gc ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The result of a collection: what goes, and why the rest stays."""

    items: tuple[Item, ...]
    shared: tuple[SharedItem, ...]
    kept: Mapping[str, int]
    """Number of artifacts that stay, by reason."""


def plan_collection(root: Path, rules: Rules) -> Collection:
    """Return what a collection would take now. Changes nothing."""
    runs = list_runs(root)
    bucket = RunHistory.of(root).bucket
    entries = _with_given_models(root, catalog(LocalStore(root / "artifacts")))
    there = catalog(bucket) if bucket is not None else {}
    roots = roots_of(root, there | entries, runs, rules)
    kept = reached(there | entries, roots)
    items = [*unreached(root, entries, kept, rules.ages), *leftovers(root, entries, roots, rules.ages)]
    kept_runs = [run.record.run_id for i, run in enumerate(runs) if i < rules.last or run.pin or run.record.is_live]
    items += reports_of_failures(root, kept_runs, rules.ages)
    items += results_without_artifact(root, items, entries)
    shared: list[SharedItem] = []
    if bucket is not None:
        shared += unreached_seals(there, kept, rules.ages)
        shared += finished_work(bucket, there)
        shared += unreferenced_objects(bucket, there, rules.ages)
    reasons: dict[str, int] = defaultdict(int)
    for name in kept.keys() & (there | entries).keys():
        reasons[kept[name]] += 1
    return Collection(items=tuple(items), shared=tuple(shared), kept=dict(reasons))


def collect_garbage(root: Path, rules: Rules, *, is_dry_run: bool) -> None:
    """Print what would go; without `is_dry_run` move it to the trash, and delete what has been there for a week."""
    _require(root)
    console = Console(highlight=False, soft_wrap=True)
    if is_dry_run:
        found = plan_collection(root, rules)
        _show(console, found)
        console.print("\nnothing was changed: `klear gc --yes` moves this to the trash, for a week")
        return
    bucket = RunHistory.of(root).bucket
    with collection_lock(root):  # a run that begins meanwhile waits for the moves, which take milliseconds
        found = plan_collection(root, rules)
        now = datetime.now(UTC)
        moved = move_to_trash(root, found.items, now=now)
    if bucket is not None:
        num_needed = collect(bucket, list(found.shared), now=now)
        if num_needed:
            console.print(f"{num_needed} objects were taken back: a run needs them")
    _show(console, Collection(items=tuple(moved), shared=found.shared, kept=found.kept))
    if len(moved) < len(found.items):
        console.print(f"{len(found.items) - len(moved)} are in use now, and stay")
    freed = empty_trash(root, older_than=rules.ages.work)
    if bucket is not None:
        empty_shared_trash(bucket, older_than=rules.ages.work)
    freed += sum(_compacted(file) for file in _databases(root))
    console.print(f"\nin the trash for {rules.ages.work.days} days, `klear gc --restore` takes it back; ")
    console.print(f"{_size(freed)} deleted for good: older trash, and unused space of MLflow's and Prefect's databases")


def _show(console: Console, found: Collection) -> None:
    table = Table("what", "size", "path", "why", box=None)
    for item in sorted(found.items, key=lambda item: -item.size)[:_MAX_SHOWN]:
        table.add_row(item.what, _size(item.size), escape(f"{item.path.parent.name}/{item.path.name}"), item.why)
    for shared in sorted(found.shared, key=lambda item: -item.size)[:_MAX_SHOWN]:
        table.add_row(f"{shared.what} in the store", _size(shared.size), escape(shared.key), shared.why)
    if table.row_count:
        console.print(table)
    num_more = max(0, len(found.items) - _MAX_SHOWN) + max(0, len(found.shared) - _MAX_SHOWN)
    if num_more:
        console.print(f"and {num_more} more")
    by_what: dict[str, list[int]] = defaultdict(list)
    for what, size in [(i.what, i.size) for i in found.items] + [(i.what, i.size) for i in found.shared]:
        by_what[what].append(size)
    total = ", ".join(f"{len(sizes)} {what} ({_size(sum(sizes))})" for what, sizes in by_what.items())
    console.print(f"goes: {total or 'nothing'}")
    for why, num in sorted(found.kept.items(), key=lambda kept: -kept[1])[:_MAX_SHOWN]:
        console.print(f"stays: {num} artifacts, {escape(why)}")


def restore(root: Path, which: str) -> None:
    """Take things back from the trash; `all`, or the start of an artifact's name or fingerprint."""
    _require(root)
    with collection_lock(root):
        restored = take_back(root, "" if which == "all" else which)
    if not restored:
        held = ", ".join(sorted({path.name for _, path in in_trash(root)})) or "nothing"
        raise ConfigError(f"--restore {which}: not in the trash of {root}, which has {held}")
    for place in restored:
        typer.echo(f"restored {place}")


def _databases(root: Path) -> list[Path]:
    found = (root / "mlflow" / "mlflow.db", prefect_home(WorkspaceConfig(root=str(root))) / "prefect.db")
    return [file for file in found if file.is_file()]


def _compacted(file: Path) -> int:
    """Give unused space of an SQLite database back to the disk; return its bytes. One in use is left for another time.

    Of MLflow's, runs that were deleted a week ago in its UI go first.
    """
    before = file.stat().st_size
    with reporting(f"{file} was left as it is"):
        if file.name == "mlflow.db":
            uri = f"sqlite:///{file}"
            command = [sys.executable, "-m", "mlflow", "gc", "--older-than", "7d0h0m0s", "--backend-store-uri", uri]
            subprocess.run(command, check=True, capture_output=True, timeout=_MLFLOW_GC_S)
        with closing(sqlite3.connect(file, timeout=1.0)) as database:
            database.execute("VACUUM")
    return max(0, before - file.stat().st_size)


def _require(root: Path) -> None:
    if not (root / "artifacts").is_dir():
        raise ConfigError(f"{root}: no workspace of Klear; --root names one")


# ---- klear disk ----


def show_disk(root: Path) -> None:
    """Print the bytes of a workspace by kind of artifact, of other things, and of what single runs alone hold."""
    _require(root)
    console = Console(highlight=False)
    entries = catalog(LocalStore(root / "artifacts"))
    bucket = RunHistory.of(root).bucket
    _print_kinds(console, "artifacts", entries)
    if bucket is not None:
        _print_kinds(console, f"in {bucket.url}", catalog(bucket))
    others = Table("other", "size", box=None)
    for name, size in _others(root):
        others.add_row(escape(name), _size(size))
    console.print(others)
    runs = list_runs(root)
    needed = {run.record.run_id: _needed(run, entries) for run in runs}
    num_users: dict[str, int] = defaultdict(int)
    for names in needed.values():
        for name in names:
            num_users[name] += 1
    table = Table("run", "name", "holds", "alone", box=None)
    sizes: dict[str, int] = {}
    for run_id, names in needed.items():
        sizes[run_id] = sum(entries[name].size for name in names if num_users[name] == 1)
    for run in sorted(runs, key=lambda run: -sizes[run.record.run_id])[:_MAX_SHOWN]:
        r = run.record
        label = escape(f"{r.name} [{run.label}]" if run.label else r.name)
        table.add_row(
            r.run_id[:8], label, _size(sum(entries[n].size for n in needed[r.run_id])), _size(sizes[r.run_id])
        )
    if runs:
        console.print(table)


def _needed(run: ShownRun, entries: Mapping[str, Entry]) -> set[str]:
    own = {f"{stage.kind}/{stage.fingerprint}": "" for stage in run.record.stages}
    return reached(entries, own).keys() & entries.keys()


def _print_kinds(console: Console, title: str, entries: Mapping[str, Entry]) -> None:
    by_kind: dict[str, list[int]] = defaultdict(list)
    for entry in entries.values():
        by_kind[entry.kind].append(entry.size)
    table = Table(escape(title), "number", "size", box=None)
    for kind, sizes in sorted(by_kind.items(), key=lambda found: -sum(found[1])):
        table.add_row(kind, str(len(sizes)), _size(sum(sizes)))
    console.print(table)


_OTHERS: Mapping[str, str] = {
    "unfinished work": "artifacts/.building",
    "set aside": "artifacts/.aside",
    "trash": "artifacts/.trash",
    "cache of the store": "artifacts/.objects",
    "reports of failed runs": "failed",
    "records and logs of runs": "history",
    "MLflow": "mlflow",
    "Prefect": "prefect",
    "cached results": "prefect-results",
}


def _others(root: Path) -> Iterator[tuple[str, int]]:
    for name, folder in _OTHERS.items():
        size = bytes_in(root / folder)
        if size:
            yield name, size


def _size(num: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1000
    return f"{num:.1f} TB"
