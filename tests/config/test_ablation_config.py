from pathlib import Path

import pytest

from klear_core.config.ablation import load_ablation
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
        ('"a"', '"b"', "reference 'b' is not among the variants a"),
        ("[1, 2]", "[1, 1]", "name a seed twice"),
        ("[1, 2]", "[1]", "seeds = [1]: tuple should have at least 2 items"),
        ("[1, 2]", '[1, "b"]', "seeds.1 = 'b': input should be a valid integer"),
        ("[1e-4]", "[]", "at least 1 item"),
        ("[1e-4]", "[0]", "learning_rates.0 = 0: input should be greater than 0"),
        ("[variants]", "[rates]\nb = [1e-4]\n[variants]", "rates name 'b', which is not among the variants a"),
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
