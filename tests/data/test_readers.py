import csv
import gzip
import io
import json

import pytest

from klear_core.data.arrow_batches import Span
from klear_core.data.json_arrays import large_element
from klear_core.data.readers import BrokenRow, FileRow, read_rows, stem_of
from klear_core.errors import ConfigError, DataError


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def test_the_same_rows_come_from_every_kind_of_file(tmp_path):
    rows = [{"q": "a", "n": 1}, {"q": "b", "n": 2}]
    lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    write_parquet(tmp_path / "a.parquet", rows)
    for path in sorted(tmp_path.iterdir()):
        assert [r.fields for r in read_rows(path)] == rows, path


CELLS = [
    {"question": "What is 1, 2?", "answer": "3"},
    {"question": 'Two\nlines, and "quotes".', "answer": "é"},
    {"question": "An empty cell", "answer": None},
]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_csv_and_tsv_are_read_like_the_other_files(tmp_path, separator, ends):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["question", "answer"], delimiter=separator, lineterminator=ends)
    writer.writeheader()
    writer.writerows(CELLS)
    body = text.getvalue().encode()
    kind = "tsv" if separator == "\t" else "csv"
    (tmp_path / f"a.{kind}").write_bytes(body)
    (tmp_path / f"bom.{kind}").write_bytes(b"\xef\xbb\xbf" + body + ends.encode())
    (tmp_path / f"a.{kind}.gz").write_bytes(gzip.compress(body))
    for path in sorted(tmp_path.iterdir()):
        rows = list(read_rows(path))
        assert [r.fields for r in rows] == CELLS, path
        assert [r.where for r in rows] == [f"{path}:{line}" for line in (2, 3, 5)]
        assert next(r.fields for r in read_rows(path, columns=frozenset(["answer"]))) == {"answer": "3"}
    assert stem_of(tmp_path / f"a.{kind}.gz") == "a"


def test_json_in_a_cell_is_what_it_holds_if_it_is_objects(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,truth,answer,set\n"[{""role"": ""user""}]","{""a"": 1}","[1, 2]","{1, 2}"\n')
    (row,) = read_rows(path)
    assert row.fields == {"prompt": [{"role": "user"}], "truth": {"a": 1}, "answer": "[1, 2]", "set": "{1, 2}"}


def test_half_a_character_in_the_json_of_a_cell_costs_its_row_alone(tmp_path):
    path = tmp_path / "a.csv"
    halves = [r"\ud83d\ude00", r"\ud83d"]
    lines = [f'"[{{""role"": ""user"", ""content"": ""1+1? {half}""}}]",2\n' for half in halves]
    path.write_text("messages,answer\n" + "".join(lines) + r"\ud83d as text,3")
    whole, broken, text = read_rows(path)
    assert whole.fields == {"messages": [{"role": "user", "content": "1+1? \U0001f600"}], "answer": "2"}
    assert broken.reason == "not_utf8"
    assert text.fields == {"messages": r"\ud83d as text", "answer": "3"}


def test_a_broken_row_of_cells_is_reported_with_its_line_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'q,a,\n1,2,\n\n1\n1,2,3,4\n\xff,2,\n"x"y,2,\n' + b"z" * 60 + b',1,\n3,4,\n"5,6,\n')
    found = list(read_rows(path, max_row_bytes=50))
    assert [r.fields for r in found if isinstance(r, FileRow)] == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]
    assert [(r.where.removeprefix(f"{path}:"), r.reason) for r in found if isinstance(r, BrokenRow)] == [
        ("4", "wrong_columns"),
        ("5", "wrong_columns"),
        ("6", "not_utf8"),
        ("7", "not_csv"),
        ("8", "row_too_large"),
        ("10", "cut_short"),
    ]


@pytest.mark.parametrize("head", [b"q,q\n", b"q,\xff\n"])
def test_columns_without_names_of_their_own_are_a_data_error(tmp_path, head):
    (tmp_path / "a.csv").write_bytes(head + b"1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: .*must name its columns"):
        list(read_rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_table_in_utf_16_is_told_so(tmp_path, encoding):
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "a.csv").write_bytes(f"{mark}problem,answer\n1+1?,2\n".encode(encoding))
    with pytest.raises(DataError, match=r"a\.csv: this is UTF-16"):
        list(read_rows(tmp_path / "a.csv"))


