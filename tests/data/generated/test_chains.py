from collections import Counter
from itertools import product

import pytest

from klear_core.config.data import ProceduralSource
from klear_core.data.generated.chains import (
    ChainProblem,
    ChainStep,
    all_steps,
    generate_chains,
    is_held_out,
    parse_chain,
    solve_chain,
    write_chain,
)
from klear_core.data.generated.puzzles import check_generated
from klear_core.errors import ConfigError, DataError
from klear_core.types import Domain, MathReference


def test_a_chain_is_worked_from_left_to_right_without_precedence():
    chain = parse_chain("mod 10: 3,+4,*7,-2=?")
    assert solve_chain(chain) == (7, 9, 7)  # 3+4=7, 7*7=49, 9-2=7; with precedence it would be 29, so 9


def test_results_below_zero_wrap_around():
    assert solve_chain(parse_chain("mod 10: 3,-4,-9=?")) == (9, 0)


def test_what_is_written_is_read_back():
    for modulus in (2, 3, 10):
        for start, step in product(range(modulus), all_steps(modulus)):
            chain = ChainProblem(modulus=modulus, start=start, steps=(step, step))
            assert parse_chain(write_chain(chain)) == chain


@pytest.mark.parametrize(
    "text", ["", "What is 2+2?", "mod 10: 3=?", "mod 10: 3,/4=?", "mod 10: 3,+4", "mod 10: 3,+4=? and more"]
)
def test_other_text_is_not_a_chain(text):
    with pytest.raises(DataError, match="not a chain problem"):
        parse_chain(text)


def test_steps_that_change_nothing_or_forget_all_are_left_out():
    assert ChainStep(operator="*", operand=2) in all_steps(10)
    assert {(s.operator, s.operand) for s in all_steps(3)} == {("+", 1), ("+", 2), ("-", 1), ("-", 2), ("*", 2)}


def test_splits_share_no_problem_and_together_are_the_whole_space_whatever_the_seeds():
    everything = {
        write_chain(ChainProblem(modulus=3, start=start, steps=steps))
        for level in (1, 2, 3)
        for start in range(3)
        for steps in product(all_steps(3), repeat=level)
    }
    held_out = {q for q in everything if is_held_out(q)}
    found = {"train": set(), "heldout": set()}
    for split, seed, level in product(found, range(3), (1, 2, 3)):
        available = sum(
            1 for q in everything if (q in held_out) == (split == "heldout") and len(parse_chain(q).steps) == level
        )
        if available:
            cfg = ProceduralSource(modulus=3, num_operations=(level,), num_problems=available, split=split)
            found[split] |= {c.question for c in generate_chains(cfg, seed=seed)}
    assert found["heldout"] == held_out
    assert found["train"] == everything - held_out


def test_about_one_problem_in_eight_is_held_out():
    questions = [f"mod 10: {i % 10},+{i}=?" for i in range(8000)]
    assert 850 < sum(map(is_held_out, questions)) < 1150


def test_large_and_small_spaces_keep_the_splits_apart_too():
    seen = {
        split: {c.question for c in generate_chains(ProceduralSource(split=split, num_problems=2000), seed=seed)}
        for seed, split in enumerate(("train", "heldout"))
    }
    assert not seen["train"] & seen["heldout"]
    assert len(seen["train"]) == len(seen["heldout"]) == 2000


def test_levels_are_mixed_evenly_and_rated_by_length():
    rows = list(generate_chains(ProceduralSource(num_operations=(2, 4, 12), num_problems=300), seed=0))
    assert Counter(len(parse_chain(r.question).steps) for r in rows) == {2: 100, 4: 100, 12: 100}
    assert {(len(parse_chain(r.question).steps), r.rating) for r in rows} == {(2, 0.2), (4, 0.4), (12, 1.0)}


def test_no_problem_comes_twice_and_every_reference_is_its_answer():
    rows = list(generate_chains(ProceduralSource(num_operations=(1, 2, 30), num_problems=600), seed=7))
    assert len({r.question for r in rows}) == 600
    for row in rows:
        assert row.reference == MathReference(answers=(str(solve_chain(parse_chain(row.question))[-1]),))
        assert row.domain is Domain.MATH


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    cfg = ProceduralSource(num_problems=50)
    assert list(generate_chains(cfg, seed=1)) == list(generate_chains(cfg, seed=1))
    assert list(generate_chains(cfg, seed=1)) != list(generate_chains(cfg, seed=2))


def test_more_problems_than_there_are_is_a_config_error_that_says_how_many_there_are():
    cfg = ProceduralSource(modulus=2, num_operations=(1,), num_problems=50)
    with pytest.raises(ConfigError, match="there are only"):
        check_generated(cfg)
    with pytest.raises(ConfigError, match="there are only"):
        list(generate_chains(cfg, seed=0))


@pytest.mark.parametrize("levels", [(), (0,), (2, 2)])
def test_levels_that_make_no_sense_are_config_errors(levels):
    with pytest.raises(ConfigError, match="num_operations"):
        check_generated(ProceduralSource(num_operations=levels))
