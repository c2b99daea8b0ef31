from klear_core.config.data import DedupConfig
from klear_core.data.candidates import Candidate
from klear_core.data.dedup import Deduplicator
from klear_core.types import CodeReference, Domain, MathReference, StdinCase, StdinTests


def candidate(question, answer="1", source="a"):
    return Candidate(
        source=source, domain=Domain.MATH, question=question, reference=MathReference(answers=(answer,)), rating=None
    )


def code(question, output):
    reference = CodeReference(tests=StdinTests(cases=(StdinCase(input="", output=output),)))
    return Candidate(source="c", domain=Domain.CODE, question=question, reference=reference, rating=None)


def test_the_first_stays_and_repeats_name_it():
    dedup = Deduplicator(DedupConfig())
    first = candidate("Find $x+1$.")
    assert dedup.repeat_of(first) is None
    repeat = dedup.repeat_of(candidate("find   x + 1", source="b"))
    assert repeat is not None
    assert (repeat.step, repeat.reason) == ("dedup", "repeated_question")
    assert first.problem_id in repeat.detail
    assert dedup.repeats == {"b": 1}
    assert dedup.num_conflicting_answers == 0


def test_repeats_with_another_answer_are_counted_apart():
    dedup = Deduplicator(DedupConfig())
    dedup.repeat_of(candidate("q", answer="$\\frac12$"))
    dedup.repeat_of(candidate("q", answer="\\frac12"))
    assert dedup.num_conflicting_answers == 0
    repeat = dedup.repeat_of(candidate("q", answer="3"))
    assert dedup.num_conflicting_answers == 1
    assert "another answer" in repeat.detail
    assert dedup.repeats == {"a": 2}


def test_other_tests_of_one_code_problem_are_no_conflict():
    dedup = Deduplicator(DedupConfig())
    assert dedup.repeat_of(code("sort", "1")) is None
    assert dedup.repeat_of(code("sort", "2")) is not None
    assert dedup.num_conflicting_answers == 0


def test_math_and_code_never_repeat_each_other():
    dedup = Deduplicator(DedupConfig())
    assert dedup.repeat_of(candidate("sort")) is None
    assert dedup.repeat_of(code("sort", "1")) is None


def test_without_normalisation_only_equal_text_is_a_repeat():
    dedup = Deduplicator(DedupConfig(normalise=False))
    assert dedup.repeat_of(candidate("Find x")) is None
    assert dedup.repeat_of(candidate("find x")) is None
    assert dedup.repeat_of(candidate("Find x")) is not None


def test_questions_of_punctuation_alone_are_told_apart():
    dedup = Deduplicator(DedupConfig())
    assert dedup.repeat_of(candidate("?")) is None
    assert dedup.repeat_of(candidate("??")) is None
