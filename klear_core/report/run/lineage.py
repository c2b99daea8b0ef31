"""Follow a model back to its sources through the manifests of a store, and lay out the graph of artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from klear_core.artifacts.hub import HubFiles
from klear_core.artifacts.manifest import MANIFEST, OUTSIDE_KINDS, GivenRecord, Manifest, manifest_folder, read_manifest
from klear_core.artifacts.model_files import licence_in
from klear_core.config.data import HubRuntime
from klear_core.config.data_jobs import BenchmarksJob, GivenProblemsJob, GivenTracesJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import BaseJob
from klear_core.errors import ArtifactError
from klear_core.train.base_model import pointed_folder

if TYPE_CHECKING:
    from klear_core.report.run.facts import StageFacts

NOT_STATED = "not stated"
NO_LICENCE_NEEDED = "none needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """An artifact that a model is made from, or the model itself."""

    folder: Path
    """Holds its manifest; its files may be on another node."""
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A data set, model or teacher from outside Klear that a model was made from."""

    what: str
    """Its role: `base model`, `problems`, `traces`, `benchmark questions, kept out`, `teacher`."""
    name: str
    licence: str
    datasets: tuple[str, ...] = ()
    """Data sets of the Hub that were trained on, `owner/name`; empty for models, and for questions kept out."""


def ancestors(model: Path) -> list[Ancestor]:
    """Return a model's artifact and all that it was made from, as far as they are in the store, sources first."""
    store = model.absolute().parents[1]
    found: dict[Path, Ancestor] = {}

    def visit(folder: Path) -> None:
        if folder in found:
            return
        manifest = read_manifest(folder)
        for record in manifest.inputs:
            # A missing artifact is left out: the rest of the lineage is still worth showing.
            source = None if record.kind in OUTSIDE_KINDS else manifest_folder(store, record)
            if source is not None:
                visit(source)
        found[folder] = Ancestor(folder=folder, manifest=manifest)

    visit(model.absolute())
    return list(found.values())


def pointed_artifact(artifact: Path) -> Path | None:
    """Return the artifact of a run of ours that holds a given model's files; None if the files are from elsewhere.

    `artifact` may be of any kind. Its own manifest names no inputs if its model was given, so its lineage goes on in
    the returned artifact.
    """
    pointed = pointed_folder(artifact)
    if pointed is None or not (pointed.parent / MANIFEST).is_file():
        return None
    return pointed.parent


def data_sources(lineage: Sequence[Ancestor]) -> list[DataSource]:
    """Return the base model, teachers and data sets behind a model, each once, with the licence that is known."""
    found: dict[tuple[str, str], DataSource] = {}
    for ancestor in lineage:
        for source in _sources_of(ancestor.manifest):
            found.setdefault((source.what, source.name), source)
    return list(found.values())


def own_licence(lineage: Sequence[Ancestor]) -> str:
    """Return the licence of the given model that a model, last in `lineage`, was trained from; empty if none is known.

    A given model that only tagged problems does not count.
    """
    known = {(a.manifest.kind, a.manifest.fingerprint): a.manifest for a in lineage}
    manifest: Manifest | None = lineage[-1].manifest
    while manifest is not None and manifest.given is None:
        start = next((i for i in manifest.inputs if i.role == "model"), None)
        manifest = known.get((start.kind, start.fingerprint)) if start else None
    if manifest is None or manifest.given is None or manifest.given.licence == NOT_STATED:
        return ""
    return manifest.given.licence


def run_config(model: Path) -> PipelineConfig | None:
    """Return the settings of the newest run whose report names this model; None if no report here does."""
    own = read_manifest(model)
    reports = []
    for folder in (model.absolute().parents[1] / "report").glob("*"):
        try:
            manifest = read_manifest(folder)
        except ArtifactError:
            continue  # damaged: the next run reports it and moves it aside
        if any(i.fingerprint == own.fingerprint and i.kind == own.kind for i in manifest.inputs):
            reports.append((manifest.created_at, manifest.config.get("config")))
    # Newest first: a model may be in the reports of several runs, such as one that only evaluated it.
    for _, config in sorted(reports, key=lambda report: report[0], reverse=True):
        try:
            return PipelineConfig.model_validate(config)
        except ValidationError:
            continue  # of another version of Klear
    return None


