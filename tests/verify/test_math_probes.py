"""Right math answers in the spellings of many writers are accepted, and look-alikes of them are not."""

import re
from collections import Counter
from pathlib import Path

import pytest
from math_probes import Probe, boxed_probe, probes
from metamorphic import SHARED, published_references, rewritten
from verify_builders import math_problem

from klear_core.types import Verdict
from klear_core.verify import JudgePool

PAGE = Path(__file__).parents[2] / "docs" / "data" / "verdicts.md"
KINDS = list(dict.fromkeys(probe.kind for probe in probes()))
SEED, NUM_REFERENCES = 20, 120


def judged(pool: JudgePool, asked: list[Probe]) -> list[Verdict]:
    futures = [pool.submit(math_problem(probe.gold), "</think>" + probe.response) for probe in asked]
    return [future.result() for future in futures]


def misjudged(pool: JudgePool, asked: list[Probe]) -> list[tuple[str, str, str]]:
    verdicts = judged(pool, asked)
    return [
        (probe.gold, probe.response, verdict.detail)
        for probe, verdict in zip(asked, verdicts, strict=True)
        if (verdict.score == 1.0) is not probe.is_right
    ]


@pytest.fixture(scope="module")
def errors(math_pool: JudgePool) -> list[tuple[Probe, str]]:
    """All probes that are judged wrongly, with the reason of the verdict; judged once for all tests."""
    found = zip(probes(), judged(math_pool, probes()), strict=True)
    return [(probe, verdict.detail) for probe, verdict in found if (verdict.score == 1.0) is not probe.is_right]


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_of_a_class_are_accepted_and_wrong_ones_are_not(
    errors: list[tuple[Probe, str]], kind: str
) -> None:
    assert [error for error in errors if error[0].kind == kind] == []


def test_every_reference_is_right_against_itself(math_pool: JudgePool) -> None:
    golds = list(dict.fromkeys(probe.gold for probe in probes()))
    assert misjudged(math_pool, [boxed_probe("itself", gold, gold, is_right=True) for gold in golds]) == []


def test_the_page_has_the_number_of_probes_of_each_class() -> None:
    right = Counter(probe.kind for probe in probes() if probe.is_right)
    wrong = Counter(probe.kind for probe in probes() if not probe.is_right)
    rows = re.findall(
        r"^\| ([a-z -]+?) \| (\d+) of (\d+) \| [^|]*\| (?:(\d+) of (\d+)|-) \|", PAGE.read_text("utf-8"), re.M
    )
    on_page = {kind: tuple(int(n or 0) for n in numbers) for kind, *numbers in rows}
    assert on_page == {kind: (right[kind], right[kind], 0, wrong[kind]) for kind in KINDS}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no published references in {SHARED}")
def test_other_forms_of_published_references_are_right_and_other_values_wrong(math_pool: JudgePool) -> None:
    """Expanded, factored, reordered, on a common denominator, or typeset in another way: the value is the same."""
    asked = [
        boxed_probe(kind, gold, answer, is_right=is_right)
        for kind, gold, answer, is_right in rewritten(published_references(), SEED, NUM_REFERENCES)
    ]
    assert len(asked) > 3 * NUM_REFERENCES
    assert misjudged(math_pool, asked) == []
