"""Plans of an update for ranks in lockstep: nothing is lost, nothing is too full, and nobody waits long."""

import gzip
import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klear_core.train.balance import Item, RowWork, best_fit, busy_bound, busy_share, distribute, lockstep_work

QWEN3_8B = RowWork.of(
    product_flops=8 * 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 6 * 151936 * 4096,
    attention_width=36 * 4096,
    recomputes=True,
)
TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "cot-skythought"

lengths_of_rows = st.lists(st.integers(1, 300), max_size=60)


def items_of(lengths, row_work=QWEN3_8B):
    return [Item(num_tokens=n, work=row_work(n)) for n in lengths]


def lognormal(count, *, seed):
    rng = random.Random(seed)
    return [min(32768, max(64, round(rng.lognormvariate(math.log(9000), 0.8)))) for _ in range(count)]


def mean_busy_share(draws, num_ranks):
    """Return mean work over lockstep time, with lines of 32,768 tokens."""
    work = lockstep = 0.0
    for lengths in draws:
        items = items_of(lengths)
        work += sum(item.work for item in items) / num_ranks
        lockstep += lockstep_work(distribute(items, capacity=32768, num_ranks=num_ranks), items)
    return work / lockstep


def test_a_row_of_the_attention_length_costs_twice_its_products():
    assert RowWork(attention_len=100)(100) == 200
    assert RowWork()(100) == 100


def test_work_of_qwen3_8b_by_hand():
    """8 * 6.946e9 + 6 * 0.622e9 FLOPs a token over 9 * 147,456 a pair of tokens; a full row costs 1.46 of four quarters."""
    assert QWEN3_8B.attention_len == pytest.approx(44_684, abs=1)
    assert QWEN3_8B(32768) / (4 * QWEN3_8B(8192)) == pytest.approx(1.46, abs=0.005)


@settings(max_examples=150)
@given(lengths=lengths_of_rows, capacity=st.integers(1, 400), num_ranks=st.integers(1, 9), scale=st.floats(1, 1e5))
def test_every_plan_is_complete_within_its_budget_equal_and_within_the_bound(lengths, capacity, num_ranks, scale):
    items = items_of(lengths, RowWork(attention_len=scale))
    plan = distribute(items, capacity=capacity, num_ranks=num_ranks)
    assert sorted(i for bins in plan for b in bins for i in b) == list(range(len(lengths)))
    assert {len(bins) for bins in plan} <= {num_ranks}  # every rank has a micro-batch in every pass
    assert all(any(bins) for bins in plan)  # no pass is empty
    for bins in plan:
        for b in bins:
            assert sum(lengths[i] for i in b) <= capacity or len(b) == 1
    assert plan == distribute(items, capacity=capacity, num_ranks=num_ranks)
    if items:
        bound = busy_bound(items, capacity=capacity, num_ranks=num_ranks)
        assert busy_share(plan, items, num_ranks) <= bound * (1 + 1e-9)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), num_ranks=st.integers(2, 9), data=st.data())
def test_no_plan_is_slower_than_the_bins_of_best_fit_in_any_order(lengths, num_ranks, data):
    items = items_of(lengths, RowWork(attention_len=150))
    bins = data.draw(st.permutations(best_fit(lengths, 300)))
    other = [bins[i : i + num_ranks] for i in range(0, len(bins), num_ranks)]
    now = distribute(items, capacity=300, num_ranks=num_ranks)
    # A pass costs 300 beyond its work, for which a plan with fewer passes may be chosen.
    assert lockstep_work(now, items) + 300 * len(now) <= (lockstep_work(other, items) + 300 * len(other)) * (1 + 1e-9)


def test_one_rank_gets_the_bins_of_best_fit_longest_first():
    items = items_of([2, 3, 4, 5, 6])
    assert distribute(items, capacity=10, num_ranks=1) == [[[4, 2]], [[3, 1, 0]]]


def test_the_bound_of_one_long_and_many_short_rows_by_hand():
    """Rows of 10 and 2 x 1, two ranks: the long one alone takes 10 of work, so of 2 x 10 at most 12 are used."""
    items = items_of([10, 1, 1], RowWork())
    assert busy_bound(items, capacity=10, num_ranks=2) == pytest.approx(12 / 20)
    assert busy_share(distribute(items, capacity=10, num_ranks=2), items, 2) == pytest.approx(12 / 20)


@pytest.mark.parametrize(("num_rows", "num_ranks", "least"), [(128, 8, 0.97), (256, 8, 0.97), (256, 32, 0.93)])
def test_ranks_are_busy_with_lognormal_lengths(num_rows, num_ranks, least):
    assert mean_busy_share([lognormal(num_rows, seed=s) for s in range(8)], num_ranks) >= least


@pytest.mark.parametrize(("num_rows", "num_ranks", "least"), [(128, 8, 0.97), (256, 8, 0.97), (256, 32, 0.93)])
def test_ranks_are_busy_with_the_lengths_of_published_traces(num_rows, num_ranks, least):
    """Characters of real long chains of thought, scaled to a median of 9,000."""
    if not TRACES.is_dir():
        pytest.skip("the published traces are not here (../shared/data)")
    sizes = []
    for file in sorted(TRACES.glob("*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            for line in lines:
                sizes += [len(text) for text in json.loads(line)["code"]]
    scale = 9000 / statistics.median(sizes)
    rows = [min(32768, max(64, round(size * scale))) for size in sizes]
    draws = [random.Random(s).choices(rows, k=num_rows) for s in range(8)]
    assert mean_busy_share(draws, num_ranks) >= least
