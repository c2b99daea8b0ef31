"""`klear curate`: the curation stage alone, on files, with nothing else configured."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from klear_core.artifacts.manifest import StageSummary
from klear_core.artifacts.records import whole_tables
from klear_core.config.data import FileSource
from klear_core.config.load import apply_overrides, validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.data.curation.curate import curate
from klear_core.data.curation.solutions import FAILING
from klear_core.data.curation.write import LEAKS_PAGE
from klear_core.data.datafiles import check_name, default_name
from klear_core.errors import ConfigError, KlearError
from klear_core.report.run.build import write_curation_page
from klear_core.scores import visible
from tasks.progress import ProgressLines

KEPT, DROPPED, PAGE, LEAKS = "kept.parquet", "dropped.parquet", "report.html", LEAKS_PAGE
UNSOLVED = f"{FAILING}.parquet"


def curate_files(sources: Sequence[str], benchmarks: Sequence[str], overrides: Sequence[str], *, out: Path) -> None:
    """Curate files and write `kept.parquet`, `dropped.parquet`, `report.html` and `leaks.html` to the folder `out`.

    `benchmarks` are files of questions to keep out. A run that was killed is continued if it is started again with the
    same settings and files. Raise ConfigError for settings outside `curate` and `seed`, and if
    `out` holds anything that this command has not written.
    """
    config = config_of(sources, benchmarks, overrides)
    _require_own_folder(out)
    workdir = out / ".work"
    no_benchmarks = workdir / "benchmarks"  # the questions to keep out are files here, not an artifact
    no_benchmarks.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with shown_progress("reading") as show:
            summary = curate(
                config.curate, benchmarks=no_benchmarks, seed=config.seed, workdir=workdir, telemetry=_Shown(show)
            )
        _publish(summary, workdir, out, title=out.name)
    except KlearError as e:
        if e.is_permanent:  # the blocks read so far are useless; after other errors, or a kill, the next run resumes
            shutil.rmtree(workdir, ignore_errors=True)
        raise
    shutil.rmtree(workdir)
    console.print(_drops(summary))
    for note in summary.notes:
        console.print(f"[yellow]note[/] {escape(visible(note))}")
    kept, page = (escape(str(out / name)) for name in (KEPT, PAGE))
    console.print(f"\n{summary.counts['problems']:,} problems in {kept}\nreport   {page}")


def config_of(sources: Sequence[str], benchmarks: Sequence[str], overrides: Sequence[str]) -> PipelineConfig:
    """Return a config whose `curate` reads these files. Raise ConfigError for an override of anything else."""
    settings: dict[str, object] = {
        "curate": {
            "sources": [{"kind": "file", **named} for named in _named(sources)],
            "decontaminate": {"also": _named(benchmarks)},
        }
    }
    for override in overrides:
        if not override.startswith(("curate.", "seed=")):
            raise ConfigError(f"--set {override!r}: this command takes only curate.* settings and the seed")
    return validate(apply_overrides(settings, overrides), origin="klear curate")


def _named(paths: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of files. Files with the same name get as many of their folders in it as make them differ.

    Raise ConfigError for an empty path.
    """
    if "" in paths:
        raise ConfigError("'' is no path: name files, folders or globs")
    for path in paths:
        check_name(path)
    names = {path: default_name(FileSource(path=path)) for path in paths}
    folders = {path: Path(path).absolute().parent.parts[1:] for path in paths}
    for depth in range(1, max(map(len, folders.values()), default=0) + 1):
        counts = Counter(names.values())
        for path, name in names.items():
            if counts[name] > 1:
                own = default_name(FileSource(path=path))
                names[path] = "/".join([*folders[path][-depth:], own])
    return [{"path": path, "name": names[path]} for path in paths]


def _drops(summary: StageSummary) -> Table:
    """Return a table of the steps that drop rows; the page has all counts."""
    table = Table("step", "in", "out", "dropped", box=None)
    for step in summary.ledger:
        dropped = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in step.dropped.items())
        table.add_row(step.step, f"{step.num_in:,}", f"{step.num_out:,}", escape(dropped))
    return table


ShowProgress = Callable[[int, int, str], None]
"""Shows that `done` of `total` units (0: not known) are done, with a note."""


