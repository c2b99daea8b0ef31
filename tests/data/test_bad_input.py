"""Broken sources end in a clear error or in a counted drop, never in a library's error."""

import contextlib
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.config.curate import CurateConfig
from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate
from klear_core.data.curation.curate import curate
from klear_core.data.readers import BrokenRow, FileRow, read_rows
from klear_core.data.sources import check_source, read_source
from klear_core.errors import ConfigError, DataError
from klear_core.metrics import NullTelemetry
from klear_core.seeding import seed_for
from klear_core.types import Dropped

GOOD = [{"id": i, "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in GOOD).encode()


def reasons(path):
    return [row.reason if isinstance(row, Dropped) else "" for row in read_source(FileSource(path=str(path)), seed=0)]


def bad_text(values):
    buffers = pa.array(values, pa.binary()).buffers()
    return pa.table(
        {"problem": pa.Array.from_buffers(pa.string(), len(values), buffers), "answer": ["1"] * len(values)}
    )


def test_undecodable_text_in_a_table_costs_its_row_alone(tmp_path):
    table = bad_text([b"a", b"b", b"\xff\xfe", b"c", b"d"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert reasons(tmp_path / name) == ["", "", "not_utf8", "", ""]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**62, 1], pa.timestamp("us")),
        pa.array([0, 2**30, 1], pa.int32()).cast(pa.date32()),
    ],
)
def test_a_date_that_python_cannot_hold_costs_its_row_alone(column, tmp_path):
    table = pa.table({"problem": ["a", "b", "c"], "answer": ["1", "2", "3"], "day": column})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert reasons(tmp_path / name) == ["", "bad_value", ""]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1], pa.timestamp("us", "Mars/Olympus")),
        pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["twice", "twice"]),
    ],
)
def test_a_column_that_python_cannot_hold_is_an_error_that_says_why(column, tmp_path):
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": ["1", "2"], "odd": column}), tmp_path / "a.parquet")
    assert reasons(tmp_path / "a.parquet") == ["bad_value", "bad_value"]
    with pytest.raises(ConfigError, match=r"a\.parquet row 1: .*(Mars|duplicate)"):
        check_source(FileSource(path=str(tmp_path / "a.parquet")))


def test_a_link_to_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "blobs" / "0123")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl: is a link to .*0123, which is not there"):
            check_source(FileSource(path=str(path)))


def test_a_file_whose_name_is_not_utf8_is_an_error_that_names_it(tmp_path):
    (tmp_path / "caf\udce9.jsonl").write_text('{"problem": "p", "answer": "1"}\n')
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"caf\\udce9\.jsonl'?: .* rename it"):
            check_source(FileSource(path=str(path)))


def test_undecodable_text_in_json_costs_its_row_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"problem": "\xff", "answer": "1"}\n' + LINES)
    assert reasons(tmp_path / "a.jsonl") == ["not_utf8", *[""] * 20]
    array = json.dumps(GOOD).encode()
    (tmp_path / "a.json").write_bytes(array.replace(b"What is 3", b"What \xff 3"))
    assert reasons(tmp_path / "a.json") == ["", "", "", "not_utf8", *[""] * 16]
    (tmp_path / "a.json").write_bytes(array.replace(b"}, {", b"}, \xff {", 1))
    with pytest.raises(DataError, match=r"a\.json: .* row 2 cannot be read"):
        list(read_rows(tmp_path / "a.json"))


def test_half_of_a_surrogate_pair_is_dropped_and_a_whole_pair_is_a_character(tmp_path):
    rows = [b'{"problem": "\\ud83d", "answer": "1"}', b'{"problem": "\\ud83d\\ude00", "answer": "1"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    (tmp_path / "a.json").write_bytes(b"[" + b",".join(rows) + b"]")
    assert reasons(tmp_path / "a.jsonl") == reasons(tmp_path / "a.json") == ["not_utf8", ""]


def test_a_number_too_long_for_python_is_kept_as_its_digits(tmp_path):
    digits = "7" * 5000
    (tmp_path / "a.jsonl").write_text(f'{{"problem": "p", "answer": {digits}}}\n')
    (tmp_path / "a.json").write_text(f'[{{"problem": "p", "answer": {digits}}}]')
    for name in ("a.jsonl", "a.json"):
        (found,) = read_source(FileSource(path=str(tmp_path / name)), seed=0)
        assert found.reference.answers == (digits,)


def test_a_row_of_ten_megabytes_is_read_and_its_long_question_dropped_by_reason(tmp_path):
    huge = {"problem": "x" * 10_000_000, "answer": "1"}
    (tmp_path / "a.jsonl").write_bytes(json.dumps(huge).encode() + b"\n" + LINES)
    summary = curate_file(tmp_path)
    assert summary.counts["problems"] == 20
    assert {step.step: step.dropped for step in summary.ledger}["length"] == {"question_too_long": 1}


def test_a_line_over_the_limit_is_dropped_and_the_next_ones_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"q": "' + b"x" * 3_000_000 + b'"}\n{"q": 1}\n')
    found = list(read_rows(path, max_row_bytes=1000))
    assert [type(row) for row in found] == [BrokenRow, FileRow]
    assert (found[0].reason, found[0].where) == ("row_too_large", f"{path}:1")
    assert found[1].where == f"{path}:2"


