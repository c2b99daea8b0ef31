from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from klear_core.config.load import load_profile

PROFILE = Path(__file__).parents[2] / "configs" / "klear_8b"
README = (PROFILE / "README.md").read_text()
SET = re.compile(r"`((?:rl|rl_code|sft|evaluate)\.[a-z_.]+) ?= ?([^`]+)`")


def differences() -> list[list[str]]:
    """Rows of the table of differences, cell by cell."""
    table = README.split("## Where the paper and its scripts differ")[1]
    rows = [line.strip("| \n").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return rows[1:]


def resolved(key: str, *overrides: str) -> object:
    value: object = load_profile(PROFILE, overrides)
    for name in key.split("."):
        value = getattr(value, name)
    return value


HERE = [found.groups() for row in differences() for found in SET.finditer(" ".join(row[:2]))]
SCRIPTS = [found.groups() for row in differences() for found in SET.finditer(row[-1])]


def test_the_table_has_rows() -> None:
    assert len(HERE) >= 9
    assert len(SCRIPTS) >= 7


@pytest.mark.parametrize(("key", "value"), HERE, ids=[key for key, _ in HERE])
def test_a_value_in_the_readme_is_that_of_the_profile(key: str, value: str) -> None:
    assert resolved(key) == tomllib.loads(f"value = {value}")["value"]


@pytest.mark.parametrize(("key", "value"), SCRIPTS, ids=[key for key, _ in SCRIPTS])
def test_what_follows_the_scripts_is_accepted_and_is_another_value(key: str, value: str) -> None:
    wanted = tomllib.loads(f"value = {value}")["value"]
    assert resolved(key, f"{key}={value}") == wanted
    assert resolved(key) != wanted


@pytest.mark.parametrize(
    ("file", "key", "named"),
    [
        (file, key, named)
        for file in ("rl.toml", "rl_code.toml")
        for key, named in [
            ("std", ("paper equation 4", "script", "core_algos.py")),
            ("zero_advantage", ("paper", "script", "filter_groups_metric=acc")),
            ("# no dual_clip", ("paper equation 11", "script", "clip_ratio_c=10.0")),
            ("normalise", ("paper equation 11", "script", "dp_actor.py")),
            ("beta_low", ("paper 3.2.3", "script", "ppo_trainer.yaml")),
            ("num_steps", ("paper", "script", "total_epochs=5")),
        ]
    ]
    + [
        ("evaluate.toml", "top_k", ("paper", "script", "inference.py")),
        ("evaluate.toml", "repetition_penalty", ("paper", "script", "inference.py")),
        ("rl_code.toml", "wrong", ("paper 3.2.4", "script", "code_r1_compute.py")),
    ],
)
def test_a_line_on_which_paper_and_scripts_differ_names_both(file: str, key: str, named: tuple[str, ...]) -> None:
    (line,) = [line for line in (PROFILE / file).read_text().splitlines() if line.startswith(key)]
    assert [name for name in named if name not in line] == []
