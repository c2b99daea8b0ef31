"""Store the single runs of an ablation grid, one JSON line each, so that its table can be computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.ablation import rows_of
from klear_core.evaluate.ablation_runs import RunResult
from klear_core.evaluate.ablation_table import AblationTable


class CellRecord(Settings):
    """One run of a grid: its variant, rate and seed, the main settings, and its result."""

    variant: str
    learning_rate: float
    seed: int
    minibatches_per_step: int | None
    """Optimizer updates per RL step; None for SFT."""
    steps: int
    """RL steps that the config asked for, or updates of SFT."""
    collapsed: bool
    """Whether less than half of the score before RL was left; False for SFT."""
    result: RunResult


def write_cells(cells: Sequence[CellRecord], file: Path) -> None:
    """Write the cells to `file`, one JSON object per line."""
    file.write_text("".join(cell.model_dump_json() + "\n" for cell in cells))


def read_cells(file: Path) -> list[CellRecord]:
    """Read a file that `write_cells` wrote. Raise ArtifactError with the number of the first invalid line."""
    cells = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            cells.append(CellRecord.model_validate_json(line))
        except ValidationError as e:
            raise ArtifactError(f"{file}, line {number}: not a run of a grid: {e}") from e
    return cells


def table_of(cells: Sequence[CellRecord], reference: str, references: Mapping[str, str] | None = None) -> AblationTable:
    """Compute the table from its cells, as `klear ablate` does from its runs. `references` are those by variant."""
    runs: dict[str, dict[float, dict[int, RunResult]]] = {}
    for cell in cells:
        runs.setdefault(cell.variant, {}).setdefault(cell.learning_rate, {})[cell.seed] = cell.result
    return AblationTable(reference=reference, rows=rows_of(runs, reference, references), failures={})
