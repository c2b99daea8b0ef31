from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import laptop_run

from klear_core.report.run.claims import headline, standing_of
from klear_core.report.run.facts import ComparedModels, Facts, read_facts
from klear_core.scores import MINUS, Range


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return read_facts(laptop_run(tmp_path_factory.mktemp("store")))


def with_last(facts: Facts, **changes: object) -> Facts:
    """The run with the sampled SFT to RL difference changed."""
    changed = tuple(changed_to(d, **changes) if is_last(d) else d for d in facts.differences)
    return replace(facts, differences=changed)


def is_last(models: ComparedModels) -> bool:
    return (models.before, models.after, models.scores.decoding) == ("sft", "rl", "sampled")


def changed_to(models: ComparedModels, **changes: object) -> ComparedModels:
    return replace(models, scores=models.scores.model_copy(update=changes))


def sentence(facts: Facts) -> str:
    return headline(facts).sentence.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("p", "value", "standing"),
    [
        (0.049, 0.1, "better"),
        (0.049, -0.1, "worse"),
        (0.05, 0.1, "not_shown"),
        (1.0, 0.0, "not_shown"),
    ],
)
def test_only_the_corrected_test_shows_anything(p: float, value: float, standing: str, facts: Facts) -> None:
    """The interval over other problems is the same each time, and above zero."""
    difference = changed_to(facts.differences[0], p_corrected=p, difference=value).scores
    assert difference.new_problems.low > 0
    assert standing_of(difference) == standing


def test_a_gain_within_noise_is_said_to_be_not_shown(facts: Facts) -> None:
    ends = Range(low=-0.005, high=0.021)
    noise = with_last(facts, difference=0.008, rerun=Range(low=0.001, high=0.015), new_problems=ends, p_corrected=0.31)
    assert headline(noise).standing == "not_shown"
    assert sentence(noise).startswith("An effect of GPPO on held-out avg@4 is not shown:")
    assert (
        f"(+0.8 points; re-run of these problems: +0.1 to +1.5; other such problems: {MINUS}0.5 to +2.1; "
        "sign-flip p = 0.31, corrected for 3 comparisons)."
    ) in sentence(noise)
    assert "improved" not in sentence(noise)


def test_a_loss_is_called_worse(facts: Facts) -> None:
    worse = with_last(facts, difference=-0.1, rerun=None, new_problems=Range(low=-0.15, high=-0.05))
    assert headline(worse).standing == "worse"
    assert sentence(worse).startswith("GPPO made held-out avg@4 worse:")
    assert f"({MINUS}10.0 points; other such problems: {MINUS}15.0 to {MINUS}5.0; sign-flip p < 0.0001" in sentence(
        worse
    )


def test_too_few_changed_problems_are_said_to_be_the_reason(facts: Facts) -> None:
    few = with_last(facts, num_changed=5, p_corrected=0.31)
    assert "; only 5 of 256 problems changed, too few for a test)." in sentence(few)


def test_how_few_are_too_few_depends_on_the_level(facts: Facts) -> None:
    """Five of five: p = 2 / 2^5 = 0.0625, below 1 - 0.9."""
    five = with_last(facts, num_changed=5, p_corrected=0.0625, confidence=0.9)
    assert headline(five).standing == "better"
    assert "too few" not in sentence(five)
    seven = with_last(facts, num_changed=7, p_corrected=0.0156, confidence=0.99)
    assert "only 7 of 256 problems changed, too few for a test" in sentence(seven)


def test_the_earlier_step_follows_as_a_claim_of_its_own(facts: Facts) -> None:
    assert [c.sentence.startswith("SFT improved") for c in headline(facts).claims] == [True]


def test_unlike_decoding_is_part_of_the_sentence(facts: Facts) -> None:
    assert "the two were decoded differently" in sentence(with_last(facts, is_same_decoding=False))


def test_without_a_paired_comparison_nothing_is_claimed_of_the_last_step(facts: Facts) -> None:
    bare = replace(facts, differences=tuple(d for d in facts.differences if d.after != "rl"))
    assert headline(bare).standing == "incomplete"
    assert sentence(bare) == "No paired comparison of SFT and RL was made, so nothing is claimed of the last step."


def test_several_benchmarks_are_counted_and_named_by_what_became_of_them(facts: Facts) -> None:
    second = next(d for d in facts.differences if is_last(d))
    more = replace(facts, differences=(*facts.differences, changed_to(second, benchmark="aime24", p_corrected=0.2)))
    assert (
        sentence(more)
        == "Of 2 benchmarks, GPPO improved heldout (67.1 % to 97.8 %), and has no shown effect on aime24."
    )


def test_one_model_alone_proves_nothing(facts: Facts) -> None:
    alone = replace(facts, models=facts.models[:1], differences=())
    assert headline(alone).standing == "incomplete"


def test_reading_needs_only_the_folders(tmp_path: Path) -> None:
    read = read_facts(laptop_run(tmp_path))
    assert [m.maker.name for m in read.models] == ["base", "sft", "rl"]
    assert {s.name for s in read.stages if s.metrics} == {"sft", "rl"}