def curate_file(tmp_path, name="a.jsonl"):
    cfg = CurateConfig(sources=(FileSource(path=str(tmp_path / name)),))
    (tmp_path / "bench").mkdir()
    out = tmp_path / "out"
    return curate(cfg, benchmarks=tmp_path / "bench", seed=0, workdir=out, telemetry=NullTelemetry())


def test_rows_of_one_id_are_told_apart_by_their_questions(tmp_path):
    rows = [GOOD[0], GOOD[1] | {"id": 0}, GOOD[0]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = curate_file(tmp_path)
    assert summary.counts == summary.counts | {"rows": 3, "problems": 2}
    assert sum(summary.ledger[2].dropped.values()) == 1


def test_references_that_do_not_parse_are_dropped_with_the_id_of_their_row(tmp_path):
    row = {"problem_id": 7, "question": "Add.", "input_output": '{"inputs": ["1"], "outputs": '}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_source(FileSource(path=str(tmp_path / "a.jsonl")), seed=0)
    assert found.reason == "bad_reference"
    assert "a.jsonl:1 (id 7): tests: tests are not JSON" in found.detail


HALF = chr(92) + "ud800"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Add.", "input_output": f'{{"inputs": ["{HALF}"], "outputs": ["1"]}}'},
        {"question": "Add.", "input_output": f'{{"inputs": ["1"], "outputs": ["{HALF}"]}}'},
        {"question": "Add.", "input_output": f'{{"inputs": [[1]], "outputs": [1], "fn_name": "{HALF}"}}'},
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": "Add."}],
            "ability": "math",
            "reward_model": {"ground_truth": f'["{HALF}"]'},
        },
    ],
)
def test_half_a_character_in_json_text_inside_of_a_row_costs_that_row_alone(row, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row).replace("ud800", "u00e9") + "\n")
    bad, good = read_source(FileSource(path=str(tmp_path / "a.jsonl")), seed=0)
    assert isinstance(bad, Dropped)
    assert bad.reason == "not_utf8"
    assert isinstance(good, Candidate)


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_source_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json: holds no row"):
        check_source(FileSource(path=str(tmp_path / "a.json")))


def test_an_empty_shard_among_others_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.jsonl: is empty \(0 bytes\)"):
        check_source(FileSource(path=str(tmp_path)))


def whole_files(folder):
    table = pa.Table.from_pylist(GOOD)
    pq.write_table(table, folder / "a.parquet", row_group_size=4)
    with pa.ipc.new_stream(str(folder / "stream.arrow"), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=4):
            writer.write_batch(batch)
    with pa.ipc.new_file(str(folder / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "a.json").write_text(json.dumps(GOOD))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as f:
        f.write(LINES)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.97])
def test_a_file_cut_short_anywhere_is_an_error_that_names_it_and_says_to_fetch_it_again(share, tmp_path):
    for name, content in whole_files(tmp_path).items():
        (tmp_path / name).write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            list(read_rows(tmp_path / name))


def test_an_arrow_stream_cut_between_two_batches_is_not_taken_for_whole(tmp_path):
    content = whole_files(tmp_path)["stream.arrow"]
    (tmp_path / "stream.arrow").write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"stream\.arrow: the Arrow stream lacks its end mark"):
        list(read_rows(tmp_path / "stream.arrow"))


def test_the_error_says_how_many_rows_were_whole(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    text = "".join(json.dumps({"n": i, "noise": seed_for(0, "noise", str(i))}) + "\n" for i in range(50_000)).encode()
    path.write_bytes(gzip.compress(text)[:-100])
    with pytest.raises(
        DataError, match=r"a\.jsonl\.gz: cannot be read beyond row [1-9]\d* .*cut short: fetch it again"
    ):
        list(read_rows(path))


def test_lines_cut_short_are_counted_as_such(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES[:-12])
    assert reasons(tmp_path / "a.jsonl") == [*[""] * 19, "cut_short"]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_a_shard_cut_short_is_found_before_the_first_is_read(name, tmp_path):
    (tmp_path / "whole").mkdir()
    content = whole_files(tmp_path / "whole")[name]
    shards = tmp_path / "shards"
    shards.mkdir()
    suffix = name.rsplit(".", 1)[1]
    (shards / f"0.{suffix}").write_bytes(content)
    (shards / f"1.{suffix}").write_bytes(content[:-30])
    with pytest.raises(DataError, match=rf"1\.{suffix}: .*fetch it again"):
        check_source(FileSource(path=str(shards)))
    assert isinstance(next(iter(read_source(FileSource(path=str(shards)), seed=0))), Candidate)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_changed_bytes_in_a_file_never_lead_to_a_librarys_error(name, tmp_path):
    content = whole_files(tmp_path)[name]
    draw = random.Random(0)
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 3, 20))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        (tmp_path / name).write_bytes(changed)
        with contextlib.suppress(DataError):
            list(read_rows(tmp_path / name))
