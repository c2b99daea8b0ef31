import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from klear_core.artifacts.files import content_digest
from klear_core.config.data import FileSource, HubSource
from klear_core.data.candidates import Candidate
from klear_core.data.datafiles import data_files
from klear_core.data.sources import check_source, read_source, source_name
from klear_core.errors import ConfigError, DataError

REVISION = "0123456789abcdef0123456789abcdef01234567"


def rows_of(*numbers):
    return [{"problem": f"What is {n}+{n}?", "answer": str(2 * n)} for n in numbers]


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def answers(source):
    return [c.reference.answers[0] for c in read_source(source, seed=0) if isinstance(c, Candidate)]


def shards(folder, *, split="train", count=3, without=()):
    for i in range(count):
        if i not in without:
            write_parquet(folder / f"{split}-{i:05d}-of-{count:05d}.parquet", rows_of(i))


@pytest.mark.parametrize("path", ["", "data", "data/train-*.parquet", "**/*.parquet"])
def test_shards_of_a_folder_or_pattern_are_read_in_the_order_of_their_names(path, tmp_path):
    shards(tmp_path / "data", count=12)
    assert answers(FileSource(path=str(tmp_path / path))) == [str(2 * i) for i in range(12)]


def test_every_way_to_store_rows_gives_the_same_candidates(tmp_path):
    table = pa.Table.from_pylist(rows_of(1, 2))
    lines = "".join(json.dumps(row) + "\n" for row in rows_of(1, 2)).encode()
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    for codec, suffix in (("gzip", "gz"), ("zstd", "zst")):
        with pa.output_stream(str(tmp_path / f"a.jsonl.{suffix}"), compression=codec) as f:
            f.write(lines)
    (tmp_path / "a.ndjson").write_bytes(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows_of(1, 2)))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 7
    for file in files:
        assert answers(FileSource(path=str(file))) == ["2", "4"], file


