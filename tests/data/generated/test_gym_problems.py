import json
import re
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from klear_core.config.data import REASONING_GYM, BenchmarkConfig, GymSource
from klear_core.data.candidates import Candidate
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.generated.gym_problems import BY_MATH, BY_TEXT, as_candidates, content_of, problems_here
from klear_core.data.sources import check_source, read_source
from klear_core.errors import ConfigError
from klear_core.types import CustomReference, MathReference

gym = pytest.importorskip("klear_core.verify.gym")
pytest.importorskip("reasoning_gym", reason="needs the extra `gym`")

ROOT = Path(__file__).parents[3]
SLOW_TASKS = {"knight_swap", "sokoban", "zebra_puzzles", "futoshiki"}
"""They take a quarter of a second and more for a problem."""


def source_of(task: str, num_problems: int, settings: dict[str, object]) -> GymSource:
    return GymSource.model_validate({"task": task, "num_problems": num_problems} | settings)


def candidates(task: str, num_problems: int = 12, *, seed: int = 0, **settings: object) -> list[Candidate]:
    """The problems of a source, made here: a process for each source takes seconds to start."""
    source = source_of(task, num_problems, settings)
    rows = [json.loads(json.dumps(row)) for row in problems_here(source, seed)]
    return list(as_candidates(source, rows))


def read_candidates(task: str, num_problems: int, *, seed: int, **settings: object) -> list[Candidate]:
    """The same from a process with its own hash seed, on which some tasks depend."""
    return list(read_source(source_of(task, num_problems, settings), seed=seed))


def value_of(candidate: Candidate) -> dict:
    assert isinstance(candidate.reference, CustomReference)
    return json.loads(candidate.reference.value_json)


def test_the_extra_pins_the_version_that_the_source_names():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"reasoning-gym=={REASONING_GYM}" in extras["gym"]


def test_sums_have_their_numbers_in_the_question_and_their_value_as_reference():
    for candidate in candidates("chain_sum", judge="math", instruction=""):
        sum_text = candidate.question.rpartition(": ")[2].removesuffix(" =")
        assert candidate.reference == MathReference(answers=(str(eval(sum_text)),))


def test_the_instruction_ends_the_question():
    assert all(c.question.endswith("\n\nBox it.") for c in candidates("lcm", 3, instruction="Box it."))


def test_the_level_over_the_highest_one_is_the_difficulty():
    # chain_sum has eleven levels of num_terms, 2 to 12, and ten of num_digits: level 2 has 4 terms of 3 digits.
    rows = candidates("chain_sum", 6, levels=(0, 2))
    assert [row.rating for row in rows] == [0.0, 0.2] * 3
    assert [
        value_of(row)["entry"] is not None and row.question.count(" + ") + row.question.count(" - ") for row in rows
    ] == [1, 3] * 3


def test_without_levels_there_is_no_difficulty():
    assert {row.rating for row in candidates("chain_sum", 4)} == {None}


def test_a_setting_of_the_task_wins_over_the_level():
    rows = candidates("chain_sum", 6, levels=(0,), config={"min_terms": 5, "max_terms": 5})
    assert {row.question.count(" + ") + row.question.count(" - ") for row in rows} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["isomorphic_strings", "list_functions"])
def test_the_same_seed_gives_the_same_problems_whatever_the_hash_seed_of_this_process(monkeypatch, task):
    # The first depends on the order of sets, the second on Python's global generator.
    read = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        read.append(read_candidates(task, 3, seed=5))
    assert read[0] == read[1]


def test_only_the_wording_differs_so_it_is_the_same_problem():
    assert content_of("basic_arithmetic", "What is 36 + 19?", "55") == content_of(
        "basic_arithmetic", "Compute 19 + 36.", "55"
    )
    assert content_of("aiw", "Alice has 3 sisters.", "3") == content_of("aiw", "Mary has 3 sisters.", "3")
    assert content_of("aiw", "Alice and Tom", "3") != content_of("aiw", "Alice and Alice", "3")


@pytest.mark.parametrize("task", ["emoji_mystery", "modulo_grid", "n_queens", "rectangle_count"])
def test_problems_that_differ_in_a_drawing_are_no_copies_to_curation(task):
    questions = [tokens_of(candidate.question) for candidate in candidates(task, 6)]
    assert len(set(map(tuple, questions))) == 6


def test_other_numbers_another_answer_or_another_task_are_another_problem():
    same = content_of("basic_arithmetic", "What is 36 + 19?", "55")
    assert same != content_of("basic_arithmetic", "What is 36 - 19?", "17")
    assert same != content_of("basic_arithmetic", "What is 37 + 18?", "55")
    assert same != content_of("chain_sum", "What is 36 + 19?", "55")


def assert_disjoint(task: str, num_problems: int) -> None:
    heldout = candidates(task, num_problems, name="a", split="heldout", seed=1)
    training = candidates(task, num_problems, name="b", seed=2)
    for how in (
        lambda c: c.question,
        lambda c: content_of(task, c.question, value_of(c)["answer"]),
        # Not by what decides the split: what the generator itself says that a problem is made of.
        lambda c: json.dumps(made_of(task, c)),
    ):
        assert not {how(c) for c in heldout} & {how(c) for c in training}, task


def made_of(task: str, candidate: Candidate) -> object:
    """What the generator says that a problem is made of; the question where it says nothing of it.

    Counts, names of variables and the empty grid of a puzzle are no part of that: many problems share them.
    """
    fields = dict(value_of(candidate)["entry"][1:])
    metadata = dict(fields["metadata"][1:])
    known = ("animals", "denominator", "equation", "expression", "matrix", "numbers", "numerator")
    told = {key: metadata[key] for key in known if key in metadata and not isinstance(metadata[key], int)}
    return told or candidate.question


