"""Which rows go together, how they lie, and that none is lost."""

from dataclasses import dataclass

import pytest
import torch

from klear_core.train.packing import BUCKET_COST, pack


@dataclass(frozen=True)
class Row:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def row(*tokens: int, prompt: int = 1) -> Row:
    return Row(tokens, (False,) * prompt + (True,) * (len(tokens) - prompt))


def rows_of_lengths(*lengths: int) -> list[Row]:
    return [row(*range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]


def bins(rows, layout, tokens, **kw):
    return [m.rows for m in pack(rows, layout=layout, tokens_per_microbatch=tokens, **kw).micros]


def test_varlen_lays_rows_end_to_end_with_positions_that_restart():
    micro = pack([row(5, 6, 7, prompt=2), row(8, 9)], layout="varlen", tokens_per_microbatch=10).micros[0]
    assert micro.token_ids_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert micro.position_ids_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.bounds.tolist() == [0, 3, 5]
    assert micro.max_row_len == 3
    assert micro.target_N.tolist() == [7, 9]
    assert micro.select_N.tolist() == [1, 3]  # the place before the target, in the same row
    assert micro.row_N.tolist() == [0, 1]
    assert micro.column_N.tolist() == [2, 1]
    assert micro.counts == (1, 1)


def test_padded_lays_rows_side_by_side_and_padding_is_never_selected():
    micro = pack([row(5, 6, 7), row(8, 9)], layout="padded", tokens_per_microbatch=100).micros[0]
    assert micro.rows == (1, 0)
    assert micro.token_ids_BT.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert micro.bounds is None
    assert micro.select_N.tolist() == [0, 3, 4]
    assert micro.target_N.tolist() == [9, 6, 7]
    assert micro.row_N.tolist() == [1, 0, 0]


def test_best_fit_fills_the_fullest_bin_that_still_has_room():
    assert bins(rows_of_lengths(6, 5, 4, 3, 2), "varlen", 10) == [(0, 2), (1, 3, 4)]


def test_a_row_longer_than_the_capacity_gets_a_bin_of_its_own():
    for layout in ("varlen", "padded"):
        assert sorted(bins(rows_of_lengths(3, 25, 3), layout, 10)) == [(0, 2), (1,)]


def test_buckets_part_short_from_long_where_padding_costs_more_than_a_bucket():
    assert BUCKET_COST == 200
    assert bins(rows_of_lengths(10, 90, 10, 90), "padded", 1000) == [(0, 2, 1, 3)]  # 160 padded tokens are cheaper than a bucket
    assert sorted(bins(rows_of_lengths(10, 90, 10, 90, 10), "padded", 1000)) == [(0, 2, 4), (1, 3)]  # 240 are not


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_every_row_lies_in_exactly_one_micro_batch(layout):
    rows = rows_of_lengths(*[3 + 7 * i % 40 for i in range(50)])
    packed = pack(rows, layout=layout, tokens_per_microbatch=120)
    assert sorted(r for m in packed.micros for r in m.rows) == list(range(50))
    assert all(m.token_ids_BT.numel() <= 120 for m in packed.micros)
    assert packed.num_tokens == sum(len(r.token_ids) for r in rows)
    assert packed.num_loss_tokens == packed.num_tokens - 50
    assert packed.fill == packed.num_tokens / sum(m.token_ids_BT.numel() for m in packed.micros)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_ranks_share_all_rows_and_make_equally_many_passes(layout):
    rows = rows_of_lengths(9, 8, 7, 6, 5)
    shares = [pack(rows, layout=layout, tokens_per_microbatch=10, rank=r, num_ranks=3) for r in range(3)]
    assert len({len(s.micros) for s in shares}) == 1
    assert sorted(r for s in shares for m in s.micros for r in m.rows) == [0, 1, 2, 3, 4]
    assert {s.num_loss_tokens for s in shares} == {30}  # the global count, on every rank


def test_a_rank_without_rows_runs_an_empty_pass_without_loss_tokens():
    (micro,) = pack(rows_of_lengths(4), layout="varlen", tokens_per_microbatch=10, rank=1, num_ranks=2).micros
    assert micro.rows == ()
    assert micro.num_loss_tokens == 0
    assert micro.gather([[1.0] * 4]).tolist() == []


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_gather_lays_per_token_values_where_their_tokens_are(layout):
    rows = [row(5, 6, 7, prompt=2), row(8, 9, 4), row(1, 2)]
    values = [[float(t) for t in r.token_ids] for r in rows]
    for micro in pack(rows, layout=layout, tokens_per_microbatch=5).micros:
        assert micro.gather(values).tolist() == micro.target_N.tolist()


def test_a_row_may_not_learn_its_first_token():
    with pytest.raises(AssertionError, match="first token"):
        pack([row(5, 6, prompt=0)], layout="varlen", tokens_per_microbatch=10)


def test_targets_come_back_by_row_and_column():
    rows = rows_of_lengths(6, 5, 4, 3, 2)
    for micro in pack(rows, layout="padded", tokens_per_microbatch=12).micros:
        found = [rows[r].token_ids[c] for r, c in zip(micro.row_N.tolist(), micro.column_N.tolist(), strict=True)]
        assert found == micro.target_N.tolist()
        assert torch.equal(micro.token_ids_BT.flatten()[micro.select_N + 1], micro.target_N)