def test_what_datasets_saves_to_disk_is_read(tmp_path):
    table = pa.Table.from_pylist(rows_of(1, 2))
    for i in range(2):
        with pa.ipc.new_stream(str(tmp_path / f"data-{i:05d}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(table.slice(i, 1))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    assert answers(FileSource(path=str(tmp_path))) == ["2", "4"]


def test_a_folder_of_several_splits_needs_to_be_told_which(tmp_path):
    shards(tmp_path / "data")
    shards(tmp_path / "data", split="test", count=1)
    with pytest.raises(ConfigError, match="holds the splits test, train; set `split`"):
        data_files(FileSource(path=str(tmp_path)))
    assert len(data_files(FileSource(path=str(tmp_path), split="train"))) == 3
    with pytest.raises(ConfigError, match="no data file of split 'dev'; there are data/test-0000"):
        data_files(FileSource(path=str(tmp_path), split="dev"))
    with pytest.raises(ConfigError, match="no data file of split 'dev'"):
        data_files(FileSource(path=str(tmp_path / "data" / "test-00000-of-00001.parquet"), split="dev"))


def test_a_folder_of_several_subsets_needs_to_be_told_which(tmp_path):
    shards(tmp_path / "data")
    shards(tmp_path / "extended")
    with pytest.raises(ConfigError, match=r"several folders \(data, extended\).*set `subset`"):
        data_files(FileSource(path=str(tmp_path)))
    files = data_files(FileSource(path=str(tmp_path), subset="extended"))
    assert {file.path.parent.name for file in files} == {"extended"}


def test_a_missing_shard_is_named_unless_a_pattern_leaves_it_out(tmp_path):
    shards(tmp_path, without=[1])
    for path in (tmp_path, tmp_path / "train-*.parquet"):
        with pytest.raises(DataError, match=r"1 of its shards are missing \(train-00001-of-00003.parquet\)"):
            data_files(FileSource(path=str(path)))
    assert answers(FileSource(path=str(tmp_path / "train-00000-of-*.parquet"))) == ["0"]


def test_shards_whose_names_have_a_hash_each_are_one_set(tmp_path):
    names = [f"train-0000{i}-of-00003-{i + 10:016x}.parquet" for i in range(3)]  # as deepmind/code_contests has them
    for i, name in enumerate(names):
        write_parquet(tmp_path / name, rows_of(i))
    for path in (tmp_path, tmp_path / "train-*.parquet"):
        assert answers(FileSource(path=str(path))) == ["0", "2", "4"]
    (tmp_path / names[1]).unlink()
    with pytest.raises(DataError, match=r"1 of its shards are missing \(train-00001-of-00003-\*.parquet\)"):
        data_files(FileSource(path=str(tmp_path)))
    assert answers(FileSource(path=str(tmp_path / "train-00000-of-*.parquet"))) == ["0"]
    assert answers(FileSource(path=str(tmp_path / f"{names[2][:20]}*.parquet"))) == ["4"]


def test_shards_may_count_from_one(tmp_path):
    for i in (1, 2, 3):
        write_parquet(tmp_path / f"train-0000{i}-of-00003.parquet", rows_of(i))
    assert answers(FileSource(path=str(tmp_path))) == ["2", "4", "6"]
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match=r"1 of its shards are missing \(train-00001-of-00003.parquet\)"):
        data_files(FileSource(path=str(tmp_path)))


def test_brackets_in_the_name_of_a_folder_are_no_pattern(tmp_path):
    folder = tmp_path / "data [v2]"
    folder.mkdir()
    write_parquet(folder / "train-00000-of-00001.parquet", rows_of(1))
    pattern = folder / "train-*.parquet"
    assert answers(FileSource(path=str(pattern))) == ["2"]
    assert content_digest(pattern) == content_digest(folder)


def test_a_name_that_is_not_utf8_is_said_by_its_file(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"question": "1+1?", "answer": "2"}')
    assert content_digest(tmp_path)
    with pytest.raises(ConfigError, match="the name of this file is not UTF-8"):
        data_files(FileSource(path=str(tmp_path)))


def test_files_of_two_formats_are_refused_before_any_is_read(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows_of(1))
    write_parquet(tmp_path / "b.parquet", [{"question": "q", "answer": "#### 1"}])
    with pytest.raises(ConfigError, match=r"several row formats .*a\.parquet is 'problem_answer'.*'gsm8k'"):
        check_source(FileSource(path=str(tmp_path)))


@pytest.mark.parametrize("path", ["nothing/*.parquet", "empty"])
def test_a_source_without_a_data_file_is_refused(path, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("")
    with pytest.raises(ConfigError, match=r"holds no data file; such files end in \.jsonl"):
        data_files(FileSource(path=str(tmp_path / path)))


def test_a_source_is_called_by_its_file_folder_or_repository():
    assert source_name(FileSource(path="x/OpenThoughts")) == "OpenThoughts"
    assert source_name(FileSource(path="x/TACO/train/data-*.arrow")) == "train"
    assert source_name(HubSource(repo="AI-MO/NuminaMath-1.5", revision=REVISION)) == "NuminaMath-1.5"


def test_the_fingerprint_covers_every_file_of_a_pattern_and_its_name(tmp_path):
    shards(tmp_path)
    pattern = tmp_path / "train-*.parquet"
    before = content_digest(pattern)
    (tmp_path / "other.parquet").write_bytes(b"x")
    assert content_digest(pattern) == before
    write_parquet(tmp_path / "train-00001-of-00003.parquet", rows_of(7))
    changed = content_digest(pattern)
    assert changed != before
    (tmp_path / "train-00001-of-00003.parquet").rename(tmp_path / "train-9.parquet")
    assert content_digest(pattern) not in (before, changed)


def cached(folder, names=("data/train-00000-of-00001.parquet",), repo="some/math"):
    root = folder / f"datasets--{repo.replace('/', '--')}"
    for i, name in enumerate(names):
        blob = root / "blobs" / f"{i}"
        write_parquet(blob, rows_of(i + 1))
        link = root / "snapshots" / REVISION / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return HubSource(repo=repo, revision=REVISION, runtime={"cache_dir": str(folder), "endpoint": "http://127.0.0.1:9"})


def test_a_copy_of_the_hubs_cache_is_read_without_a_network(tmp_path):
    names = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
    source = cached(tmp_path, names)
    check_source(source)
    found = list(read_source(source, seed=0))
    assert [c.reference.answers[0] for c in found] == ["2", "4"]
    assert {c.source for c in found} == {"math"}
    folder = tmp_path / "datasets--some--math" / "snapshots" / REVISION
    assert answers(FileSource(path=str(folder))) == ["2", "4"]


def test_rows_of_the_hub_are_named_alike_on_every_machine(tmp_path):
    source = cached(tmp_path)
    folder = tmp_path / "datasets--some--math" / "snapshots" / REVISION / "data"
    (folder / "train-00000-of-00001.parquet").unlink()
    write_parquet(folder / "train-00000-of-00001.parquet", [{"problem": "q", "answer": ""}, *rows_of(1)])
    assert next(iter(read_source(source, seed=0))).problem_id == "some/math/data/train-00000-of-00001.parquet row 1"


def test_a_hub_source_that_is_neither_in_the_cache_nor_reachable_says_what_to_do(tmp_path):
    missing = cached(tmp_path, ("data/train-00000-of-00002.parquet",))
    for source in (missing, missing.model_copy(update={"repo": "some/other"})):
        with pytest.raises(ConfigError, match=r"the Hub cannot be reached.*hf download some/\w+ --repo-type dataset"):
            check_source(source)
        with pytest.raises(ConfigError, match="copy the cache folder here, or name a local copy"):
            list(read_source(source, seed=0))


@pytest.mark.parametrize("revision", ["main", "", "0123456", REVISION.upper()])
def test_a_revision_is_a_whole_commit(revision):
    with pytest.raises(ValidationError, match="revision"):
        HubSource(repo="some/math", revision=revision)


def test_where_the_hubs_files_are_kept_changes_no_fingerprint():
    from klear_core.config.settings import config_digest

    here, there = (HubSource(repo="a/b", revision=REVISION, runtime={"cache_dir": folder}) for folder in ("x", "y"))
    assert config_digest(here) == config_digest(there)
    assert config_digest(here) != config_digest(here.model_copy(update={"revision": "f" * 40}))
