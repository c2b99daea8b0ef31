"""A table of small groups, and the estimators by hand."""

from __future__ import annotations

import pytest

from klear_core.config.rl import BatchAdvantage, GrpoAdvantage, RlooAdvantage
from klear_core.rl.rewards import advantages

PAPER, CODE, DR = GrpoAdvantage(std="population"), GrpoAdvantage(std="sample"), GrpoAdvantage(std="none")


@pytest.mark.parametrize(
    ("rewards", "code", "paper"),
    [
        ([1, *[-1] * 7], [2.4749, *[-0.3536] * 7], [2.6458, *[-0.3780] * 7]),
        ([1, 1, *[-1] * 6], [1.6202] * 2 + [-0.5401] * 6, [1.7321] * 2 + [-0.5774] * 6),
        ([*[1] * 7, -1], [0.3536] * 7 + [-2.4749], [0.3780] * 7 + [-2.6458]),
        (
            [1, 0.5, 0, -0.5, -1, -1, -0.5, 0],
            [1.6869, 0.9766, 0.2664, -0.4439, -1.1542, -1.1542, -0.4439, 0.2664],
            [1.8034, 1.0441, 0.2847, -0.4746, -1.2339, -1.2339, -0.4746, 0.2847],
        ),
        ([-1, -1, -0.5, *[-1] * 5], [-0.3536, -0.3536, 2.4749, *[-0.3536] * 5], None),
    ],
)
def test_group_advantages_match_the_published_numbers(
    rewards: list[float], code: list[float], paper: list[float] | None
) -> None:
    assert advantages([rewards], CODE)[0] == pytest.approx(code, abs=6e-5)
    if paper is not None:
        assert advantages([rewards], PAPER)[0] == pytest.approx(paper, abs=6e-5)


def test_a_group_of_one_is_its_reward_in_the_papers_code_and_nothing_elsewhere() -> None:
    assert advantages([[0.7]], CODE) == [[0.7]]
    assert advantages([[0.7]], PAPER) == [[0.0]]
    assert advantages([[0.7]], RlooAdvantage()) == [[0.0]]


@pytest.mark.parametrize("cfg", [PAPER, CODE, DR, RlooAdvantage(), BatchAdvantage()])
def test_equal_rewards_give_no_advantage(cfg: GrpoAdvantage | RlooAdvantage | BatchAdvantage) -> None:
    assert advantages([[0.1] * 3], cfg)[0] == pytest.approx([0, 0, 0], abs=1e-9)


def test_dr_grpo_only_centres() -> None:
    assert advantages([[1, 0, 0, 0]], DR) == [[0.75, -0.25, -0.25, -0.25]]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert advantages([[3, 1, 2]], RlooAdvantage())[0] == pytest.approx([3 - 1.5, 1 - 2.5, 2 - 2])


def test_batch_normalisation_divides_by_the_spread_of_the_whole_batch() -> None:
    # Centred: [1, -1] and [3, -3]; variance (1 + 1 + 9 + 9) / 4 = 5.
    expected = [[1 / 5**0.5, -1 / 5**0.5], [3 / 5**0.5, -3 / 5**0.5]]
    assert [pytest.approx(e, abs=1e-5) for e in expected] == advantages([[2, 0], [6, 0]], BatchAdvantage())


def test_advantages_do_not_see_an_affine_change_of_rewards() -> None:
    soft = [0.25, 0.5, 0.75, 0, 0.25, 0.5, 0.75, 0.5]
    assert advantages([soft], PAPER)[0] == pytest.approx(advantages([[2 * p - 1 for p in soft]], PAPER)[0], abs=1e-4)
