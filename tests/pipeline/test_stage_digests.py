"""An upgrade throws away nobody's artifacts: what a stage of a profile is has not changed since the last release, or CHANGELOG says so.

The identity of a stage is its code version and the digest of its settings. A stage that computes something else gets a new code
version. A setting that is added has a value at which the stage does what it did; `Settings.as_before` names it, so that it is not
hashed. Whatever changes all the same is named in CHANGELOG under "Unreleased", as "Runs again: `kind`", with its reason.
A release puts the digests of its day in the place of the old file.
"""

import json
import re
from pathlib import Path

import pytest
from pydantic import JsonValue

from klear_core.config.load import load_profile
from klear_core.config.settings import Settings, config_digest
from klear_core.pipeline.graph import stages_of

ROOT = Path(__file__).parents[2]
RELEASED = "0.2.0"
OLD = json.loads((ROOT / "tests" / "files" / f"stage_digests_{RELEASED}.json").read_text())


def identities() -> dict[str, list[JsonValue]]:
    """Kind, code version and digest of every stage of every profile that the last release had, by profile/stage."""
    found: dict[str, list[JsonValue]] = {}
    for profile in sorted({name.partition("/")[0] for name in OLD}):
        for stage in stages_of(load_profile(ROOT / "configs" / profile, [])):
            found[f"{profile}/{stage.name}"] = [stage.kind, stage.job.code_version, config_digest(stage.job)]
    return found


def named_in_changelog() -> set[str]:
    """Kinds that CHANGELOG names as running again since the last release."""
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition(f"## {RELEASED}")[0]
    lines = re.findall(r"^- Runs again: ([^:]*):", unreleased, re.MULTILINE)
    return {kind for line in lines for kind in re.findall(r"`(\w+)`", line)}


def test_only_the_stages_that_the_changelog_names_run_again_after_an_upgrade():
    now = identities()
    changed = {kind for name, (kind, *identity) in now.items() if name in OLD and identity != OLD[name][1:3]}
    assert changed == named_in_changelog()


def test_a_new_code_version_says_what_it_does_otherwise_in_the_words_of_the_changelog():
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition(f"## {RELEASED}")[0]
    lines = [line for line in unreleased.splitlines() if "Runs again" in line]
    for profile in sorted({name.partition("/")[0] for name in OLD}):
        for stage in stages_of(load_profile(ROOT / "configs" / profile, [])):
            released = OLD.get(f"{profile}/{stage.name}", [None, stage.job.code_version])[1]
            for version in range(released + 1, stage.job.code_version + 1):
                assert any(f"`{stage.kind}`" in line and stage.job.code_changes[version] in line for line in lines)


def test_no_stage_of_a_released_profile_is_gone():
    assert OLD.keys() - identities().keys() == set()


class Inner(Settings):
    width: int = 1
    height: int = 2
    as_before = {"height": 2}


class Outer(Settings):
    inner: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(),)


class OldInner(Settings):
    width: int = 1


class OldOuter(Settings):
    inner: OldInner = OldInner()
    several: tuple[OldInner, ...] = (OldInner(),)


def test_a_new_field_at_the_value_that_means_as_before_is_not_hashed():
    assert config_digest(Outer()) == config_digest(OldOuter())


@pytest.mark.parametrize("other", [Outer(inner=Inner(height=3)), Outer(several=(Inner(height=3),))])
def test_a_new_field_at_any_other_value_is_hashed(other: Outer):
    assert config_digest(other) != config_digest(OldOuter())
