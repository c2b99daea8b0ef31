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


def test_non_finite_numbers_become_null(tmp_path):
    f = MetricsFile(tmp_path / "m.jsonl")
    f.append({"a/b/c": math.nan}, step=1)
    assert read_metrics(f.path) == [{"step": 1, "a/b/c": None}]