@pytest.mark.parametrize(
    "task", ["basic_arithmetic", "gsm_symbolic", "leg_counting", "gcd", "word_sorting", "syllogism"]
)
def test_no_heldout_problem_is_a_training_problem_in_other_words(task):
    assert_disjoint(task, 120)


ONE_DIGIT_SUMS: dict[str, object] = {
    "min_terms": 2, "max_terms": 2, "operators": ("+",), "allow_parentheses": False, "format_style": "natural",
    "min_digits": 1, "max_digits": 1,
}  # fmt: skip
"""0 to 10 twice, in either order: 66 sums, in four wordings each; 55 are of the training split."""


def test_the_numbers_of_small_tasks_run_out_before_the_same_are_asked_in_other_words():
    with pytest.raises(
        ConfigError,
        match=r"200 train problems of 'basic_arithmetic' wanted, but \d+ draws gave only 55 that differ",
    ):
        read_candidates("basic_arithmetic", 200, seed=0, config=ONE_DIGIT_SUMS)


@pytest.mark.parametrize("num_problems", [200, 500, 2000])
def test_drawing_ends_soon_after_the_last_problem_that_there_is(num_problems):
    # All 55 are found in a few hundred draws; 82,000 were made for 2000.
    with pytest.raises(ConfigError, match=r"but 1[05]00 draws gave only 55 that differ"):
        candidates("basic_arithmetic", num_problems, config=ONE_DIGIT_SUMS)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_problem_that_there_is_is_found(seed):
    assert len(candidates("basic_arithmetic", 55, seed=seed, config=ONE_DIGIT_SUMS)) == 55


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sums"}, "no task 'sums'; it has ab, acre, "),
        ({"task": "composite"}, "no task 'composite'"),
        ({"task": "chain_sum", "levels": (11,)}, "'chain_sum' has levels 0 to 10, and not 11"),
        ({"task": "gsm_symbolic", "levels": (0,)}, "'gsm_symbolic' has no levels"),
        ({"task": "chain_sum", "levels": (1, 1)}, "names a level twice"),
        ({"task": "chain_sum", "config": {"terms": 3}}, "no setting 'terms'; it has allow_negation, max_digits, "),
        ({"task": "chain_sum", "config": {"size": 3}}, "no setting 'size'"),
        ({"task": "chain_sum", "config": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"task": "chain_sum", "config": {"min_terms": "x"}}, "refuses its configuration"),
        ({"task": "countdown", "judge": "math"}, "wrong answers to 'countdown' right, .*: set judge = 'own'"),
        ({"task": "zebra_puzzles", "judge": "math"}, "set judge = 'own'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_generated(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_source(GymSource.model_validate({"num_problems": 5} | settings))


def test_the_math_judge_is_accepted_for_the_tasks_that_the_page_of_the_bench_lists():
    (listed,) = re.findall(r"^These are (.*)\.$", (ROOT / "docs/data/reasoning_gym.md").read_text(), re.MULTILINE)
    assert set(listed.replace("`", "").split(", ")) == BY_MATH
    check_source(GymSource(task="chain_sum", name="chain_sum", num_problems=5, judge="math"))


@pytest.mark.parametrize("task", ["countdown", "prime_factorization", "puzzle24"])
def test_tasks_that_ask_for_a_calculation_are_not_judged_by_its_value(task):
    assert task not in BY_MATH


def test_the_process_ends_when_only_the_first_problems_are_read():
    rows = read_source(GymSource(task="chain_sum", num_problems=100_000), seed=0)
    assert list(islice(rows, 3)) == candidates("chain_sum", 3)
    rows.close()  # type: ignore[attr-defined]


def test_a_benchmark_by_name_has_heldout_problems():
    bench = BenchmarkConfig.model_validate({"known": "reasoning_gym/chain_sum"})
    assert bench.name == "chain_sum"
    assert isinstance(bench.source, GymSource)
    assert (bench.source.task, bench.source.split, bench.source.num_problems) == ("chain_sum", "heldout", 200)


SHARED_METADATA = (
    "kakurasu",
    "number_filtering",
    "number_sorting",
    "polynomial_multiplication",
    "propositional_logic",
)
"""Tasks whose generators state something beside that problems of both splits have in common."""
BROKEN_LEVELS = {
    "caesar_cipher",
    "jugs",
    "knight_swap",
    "letter_jumble",
    "puzzle24",
    "rubiks_cube",
    "spell_backward",
}
"""Tasks of reasoning-gym 0.1.25 whose own curriculum asks at an end for what their generator refuses, or takes minutes for."""


@pytest.mark.slow
@pytest.mark.parametrize("task", [*gym.tasks()[::8], *SHARED_METADATA])
def test_tasks_give_problems_that_its_scorer_accepts_in_two_disjoint_splits(task):
    num_problems = 2 if task in SLOW_TASKS else 12
    assert_disjoint(task, num_problems)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(gym.tasks()) - BROKEN_LEVELS))
def test_each_level_of_each_curriculum_gives_a_problem(task):
    top = gym.num_levels(task)
    for level in (0, top - 1) if top else ():
        dataset = gym.open_dataset(task, {}, level=level, seed=3)
        assert dataset[0]["question"]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(gym.tasks()) - BY_TEXT - SLOW_TASKS))
def test_numbers_and_answer_tell_problems_apart_where_they_decide_the_split(task):
    dataset = gym.open_dataset(task, {}, seed=5, size=150)
    entries = [dataset[i] for i in range(150)]
    told_apart = {content_of(task, e["question"], e["answer"]) for e in entries}
    assert len(told_apart) >= 0.9 * len({(e["question"], e["answer"]) for e in entries})
