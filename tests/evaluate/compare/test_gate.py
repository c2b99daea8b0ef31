"""The gate of one evaluation against another, by tiers of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
from manifests import manifest
from pydantic import ValidationError
from test_promotion import EASY, HARD, scored

from klear_core.artifacts.manifest import InputRecord, write_manifest
from klear_core.config.evaluate import EvaluateConfig
from klear_core.errors import ConfigError
from klear_core.evaluate.compare.gate import GatePolicy, gate, read_policy, take_look
from klear_core.evaluate.stats.significance import confidence_at


def verdict(tmp_path: Path, **policy) -> str:
    """Gate a model that gains 20 of 100 problems on `a` and loses 10 of 100 on `b`."""
    old, new = tmp_path / "old", tmp_path / "new"
    if not old.exists():
        scored(old, a=[EASY] * 50 + [HARD] * 50, b=[EASY] * 100)
        scored(new, a=[EASY] * 70 + [HARD] * 30, b=[EASY] * 90 + [HARD] * 10)
    return gate(GatePolicy.model_validate(policy), new, old).verdict


def test_a_critical_loss_is_open_within_the_interval_and_fails_beyond_it(tmp_path: Path) -> None:
    """The loss of 10 points has an interval of about 4 to 18: a margin of 8 is in it, one of 3 is not, 25 is beyond."""
    assert verdict(tmp_path, margin=8) == "inconclusive"
    assert verdict(tmp_path, margin=3) == "failed"
    assert verdict(tmp_path, margin=25) == "passed"
    assert verdict(tmp_path, margin=3, margins={"b": 25}) == "passed"


def test_a_supporting_benchmark_fails_by_a_shown_loss_and_an_advisory_one_never(tmp_path: Path) -> None:
    assert verdict(tmp_path, tiers={"b": "supporting"}) == "failed"
    assert verdict(tmp_path, tiers={"b": "advisory"}) == "passed"


def test_a_gain_may_be_asked_for_and_does_not_come_from_an_advisory_benchmark(tmp_path: Path) -> None:
    assert verdict(tmp_path, margin=25, gain=True) == "passed"
    assert verdict(tmp_path, margin=25, gain=True, tiers={"a": "advisory"}) == "failed"


def test_scores_of_other_benchmarks_fail(tmp_path: Path) -> None:
    old, new = scored(tmp_path / "a", a=[EASY] * 50), scored(tmp_path / "b", c=[EASY] * 50)
    result = gate(GatePolicy(), new, old)
    assert (result.verdict, result.comparisons) == ("failed", ())


def test_one_evaluation_is_no_comparison(tmp_path: Path) -> None:
    old = scored(tmp_path / "a", a=[EASY] * 50)
    with pytest.raises(ConfigError, match="both are the same evaluation, a: there is nothing to compare"):
        gate(GatePolicy(), old, tmp_path / "b" / ".." / "a")


def test_what_cannot_be_asked_takes_no_look(tmp_path: Path) -> None:
    verdict(tmp_path)
    policy = GatePolicy(margins={"aime99": 3}, looks=(0.5, 1))
    with pytest.raises(ConfigError, match="names 'aime99'"):
        gate(policy, tmp_path / "new", tmp_path / "old", take=lambda: pytest.fail("a look was taken"))


def test_a_policy_is_checked_with_its_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "gate.toml"
    file.write_text('[tiers]\naime24 = "vital"\n')
    with pytest.raises(ConfigError, match=r"gate\.toml: .*tiers\.aime24"):
        read_policy(file)
    with pytest.raises(ConfigError, match="names 'aime99', but the benchmarks are a, b"):
        verdict(tmp_path, margins={"aime99": 3})


def test_looks_share_the_error_and_the_last_has_most_of_it() -> None:
    """O'Brien and Fleming's spending: 2 - 2 Phi(1.96 / sqrt(1/2)) = .00557 at half of the samples, .05 in all."""
    levels = [confidence_at(look, (0.5, 1.0), confidence=0.95) for look in (1, 2)]
    assert levels == pytest.approx([1 - 0.00557, 1 - (0.05 - 0.00557)], abs=1e-5)
    assert confidence_at(1, (1.0,), confidence=0.95) == pytest.approx(0.95)


def test_an_early_look_asks_for_more_than_the_last(tmp_path: Path) -> None:
    """20 problems that all gain have p = 2 / 2**20 = 2e-6, and a look at a tenth of the samples may spend 6e-10."""
    policy = GatePolicy(margin=25, gain=True, looks=(0.1, 1))
    verdict(tmp_path)
    old, new = tmp_path / "old", tmp_path / "new"
    last = gate(policy, new, old, take=lambda: 2)
    assert (last.verdict, last.look) == ("passed", 2)
    assert gate(policy, new, old).verdict != "passed"
    with pytest.raises(ValidationError, match="must grow to 1"):
        GatePolicy(looks=(1.0, 0.5))


def test_a_look_that_may_spend_nearly_no_error_passes_no_loss(tmp_path: Path) -> None:
    """At 99.9 % a tenth of the samples may spend 2e-25, and 1 minus that is 1, which is no level."""
    cfg = EvaluateConfig(confidence=0.999)
    old = scored(tmp_path / "old", cfg, a=[EASY] * 50)
    new = scored(tmp_path / "new", cfg, a=[HARD] * 50)
    result = gate(GatePolicy(looks=(0.1, 1)), new, old)
    assert result.verdict != "passed"
    (comparison,) = result.comparisons
    assert comparison.new_problems.low <= comparison.difference <= comparison.new_problems.high


def test_looks_are_counted_by_what_was_asked_and_none_is_spent_twice(tmp_path: Path) -> None:
    policy, record = GatePolicy(looks=(0.25, 1)), tmp_path / "gates"
    model = InputRecord(role="model", kind="rl", fingerprint="m" * 20)
    old, *grown = (tmp_path / name for name in ("old", "n16", "n64", "n96"))
    for folder in (old, *grown):
        folder.mkdir()
        write_manifest(folder, manifest("evaluate", inputs=(model,)))

    def look(new: Path, rule: GatePolicy = policy) -> int:
        return take_look(rule, new, old, record=record)

    assert [look(grown[0]), look(grown[0]), look(grown[1]), look(grown[0])] == [1, 1, 2, 1]
    with pytest.raises(ConfigError, match="all 2 looks of this policy at these two models are spent"):
        look(grown[2])
    assert look(grown[2], GatePolicy(looks=(0.25, 1), margin=9)) == 1  # another question
    assert look(grown[2], GatePolicy()) == 1
