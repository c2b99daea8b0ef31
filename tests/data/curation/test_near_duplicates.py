# ruff: noqa: RUF001  Unicode signs are the point
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from klear_core.config.curate import DedupConfig, NearConfig
from klear_core.data.candidates import Candidate
from klear_core.data.curation.near_duplicates import candidate_pairs, compare, decide, marks_of, near_table
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.segment import exact_key, first_with_key, keys_array
from klear_core.data.curation.sketch import SKETCH_SIZE, overlaps_of, ragged, sketches_of
from klear_core.data.curation.work_plan import templates_of
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    Domain,
    MathReference,
    StdinCase,
    StdinTests,
    UnverifiableReference,
)

STORY = (
    "Every card in a deck has a picture of one shape, circle, square, or triangle, which is painted in one of the "
    "three colors, red, blue, or green. How many different sets of cards are there?"
)


def math(question, answer="117", source="a"):
    reference = MathReference(answers=(answer,))
    return Candidate(source=source, domain=Domain.MATH, question=question, reference=reference, rating=None)


def program(question, tests, source="a"):
    reference = CodeReference(tests=tests)
    return Candidate(source=source, domain=Domain.CODE, question=question, reference=reference, rating=None)


def stdin(question, *cases):
    return program(question, StdinTests(cases=tuple(StdinCase(input=i, output=o) for i, o in cases)))


def call(question, name):
    return program(question, CallTests(fn_name=name, cases=(CallCase(args_json="[1]", expected_json="1"),)))


def table_of(*candidates, **cfg):
    by_source = defaultdict(list)
    for candidate in candidates:
        by_source[candidate.source].append(tokens_of(candidate.question))
    templates = {source: templates_of(questions) for source, questions in by_source.items()}
    bare = [templates[c.source].bare(tokens_of(c.question)) for c in candidates]
    marks = [marks_of(c.question, c.reference) for c in candidates]
    return near_table(bare, [c.domain for c in candidates], marks, NearConfig(**cfg))


def near_duplicates(tables, cfg):
    pairs = candidate_pairs(tables, np.arange(sum(map(len, tables))), cfg)
    return decide(pairs, compare(tables, pairs, cfg))


def duplicates(*candidates, **cfg):
    return near_duplicates([table_of(*candidates, **cfg)], NearConfig(**cfg))


def dropped(*candidates, **cfg):
    return sorted(duplicates(*candidates, **cfg).copies)


def is_exact_repeat(one, other):
    keys = keys_array(exact_key(c, tokens_of(c.question), DedupConfig()) for c in (one, other))
    return first_with_key(keys).tolist() == [0, 0]


