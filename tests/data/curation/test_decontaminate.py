# ruff: noqa: RUF001  Cyrillic letters are the point
import dataclasses
import html
import re
from collections import Counter
from urllib.parse import quote

import pytest

from klear_core.config.curate import DecontaminateConfig
from klear_core.data.candidates import Candidate
from klear_core.data.curation.decontaminate import Decontaminator, Protected, counts_by_rule, drop_of
from klear_core.data.curation.normalise import tokens_of
from klear_core.errors import DataError
from klear_core.types import Domain, MathReference

ALPHABET = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda"


def prompt(question):
    return Candidate(
        source="s", domain=Domain.MATH, question=question, reference=MathReference(answers=("1",)), rating=None
    )


def protect(*questions, cfg=None):
    rows = [Protected(benchmark="bench", question_id=f"q{i}", question=q) for i, q in enumerate(questions)]
    return Guard(cfg or DecontaminateConfig(), rows)


class Guard:
    """Looks for leaks one by one and many at once, which must find the same."""

    def __init__(self, cfg, rows):
        self._decontaminator = Decontaminator(cfg, rows)
        self.common_phrases = self._decontaminator.common_phrases
        self.leaks = []

    def leak_in(self, candidate):
        tokens = tokens_of(candidate.question)
        alone = self._decontaminator.leak_of(candidate, tokens)
        other = prompt("Find the sum of all of them")
        candidates = [other, candidate, other]
        assert self._decontaminator.leaks_in(candidates, [tokens_of(c.question) for c in candidates])[1] == alone
        if alone is None:
            return None
        self.leaks.append(alone)
        return drop_of(alone) if alone.is_dropped else None

    def counts_by_rule(self):
        return counts_by_rule(Counter(leak.rules for leak in self.leaks))


def test_nine_words_in_a_row_condemn_and_eight_do_not():
    guard = protect(ALPHABET)  # eleven words
    words = ALPHABET.split()
    assert guard.leak_in(prompt("once upon " + " ".join(words[1:10]) + " a time")) is not None
    assert guard.leak_in(prompt("once upon " + " ".join(words[1:9]) + " a time")) is None


@pytest.mark.parametrize(
    "copy",
    [
        "请你小明有3个苹果，又买了5个，妈妈又给了他2个，小明现在总共有多少个苹果？",
        "りんごは全部でいくつありますか答えなさい",
    ],
)
def test_characters_are_the_words_of_scripts_without_spaces(copy):
    questions = [
        "小明有3个苹果，又买了5个，妈妈又给了他2个，请问小明现在一共有多少个苹果？",
        "りんごは全部でいくつありますか",
    ]
    guard = protect(*questions)
    assert guard.leak_in(prompt(copy)) is not None
    assert guard.leak_in(prompt("小红有3支铅笔，又买了5支，一共有多少支铅笔？")) is None


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


OTHER = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor"  # twelve words


def test_overlap_is_counted_within_one_question():
    """Two n-grams of one question each are no overlap of two with either."""
    guard = protect(ALPHABET, OTHER, cfg=DecontaminateConfig(min_overlap=2))
    one_of_each = " ".join(ALPHABET.split()[:9]) + " and " + " ".join(OTHER.split()[:9])
    assert guard.leak_in(prompt(one_of_each)) is None
    assert guard.leak_in(prompt(" ".join(OTHER.split()[:10]))) is not None


def rules_that_match(guard, question):
    guard.leak_in(prompt(question))
    return guard.leaks[-1].rules.split() if guard.leaks else []


def test_every_rule_is_tried_and_only_the_configured_one_drops():
    long = " ".join(f"word{i}" for i in range(60))
    other = " ".join(f"own{i}" for i in range(60))
    start = " ".join(long.split()[:9])  # one of 52 n-grams, 7 of 58 shingles
    assert rules_that_match(protect(long), f"{start} {other}") == ["ngram", "any_ngram"]
    strict = protect(long, cfg=DecontaminateConfig(rules=("share", "near")))
    assert strict.leak_in(prompt(f"{start} {other}")) is None
    assert [leak.is_dropped for leak in strict.leaks] == [False]
    drop = strict.leak_in(prompt(f"once upon a time {long}"))
    assert drop is not None
    assert drop.detail.endswith("rules: ngram, any_ngram, share, near")


def test_a_share_is_relative_to_the_shorter_text():
    long = " ".join(f"word{i}" for i in range(60))
    part = " ".join(long.split()[10:30])  # 12 n-grams, all of them in the question: 12 of its 52
    for question, text in ((long, part), (part, long)):
        assert "share" in rules_that_match(protect(question, cfg=DecontaminateConfig(min_share=1.0)), text)
    assert protect(long, cfg=DecontaminateConfig(min_coverage=0.3)).leak_in(prompt(part)) is None


def test_a_reworded_question_without_a_long_run_of_words_is_near():
    question = "Find the number of pairs (a, b) with a + b = 2024 and a b > 7."
    reworded = "How many pairs (a, b) with a + b = 2024 have a b > 7?"
    assert rules_that_match(protect(question), reworded) == ["near"]
    assert rules_that_match(protect(question), "How many pairs (c, d) satisfy c * d < 50?") == []