@contextmanager
def shown_progress(what: str) -> Iterator[ShowProgress]:
    """Yield a function that shows progress: in a bar on a terminal, elsewhere in a line a minute on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total, note: bar.update(
                task, completed=done, total=total or None, description=note or what
            )
        return
    lines = ProgressLines(what, partial(console.print, markup=False))
    try:
        yield lines.update
    finally:
        lines.close()


class _Shown:
    """Shows the step of a curation and how much of it is done; a curation logs no metrics."""

    def __init__(self, show: ShowProgress) -> None:
        self._show = show

    def log(self, metrics: object, *, step: int) -> None:
        """Do nothing."""

    def add(self, metrics: object, *, step: int) -> None:
        """Do nothing."""

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show it."""
        self._show(done, total, note)


def _require_own_folder(out: Path) -> None:
    check_folder_place("--out", out)
    known = {KEPT, DROPPED, PAGE, LEAKS, UNSOLVED, ".work"}
    if not out.is_dir():
        return
    others = sorted(path.name for path in out.iterdir() if path.name not in known)
    if others:
        raise ConfigError(f"--out {out}: has other files ({', '.join(others[:3])}); name a new or empty folder")


def _publish(summary: StageSummary, workdir: Path, out: Path, *, title: str) -> None:
    """Write the result's files in the work folder, then rename them: a killed command leaves no half-written file."""
    _join(workdir, ("problems", "rows"), workdir / KEPT)
    _join(workdir, ("dropped",), workdir / DROPPED)
    write_curation_page(summary, workdir / PAGE, title=title)
    (out / UNSOLVED).unlink(missing_ok=True)
    names = [KEPT, DROPPED, PAGE, LEAKS]
    if (workdir / FAILING).is_dir():
        _join(workdir, (FAILING,), workdir / UNSOLVED)
        names.append(UNSOLVED)
    for name in names:
        (workdir / name).replace(out / name)


def _join(workdir: Path, tables: Sequence[str], file: Path) -> None:
    """Write the shards of tables whose rows correspond as one Parquet file with the columns of all, part by part.

    Large tests, which the shards keep in files beside them, are in the one file.
    """
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    for shard in sorted((workdir / tables[0]).glob("*.parquet")):
        others = [pq.read_table(workdir / other / shard.name) for other in tables[1:]]
        start = 0
        for part in whole_tables(shard):
            joined = part
            for columns in others:
                for name in columns.column_names:
                    # Columns of the same name, such as the id, have the same values.
                    if name not in joined.column_names:
                        joined = joined.append_column(name, columns[name].slice(start, part.num_rows))
            start += part.num_rows
            writer = writer or pq.ParquetWriter(file, joined.schema, compression="zstd")
            writer.write_table(joined)
    assert writer is not None, f"{tables[0]} has at least one shard"
    writer.close()


# ---- where commands write ----


_MAX_BYTES = 120  # a file system's limit is 255; below this, names of folders stay readable


def check_folder_place(option: str, folder: Path) -> None:
    """Raise ConfigError if a folder cannot be made there: a file is in the way, or nothing can be written there."""
    with _writing(option, folder):
        for place in (folder, *folder.parents):
            if place.is_dir():
                _write_to(place)
                return
            if place.exists():
                raise ConfigError(f"{option} {folder}: {place} is a file; name a folder")


def check_file_place(option: str, file: Path) -> None:
    """Raise ConfigError if a file cannot be written there: it is a folder or below a file, or nothing can be."""
    with _writing(option, file):
        if file.is_dir():
            raise ConfigError(f"{option} {file}: a folder; name a file")
        for place in file.parents:
            if place.is_dir():
                _write_to(place)
                return
            if place.exists():
                raise ConfigError(f"{option} {file}: {place} is a file")


@contextmanager
def _writing(option: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(f"{option} {place}: cannot be written to ({e.strerror})") from e


def _write_to(folder: Path) -> None:
    """Make a folder there and remove it: permissions alone do not tell, least of all for root."""
    with TemporaryDirectory(dir=folder, prefix=".klear-"):
        pass


def folder_name(parts: list[str]) -> str:
    """Return a folder's name for all parts; one that would be too long ends in a checksum of what is left out."""
    name = "-".join(parts)
    content = name.encode()
    if len(content) <= _MAX_BYTES:
        return name
    start = content[:_MAX_BYTES].decode(errors="ignore")  # without the part of a character
    return f"{start}-{hashlib.sha256(content).hexdigest()[:8]}"
