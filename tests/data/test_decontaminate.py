import pytest

from klear_core.config.data import DecontaminateConfig
from klear_core.data.candidates import Candidate
from klear_core.data.decontaminate import Decontaminator, Protected
from klear_core.errors import DataError
from klear_core.types import Domain, MathReference

ALPHABET = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda"


def prompt(question):
    return Candidate(
        source="s", domain=Domain.MATH, question=question, reference=MathReference(answers=("1",)), rating=None
    )


def protect(*questions, cfg=None):
    rows = [Protected(benchmark="bench", question_id=f"q{i}", question=q) for i, q in enumerate(questions)]
    return Decontaminator(cfg or DecontaminateConfig(), rows)


def test_nine_words_in_a_row_condemn_and_eight_do_not():
    guard = protect(ALPHABET)  # eleven words
    words = ALPHABET.split()
    assert guard.leak_in(prompt("once upon " + " ".join(words[1:10]) + " a time")) is not None
    assert guard.leak_in(prompt("once upon " + " ".join(words[1:9]) + " a time")) is None


def test_the_drop_names_the_question_and_the_words():
    leak = protect("nothing alike", ALPHABET).leak_in(prompt("X " + ALPHABET.upper()))
    assert (leak.step, leak.reason) == ("decontaminate", "in_bench")
    assert "shares 3 with bench q1" in leak.detail  # eleven words have three grams of nine
    assert "'alpha beta gamma delta epsilon zeta eta theta iota'" in leak.detail


@pytest.mark.parametrize(
    "disguise",
    [
        "Let $a_1,a_2$ be reals with $a_1+a_2\\leq 10{,}000$. Find $\\dfrac{a_1}{a_2}$ if it exists.",
        "LET $a_{1}, a_{2}$ be reals, with $a_1 + a_2 \\le 10000$! Find $\\frac{a_1}{a_2}$, if it exists",
        "Do:\n\nLet \\(a_1\\, ,\\; a_2\\) be reals with \\( a_1 + a_2 ≤ 10,000 \\). Find \\(\\tfrac{a_1}{a_2}\\) if it exists.\n\nBox",
    ],
)
def test_case_punctuation_and_latex_do_not_hide_a_leak(disguise):
    guard = protect("Let $a_1,a_2$ be reals with $a_1+a_2\\leq 10000$. Find $\\frac{a_1}{a_2}$ if it exists.")
    assert guard.leak_in(prompt(disguise)) is not None


def test_short_questions_are_looked_for_whole_with_their_signs():
    guard = protect("Compute $3+4$.")
    assert guard.leak_in(prompt("Please do: compute 3 + 4, then box it")) is not None
    assert guard.leak_in(prompt("Compute 3 - 4")) is None
    assert guard.leak_in(prompt("Compute 3 and 4")) is None


def test_a_chain_is_not_a_leak_of_another_chain():
    guard = protect("mod 10: 3,+4,*7=?")
    assert guard.leak_in(prompt("mod 10: 3,+4,*7=?")) is not None
    assert guard.leak_in(prompt("mod 10: 3,+4,*7,-2=?")) is None
    assert guard.leak_in(prompt("mod 10: 3,-4,*7=?")) is None


def test_more_overlap_can_be_asked_for():
    guard = protect(ALPHABET, cfg=DecontaminateConfig(min_overlap=3))
    assert guard.leak_in(prompt(" ".join(ALPHABET.split()[:10]))) is None
    assert guard.leak_in(prompt(ALPHABET)) is not None


def test_coverage_is_the_share_of_one_question():
    guard = protect(ALPHABET, cfg=DecontaminateConfig(min_coverage=0.6))
    assert guard.leak_in(prompt(" ".join(ALPHABET.split()[:9]))) is None  # one of three grams
    assert guard.leak_in(prompt(" ".join(ALPHABET.split()[:10]))) is not None  # two of three


def test_a_phrase_of_many_questions_condemns_nothing_but_the_questions_stay_protected():
    phrase = "the input is given from standard input in the following format"
    questions = [
        f"{phrase} number{i} and then some more words that nobody else {i} has in this order" for i in range(12)
    ]
    guard = protect(*questions, phrase)
    assert (
        guard.leak_in(prompt(f"{phrase}: N M")) is not None
    )  # here the phrase is a question of its own, looked for whole
    guard = protect(*questions)
    assert guard.common_phrases
    assert guard.leak_in(prompt(f"{phrase}: N M")) is None
    assert all(guard.leak_in(prompt(q)) is not None for q in questions)


def test_a_question_without_a_word_cannot_be_protected():
    with pytest.raises(DataError, match="no word"):
        protect("?")
