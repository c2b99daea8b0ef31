"""Settings written as TOML and as options are read back as they were."""

from __future__ import annotations

import shlex
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from klear_core.config.load import apply_override, as_option, profile_toml, validate
from klear_core.config.pipeline import PipelineConfig

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_an_option_sets_the_value_that_it_was_written_for(value: object) -> None:
    option, text = shlex.split(as_option("a.b", value))
    assert option == "--set"
    assert apply_override({}, text) == {"a": {"b": value}}


@given(
    TEXTS.filter(str.strip),
    st.integers(0, 2**31),
    st.floats(0, 1, exclude_min=True),
    st.lists(TEXTS.filter(str.strip), max_size=3, unique=True),
)
def test_a_profile_is_read_back_as_the_config_that_it_was_written_from(
    text: str, seed: int, rate: float, names: list[str]
) -> None:
    tree = {"seed": seed, "rl": {"optim": {"lr": rate}}, "curate": {"sources": [{"kind": "procedural", "name": text}]}}
    tree["curate"]["select"] = {"quality": dict.fromkeys(names, rate)}  # type: ignore[index]
    config = validate(tree, origin="test")
    assert validate(tomllib.loads(profile_toml(config)), origin="test") == config


def test_every_setting_of_the_defaults_is_in_their_profile() -> None:
    assert validate(tomllib.loads(profile_toml(PipelineConfig())), origin="test") == PipelineConfig()
