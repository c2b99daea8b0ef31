"""Published benchmarks that a config can name: what is filled in, and what is refused."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest
from pydantic import ValidationError

from klear_core.config.data import BenchmarkConfig, FileSource, HubSource
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import EvaluateJob
from klear_core.data.formats.detect import SCHEMAS

DOCS = Path(__file__).parents[2] / "docs" / "data" / "known_benchmarks.md"


def test_a_known_benchmark_needs_its_name_alone() -> None:
    benchmark = BenchmarkConfig.model_validate({"known": "lcb_v6"})
    assert (benchmark.name, benchmark.expected_rows, benchmark.num_samples) == ("lcb_v6", 131, 8)
    assert str(benchmark.window) == "2025-02-01 to 2025-05-01"
    assert isinstance(benchmark.source, HubSource)
    assert (benchmark.source.repo, benchmark.source.files) == ("livecodebench/code_generation_lite", "test6.jsonl")
    assert len(benchmark.source.revision) == 40


@pytest.mark.parametrize("name", KNOWN_BENCHMARKS)
def test_every_known_benchmark_is_read_from_a_copy_and_survives_json(name: str) -> None:
    benchmark = BenchmarkConfig.model_validate(
        {"known": name, "source": "copy.jsonl", "name": "mine", "num_samples": 2}
    )
    assert isinstance(benchmark.source, FileSource)
    assert benchmark.source.row_schema in [schema.name for schema in SCHEMAS]
    assert (benchmark.name, benchmark.num_samples) == ("mine", 2)
    assert BenchmarkConfig.model_validate_json(benchmark.model_dump_json()) == benchmark


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"known": "aime99"}, "no known benchmark 'aime99'; known are aime24, aime25"),
        (
            {"known": "minerva"},
            r"Minerva is math-ai/minervamath on the Hub, of which no commit is known here: name one",
        ),
        ({"known": "aime24", "expected_rows": 31}, r"AIME 2024 has 30 rows .* not expected_rows = 31"),
        (
            {"known": "lcb_v5", "window": {"start": "2024-10-01", "end": "2025-02-01"}},
            "has 279 rows and the window 2024-08-01 to 2025-02-01, not .* window = 2024-10-01 to 2025-02-01",
        ),
        ({"known": "aime24", "window": {"start": "2025-02-01", "end": "2025-02-01"}}, "is not before its end"),
    ],
)
def test_what_is_not_the_known_benchmark_is_refused_with_both_values(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BenchmarkConfig.model_validate(settings)


def test_the_benchmark_s_own_repository_may_be_read_at_another_commit_and_another_one_with_its_own_files() -> None:
    other = "0" * 40
    own = BenchmarkConfig.model_validate({"known": "mbpp", "source": {"kind": "hub", "revision": other}}).source
    assert isinstance(own, HubSource)
    assert (own.repo, own.revision, own.split) == ("google-research-datasets/mbpp", other, "test")
    source = {"kind": "hub", "repo": "me/copy", "revision": other, "row_schema": "amc23"}
    copy = BenchmarkConfig.model_validate({"known": "mbpp", "source": source}).source
    assert isinstance(copy, HubSource)
    assert (copy.repo, copy.split, copy.row_schema) == ("me/copy", "", "amc23")


def test_a_window_is_part_of_the_benchmarks_and_of_no_evaluation() -> None:
    known = BenchmarkConfig.model_validate({"known": "lcb_v5", "source": "a.jsonl"})
    whole = BenchmarkConfig(name="lcb_v5", source=known.source, num_samples=8)
    jobs = [BenchmarksJob.of(PipelineConfig(benchmarks=(b,))) for b in (known, whole)]
    assert [list(result_settings(job).get("windows", {})) for job in jobs] == [["lcb_v5"], []]
    scored = [EvaluateJob.of(PipelineConfig(benchmarks=(b,))) for b in (known, whole)]
    assert result_settings(scored[0]) == result_settings(scored[1])
    assert jobs[0].benchmarks()[0].known == "lcb_v5"
    assert BenchmarksJob.model_validate_json(jobs[0].model_dump_json()) == jobs[0]


def test_a_set_of_one_s_own_may_state_when_it_was_published() -> None:
    mine = BenchmarkConfig(name="mine", source=FileSource(path="a.jsonl"), published=date(2026, 5, 1))
    assert mine.published_on == date(2026, 5, 1)
    assert BenchmarkConfig.model_validate({"known": "aime25"}).published_on == date(2025, 2, 6)
    assert "published" not in json.loads(BenchmarkConfig(name="b", source=mine.source).model_dump_json())


def test_the_docs_list_every_known_benchmark_with_its_size_date_and_what_it_was_checked_on() -> None:
    rows = [
        line.split("|")[1:-1] for line in DOCS.read_text().splitlines() if re.match(r"\| `\w+` \| .* \| \d{4}-", line)
    ]
    listed = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}
    assert list(listed) == list(KNOWN_BENCHMARKS)
    for name, known in KNOWN_BENCHMARKS.items():
        title, num_rows, published, repo, checked = listed[name]
        assert title.startswith(known.title)
        assert (int(num_rows.replace(",", "")), published, checked) == (known.rows, str(known.published), known.checked)
        assert repo.startswith(known.repo)
        assert (repo == known.repo) == bool(known.revision), "a repository without a known commit is marked by *"