def test_the_same_problem_with_a_word_changed_is_a_copy_and_the_first_stays():
    copy = math(STORY.replace("How many different", "Determine how many different"), source="b")
    near = duplicates(math(STORY), copy)
    assert {rank: found.of for rank, found in near.copies.items()} == {1: 0}
    assert near.copies[1].similarity > 0.8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("three colors", "four colors"),
        ("in one of the three", "in one of the 30"),
        ("How many different sets", "What is the largest number of different sets"),
        ("a deck has", "a deck has not"),
        ("three colors", "thirty colors"),
        ("three colors", "fifteen colors"),
        ("one of the three", "half of the three"),
        ("one of the three", "twice the three"),
        ("in one of", "in the fourth of"),
        ("which is painted", "which isn't painted"),
        ("different sets", "finite sets"),
        ("different sets", "non-empty sets"),
        ("different sets", "irrational sets"),
    ],
)
def test_other_numbers_or_opposite_words_make_another_problem(one, other):
    near = duplicates(math(STORY), math(STORY.replace(one, other)))
    assert near.copies == {}
    assert near.kept == {"similar_with_other_numbers_or_signs": 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$x^2+5x-6$", "$x^2-5x-6$"),
        ("$x^2+5x-6$", "$x^2+5x+6$"),
        ("$(x+1)^2-3$", "$x+(1^2-3)$"),
        ("$2^{x+1}-3$", "$2^x+1-3$"),
        ("$\\frac{x}{x+2}$", "$\\frac{x}{x}+2$"),
        ("$a\\cdot b+c$", "$a+b\\cdot c$"),
        ("$x<3y$", "$x>3y$"),
        ("$x<3y$", "$x\\leq3y$"),
        ("$\\sin x$", "$\\cos x$"),
        ("$\\lfloor 3x\\rfloor$", "$\\lceil 3x\\rceil$"),
        ("$A\\cup B$", "$A\\cap B$"),
        ("$A ∪ B$", "$A ∩ B$"),
        ("$f'(x)$", "$f(x)$"),
        ("$|x|$", "$x$"),
        ("$\\{x\\}$", "$x$"),
        ("$n!$", "$n$"),
        ("$[0,1)$", "$(0,1]$"),
        ("$10²$", "$102$"),
        ("$0.\\overline{12}$", "$0.12$"),
        ("$x-ab$", "$x+ab$"),
        ("$3-\\pi$", "$3+\\pi$"),
        ("$\\sqrt{x+1}$", "$\\sqrt{x}+1$"),
        ("$12x$", "$21x$"),
    ],
)
def test_a_sign_an_operator_a_bracket_or_a_number_makes_another_problem(one, other):
    sentence = (
        "Let x, y, a, b, c be real numbers such that the expression {} is defined; find all of its possible values."
    )
    pair = [math(sentence.format(one), "5"), math(sentence.format(other), "5")]
    assert not is_exact_repeat(*pair)
    assert dropped(*pair) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("twenty balls", "thirty balls"),
        ("a hundred balls", "a thousand balls"),
        ("twice as many balls", "half as many balls"),
        ("the fourth of them", "the fifth of them"),
        ("negative integers", "non-negative integers"),
        ("integers that aren't prime", "integers that are prime"),
        ("rational roots", "irrational roots"),
        ("circles inscribed in it", "circles circumscribed about it"),
        ("the numerator of it", "the denominator of it"),
    ],
)
def test_number_words_and_negations_make_another_problem_also_without_an_answer(one, other):
    sentence = (
        "Think of all the ways in which you can draw shapes on paper with a pencil and take them to your friend, and then "
        "consider every part with great care: {}; explain in whole sentences how you found what you say about each."
    )
    pair = [math(sentence.format(text)) for text in (one, other)]
    pair = [replace(c, reference=UnverifiableReference(domain=Domain.MATH, why="none")) for c in pair]
    assert dropped(*pair) == []
    assert dropped(pair[0], replace(pair[0], question=pair[0].question + " Go.")) == [1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$\\frac12$ of the 5-digit numbers", "$\\dfrac{1}{2}$ of the five-digit numbers"),
        ("angle of $90^{\\circ}$ at a right-angled n-gon", "angle of 90° at a right angled $n$-gon"),
        ("$x \\geqslant 2\\pi$ holds", "x ≥ 2π holds"),
        ("segment $\\overline{AB}$ is", "segment $AB$ is"),
    ],
)
def test_typesetting_does_not_make_another_problem(one, other):
    sentence = (
        "Consider the following and decide with care how many of them there are in all: {}, and tell why this is so."
    )
    first, second = math(sentence.format(one), "\\frac{1}{2}"), math(sentence.format(other), "$\\frac12$")
    assert is_exact_repeat(first, second) or dropped(first, second) == [1]


def test_another_answer_makes_another_problem():
    near = duplicates(math(STORY), math(STORY + " Explain.", "118"))
    assert (near.copies, near.kept) == ({}, {"similar_with_another_answer": 1})
    assert dropped(math(STORY, "7"), math(STORY + " Explain.", "$7.0$")) == [1]


def test_programs_are_compared_by_their_tests_or_their_functions_name():
    longer = STORY + " Print the number of sets."
    assert dropped(stdin(STORY, ("1", "1"), ("2", "4")), stdin(longer, ("2", "4"), ("3", "9"))) == [1]
    assert dropped(stdin(STORY, ("1", "1"), ("2", "4")), stdin(longer, ("2", "5"))) == []
    assert dropped(call(STORY, "sets"), call(STORY + " Go.", "sets")) == [1]
    assert dropped(call(STORY, "sets"), call(STORY + " Go.", "packs")) == []


def test_programs_without_a_common_test_must_be_more_alike():
    one, other = (
        stdin(STORY, ("1", "1")),
        stdin(STORY.replace("How many different", "Say how many distinct"), ("2", "4")),
    )
    alike = similarity(tokens_of(one.question), tokens_of(other.question))
    assert 0.7 < alike < 0.85
    assert dropped(one, other) == []
    assert dropped(one, other, threshold_unanswered=0.7) == [1]


def test_math_and_code_are_never_copies_of_each_other():
    assert dropped(math(STORY), stdin(STORY + " Go.", ("1", "1"))) == []


