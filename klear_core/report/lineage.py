"""Lay out the graph of artifacts and their inputs, in columns by distance from the sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from klear_core.report.facts import StageFacts

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