def test_a_file_of_cells_without_rows_has_none(tmp_path):
    for body in ("", "q,a\n", "\n"):
        (tmp_path / "a.csv").write_text(body)
        assert list(read_rows(tmp_path / "a.csv")) == []


def test_a_broken_line_is_reported_with_its_number_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"q": 1}\n\n{"q": \n[1]\n"text"\n\xff\xfe\n{"q": 2}\n' + b"[" * 100_000 + b"\n")
    found = list(read_rows(path))
    assert [r.fields for r in found if isinstance(r, FileRow)] == [{"q": 1}, {"q": 2}]
    broken = [(r.where.removeprefix(f"{path}:"), r.reason) for r in found if isinstance(r, BrokenRow)]
    assert broken == [
        ("3", "not_json"),
        ("4", "not_an_object"),
        ("5", "not_an_object"),
        ("6", "not_utf8"),
        ("8", "not_json"),
    ]


def test_a_missing_file_and_an_unknown_kind_are_config_errors_that_name_them(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: no such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"/nowhere: no such file"):
        list(read_rows(tmp_path / "nowhere"))  # a folder that is misspelt, not a kind of file
    (tmp_path / "a.xlsx").write_text("q\n1\n")
    with pytest.raises(ConfigError, match=r"a\.xlsx: unknown kind of file; allowed: \*\.jsonl"):
        list(read_rows(tmp_path / "a.xlsx"))


def test_damaged_files_are_data_errors_that_name_them(tmp_path):
    whole = gzip.compress(b'{"q": "some text that is long enough to be cut"}\n' * 100)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "not.jsonl.gz").write_bytes(b"plain text")
    (tmp_path / "cut.json").write_text('[{"q": 1}, {"q"')
    (tmp_path / "unclosed.json").write_text('[{"q": 1}, {"q": 2}')
    (tmp_path / "no_comma.json").write_text('[{"q": 1} {"q": 2}]')
    (tmp_path / "two.json").write_text('[{"q": 1}]\n[{"q": 2}]')
    (tmp_path / "not.parquet").write_bytes(b"PAR1 but not really")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(DataError, match=path.name):
            list(read_rows(path))


def test_arrays_are_read_whole_whatever_the_size_of_their_elements(tmp_path):
    for rows in ([], [{"q": "x" * 3_000_000}, {"q": 2}], [{"q": i, "text": "y" * 50} for i in range(40_000)]):
        (tmp_path / "a.json").write_text(json.dumps(rows))
        assert [r.fields for r in read_rows(tmp_path / "a.json")] == rows


def test_elements_that_are_not_objects_are_reported_by_their_number(tmp_path):
    (tmp_path / "a.json").write_text(' [ 12 , {"q": 1},\n"]", [3] ] \n')
    found = list(read_rows(tmp_path / "a.json"))
    assert [(type(r).__name__, r.where.rsplit(" ", 1)[1]) for r in found] == [
        ("BrokenRow", "1"),
        ("FileRow", "2"),
        ("BrokenRow", "3"),
        ("BrokenRow", "4"),
    ]


def test_rows_are_streamed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": 1}\n' * 3)
    rows = read_rows(path)
    assert next(rows) == FileRow(where=f"{path}:1", fields={"q": 1})


@pytest.mark.parametrize(
    ("name", "stem"),
    [("train.jsonl", "train"), ("a.b.jsonl.gz", "a.b"), ("aime24.qs.jsonl", "aime24.qs"), ("x.parquet", "x")],
)
def test_the_stem_leaves_out_how_the_file_is_stored(tmp_path, name, stem):
    assert stem_of(tmp_path / name) == stem