REWORDED = [
    (STORY, STORY.replace("picture", "drawing").replace("painted", "coloured")),
    ("Find the sum of all primes below 20 that are not of the form 4k+1.", "Determine the sum of those primes below 20 "
     "that are not of the form 4k+1."),
    ("What is the remainder when $7^{100}$ is divided by 13?", "Compute the remainder if $7^{100}$ is divided by 13."),
    ("Is every compact subset of a Hausdorff space closed in that space?", "Is each compact subset of a Hausdorff "
     "space closed in that space?"),
]  # fmt: skip
WRAPPERS = [
    "{}",
    "Please solve the following problem carefully, and explain all of your reasoning before you answer: {}",
    "{}\nThink step-by-step, and put the final answer within \\boxed{{}}.",
    "<p>{}</p>\n**Solution.**",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant",
    "<s>[INST] <<SYS>>You are a teacher.<</SYS>> {} [/INST]",
    "You are an expert. Here is a task for you, which you should read with care.\n\n{}\n\nLet's think about it.",
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("question", "reworded"), REWORDED)
def test_a_wrapper_and_two_other_words_do_not_hide_a_copy(question, reworded, wrapper):
    wrapped = wrapper.format(reworded)
    assert dropped(math(question), math(wrapped)) == [1]
    assert dropped(math(wrapped), math(question)) == [1]
    assert dropped(math(question), math(wrapped, "118")) == []
    if "20" in question:
        assert dropped(math(question), math(wrapped.replace("20", "30"))) == []


def test_different_questions_with_the_same_numbers_and_answer_stay():
    dice = "Ivan has 20 dice. Jerry has twice as many dice as Ivan. How many dice do they have altogether?"
    spokes = "A bicycle has 20 spokes on the front wheel and twice as many on the back wheel. How many spokes has it?"
    assert dropped(math(dice, "60"), math(spokes, "60")) == []
    statement = "Determine whether the following statement is true or false: "
    compact = statement + "a compact set is closed in every Hausdorff space."
    measure = statement + "a sequence of functions that converges in measure has a limit almost everywhere."
    assert dropped(math(compact, "True"), math(measure, "True")) == []


def test_reworded_programs_are_copies_if_their_tests_are_the_same():
    wrapped = WRAPPERS[1].format(REWORDED[0][1])
    assert dropped(call(STORY, "sets"), call(wrapped, "sets")) == [1]
    assert dropped(call(STORY, "sets"), call(wrapped, "packs")) == []
    assert dropped(stdin(STORY, ("1", "1"), ("2", "4")), stdin(wrapped, ("1", "1"), ("2", "4"))) == [1]
    assert dropped(stdin(STORY, ("1", "1"), ("2", "4")), stdin(wrapped, ("1", "1"), ("2", "5"))) == []
    asserts = [AssertTests(programs=(f"assert sets({n}) == {n}",)) for n in (1, 2)]
    assert dropped(program(STORY, asserts[0]), program(wrapped, asserts[0])) == [1]
    assert dropped(program(STORY, asserts[0]), program(wrapped, asserts[1])) == []


def test_without_an_answer_a_longer_text_must_contain_the_question():
    def proof(question):
        reference = UnverifiableReference(domain=Domain.MATH, why="a proof")
        return Candidate(source="a", domain=Domain.MATH, question=question, reference=reference, rating=None)

    wrapped = WRAPPERS[1].format(STORY)
    assert dropped(math(STORY), proof(wrapped)) == [1]
    assert dropped(proof(STORY), proof(wrapped)) == [1]
    assert dropped(proof(STORY), proof(wrapped.replace("cards are", "shapes are"))) == []