def test_a_large_share_of_very_few_runs_of_tokens_is_not_near():
    chains = [f"mod 10: {a},-{b},*{c}=?" for a in range(2, 9) for b in range(2, 9) for c in (2, 3, 4)]
    guard = protect(*chains, "mod 10: 4,-1=?")  # of the last one's runs of three only "4 - 1" is rare
    assert guard.leak_in(prompt("mod 10: 8,+6,-4,-3,*4,-1,+3=?")) is None
    assert guard.leaks == []


def test_only_any_ngram_drops_for_a_common_phrase():
    phrase = "the input is given from standard input in the following format"
    questions = [f"{phrase} number{i} then more words that nobody else {i} has in this order" for i in range(12)]
    text = "It rains. " + phrase
    assert rules_that_match(protect(*questions), text) == ["any_ngram"]
    assert protect(*questions).leak_in(prompt(text)) is None
    strict = protect(*questions, cfg=DecontaminateConfig(rules=("any_ngram",)))
    assert strict.leak_in(prompt(text)).reason == "in_bench"


def test_the_counts_say_what_each_rule_matches_and_what_no_other_does():
    question = "Find the number of pairs (a, b) with a + b = 2024 and a b > 7."
    guard = protect(question, ALPHABET)
    guard.leak_in(prompt("How many pairs (a, b) with a + b = 2024 have a b > 7?"))
    guard.leak_in(prompt(ALPHABET))
    guard.leak_in(prompt("What is one and one?"))
    counts = guard.counts_by_rule()
    assert (counts["rule_near_matches"], counts["rule_near_alone"]) == (2, 1)
    assert (counts["rule_ngram_matches"], counts["rule_ngram_alone"]) == (1, 0)


def test_a_leak_stands_beside_the_question_it_resembles():
    guard = protect("nothing alike", ALPHABET)
    guard.leak_in(prompt("X " + ALPHABET))
    leak = guard.leaks[0]
    assert (leak.benchmark, leak.question_id, leak.source) == ("bench", "q1", "s")
    assert (leak.prompt, leak.question) == ("X " + ALPHABET, ALPHABET)


def test_decontamination_cannot_be_turned_off():
    with pytest.raises(ValueError, match="at least 1 item"):
        DecontaminateConfig(rules=())


def test_a_contest_problem_is_known_by_its_id_whatever_its_words():
    asked = Protected(benchmark="lcb", question_id="q", question=ALPHABET, contest_id="atcoder/abc365_b")
    same = dataclasses.replace(prompt("Takahashi walks."), contest_id="atcoder/abc365_b")
    other = dataclasses.replace(same, contest_id="atcoder/abc365_c")
    guard = Guard(DecontaminateConfig(rules=("contest",)), [asked])
    assert "'atcoder/abc365_b'; rules: contest" in guard.leak_in(same).detail
    assert guard.leak_in(other) is None
    assert guard.leak_in(prompt("Takahashi walks.")) is None
    by_default = Guard(DecontaminateConfig(), [asked])
    assert by_default.leak_in(same) is None
    assert by_default.counts_by_rule()["rule_contest_alone"] == 1


ENCODINGS = {
    "entities": html.escape,
    "entities, twice": lambda text: html.escape(html.escape(text)),
    "entities without their end": lambda text: html.escape(text).replace(";", "").replace("&#x27", "'"),
    "hexadecimal escapes": lambda text: re.sub(r"[^\w\s\\]", lambda m: f"\\x{ord(m[0]):02x}", text),
    "long escapes": lambda text: "".join(f"\\U{ord(char):08x}" for char in text),
    "comments": lambda text: "<![CDATA[" + text.replace(" ", "<!-- a --> ") + "]]>",
    "numeric entities": lambda text: "".join(f"&#{ord(char)};" for char in text),
    "fixed spaces": lambda text: text.replace(" ", "&nbsp;"),
    "tags": lambda text: "<p>" + re.sub(r"(\w+) (\w+)", r"<b>\1</b> <i>\2</i>", text) + "</p>",
    "JSON": lambda text: "".join(f"\\u{ord(char):04x}" for char in text),
    "URL": quote,
    "mojibake": lambda text: text.replace(" ", "\u00a0").encode().decode("cp1252"),
    "Cyrillic": lambda text: text.translate(str.maketrans("aeopcyx", "аеорсух")),
    "Markdown": lambda text: re.sub(r"\b([a-z]{5,})\b", r"**\1**", text),
    "no width": lambda text: re.sub(r"(\w)(\w)", "\\1\u200b\\2", text),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rule", ["ngram", "near"])
def test_no_encoding_hides_a_benchmark_question_from_either_rule(encoding, rule):
    question = (
        "Real numbers x < y & y < 30 satisfy the equation $\\frac{1}{x} + \\frac{1}{y} = 2$, and their sum is even. "
        "Find the number of ordered pairs that exist."
    )
    guard = protect(question, cfg=DecontaminateConfig(rules=(rule,)))
    assert guard.leak_in(prompt(ENCODINGS[encoding](question))) is not None
    assert protect(ENCODINGS[encoding](question), cfg=DecontaminateConfig(rules=(rule,))).leak_in(prompt(question))


def test_a_killed_curation_can_go_on_with_the_indexes_that_an_earlier_version_pickled():
    """Attributes that are renamed are missing in them: the stage would fail at each attempt."""
    pickled = "_cfg _filter _near_shared _protected _shingles _short_questions _with_contest_id _words common_phrases"
    assert sorted(vars(Decontaminator(DecontaminateConfig(), []))) == pickled.split()
