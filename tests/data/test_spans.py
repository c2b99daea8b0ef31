"""A file read in spans gives the same rows, with the same places, as read in one go."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.config.data import FileSource
from klear_core.data.datafiles import data_files, spans_of
from klear_core.data.readers import read_rows
from klear_core.data.sources import Piece, first_row, read_pieces, read_source
from klear_core.errors import DataError

ROWS = [{"problem": f"What is {i}+{i}?" + " Tell." * (i % 5), "answer": str(2 * i)} for i in range(50)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
ODD_LINES = [b"\n", *LINES[:10], b"broken\n", b"  \r\n", *LINES[10:30], b'{"problem": "\xff"}\n', b'{"problem": "cut']


def write_files(folder):
    (folder / "plain.jsonl").write_bytes(b"".join(LINES))
    (folder / "odd.jsonl").write_bytes(b"".join(ODD_LINES))
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(LINES))
    (folder / "empty.jsonl").write_bytes(b"")
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "small_groups.parquet", row_group_size=4)
    pq.write_table(table, folder / "one_group.parquet")
    with pa.ipc.new_stream(str(folder / "stream.arrow"), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)
    with pa.ipc.new_file(str(folder / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("num_bytes", [1, 100, 333, 1 << 20])
@pytest.mark.parametrize("limit", [None, 1, 10, 11, 29, 1000])
def test_spans_make_up_the_file_or_its_first_rows(num_bytes, limit, tmp_path):
    for path in write_files(tmp_path):
        whole = list(read_rows(path))[:limit]
        spans = spans_of(path, label=path.name, num_bytes=num_bytes, limit=limit)
        parts = [list(read_rows(path, span=span)) for span in spans]
        assert [row for part in parts for row in part] == whole, path.name
        assert [span.num_rows for span in spans] == [len(part) for part in parts], path.name


def test_smaller_spans_are_more(tmp_path):
    (tmp_path / "plain.jsonl").write_bytes(b"".join(LINES))
    counts = [len(spans_of(tmp_path / "plain.jsonl", label="a", num_bytes=n, limit=None)) for n in (1, 500, 1 << 20)]
    assert counts[0] == 50 > counts[1] > counts[2] == 1


def test_compressed_files_and_arrays_have_no_spans(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES)))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    for path in tmp_path.iterdir():
        assert spans_of(path, label="a", num_bytes=1, limit=None) is None


def test_a_damaged_table_is_an_error_that_names_it(tmp_path):
    content = next(path for path in write_files(tmp_path) if path.name == "stream.arrow").read_bytes()
    (tmp_path / "stream.arrow").write_bytes(content[:-30])
    with pytest.raises(DataError, match="the-label: the Arrow stream lacks its end mark"):
        spans_of(tmp_path / "stream.arrow", label="the-label", num_bytes=1, limit=None)


def test_rows_of_a_part_have_the_format_of_the_sources_first_row(tmp_path):
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2", "solution": "2", "level": "Level 5"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource(path=str(tmp_path / "a.jsonl"))
    first = first_row(source, data_files(source))
    (file,) = data_files(source)
    last = spans_of(file.path, label=file.label, num_bytes=1, limit=None)[-1]
    found = list(read_pieces(source, [Piece(path=file.path, label=file.label, span=last)], first, None))
    assert found == list(read_source(source, seed=0))[1:]