TEMPLATES = [
    "{} Let's think step by step and output the final answer within \\boxed{{}}.",
    "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "Solve the following problem.\n\n{}",
    "Solve the following math problem in 3 steps: (1) read it carefully, (2) think, (3) answer.\n{}\nPut it in \\boxed{{n}}.",
]
SHORT = ["Find all primes below $20$.", "What is $3+4\\cdot 5$?", "Compute $\\sqrt{49}$.", "How many sides has a cube?"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_a_template_of_the_source_hides_no_copy(template, is_wrapped_first):
    bare = [math(question, str(i), source="bare") for i, question in enumerate(SHORT)]
    wrapped = [math(template.format(question), str(i), source="wrapped") for i, question in enumerate(SHORT)]
    candidates = [*wrapped, *bare] if is_wrapped_first else [*bare, *wrapped]
    assert dropped(*candidates) == [4, 5, 6, 7]


def test_a_short_opening_with_a_number_is_part_of_the_problem():
    sums = ["$3+4+9$", "$8+9+2$", "$5+6+7$", "$1+2+3$"]
    by_7 = [math(f"Work out modulo 7: {s}", "1", source="seven") for s in sums]
    by_5 = [math(f"Work out modulo 5: {s}", "1", source="five") for s in sums]
    assert dropped(*by_7, *by_5) == []


def test_tables_of_parts_give_the_same_copies_as_one_of_all():
    questions = [
        STORY,
        STORY.replace("deck", "pack"),
        "Find $x$ with $x^2=4$ and $x>0$.",
        STORY.replace("sets", "groups"),
    ]
    candidates = [math(question, source=question) for question in questions]  # sources of one row have no template
    whole = duplicates(*candidates)
    parts = [table_of(*candidates[:2]), table_of(candidates[2]), table_of(candidates[3])]
    assert near_duplicates(parts, NearConfig()) == whole
    assert whole.copies.keys() == {1, 3}


def test_pairs_can_be_compared_in_parts():
    tables = [table_of(*[math(STORY.replace("deck", word)) for word in ("deck", "pack", "set", "box")])]
    pairs = candidate_pairs(tables, np.arange(4), NearConfig())
    assert len(pairs) > 2
    whole = compare(tables, pairs, NearConfig())
    parts = [compare(tables, part, NearConfig()) for part in (pairs[:2], pairs[2:])]
    assert np.concatenate([part.similarity_P for part in parts]).tolist() == whole.similarity_P.tolist()
    assert np.concatenate([part.code_P for part in parts]).tolist() == whole.code_P.tolist()


def similarity(one, other):
    """Of two lists of tokens, through both in one batch with a third."""
    sets = sketches_of([one, other, ["x"]], NearConfig()).shingles
    pair = [ragged([sets[i], sets[2]], np.uint32) for i in (0, 1)]
    alike = overlaps_of(*pair).similarities().tolist()
    assert alike[1] == 1.0
    return alike[0]


def test_similarity_is_jaccards_share_of_common_shingles():
    one, other = ["a", "b", "c", "d", "e", "f"], ["b", "c", "d", "e", "f", "g"]
    assert similarity(one, other) == pytest.approx(3 / 5)  # bcd, cde, def of abc, bcd, cde, def, efg
    assert similarity(one, one) == 1.0


def test_the_similarity_of_long_questions_is_estimated():
    words = [f"w{i}" for i in range(3000)]
    assert len(sketches_of([words[:2000]], NearConfig()).shingles[0]) == SKETCH_SIZE
    assert similarity(words[:2000], words[500:2500]) == pytest.approx(1500 / 2500, abs=0.1)


def test_a_sketch_does_not_depend_on_the_questions_beside_it():
    questions = [["a"], ["b", "c"], STORY.split(), [f"w{i}" for i in range(400)], ["a"]]
    together = sketches_of(questions, NearConfig())
    for i, question in enumerate(questions):
        alone = sketches_of([question], NearConfig())
        assert together.shingles[i].tolist() == alone.shingles[0].tolist()
        assert together.band_keys_BN[:, i].tolist() == alone.band_keys_BN[:, 0].tolist()


def test_sketches_are_the_same_in_another_process():
    code = (
        "from klear_core.config.curate import NearConfig; from klear_core.data.curation.sketch import sketches_of, hash_of;"
        "s = sketches_of(['the quick brown fox'.split()], NearConfig());"
        "print(s.shingles[0].tolist(), s.band_keys_BN.tolist(), hash_of('\\ud800'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    sketches = sketches_of([["the", "quick", "brown", "fox"]], NearConfig())
    assert sketches.shingles[0].tolist() == [335126912, 1461449176]


def test_thousands_of_questions_with_one_answer_and_no_number_are_no_quadratic_work():
    words = [f"{a}{b}{c}" for a in "bdfg" for b in "aeiou" for c in "klmnprst"]
    draw = Random(0)
    questions = [math("Is " + " ".join(draw.choices(words, k=20)) + "?", "yes") for _ in range(3000)]
    table = table_of(*questions)
    assert len(candidate_pairs([table], np.arange(3000), NearConfig())) <= 8 * 3000
    assert dropped(*questions) == []


def test_thousands_of_questions_in_one_bucket_are_no_quadratic_work():
    near = duplicates(*[math(f"{STORY} Take {number}.", str(number)) for number in range(3000)])
    assert near.copies == {}
    assert near.kept == {"similar_with_other_numbers_or_signs": 2999}