def test_an_array_element_over_the_limit_is_dropped_and_the_next_ones_are_read(tmp_path):
    for size in (2000, 20_000_000):  # parsed with the rest of the file, and skipped by looking for its end
        rows = [{"q": 1}, {"q": '\\"]},' * (size // 6), "r": [{}, "]"]}, {"q": 3}, {"q": 4}]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        found = list(read_rows(tmp_path / "a.json", max_row_bytes=1000))
        assert [row.fields for row in found if isinstance(row, FileRow)] == [rows[0], rows[2], rows[3]]
        assert [(row.reason, row.where.rsplit(" ", 1)[1]) for row in found if isinstance(row, BrokenRow)] == [
            ("row_too_large", "2")
        ]


def test_large_array_elements_are_read_whole(tmp_path):
    large = {"q": '\\"]}, é' * 1_500_000, "r": [[{"a": "]["}], 7.5, None]}
    for rows in ([large, {"q": 2}], [{"q": 1}, large], [large, large]):
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
        assert [row.fields for row in read_rows(tmp_path / "a.json")] == rows


@pytest.mark.parametrize("end", ["", '"', '"}', '"} {}]', '"} 7, {}]', '"}]]'])
def test_a_large_element_that_is_cut_short_or_broken_is_an_error_that_names_its_row(tmp_path, end):
    (tmp_path / "a.json").write_text('[{"q": 1}, {"q": "' + "x" * 9_000_000 + end)
    with pytest.raises(DataError, match=r"a\.json: .*row [23] cannot be read"):
        list(read_rows(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "element",
    ["12", "-1.5e3", '"a,]}"', '"\\\\"', '"\\"],"', "{}", "[]", '{"a": [1, {"b": "}"}], "c": "\\\\\\""}', "[[], [[]]]"],
)
def test_the_end_of_an_element_is_found_in_text_that_comes_in_any_parts(element):
    text = f"{element} , 7]"
    for width in (1, 2, 3, len(text)):
        found, after = large_element(_Parts(text, width), text[:width], 100)
        assert (found, after[0]) == (f"{element} ", ",")


class _Parts(io.StringIO):
    """A file that gives a few characters at a time."""

    def __init__(self, text: str, width: int) -> None:
        super().__init__(text[width:])
        self._width = width

    def read(self, _size: int | None = -1) -> str:
        return super().read(self._width)


def classes_of(path, numbers, kind="int64"):
    """Write answers that are classes, yes and no, with their names as the library `datasets` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"answer": {"names": ["yes", "no"], "_type": "ClassLabel"}, "n": {"dtype": "int64", "_type": "Value"}}
    columns = {"n": [0] * len(numbers), "answer": pa.array(numbers, pa.type_for_alias(kind))}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(columns).replace_schema_metadata(metadata)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("span", [None, Span(start=1, stop=4, rows_before=1, num_rows=3, num_bytes=1)])
def test_classes_come_by_number_or_by_the_names_that_datasets_wrote_down(tmp_path, name, span):
    path = classes_of(tmp_path / name, [0, 1, None, -1])
    first = 0 if span is None else 1
    for names_classes, answers in ((False, [0, 1, None, -1]), (True, ["yes", "no", None, None])):
        rows = list(read_rows(path, span=span, names_classes=names_classes))
        assert [row.fields for row in rows] == [{"n": 0, "answer": answer} for answer in answers[first:]]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int64"])
def test_a_class_without_a_name_is_null(tmp_path, kind):
    numbers = [0, 1, 2, 5, 127] if kind == "uint8" else [0, 1, 2, -2, -128]
    rows = read_rows(classes_of(tmp_path / "a.parquet", numbers, kind), names_classes=True)
    assert [row.fields["answer"] for row in rows] == ["yes", "no", None, None, None]


@pytest.mark.parametrize("written", ["{}", '{"info": {}}', '{"info": {"features": null}}', "not JSON", "[]"])
def test_numbers_stay_numbers_where_the_features_say_nothing(tmp_path, written):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"answer": [1]}).replace_schema_metadata({"huggingface": written})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [row.fields for row in read_rows(tmp_path / "a.parquet", names_classes=True)] == [{"answer": 1}]
