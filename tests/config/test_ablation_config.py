from pathlib import Path

import pytest

from klear_core.config.grids import load_ablation
from klear_core.errors import ConfigError

GRID = """
profile = "smoke"
reference = "a"
learning_rates = [1e-4]
seeds = [1, 2]
[variants]
a = []
"""


@pytest.mark.parametrize(
    ("changed", "to", "complaint"),
    [
        ("seeds", "sedes", "sedes: unknown key; did you mean seeds?"),
        ('"a"', '"b"', "reference: 'b' is not among the variants a"),
        ("[1, 2]", "[1, 1]", "name a seed twice"),
        ("[1, 2]", "[1]", "seeds = [1]: tuple should have at least 2 items"),
        ("[1, 2]", '[1, "b"]', "seeds.1 = 'b': input should be a valid integer"),
        ("[1e-4]", "[]", "at least 1 item"),
        ("[1e-4]", "[0]", "learning_rates.0 = 0: input should be greater than 0"),
        ("[variants]", "[rates]\nb = [1e-4]\n[variants]", "rates: 'b' is not among the variants a"),
        ("[variants]", "[variants", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_grid_is_said(tmp_path: Path, changed: str, to: str, complaint: str) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace(changed, to, 1))
    with pytest.raises(ConfigError, match=r"grid\.toml") as error:
        load_ablation(file)
    assert complaint in str(error.value)


def test_a_grid_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_ablation(tmp_path / "none.toml")


OTHER = """
[profiles.klear_8b]
overrides = []
learning_rates = [1e-6]
variants = { a = [], c = ["seed=1"] }
[paper]
source = "arXiv 0, Table 1"
about = "at 8B"
scores = { a = { aime24 = 10.0 }, b = { aime24 = 12.5 } }
"""


def test_settings_for_another_profile_replace_those_of_the_grid(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("[variants]", 'overrides = ["seed=4"]\n[variants]\nb = []') + OTHER)
    grid = load_ablation(file, "klear_8b")
    assert (grid.profile, grid.overrides, grid.learning_rates, grid.seeds) == ("klear_8b", (), (1e-6,), (1, 2))
    assert list(grid.variants) == ["a", "c"]
    assert grid.paper is not None
    assert list(grid.paper.scores) == ["a"]  # b is no variant there
    assert load_ablation(file, "my/klear_8b").variants == grid.variants
    assert load_ablation(file, "node_8", ["klear_8b"]) == grid.model_copy(update={"profile": "node_8"})
    assert load_ablation(file, "smoke") == load_ablation(file)
    with pytest.raises(ConfigError, match=r"grid\.toml: this grid is for smoke, klear_8b, .*for laptop"):
        load_ablation(file, "laptop")


@pytest.mark.parametrize(
    ("changed", "to", "complaint"),
    [
        ("b = { aime24", "d = { aime24", "paper.scores: 'd' is not among the variants b, a, c"),
        ("b = { aime24", "b = { aime25", "all variants must have scores of the same benchmarks"),
        ("12.5", "125", "should be less than or equal to 100"),
        ("learning_rates = [1e-6]", "learning_rate = [1e-6]", "did you mean learning_rates?"),
    ],
)
def test_what_is_wrong_with_published_rows_or_other_profiles_is_said(
    tmp_path: Path, changed: str, to: str, complaint: str
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace("[variants]", "[variants]\nb = []") + OTHER.replace(changed, to, 1))
    with pytest.raises(ConfigError) as error:
        load_ablation(file)
    assert complaint in str(error.value)
