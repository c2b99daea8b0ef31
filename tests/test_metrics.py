import math

from klear_core.metrics import MetricsFile, read_metrics


def test_rows_come_back_in_order(tmp_path):
    f = MetricsFile(tmp_path / "m.jsonl")
    f.append({"rl/reward/mean": 0.5}, step=1)
    f.append({"rl/reward/mean": 0.6}, step=2)
    assert read_metrics(f.path) == [{"step": 1, "rl/reward/mean": 0.5}, {"step": 2, "rl/reward/mean": 0.6}]


def test_rewind_forgets_the_step_and_what_came_after(tmp_path):
    f = MetricsFile(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        f.append({"a/b/c": step}, step=step)
    f.rewind(2)
    assert [row["step"] for row in read_metrics(f.path)] == [1]


def test_a_half_written_last_line_is_skipped(tmp_path):
    f = MetricsFile(tmp_path / "m.jsonl")
    f.append({"a/b/c": 1}, step=1)
    with f.path.open("a") as out:
        out.write('{"step": 2, "a/b')
    assert [row["step"] for row in read_metrics(f.path)] == [1]
    f.rewind(2)
    assert f.path.read_text().count("\n") == 1


def test_a_row_after_a_half_written_line_is_not_lost_with_it(tmp_path):
    """A full disk may end in the middle of a line; a resumed stage may add to an old step before it logs a new one."""
    f = MetricsFile(tmp_path / "m.jsonl")
    f.append({"a/b/c": 1}, step=1)
    with f.path.open("a") as out:
        out.write('{"step": 2, "a/b')
    f.append({"a/b/d": 3}, step=1)
    assert read_metrics(f.path) == [{"step": 1, "a/b/c": 1}, {"step": 1, "a/b/d": 3}]


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    f = MetricsFile(tmp_path / "m.jsonl")
    f.append({"a/b/c": math.nan, "a/b/d": 1.0, "a/b/e": -math.inf}, step=1)
    assert f.path.read_text() == '{"step": 1, "a/b/d": 1.0}\n'


def test_files_of_earlier_versions_have_null_or_nan_where_a_number_is_missing(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a/b/c": null, "a/b/d": NaN, "a/b/e": -Infinity, "a/b/f": 2.0}\n')
    assert read_metrics(path) == [{"step": 1, "a/b/c": None, "a/b/d": None, "a/b/e": None, "a/b/f": 2.0}]
