"""Which rows come when, by hand."""

from collections import Counter

import pytest

from klear_core.errors import DataError
from klear_core.sft.examples import RowOrder, split_rows


def order(num_rows=10, *, weights=None, num_epochs=2, rows_per_step=4, seed=0, sources=None):
    sources = sources or ["a"] * num_rows
    return RowOrder(
        range(num_rows),
        sources,
        source_weights=weights or {},
        num_epochs=num_epochs,
        rows_per_step=rows_per_step,
        seed=seed,
    )


def stream(o):
    return [r for s in range(o.num_steps) for r in o.step(s)]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    rows = stream(order(10))
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]


def test_epochs_follow_without_a_gap_and_the_last_step_may_be_smaller():
    o = order(10, num_epochs=3)
    assert o.num_steps == 8
    assert [len(o.step(s)) for s in range(8)] == [4, 4, 4, 4, 4, 4, 4, 2]


def test_a_step_is_the_same_whichever_was_asked_before():
    one, other = order(10), order(10)
    assert [other.step(s) for s in reversed(range(5))][::-1] == [one.step(s) for s in range(5)]


def test_another_seed_is_another_order():
    assert stream(order(50)) != stream(order(50, seed=1))


def test_weights_repeat_leave_out_and_take_a_new_part_each_epoch():
    o = order(30, weights={"b": 2.0, "c": 0.5, "d": 0.0}, sources=["a"] * 6 + ["b"] * 4 + ["c"] * 10 + ["d"] * 10)
    assert o.rows_per_epoch == 6 + 8 + 5
    rows = stream(o)
    first, second = Counter(rows[:19]), Counter(rows[19:])
    assert all(first[r] == second[r] == (1 if r < 6 else 2) for r in range(10))
    halves = [{r for r in epoch if r >= 10} for epoch in (first, second)]
    assert [len(h) for h in halves] == [5, 5]
    assert halves[0] != halves[1]
    assert max(rows) < 20


def test_distinct_rows_are_those_that_the_steps_have_by_hand():
    o = order(30, weights={"b": 2.0, "c": 0.5, "d": 0.0}, sources=["a"] * 6 + ["b"] * 4 + ["c"] * 10 + ["d"] * 10)
    for num_steps in (0, 1, 3, 5, 7, o.num_steps):
        assert o.num_distinct(num_steps) == len({r for s in range(num_steps) for r in o.step(s)})
    assert 6 + 4 + 5 < o.num_distinct(o.num_steps) <= 6 + 4 + 10


def test_weights_that_leave_nothing_to_train_on_are_refused():
    with pytest.raises(DataError, match=r"source_weights {'a': 0\.0} leave none of 10 rows"):
        order(10, weights={"a": 0.0})
    with pytest.raises(DataError, match="leave none of 0 rows that are not held out"):
        order(0)


def test_all_rows_of_a_problem_are_on_one_side():
    ids = [f"p{i // 3}" for i in range(300)]
    split = split_rows(ids, frac=0.2, max_rows=1000, seed=0)
    assert sorted(split.train + split.validation) == list(range(300))
    assert not {ids[r] for r in split.train} & {ids[r] for r in split.validation}
    assert len(split.validation) == pytest.approx(60, abs=25)


def test_validation_keeps_to_its_limit_and_the_rest_is_trained_on():
    split = split_rows([f"p{i}" for i in range(100)], frac=0.4, max_rows=7, seed=0)
    assert len(split.validation) == 7
    assert len(split.train) == 93


def test_no_validation_when_none_is_asked_for():
    assert split_rows(["a", "b"], frac=0.0, max_rows=5, seed=0).validation == ()
