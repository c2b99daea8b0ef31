from klear_core.config.curate import DedupConfig
from klear_core.data.candidates import Candidate
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.curation.segment import (
    contradict,
    exact_key,
    first_with_key,
    keys_array,
    written_answers,
)
from klear_core.types import CodeReference, Domain, MathReference, StdinCase, StdinTests


def candidate(question, answer="1", source="a"):
    return Candidate(
        source=source, domain=Domain.MATH, question=question, reference=MathReference(answers=(answer,)), rating=None
    )


def code(question, output):
    reference = CodeReference(tests=StdinTests(cases=(StdinCase(input="", output=output),)))
    return Candidate(source="c", domain=Domain.CODE, question=question, reference=reference, rating=None)


def first_of(*candidates, **cfg):
    keys = keys_array(exact_key(c, tokens_of(c.question), DedupConfig(**cfg)) for c in candidates)
    return first_with_key(keys).tolist()


def differ(one, other):
    return contradict(written_answers(one), written_answers(other))


def test_the_first_stays_and_repeats_name_it():
    assert first_of(candidate("Find $x+1$."), candidate("q"), candidate("find   x + 1", source="b")) == [0, 1, 0]


def test_of_many_repeats_each_names_the_first():
    questions = [f"Find {i % 7}." for i in range(100)]
    assert first_of(*map(candidate, questions)) == [questions.index(question) for question in questions]


def test_repeats_with_another_answer_contradict_the_first():
    first = candidate("q", answer="$\\frac12$")
    assert not differ(first, candidate("q", answer="\\frac12"))
    assert differ(first, candidate("q", answer="3"))


def test_other_tests_of_one_code_problem_are_no_conflict():
    assert first_of(code("sort", "1"), code("sort", "2")) == [0, 0]
    assert not differ(code("sort", "1"), code("sort", "2"))


def test_math_and_code_never_repeat_each_other():
    assert first_of(candidate("sort"), code("sort", "1")) == [0, 1]


def test_without_normalisation_only_equal_text_is_a_repeat():
    questions = [candidate("Find x"), candidate("find x"), candidate("Find x")]
    assert first_of(*questions, normalise=False) == [0, 1, 0]


def test_questions_of_punctuation_alone_are_told_apart():
    assert first_of(candidate("?"), candidate("??")) == [0, 1]
