from __future__ import annotations

from pathlib import Path

import pytest
from evaluations import write_scores
from manifests import manifest

from klear_core.artifacts.manifest import write_manifest
from klear_core.config.grids import PaperRows
from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.ablation import RunResult, read_offline_run, rows_of
from klear_core.evaluate.compare.published import AblationTable, as_markdown, beside_paper


def an_sft_run(after: float, **scores: float) -> RunResult:
    return RunResult(before=None, after=after, scores=scores, token_shares={}, num_steps=100, num_tokens=12_000)


PAPER = PaperRows(
    source="arXiv 2508.07629, Table 2",
    about="at 8B",
    scores={
        "easy_mixed": {"aime24": 40.22, "aime25": 30.63},
        "easy_correct": {"aime24": 45.00, "aime25": 31.25},
        "all_mixed": {"aime24": 42.92, "aime25": 32.50},
        "all_correct": {"aime24": 44.58, "aime25": 32.29},
    },
)
REFERENCES = dict.fromkeys(PAPER.scores, "all_mixed") | {"easy_correct": "easy_mixed"}
RUNS = {
    # minus easy_mixed .28, .30, .32: mean .30, standard deviation .02, half width 4.3027 * .02 / sqrt(3) = .0497
    "easy_mixed": {1e-3: {1: an_sft_run(0.20), 2: an_sft_run(0.20), 3: an_sft_run(0.20)}},
    "easy_correct": {1e-3: {1: an_sft_run(0.48), 2: an_sft_run(0.50), 3: an_sft_run(0.52)}},
    "all_mixed": {1e-3: {1: an_sft_run(0.60), 2: an_sft_run(0.60), 3: an_sft_run(0.60)}},
    # minus all_mixed +.1, 0, -.1
    "all_correct": {1e-3: {1: an_sft_run(0.70), 2: an_sft_run(0.60), 3: an_sft_run(0.50)}},
}


def table() -> AblationTable:
    rows = rows_of(RUNS, "all_mixed", {"easy_correct": "easy_mixed"})
    beside = beside_paper(PAPER, rows, REFERENCES)
    return AblationTable(reference="all_mixed", benchmarks=("heldout",), rows=rows, beside=beside, failures={})


def test_published_differences_are_taken_from_the_same_reference() -> None:
    beside = table().beside
    assert beside is not None
    found = {row.variant: (row.reference, row.paper_difference, row.direction) for row in beside.rows}
    assert found == {
        "easy_mixed": ("all_mixed", {"aime24": -2.7, "aime25": -1.87}, "not shown by ours"),  # equal on three seeds
        "easy_correct": ("easy_mixed", {"aime24": 4.78, "aime25": 0.62}, "same in 2 of 2"),
        "all_mixed": ("all_mixed", {}, ""),
        "all_correct": ("all_mixed", {"aime24": 1.66, "aime25": -0.21}, "not shown by ours"),
    }
    assert AblationTable.model_validate_json(table().model_dump_json()) == table()


def test_our_differences_are_corrected_for_their_number() -> None:
    """Two variants with differences 0, .02, .04: t(2) is .02 / (.02 / sqrt(3)) = 1.732, p = .2254; Holm doubles both."""
    runs = {v: {1e-3: {s: an_sft_run(0.4 + 0.02 * s) for s in range(3)}} for v in ("easy_mixed", "all_correct")}
    runs["all_mixed"] = {1e-3: {s: an_sft_run(0.4) for s in range(3)}}
    beside = beside_paper(PAPER, rows_of(runs, "all_mixed"), REFERENCES)
    assert {row.variant: row.p for row in beside.rows} == {
        "easy_mixed": pytest.approx(0.4508, abs=1e-4),
        "all_correct": pytest.approx(0.4508, abs=1e-4),
        "easy_correct": None,
        "all_mixed": None,
    }


def test_the_table_of_sft_has_no_columns_of_rl_and_the_paper_stands_below_it(snapshot) -> None:
    snapshot("ablation_beside_paper", as_markdown(table()))


def test_our_scores_on_the_same_benchmarks_stand_beside_the_published_ones() -> None:
    runs = {v: {1e-3: {s: an_sft_run(0.5, aime24=0.4 + s / 10) for s in (1, 2)}} for v in ("all_mixed", "all_correct")}
    rows = rows_of(runs, "all_mixed")
    beside = beside_paper(PAPER, rows, REFERENCES)
    ours = {row.variant: row.our_scores for row in beside.rows}
    assert ours["all_correct"] == {"aime24": pytest.approx(55)}
    assert ours["easy_mixed"] == {}
    shown = as_markdown(AblationTable(reference="all_mixed", rows=rows, beside=beside, failures={}))
    assert "| ours: aime24 | paper: aime24 | difference | paper: aime25 | difference |" in shown
    assert "| easy_mixed | no result | all_mixed | no result | none |  | no result | 40.22 |" in shown


def test_a_run_that_compares_sft_is_read_from_its_model_and_evaluation(tmp_path: Path) -> None:
    sft, after = tmp_path / "sft", tmp_path / "after"
    sft.mkdir()
    after.mkdir()
    write_manifest(sft, manifest(counts={"steps": 40, "tokens": 9000}, git_commit="abc"))
    write_scores(after, 0.3, 0.7)
    run = read_offline_run(model=sft, before=None, after=after)
    assert (run.before, run.after, run.num_steps, run.num_tokens, run.commit) == (None, 0.5, 40, 9000, "abc")
    assert run.scores == {"b0": 0.3, "b1": 0.7}
    assert not run.has_collapsed
    distilled = read_offline_run(model=sft, before=after, after=after, sampled_tokens=7000)
    assert (distilled.before, distilled.num_tokens, distilled.sampled_tokens) == (0.5, None, 7000)
    assert read_offline_run(model=sft, before=None, after=after, scored_on=["b1"]).after == 0.7
    with pytest.raises(ArtifactError, match="lacks benchmarks of b1, b2"):
        read_offline_run(model=sft, before=None, after=after, scored_on=["b1", "b2"])