def _sources_of(manifest: Manifest) -> Iterator[DataSource]:
    config: Mapping[str, Any] = manifest.config
    given = manifest.given
    if given is not None:
        yield _given_source(manifest, given)
    elif manifest.kind == BaseJob.kind:
        yield DataSource(what="base model", name="random weights, made by Klear", licence=NO_LICENCE_NEEDED)
    for source in config.get("curate", {}).get("sources", ()):
        yield _described("problems", source)
    if manifest.kind == BenchmarksJob.kind:
        for source in config.get("sources", {}).values():
            # not among the data sets that a card names as trained on
            yield replace(_described("benchmark questions, kept out", source), datasets=())
    teacher = config.get("distill", {}).get("teacher", {})
    if teacher and teacher.get("kind") != "local":  # a local one is a model of the lineage
        name = teacher.get("model") or f"{teacher.get('kind')}, a program of Klear's"
        yield DataSource(
            what="teacher", name=str(name), licence=NOT_STATED if teacher.get("model") else NO_LICENCE_NEEDED
        )


def _given_source(manifest: Manifest, given: GivenRecord) -> DataSource:
    """Return the source of a given result: its repositories, or its files or folder without their place."""
    # A model that was given for a stage is called by that stage, as it may be a tagger or a teacher.
    roles = {BaseJob.kind: "base model", GivenTracesJob.kind: "traces", GivenProblemsJob.kind: "problems"}
    what = roles.get(manifest.kind, manifest.stage)
    config: Mapping[str, Any] = manifest.config
    rows = config.get("runtime", {}).get("sources", ())
    if not rows:
        model = config.get("model") or config.get("runtime", {})
        is_folder = "path" in model
        # two parts, because many a model's folder is called `model`
        name = "/".join(PurePath(given.origin).parts[-2:]) if is_folder else given.origin
        return DataSource(what=what, name=name, licence=given.licence)
    described = [_described(what, source) for source in rows]
    datasets = dict.fromkeys(repo for source in described for repo in source.datasets)
    name = ", ".join(dict.fromkeys(source.name for source in described))
    return DataSource(what=what, name=name, licence=given.licence, datasets=tuple(datasets))


def _described(what: str, source: Mapping[str, Any]) -> DataSource:
    if "repo" in source:
        runtime = TypeAdapter(HubRuntime).validate_python(source.get("runtime", {}))
        repo = HubFiles(type="dataset", repo=source["repo"], revision=source["revision"], runtime=runtime)
        name = f"{source['repo']}@{source['revision'][:7]} (Hub)"
        licence = licence_in(repo.folder) or NOT_STATED
        return DataSource(what=what, name=name, licence=licence, datasets=(source["repo"],))
    if "path" in source:
        path = PurePath(source["path"])  # a published card must not show the folders of this machine
        return DataSource(what=what, name=path.name, licence=licence_in(Path(path.parent)) or NOT_STATED)
    split = f", split {source['split']}" if "split" in source else ""
    return DataSource(what=what, name=f"{source.get('kind')} problems{split}", licence=NO_LICENCE_NEEDED)


# ---- lineage ----
# Lay out the graph of artifacts and their inputs, in columns by distance from the sources.


NODE_WIDTH, NODE_HEIGHT = 136, 46
GAP_X, GAP_Y = 44, 16
LANE_HEIGHT = 4
MARGIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One artifact; `x` and `y` are its top left corner."""

    name: str
    fingerprint: str
    is_source: bool
    was_reused: bool
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and the SVG path data of the edges between them."""

    nodes: tuple[Node, ...]
    edges: tuple[str, ...]
    width: float
    height: float


