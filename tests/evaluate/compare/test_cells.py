from __future__ import annotations

from pathlib import Path

import pytest

from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.ablation import TOKEN_SHARES, RunResult, rows_of
from klear_core.evaluate.compare.published import CellRecord, read_cells, table_of, write_cells


def a_cell(variant: str, rate: float, seed: int, after: float) -> CellRecord:
    run = RunResult(
        before=0.6,
        after=after,
        token_shares=dict.fromkeys(TOKEN_SHARES, 0.0),
        max_ratio=3.0,
        entropy=0.25,
        greedy=0.5,
        commit="abc",
    )
    place = {"variant": variant, "learning_rate": rate, "seed": seed}
    return CellRecord(**place, minibatches_per_step=16, steps=20, collapsed=run.has_collapsed, result=run)


CELLS = [
    a_cell("paper", 1e-4, 1, 0.3),
    a_cell("paper", 1e-4, 2, 0.5),
    a_cell("clip", 1e-4, 2, 0.7),
    a_cell("clip", 1e-4, 1, 0.4),
]


def test_cells_are_read_as_they_were_written_one_a_line(tmp_path: Path) -> None:
    write_cells(CELLS, tmp_path / "cells.jsonl")
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 4
    assert read_cells(tmp_path / "cells.jsonl") == CELLS


def test_a_line_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text(CELLS[0].model_dump_json() + '\n{"variant": "clip"}\n')
    with pytest.raises(ArtifactError, match="line 2: not a run"):
        read_cells(file)


def test_the_table_of_cells_is_that_of_their_runs() -> None:
    runs = {v: {1e-4: {c.seed: c.result for c in CELLS if c.variant == v}} for v in ("paper", "clip")}
    table = table_of(CELLS, "paper")
    assert table.rows == rows_of(runs, "paper")
    assert table.rows[1].difference is not None
    assert table.rows[1].difference.mean == pytest.approx(0.15)
