"""Data files are downloaded from a Hub once, as far as they are needed."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REVISION, hub

from klear_core.config.data import HubSource
from klear_core.data.sources import check_source, read_source
from klear_core.errors import ConfigError

REPO = "some/math"


def parquet(*numbers):
    rows = [{"problem": f"What is {n}+{n}?", "answer": str(2 * n)} for n in numbers]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


FILES = {
    "README.md": b"# Math",
    "data/train-00000-of-00002.parquet": parquet(1),
    "data/train-00001-of-00002.parquet": parquet(2),
    "traces/train-00000-of-00001.parquet": parquet(3),
}


def source_at(endpoint, folder, **settings):
    runtime = {"cache_dir": str(folder), "endpoint": endpoint}
    return HubSource(repo=REPO, revision=REVISION, runtime=runtime, **settings)


def test_the_chosen_files_are_downloaded_once_and_no_others(tmp_path):
    with hub(REPO, FILES) as (endpoint, fetched):
        source = source_at(endpoint, tmp_path, subset="data")
        check_source(source)
        assert fetched == []
        for _ in range(2):
            found = list(read_source(source, seed=0))
            assert [c.reference.answers[0] for c in found] == ["2", "4"]
        assert sorted(fetched) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    check_source(source)
    assert len(list(read_source(source, seed=0))) == 2


def test_what_a_repository_leaves_open_is_asked_before_anything_is_downloaded(tmp_path):
    with hub(REPO, FILES) as (endpoint, fetched):
        with pytest.raises(ConfigError, match=r"several folders \(data, traces\)"):
            check_source(source_at(endpoint, tmp_path))
        assert fetched == []


def test_a_pattern_names_the_files_of_a_repository(tmp_path):
    with hub(REPO, FILES) as (endpoint, fetched):
        found = list(read_source(source_at(endpoint, tmp_path, files="traces/*.parquet"), seed=0))
        assert [c.reference.answers[0] for c in found] == ["6"]
        assert fetched == ["traces/train-00000-of-00001.parquet"]


def test_a_repository_or_commit_that_the_hub_does_not_know_is_named(tmp_path):
    with hub(REPO, FILES) as (endpoint, _):
        for change in ({"repo": "some/other"}, {"revision": "f" * 40}):
            source = source_at(endpoint, tmp_path).model_copy(update=change)
            with pytest.raises(ConfigError, match=rf"{source.repo} at revision {source.revision}: the Hub has no such"):
                check_source(source)
