"""What the library `datasets` loads is a source: configs, splits, streams; from a folder in the Hub's layout, or a Hub."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.exceptions import FSTimeoutError
from hub_server import REVISION, hub
from pydantic import ValidationError

from klear_core.config.data import DatasetsSource, FileSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import GivenConfig
from klear_core.data.candidates import Candidate
from klear_core.data.datafiles import data_files
from klear_core.data.sources import Piece, check_source, domains_of, files_here, first_row, read_pieces, read_source
from klear_core.errors import ConfigError, DataError
from klear_core.pipeline.graph import fingerprints_of, stages_of

CARD = """---
license: mit
configs:
- config_name: easy
  data_files:
  - split: train
    path: easy/train*.jsonl
  - split: test
    path: easy/test.jsonl
- config_name: hard
  data_files: hard/*.jsonl
---
"""


def row(number: int) -> dict[str, str]:
    return {"problem": f"What is {number}+{number}?", "answer": str(2 * number)}


def lines(*numbers: int) -> str:
    return "".join(json.dumps(row(n)) + "\n" for n in numbers)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A folder as the Hub has it: two configs, one of two splits."""
    folder = tmp_path / "sums"
    (folder / "easy").mkdir(parents=True)
    (folder / "hard").mkdir()
    (folder / "README.md").write_text(CARD)
    (folder / "easy" / "train-0.jsonl").write_text(lines(1, 2))
    (folder / "easy" / "train-1.jsonl").write_text(lines(3))
    (folder / "easy" / "test.jsonl").write_text(lines(4))
    (folder / "hard" / "0.jsonl").write_text(lines(*range(10, 16)))
    return folder


def answers(source: DatasetsSource) -> list[str]:
    found = list(read_source(source, seed=0))
    assert all(isinstance(one, Candidate) for one in found), found
    return [one.reference.answers[0] for one in found]


def test_configs_and_splits_are_those_of_the_card(repo: Path) -> None:
    assert answers(DatasetsSource(path=str(repo), subset="easy", split="train")) == ["2", "4", "6"]
    assert answers(DatasetsSource(path=str(repo), subset="easy", split="test")) == ["8"]
    assert answers(DatasetsSource(path=str(repo), subset="hard")) == ["20", "22", "24", "26", "28", "30"]
    assert answers(DatasetsSource(path=str(repo), subset="hard", limit=2)) == ["20", "22"]


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "arrow"])
def test_each_format_is_read(tmp_path: Path, kind: str) -> None:
    folder, rows = tmp_path / "one", [row(n) for n in (1, 2)]
    folder.mkdir()
    file, table = folder / f"train.{kind}", pa.Table.from_pylist(rows)
    match kind:
        case "csv":
            file.write_text("problem,answer\n" + "".join(f"{r['problem']},{r['answer']}\n" for r in rows))
        case "json":
            file.write_text(json.dumps(rows))
        case "jsonl":
            file.write_text(lines(1, 2))
        case "parquet":
            pq.write_table(table, file)
        case "arrow":
            with pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    assert answers(DatasetsSource(path=str(folder))) == ["2", "4"]


def test_the_rows_are_those_that_our_own_readers_read(repo: Path) -> None:
    ours = list(read_source(FileSource(path=str(repo / "hard"), name="x"), seed=0))
    theirs = list(read_source(DatasetsSource(path=str(repo), subset="hard", name="x"), seed=0))
    assert [(c.question, c.reference) for c in ours] == [(c.question, c.reference) for c in theirs]


def test_a_stream_has_the_first_rows_and_makes_no_copy_of_the_others(repo: Path, cache: Path) -> None:
    source = DatasetsSource(path=str(repo), subset="hard", streaming=True, limit=3)
    assert answers(source) == ["20", "22", "24"]
    (file,) = files_here(source)
    assert pq.read_metadata(file.path).num_rows == 3
    assert not list(cache.rglob("*.arrow"))
    assert answers(DatasetsSource(path=str(repo), subset="hard", streaming=True)) == answers(
        DatasetsSource(path=str(repo), subset="hard")
    )


def test_nothing_is_made_before_the_run_and_a_second_read_finds_what_the_first_made(repo: Path, cache: Path) -> None:
    source = DatasetsSource(path=str(repo), subset="hard")
    check_source(source)
    assert (files_here(source), domains_of(source)) == ([], frozenset())
    assert not list(cache.rglob("*.arrow"))
    answers(source)
    written = [file.path.stat().st_mtime_ns for file in files_here(source)]
    answers(source)
    assert [file.path.stat().st_mtime_ns for file in files_here(source)] == written
    check_source(source)
    assert domains_of(source)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, r"Please pick one among the available configs: \['easy', 'hard'\]"),
        ({"subset": "odd"}, r"'odd' not found. Available: \['easy', 'hard'\]"),
        ({"subset": "easy"}, "holds the splits train, test; set `split`"),
        ({"subset": "easy", "split": "dev"}, "no split 'dev'; it has train, test"),
        ({"subset": "hard", "split": "train[:10%]"}, "it has train; `limit` reads a part"),
    ],
)
def test_what_is_left_open_or_not_there_is_said_before_anything_is_made(repo, cache, settings, told) -> None:
    with pytest.raises(ConfigError, match=told):
        check_source(DatasetsSource(path=str(repo), **settings))
    assert not list(cache.rglob("*.arrow"))


def test_a_loading_script_is_refused_and_an_empty_or_missing_folder_named(tmp_path: Path) -> None:
    script = tmp_path / "scripted"
    script.mkdir()
    with pytest.raises(ConfigError, match="scripted: the library datasets cannot load it"):
        check_source(DatasetsSource(path=str(script)))
    marker = tmp_path / "ran"
    (script / "scripted.py").write_text(f"open({str(marker)!r}, 'w')\nimport datasets\n")
    with pytest.raises(ConfigError, match=r"scripts are no longer supported.*naming its data files: kind = 'hub'"):
        check_source(DatasetsSource(path=str(script)))
    assert not marker.exists()
    with pytest.raises(ConfigError, match="no such folder"):
        check_source(DatasetsSource(path=str(tmp_path / "none")))


def test_a_damaged_file_is_a_data_error_that_names_the_source(repo: Path) -> None:
    (repo / "hard" / "0.jsonl").write_text(lines(1) + '{"problem": ')
    with pytest.raises(DataError, match="sums: the library datasets cannot load it"):
        answers(DatasetsSource(path=str(repo), subset="hard"))


def folder_of(tmp_path: Path, **files: str | bytes) -> DatasetsSource:
    """A folder `mine` with these files; `train__jsonl` stands for train.jsonl."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return DatasetsSource(path=str(folder))


@pytest.mark.parametrize("split", ["", "dev", "train+test"])
@pytest.mark.parametrize("layout", ["plain", "saved"])
def test_the_splits_of_a_folder_without_a_card_are_listed(tmp_path: Path, layout: str, split: str) -> None:
    folder = tmp_path / "mine"
    if layout == "saved":
        import datasets

        both = {name: datasets.Dataset.from_list([row(n)]) for n, name in enumerate(("train", "test"), 1)}
        datasets.DatasetDict(both).save_to_disk(str(folder))
    else:
        folder_of(tmp_path, train__jsonl=lines(1), test__jsonl=lines(2))
    told = rf"mine: .*splits train, test; set `split`|mine: no split '{re.escape(split)}'; it has train, test"
    with pytest.raises(ConfigError, match=told):
        check_source(DatasetsSource(path=str(folder), split=split))
    assert answers(DatasetsSource(path=str(folder), split="test")) == ["4"]


def no_row_of_parquet() -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"problem": pa.array([], pa.string())}), file)
    return file.getvalue().to_pybytes()


CUT_SHORT = gzip.compress(lines(*range(2000)).encode())[:-2000]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"README__md": "---\nconfigs: [\n  - a: : b\n---\n", "train__jsonl": lines(1)}, "README.md is no YAML"),
        ({"train__zip": b"PK\x03\x04rubbish"}, "not a zip file"),
        ({"train__jsonl__gz": CUT_SHORT}, "ended before the end-of-stream marker"),
        ({"train__tar": b""}, "empty file"),
        ({"train__tar": b"x" * 2000}, "invalid header"),
        ({"train__jsonl": ""}, "holds no row"),
        ({"train__jsonl__gz": gzip.compress(b"")}, "holds no row"),
        ({"train__json": "[]"}, "holds no row"),
        ({"train__csv": "problem,answer\n"}, "holds no row"),
        ({"train__parquet": no_row_of_parquet()}, "holds no row"),
    ],
)
def test_a_damaged_or_empty_folder_is_refused_before_the_run(tmp_path, files, told, streaming) -> None:
    source = folder_of(tmp_path, **files).model_copy(update={"streaming": streaming})
    with pytest.raises((ConfigError, DataError), match=rf"mine: .*{told}"):
        check_source(source)


def packed(name: str, content: str) -> bytes:
    """A tar.gz archive of one file."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content.encode())
        tar.addfile(member, io.BytesIO(content.encode()))
    return archive.getvalue()


def test_an_archive_that_cannot_be_streamed_is_refused_only_where_it_would_be(tmp_path: Path) -> None:
    source = folder_of(tmp_path, train__jsonl__tar__gz=packed("train.jsonl", lines(1, 2)))
    check_source(source)
    assert answers(source) == ["2", "4"]
    with pytest.raises(DataError, match=r"mine: .*not implemented in streaming mode"):
        check_source(source.model_copy(update={"streaming": True}))


@pytest.mark.parametrize("error", [TimeoutError, EOFError, FSTimeoutError])
def test_an_error_of_the_library_without_a_text_is_told_by_its_class(repo, monkeypatch, error) -> None:
    import datasets

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", fails)
    with pytest.raises(ConfigError, match=rf"sums: the library datasets cannot load it \({error.__name__}\)"):
        check_source(DatasetsSource(path=str(repo), subset="hard"))


def test_a_file_rewritten_with_its_old_time_is_read_again(tmp_path: Path) -> None:
    # The cache of `datasets` tells a folder's files apart by their times of modification.
    source = folder_of(tmp_path, train__jsonl=lines(1))
    file = Path(source.path) / "train.jsonl"
    modified = file.stat().st_mtime_ns
    for streaming in (False, True):
        read = source.model_copy(update={"streaming": streaming})
        for number in (1, 2):
            file.write_text(lines(number))
            os.utime(file, ns=(modified, modified))
            assert answers(read) == [str(2 * number)]


CLASSES = """---
dataset_info:
  features:
  - {name: problem, dtype: string}
  - {name: answer, dtype: {class_label: {names: {'0': 'yes', '1': 'no'}}}}
---
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_is_a_class_is_its_name(tmp_path: Path, streaming: bool) -> None:
    rows = [{"problem": f"Is {n} even?", "answer": answer} for n, answer in ((2, "yes"), (3, "no"))]
    text = "".join(f"{json.dumps(one)}\n" for one in rows)
    source = folder_of(tmp_path, README__md=CLASSES, train__jsonl=text).model_copy(update={"streaming": streaming})
    assert answers(source) == ["yes", "no"]
    files = data_files(source)
    pieces = [Piece(path=file.path, label=file.label, span=None) for file in files]
    found = read_pieces(source, pieces, first_row(source, files), None)
    assert [one.reference.answers[0] for one in found if isinstance(one, Candidate)] == ["yes", "no"]


def test_the_same_file_as_a_file_has_the_number_of_a_class(tmp_path: Path) -> None:
    """As in 0.2.0, whose results have the same fingerprints."""
    rows = [{"problem": "Is 2 even?", "answer": "yes"}, {"problem": "Is 3 even?", "answer": "no"}]
    text = "".join(f"{json.dumps(one)}\n" for one in rows)
    (made,) = data_files(folder_of(tmp_path, README__md=CLASSES, train__jsonl=text))
    found = list(read_source(FileSource(path=str(made.path)), seed=0))
    assert [one.reference.answers[0] for one in found if isinstance(one, Candidate)] == ["0", "1"]


@pytest.mark.parametrize("answer", [1, 5])
def test_a_row_whose_class_has_no_name_is_dropped_and_one_with_such_another_column_is_not(tmp_path, answer) -> None:
    features = {
        "answer": {"names": ["yes", "no"], "_type": "ClassLabel"},
        "level": {"names": ["a"], "_type": "ClassLabel"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {"problem": ["Is 2 even?", "Is 3 even?"], "answer": [0, answer], "level": [0, 5]}
    (tmp_path / "mine").mkdir()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / "mine" / "train.parquet")
    found = list(read_source(DatasetsSource(path=str(tmp_path / "mine")), seed=0))
    assert [isinstance(one, Candidate) for one in found] == [True, answer == 1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs `path`, a folder, or `repo` and `revision`"),
        ({"path": "a", "repo": "b/c", "revision": REVISION}, "needs `path`, a folder, or"),
        ({"repo": "b/c"}, "`repo` and `revision` belong together"),
        ({"repo": "b/c", "revision": "main"}, "'main' is no commit"),
    ],
)
def test_a_source_is_in_one_place_and_pinned(settings, told) -> None:
    with pytest.raises(ValidationError, match=told):
        DatasetsSource(**settings)


def test_a_changed_row_changes_the_fingerprint_of_the_curation(repo: Path, tmp_path: Path) -> None:
    def named() -> str:
        settings = {"curate": {"sources": [{"kind": "datasets", "path": str(repo), "subset": "hard"}]}}
        config = PipelineConfig.model_validate({"workspace": {"root": str(tmp_path / "ws")}, **settings})
        return fingerprints_of(stages_of(config), config.workspace)["curate"].fingerprint

    before = named()
    assert named() == before
    (repo / "hard" / "1.jsonl").write_text(lines(9))
    assert named() != before


def test_given_traces_may_be_loaded(repo: Path, tmp_path: Path) -> None:
    from klear_core.data.formats.traces import read_traces

    (tmp_path / "chats").mkdir()
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"}]
    (tmp_path / "chats" / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    given = GivenConfig.model_validate({"distill": {"kind": "datasets", "path": str(tmp_path / "chats")}})
    assert given.distill is not None
    (trace,) = read_traces(given.distill[0])
    assert [(reply.reasoning, reply.answer) for reply in trace.replies] == [("easy", "2")]


def test_a_repository_of_a_hub_is_loaded_at_its_commit(repo: Path, tmp_path: Path) -> None:
    files = {file.relative_to(repo).as_posix(): file.read_bytes() for file in repo.rglob("*") if file.is_file()}
    code = (
        "from klear_core.config.data import DatasetsSource; from klear_core.data.sources import check_source, read_source\n"
        f"source = DatasetsSource(repo='some/sums', revision='{REVISION}', subset='easy', split='train')\n"
        "check_source(source); print([c.reference.answers[0] for c in read_source(source, seed=0)])"
    )
    with hub("some/sums", files) as (endpoint, fetched):
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        said = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env)
    assert said.stdout == "['2', '4', '6']\n", said.stderr
    assert "easy/train-1.jsonl" in fetched
    assert not [name for name in fetched if name.startswith("hard")]
