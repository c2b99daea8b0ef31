"""Which rows go together, how they lie, and that none is lost."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klear_core.train.packing import pack
from klear_core.types import TokenCounts


@dataclass(frozen=True)
class Row(TokenCounts):
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def row(*tokens: int, prompt: int = 1) -> Row:
    return Row(tokens, (False,) * prompt + (True,) * (len(tokens) - prompt))


def rows_of_lengths(*lengths: int) -> list[Row]:
    return [row(*range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]


def bins(rows, tokens, **kw):
    return [m.rows for m in pack(rows, tokens_per_microbatch=tokens, **kw).micro_batches]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(8, 64),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_row_lies_whole_in_one_micro_batch_of_one_rank(lengths, capacity, num_ranks, shares_prompts):
    """Whatever the lengths, and however prompts are shared: of each row all tokens are predicted, once, and no other."""
    rows = [
        row(*range(1000 * i, 1000 * i + prompt + answer), prompt=prompt) for i, (prompt, answer) in enumerate(lengths)
    ]
    packed = [
        pack(rows, tokens_per_microbatch=capacity, rank=rank, num_ranks=num_ranks, shares_prompts=shares_prompts)
        for rank in range(num_ranks)
    ]
    assert len({len(batch.micro_batches) for batch in packed}) == 1
    micro_batches = [micro for batch in packed for micro in batch.micro_batches]
    assert sorted(i for micro in micro_batches for i in micro.rows) == list(range(len(rows)))
    targets = sorted(token for micro in micro_batches if micro.rows for token in micro.target_N.tolist())
    assert targets == sorted(
        t for r in rows for t, is_target in zip(r.token_ids, r.loss_mask, strict=True) if is_target
    )
    assert {batch.num_loss_tokens for batch in packed} == {len(targets)}


def test_rows_lie_end_to_end_with_positions_that_restart():
    micro = pack([row(5, 6, 7, prompt=2), row(8, 9)], tokens_per_microbatch=10).micro_batches[0]
    assert micro.token_ids_1T.tolist() == [[5, 6, 7, 8, 9]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.cu_seqlens.tolist() == [0, 3, 5]
    assert micro.group_bounds.tolist() == [0, 1, 2]
    assert micro.max_segment_len == 3
    assert micro.target_N.tolist() == [7, 9]
    assert micro.predictor_N.tolist() == [1, 3]  # the place before the target, in the same row
    assert micro.row_N.tolist() == [0, 1]
    assert micro.column_N.tolist() == [2, 1]
    assert micro.counts == (1, 1)


def test_a_shared_prompt_lies_once_before_what_follows_it_in_each_row():
    """Prompt 5 6 with answers 7 and 8 9, and between them in the batch prompt 5 with answer 6 7: another prompt, on its own."""
    rows = [row(5, 6, 7, prompt=2), row(5, 6, 7), row(5, 6, 8, 9, prompt=2)]
    micro = pack(rows, tokens_per_microbatch=10, shares_prompts=True).micro_batches[0]
    assert micro.rows == (0, 2, 1)
    assert micro.token_ids_1T.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 2, 3, 0, 1, 2]]
    assert micro.cu_seqlens.tolist() == [0, 2, 3, 5, 8]
    assert micro.group_bounds.tolist() == [0, 3, 4]
    assert micro.target_N.tolist() == [7, 8, 9, 6, 7]
    # Both answers' first tokens are predicted by the prompt's last.
    assert micro.predictor_N.tolist() == [1, 1, 3, 5, 6]
    assert micro.row_N.tolist() == [0, 2, 2, 1, 1]
    assert micro.column_N.tolist() == [2, 2, 3, 1, 2]
    assert micro.counts == (1, 2, 2)


def test_shared_prompts_fill_above_one():
    assert (
        pack([row(5, 6, 7, prompt=2), row(5, 6, 8, prompt=2)], tokens_per_microbatch=10, shares_prompts=True).fill
        == 6 / 4
    )


def test_without_sharing_every_row_has_its_prompt():
    micro = pack([row(5, 6, 7, prompt=2), row(5, 6, 8, prompt=2)], tokens_per_microbatch=10).micro_batches[0]
    assert micro.token_ids_1T.tolist() == [[5, 6, 7, 5, 6, 8]]


def test_a_group_that_does_not_fit_is_cut_and_each_part_has_the_prompt():
    """Three answers of two tokens after a prompt of three: two of them are 7 tokens, all three are 9."""
    rows = [row(1, 2, 3, 10 + i, 20 + i, prompt=3) for i in range(3)]
    assert bins(rows, 9, shares_prompts=True) == [(0, 1, 2)]
    assert bins(rows, 8, shares_prompts=True) == [(0, 1), (2,)]
    assert bins(rows, 4, shares_prompts=True) == [(0,), (1,), (2,)]


def test_best_fit_fills_the_fullest_bin_that_still_has_room():
    assert bins(rows_of_lengths(6, 5, 4, 3, 2), 10) == [(0, 2), (1, 3, 4)]


def test_a_row_longer_than_the_capacity_gets_a_bin_of_its_own():
    assert sorted(bins(rows_of_lengths(3, 25, 3), 10)) == [(0, 2), (1,)]


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_every_row_lies_in_exactly_one_micro_batch(shares_prompts):
    rows = rows_of_lengths(*[3 + 7 * i % 40 for i in range(50)])
    packed = pack(rows, tokens_per_microbatch=120, shares_prompts=shares_prompts)
    assert sorted(r for m in packed.micro_batches for r in m.rows) == list(range(50))
    assert all(m.token_ids_1T.numel() <= 120 for m in packed.micro_batches)
    assert packed.num_tokens == sum(len(r.token_ids) for r in rows)
    assert packed.num_loss_tokens == packed.num_tokens - 50
    assert packed.fill == packed.num_tokens / sum(m.token_ids_1T.numel() for m in packed.micro_batches)


def test_ranks_share_all_rows_and_make_equally_many_passes():
    rows = rows_of_lengths(9, 8, 7, 6, 5)
    shares = [pack(rows, tokens_per_microbatch=10, rank=r, num_ranks=3) for r in range(3)]
    assert len({len(s.micro_batches) for s in shares}) == 1
    assert sorted(r for s in shares for m in s.micro_batches for r in m.rows) == [0, 1, 2, 3, 4]
    assert {s.num_loss_tokens for s in shares} == {30}  # the global count, on every rank


def test_a_rank_without_rows_runs_an_empty_pass_without_loss_tokens():
    (micro,) = pack(rows_of_lengths(4), tokens_per_microbatch=10, rank=1, num_ranks=2).micro_batches
    assert micro.rows == ()
    assert micro.num_loss_tokens == 0
    assert micro.gather([[1.0] * 4]).tolist() == []


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_gather_lays_per_token_values_where_their_tokens_are(shares_prompts):
    rows = [row(5, 6, 7, prompt=2), row(8, 9, 4), row(1, 2), row(5, 6, 3, prompt=2)]
    values = [[float(t) for t in r.token_ids] for r in rows]
    for micro in pack(rows, tokens_per_microbatch=5, shares_prompts=shares_prompts).micro_batches:
        assert micro.gather(values).tolist() == micro.target_N.tolist()


def test_a_row_may_not_learn_its_first_token():
    with pytest.raises(AssertionError, match="first token"):
        pack([row(5, 6, prompt=0)], tokens_per_microbatch=10)


def test_targets_come_back_by_row_and_column():
    rows = rows_of_lengths(6, 5, 4, 3, 2)
    for micro in pack(rows, tokens_per_microbatch=12).micro_batches:
        found = [rows[r].token_ids[c] for r, c in zip(micro.row_N.tolist(), micro.column_N.tolist(), strict=True)]
        assert found == micro.target_N.tolist()
        assert torch.equal(micro.token_ids_1T.flatten()[micro.predictor_N + 1], micro.target_N)
