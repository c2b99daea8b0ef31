from __future__ import annotations

import json
from collections import Counter

import pytest

from klear_core.config.curate import CurateConfig
from klear_core.config.data import PuzzleSource
from klear_core.data.generated.puzzles import (
    FAMILIES,
    MODULI,
    calls_of,
    check_generated,
    count_brackets,
    generate_puzzles,
    parse_brackets,
    parse_programs,
    parse_residues,
    solve_brackets,
    solve_residues,
    write_brackets,
)
from klear_core.data.sources import check_source, domains_of, read_source
from klear_core.errors import ConfigError
from klear_core.types import CodeReference, Domain, MathReference

LEVELS = {"brackets": (2, 3, 5), "residues": (1, 4, 10), "programs": (2, 3, 4)}


def source(family: str, **settings: object) -> PuzzleSource:
    return PuzzleSource(**{"family": family, "name": family, "levels": LEVELS[family], "num_problems": 90} | settings)


def test_brackets_are_worked_modulo_seven_whatever_their_shape():
    assert solve_brackets("((3+4)*(5-2))") == "0"  # 7 is 0
    assert solve_brackets("(1-(2*(3+6)))") == "4"  # 3+6 is 2, 2*2 is 4, 1-4 is -3
    assert parse_brackets("mod 7: (5*6)=?") == "(5*6)"
    assert parse_brackets("mod 7: (7*6)=?") is None
    assert parse_brackets("mod 11: (5*6)=?") is None


def test_numbers_enumerate_all_bracket_expressions_without_a_repeat():
    assert count_brackets(1) == 147
    assert len({write_brackets(1, i) for i in range(147)}) == 147
    assert count_brackets(2) == 343 * 9 * 2  # digits, operators, and the two shapes (a.b).c and a.(b.c)
    assert len({write_brackets(2, i) for i in range(count_brackets(2))}) == 6174


def test_the_least_residue_is_what_trying_finds():
    for row in generate_puzzles(source("residues", num_problems=300), seed=0):
        puzzle = parse_residues(row.question)
        assert puzzle is not None
        fits = [x for x in range(1, 40) if (puzzle.start + puzzle.step * x) % puzzle.modulus == puzzle.target]
        assert solve_residues(puzzle) == str(fits[0])
        assert puzzle.modulus in MODULI


def test_a_congruence_that_may_have_no_solution_is_no_puzzle():
    assert parse_residues("mod 12: 5+4x=4, least x=?") is None


def test_a_pipeline_is_worked_from_left_to_right():
    pipeline = parse_programs("f(a): at least 4, add 3, reverse, list")
    assert pipeline is not None
    assert pipeline.run([1, 4, 9, 3]) == [12, 7]
    counted = parse_programs("f(a): odd, times 2, skip 1, count")
    assert counted is not None
    assert counted.run([1, 4, 9, 3]) == 2


@pytest.mark.parametrize("text", ["", "f(a): ", "f(a): list", "f(a): cube, list", "f(a): odd, even", "odd, list"])
def test_other_text_is_no_pipeline(text):
    assert parse_programs(text) is None


def test_each_program_problem_has_calls_with_different_results():
    for row in generate_puzzles(source("programs"), seed=0):
        assert isinstance(row.reference, CodeReference)
        cases = row.reference.tests.cases
        assert [json.loads(case.args_json) for case in cases] == [[numbers] for numbers in calls_of(row.question)]
        assert len({case.expected_json for case in cases}) >= 3
        assert row.domain is Domain.CODE


@pytest.mark.parametrize("family", LEVELS)
def test_splits_share_no_problem_and_no_problem_comes_twice(family):
    found = {
        split: [c.question for seed in range(2) for c in generate_puzzles(source(family, split=split), seed=seed)]
        for split in ("train", "heldout")
    }
    assert not set(found["train"]) & set(found["heldout"])
    rows = [c.question for c in generate_puzzles(source(family), seed=3)]
    assert len(set(rows)) == 90


@pytest.mark.parametrize("family", LEVELS)
def test_a_seed_determines_the_problems_and_levels_are_mixed_evenly(family):
    rows = list(generate_puzzles(source(family), seed=1))
    assert rows == list(generate_puzzles(source(family), seed=1))
    assert rows != list(generate_puzzles(source(family), seed=2))
    assert set(Counter(row.rating for row in rows).values()) == {30}


@pytest.mark.parametrize("family", LEVELS)
def test_ratings_rise_with_the_level(family):
    ratings = [
        next(generate_puzzles(source(family, levels=(level,), num_problems=1), seed=0)).rating
        for level in LEVELS[family]
    ]
    assert ratings == sorted(set(ratings))


def test_a_source_of_puzzles_is_read_like_any_other_and_states_its_domain():
    for family in LEVELS:
        check_source(source(family))
        assert next(iter(read_source(source(family), seed=0))).question
    assert domains_of(source("programs")) == {Domain.CODE}
    assert domains_of(source("brackets")) == {Domain.MATH}
    read = CurateConfig.model_validate({"sources": [source("residues").model_dump()]}).sources[0]
    assert read == source("residues")


def test_more_problems_than_there_are_is_a_config_error_that_says_how_many_there_are():
    with pytest.raises(ConfigError, match="there are only"):
        check_generated(source("residues", levels=(1,), num_problems=2000))
    with pytest.raises(ConfigError, match="there are only"):
        check_generated(source("brackets", levels=(1,), num_problems=140))


@pytest.mark.parametrize(("family", "levels"), [("brackets", ()), ("programs", (0,)), ("residues", (3, 3))])
def test_levels_that_make_no_sense_are_config_errors(family, levels):
    with pytest.raises(ConfigError, match="levels"):
        check_generated(source(family, levels=levels))


def test_residues_have_no_answer_beyond_the_largest_modulus():
    assert FAMILIES["residues"].count(12) > 0
    with pytest.raises(ConfigError, match=r"levels = \(13,\)"):
        check_generated(source("residues", levels=(13,)))


def test_references_are_of_the_kind_that_their_judge_reads():
    kinds = {family: type(next(generate_puzzles(source(family), seed=0)).reference) for family in LEVELS}
    assert kinds == {"brackets": MathReference, "residues": MathReference, "programs": CodeReference}
