"""`klear show problem ID` tells what became of one problem in every stage."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifests import manifest

from klear_core.artifacts.manifest import LedgerStep
from klear_core.artifacts.store import LocalStore

SUM, PRODUCT, LEAK = "5a0c11d2e3f40516", "5a77b0c1d2e3f405", "9e01aa55cc33dd77"

ODD = "[/b]rows.jsonl"
"""Rows that could not be read have no id but their place."""


def table(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which two problems were kept and one was dropped, and an older curation."""
    root = tmp_path_factory.mktemp("runs")
    store = LocalStore(root / "artifacts")

    def made(
        kind: str, fingerprint: str, day: int, tables: dict[str, list[dict[str, object]]], stage: str = ""
    ) -> None:
        with store.create(kind, fingerprint) as slot:
            for name, rows in tables.items():
                table(slot.workdir / name, rows)
            noted = {f"rows_of_{ODD}": 3}
            read = LedgerStep(step="read", unit="row", num_in=3, num_out=1, dropped={f"in_{ODD}": 2}, noted=noted)
            created_at = datetime(2026, 1, day, tzinfo=UTC)
            slot.publish(manifest(kind, fingerprint, stage=stage or kind, created_at=created_at, ledger=(read,)))

    kept = [{"problem_id": p, "question": f"question {p[:4]}", "source": "gsm8k"} for p in (SUM, PRODUCT)]
    dropped = [{"problem_id": LEAK, "reason": "in_aime24", "detail": "shares 12 with aime24 7: 'a b [c]'"}]
    unread = [{"problem_id": f"{ODD}:{line}", "reason": "not_json", "detail": "x"} for line in (1, 12)]
    made("curate", "c0", 1, {"problems/00000-of-00001.parquet": [{"problem_id": SUM, "source": "of an older run"}]})
    made(
        "curate",
        "c1",
        2,
        {"problems/00000-of-00001.parquet": kept, "dropped/00000-of-00001.parquet": [*dropped, *unread]},
    )
    traces = [{"problem_id": SUM, "sample_idx": i, "reasoning": "1+1" + " and so on" * i * 40} for i in (0, 1)]
    made("distill", "d1", 3, {"traces/00000-of-00002.parquet": [], "traces/00001-of-00002.parquet": traces})
    scores = [{"problem_id": SUM, "question": f"question {SUM[:4]}", "response": "\x1b[31m2"}]
    made("evaluate", "e1", 4, {"samples/heldout-00000-of-00001.parquet": scores}, stage="evaluate_rl")
    return root


def test_a_problems_story_is_told_stage_by_stage_from_the_newest_artifacts(klear, runs):
    said = klear("show", "problem", SUM, "--root", runs)
    assert said.status == 0, said.err
    heads = [line.split()[0] for line in said.out.splitlines() if "/" in line]
    assert heads == ["curate", "distill", "evaluate_rl"]
    assert said.out.startswith(f"problem {SUM}\nquestion 5a0c\n")
    assert said.out.count("sample_idx") == 2
    assert "of an older run" not in said.out


def test_long_texts_are_cut_and_control_characters_spelled_out(klear, runs):
    said = klear("show", "problem", SUM, "--root", runs).out
    assert "… (403 characters)" in said
    assert "response \\x1b[31m2" in said


def test_control_characters_in_the_records_of_an_artifact_are_spelled_out(klear, runs):
    said = klear("show", "evaluate_rl", "--root", runs)
    assert said.status == 0, said.err
    assert "\\x1b[31m2" in said.out
    assert "\x1b" not in said.out


def test_a_dropped_problem_says_why(klear, runs):
    said = klear("show", "problem", LEAK[:3], "--root", runs).out
    assert "reason in_aime24  detail shares 12 with aime24 7: 'a b [c]'" in said


def test_a_row_that_was_not_read_is_found_by_its_place_also_if_other_places_begin_so(klear, runs):
    said = klear("show", "problem", f"{ODD}:1", "--root", runs)
    assert said.status == 0, said.err
    assert f"problem {ODD}:1\n" in said.out
    assert said.out.count("reason not_json") == 1


def test_square_brackets_in_the_names_of_sources_are_shown_as_they_are(klear, runs):
    said = klear("show", "curate", "--root", runs)
    assert said.status == 0, said.err
    assert f"in_{ODD} 2" in said.out
    assert f"rows_of_{ODD} 3" in said.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["problem", "5a"], f"'5a' begins the ids of 2 problems: {SUM}, {PRODUCT}"),
        (["problem", "77"], "no problem '77' in the newest artifacts under"),
        (["problem"], "show problem: give the problem's id or its first digits"),
        (["curate", SUM], f"show curate {SUM}: only `klear show problem` takes a second argument"),
    ],
)
def test_what_is_no_single_problem_is_refused_with_the_reason(klear, runs, words, error):
    said = klear("show", *words, "--root", runs)
    assert said.status != 0
    assert error in said.err