def lineage_graph(stages: Sequence[StageFacts]) -> Graph:
    """Return the graph with inputs to the left of their outputs. An input that no stage of the run made is a source."""
    made = {stage.manifest.fingerprint: stage for stage in stages}
    parents: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}  # names of inputs that no stage made, by fingerprint
    for fingerprint, stage in made.items():
        inputs = {i.fingerprint: i.role for i in stage.manifest.inputs}
        parents[fingerprint] = tuple(inputs)
        sources |= {f: PurePath(role).name for f, role in inputs.items() if f not in made}
    parents = dict.fromkeys(sources, ()) | parents
    grid = _Grid(parents, _columns(parents))
    nodes = []
    for f in parents:
        x, y = grid.x(grid.columns[f]), grid.middle[f, grid.columns[f]] - NODE_HEIGHT / 2
        if f in sources:
            nodes.append(Node(name=sources[f], fingerprint=f[:10], is_source=True, was_reused=False, x=x, y=y))
        else:
            node = Node(name=made[f].name, fingerprint=f[:10], is_source=False, was_reused=made[f].was_reused, x=x, y=y)
            nodes.append(node)
    edges = tuple(grid.edge(parent, f) for f in made for parent in parents[f])
    width = 2 * MARGIN + grid.num_columns * (NODE_WIDTH + GAP_X) - GAP_X
    return Graph(nodes=tuple(nodes), edges=edges, width=max(width, 0), height=2 * MARGIN + grid.height)


def _columns(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return each artifact's column: the length of the longest path from a source. Fingerprints cannot form a cycle."""
    columns: dict[str, int] = {}

    def column_of(fingerprint: str) -> int:
        if fingerprint not in columns:
            columns[fingerprint] = 1 + max((column_of(p) for p in parents[fingerprint]), default=-1)
        return columns[fingerprint]

    for fingerprint in parents:
        column_of(fingerprint)
    return columns


class _Grid:
    """Positions of all boxes and lanes.

    An artifact used beyond the next column gets a lane through the columns between, so that no edge hides behind a box.
    """

    def __init__(self, parents: Mapping[str, Sequence[str]], columns: Mapping[str, int]) -> None:
        self.columns = columns
        self.num_columns = max(columns.values(), default=-1) + 1
        last_use = dict(columns)  # the column of the last artifact made from this one
        for child, its_parents in parents.items():
            for parent in its_parents:
                last_use[parent] = max(last_use[parent], columns[child])
        stacks: list[list[str]] = []
        # from left to right: the order in a column depends on the one before it
        for column in range(self.num_columns):
            here = [f for f in parents if columns[f] == column or columns[f] < column < last_use[f]]
            stacks.append(sorted(here, key=lambda f: self._pull(f, column, parents, stacks)))
        heights = []
        for column, stack in enumerate(stacks):
            boxes = sum(self._size(f, column) for f in stack)
            heights.append(boxes + GAP_Y * (len(stack) - 1))
        self.height = max(heights, default=0)
        self.middle: dict[tuple[str, int], float] = {}
        for column, stack in enumerate(stacks):
            # centre the column vertically
            y = MARGIN + (self.height - heights[column]) / 2
            for f in stack:
                self.middle[f, column] = y + self._size(f, column) / 2
                y += self._size(f, column) + GAP_Y

    def x(self, column: int) -> float:
        """Return the left edge of a column."""
        return MARGIN + column * (NODE_WIDTH + GAP_X)

    def edge(self, parent: str, child: str) -> str:
        """Return SVG path data from the parent's right side, along its lane, to the child's left side."""
        column, y = self.columns[parent], self.middle[parent, self.columns[parent]]
        path = [f"M{self.x(column) + NODE_WIDTH:g} {y:g}"]
        for step in range(column + 1, self.columns[child] + 1):
            is_lane = step < self.columns[child]
            y_next = self.middle[parent if is_lane else child, step]
            x = self.x(step)
            path.append(f"C{x - GAP_X / 2:g} {y:g} {x - GAP_X / 2:g} {y_next:g} {x:g} {y_next:g}")
            if is_lane:
                path.append(f"H{x + NODE_WIDTH:g}")
            y = y_next
        return "".join(path)

    def _size(self, fingerprint: str, column: int) -> float:
        return NODE_HEIGHT if self.columns[fingerprint] == column else LANE_HEIGHT

    def _pull(
        self, fingerprint: str, column: int, parents: Mapping[str, Sequence[str]], stacks: Sequence[Sequence[str]]
    ) -> float:
        """Return the mean place of the artifact's inputs in the column before; sorting by it avoids most crossings."""
        if column == 0:
            return 0.0
        before = stacks[column - 1]
        # A lane continues from its own place; an artifact's box follows its inputs.
        leads = parents[fingerprint] if self.columns[fingerprint] == column else [fingerprint]
        places = [before.index(f) / len(before) for f in leads if f in before]
        return sum(places) / len(places) if places else 1.0
