import pytest

from klear_core.config.curate import DifficultyConfig
from klear_core.data.candidates import difficulty_of
from klear_core.types import Difficulty


@pytest.mark.parametrize(
    ("rating", "tag"),
    [
        (None, Difficulty.UNKNOWN),
        (0.0, Difficulty.EASY),
        (0.33, Difficulty.EASY),
        (0.34, Difficulty.MEDIUM),
        (0.66, Difficulty.MEDIUM),
        (0.67, Difficulty.HARD),
        (1.0, Difficulty.HARD),
    ],
)
def test_a_rating_is_easy_below_the_first_bound_and_hard_from_the_second(rating, tag):
    assert difficulty_of(rating, DifficultyConfig()) is tag


def test_bounds_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"easy_below = 0\.9 is above hard_from = 0\.1"):
        DifficultyConfig(easy_below=0.9, hard_from=0.1)
