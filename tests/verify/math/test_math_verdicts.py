# ruff: noqa: E501, RUF001
"""Tables of math answers under the default settings: right, odd but right, wrong, and hostile. Found in the wild: first a row here.

Where math-verify alone says otherwise the row has a note: MV (0.7 and 0.9), MV7 (0.7 only), MV9 (0.9 only).
"""

from collections.abc import Iterator

import pytest
from verify_builders import THINK, boxed, is_right, math_problem

from klear_core.config.verify import MathConfig, VerifyConfig, VerifyRuntime
from klear_core.types import Outcome, Verdict
from klear_core.verify import JudgePool

RIGHT = [
    ("73", "73"),
    ("73", "073"),
    ("73", "73.0"),
    ("73", r"7.3\times10^1"),
    ("73", "x=73"),
    ("73", r"73\text{ cm}"),
    ("73", r"73^\circ"),
    ("73", r"73\%"),  # MV7 rejects
    ("0.73", r"73\%"),
    ("073", "73"),
    (r"\boxed{73}", "73"),
    ("$73$", "73"),
    ("1000", "1,000"),
    ("32348", r"\$32,\!348"),
    ("900,\\!000,\\!000", "900000000"),
    ("18", r"\$18"),
    ("18", "18 dollars"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5 centimeters"),
    ("12", r"12^{\text{th}} \text{ grade}"),
    ("0.5", r"\frac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "½"),
    ("1/3", "0.333333"),
    (r"2\sqrt2", r"\sqrt8"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\pi", "π"),
    ("-5", "−5"),
    ("73", "７３"),  # MV rejects full-width digits
    ("x^2", "x²"),
    ("C", "C"),
    ("C", "(C)"),
    ("C", r"\text{C}"),
    ("B", r"\textbf{(B)}\ 12"),  # MV rejects
    ("B", "(B) 12"),  # MV rejects
    ("B", "B. 12"),
    (r"\text{Yes}", "Yes"),
    ("no", "No"),
    (r"\text{even}", "even"),
    (r"\text{4:30 p.m.}", r"4:30 \text{ p.m.}"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,-2", "-2,1"),
    (r"(2,12) \cup (12,102)", r"(2, 12) \cup (12, 102)"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}"),
    (r"3 \pm 2 \sqrt{2}", r"3+2\sqrt{2}, 3-2\sqrt{2}"),
    (r"\frac{1+\sqrt{17}}{2}, \frac{1-\sqrt{17}}{2}", r"\frac{1\pm\sqrt{17}}{2}"),  # MV reads the sign only outside of brackets
    (r"\frac{1+\sqrt{17}}{2}, \frac{1-\sqrt{17}}{2}", r"x=\frac{1\pm\sqrt{17}}{2}"),  # MV rejects
    (r"\frac{1 \pm \sqrt{17}}{2}, 0", r"0, \frac{1-\sqrt{17}}{2}, \frac{1+\sqrt{17}}{2}"),  # MV rejects
    (r"\{\frac{1\pm\sqrt{17}}{2}\}", r"(1\pm\sqrt{17})/2"),  # MV rejects
    ("13, 13, 14", "14, 13, 13"),
    ("13, 14", r"14\text{ and }13"),
    ("E_{1},E_{2}", "E_1, E_2"),
    ("5", "2+3=5"),
    (r"\frac{5!}{2!}", "60"),
    ("y=2x+1", "y = 1 + 2x"),
    ("0.0001234", "0.00012340000001"),
    ("1.6e-19", "1.6 \\times 10^{-19}"),
    ("[0,1)", "[0, 1)"),
    (r"\{1,3,5,\ldots\}", r"\{1,3,5,\dots\}"),  # MV rejects
    ("9:16", r"9\text{ to }16"),  # MV rejects
    ("1:12", "2 to 24"),
]  # fmt: skip

WRONG = [
    ("73", "74"),
    ("73", ""),
    ("1/3", "0.333"),
    ("0.0001234", "0.0001229"),  # MV accepts: it rounds to six places after the point
    ("1.6e-19", r"9.1 \times 10^{-31}"),  # MV accepts
    ("4", "3=4"),  # MV accepts: it looks at the last side
    ("no", "on"),  # MV accepts: letters commute
    ("5 cm", "5 m"),  # MV accepts: units are dropped
    ("3:30", "6:60"),  # MV accepts: ratios
    ("9:16", "16 to 9"),
    ("C", "6"),
    ("C", "D"),
    ("E", "e"),  # MV accepts
    ("3", r"\sum_{i=1}^{2} i"),  # MV accepts: the question restated
    ("1", r"\int_0^1 2x\,dx"),  # MV accepts
    ("73", r"73 \text{ or } 74"),
    ("73", "73, 74"),
    ("73", "73, 73"),  # MV accepts: lists are sets
    ("13, 14", "13, 13, 14"),  # MV accepts
    ("13, 13, 14", r"13 \text{ and } 14"),  # MV accepts
    (r"\frac{1\pm\sqrt{17}}{2}", r"\frac{1+\sqrt{17}}{2}"),
    ("73", r"\{73, 74\}"),
    ("(1,2)", "(2,1)"),
    (r"(2,\infty)", r"[2,\infty)"),
    ("1000000", "1000001"),
    ("1000000", "1000000.5"),
    ("123456789012", "123456789013"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("x+1", "x-1"),
    ("even", "odd"),
    (r"\text{east}", r"\text{west}"),
    ("12102", "(12,102)"),
    (r"\{1,2,3,\ldots\}", r"\{1,2,3\}"),  # MV accepts: dots are dropped
    (r"\{1,2,3\}", r"\{1,2,3,\ldots\}"),  # MV accepts
    (r"\{1,2,\ldots,10\}", r"\{1,2,10\}"),  # MV accepts
    ("(1,2,3)", r"(1,2,3,\ldots)"),  # MV accepts
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_a_right_answer_scores_one(math_pool: JudgePool, gold: str, answer: str) -> None:
    verdict = math_pool.judge(math_problem(gold), boxed(answer))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_wrong_answer_scores_zero(math_pool: JudgePool, gold: str, answer: str) -> None:
    verdict = math_pool.judge(math_problem(gold), boxed(answer))
    assert verdict.outcome.counts_for_model
    assert verdict.score == 0.0, verdict.detail


INFINITE = [r"2^\infty", r"\infty^{\infty}", r"\sqrt{\infty}", r"\infty^2", r"e^{\infty}", r"\log_2\infty"]
FINITE = [
    "5",
    r"\frac{1}{2}",
    r"\ln 2",
    r"\sqrt{2}",
    "e",
    r"\log_2 3",
    r"\sin 1",
    r"3^{\log_2 5}",
    r"\frac{\ln 3}{\ln 2}",
    r"\sqrt[3]{7}",
]


@pytest.mark.parametrize("shape", ["{}", r"\{{1,{}\}}", "(-1,{}]"])
def test_an_infinite_value_equals_no_finite_one(math_pool: JudgePool, shape: str) -> None:
    # Unevaluated, about one comparison in forty held, by the order in which sympy deduces facts.
    wrong = [(shape.format(gold), shape.format(answer)) for gold in FINITE for answer in INFINITE]
    verdicts = [math_pool.submit(math_problem(gold), boxed(answer)) for gold, answer in wrong]
    assert [pair for pair, verdict in zip(wrong, verdicts, strict=True) if verdict.result().score] == []
    assert math_pool.judge(math_problem(r"\infty"), boxed(r"2^\infty")).is_correct


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_every_reference_is_right_against_itself(math_pool: JudgePool, gold: str, answer: str) -> None:
    assert math_pool.judge(math_problem(gold), boxed(gold)).score == 1.0


@pytest.mark.parametrize(
    ("response", "outcome", "score"),
    [
        (THINK + "The answer is 73.", Outcome.SCORED, 1.0),
        (THINK + "73", Outcome.SCORED, 1.0),
        (THINK + "$73$", Outcome.SCORED, 1.0),
        (THINK + "The answer is 74.", Outcome.SCORED, 0.0),
        (THINK + r"First \boxed{74}. No, wait: \boxed{73}", Outcome.SCORED, 1.0),  # MV9 rejects boxes side by side
        (THINK + r"\boxed{73}, or else \boxed{74}", Outcome.SCORED, 0.0),
        (r"<think>\boxed{73}</think> It is \boxed{74}", Outcome.SCORED, 0.0),
        (r"<think>a</think>\boxed{74}</think>\boxed{73}", Outcome.SCORED, 1.0),
        (r"<think>so it is \boxed{73}", Outcome.NO_ANSWER, 0.0),
        (r"<think>\boxed{73}</think>", Outcome.NO_ANSWER, 0.0),
        (THINK, Outcome.NO_ANSWER, 0.0),
        ("", Outcome.NO_ANSWER, 0.0),
        (THINK + r"The answer is 73. \boxed{}", Outcome.NO_ANSWER, 0.0),  # MV accepts
        (THINK + r"\boxed{73", Outcome.NO_ANSWER, 0.0),
        (THINK + r"\boxed{\text{the set \{73\}}}", Outcome.SCORED, 0.0),
        (THINK + r"\fbox{73}", Outcome.SCORED, 1.0),
        (THINK + r"\boxed {73}", Outcome.SCORED, 1.0),
        (THINK + r"\boxed{\boxed{73}}", Outcome.SCORED, 1.0),
    ],
)
def test_where_the_answer_is_looked_for(math_pool: JudgePool, response: str, outcome: Outcome, score: float) -> None:
    verdict = math_pool.judge(math_problem("73"), response)
    assert (verdict.outcome, verdict.score) == (outcome, score), verdict.detail


@pytest.mark.parametrize(("gold", "prose", "score"), [("B", "The answer is (B).", 1.0), ("B", "The answer is (C).", 0.0), (r"\text{east}", "So, the final answer is east.", 1.0), ("east", "The answer is west.", 0.0)])  # fmt: skip
def test_letters_and_words_are_read_from_prose(math_pool: JudgePool, gold: str, prose: str, score: float) -> None:
    assert math_pool.judge(math_problem(gold), THINK + prose).score == score


def test_any_of_several_references_is_right(math_pool: JudgePool) -> None:
    assert math_pool.judge(math_problem("72", r"\frac{146}{2}"), boxed("73")).score == 1.0


def test_a_reference_of_two_values_may_be_given_in_two_boxes(math_pool: JudgePool) -> None:
    assert math_pool.judge(math_problem("2,3"), THINK + r"\boxed{2} and \boxed{3}").score == 1.0
    assert math_pool.judge(math_problem("2,3"), THINK + r"\boxed{2} and \boxed{4}").score == 0.0


@pytest.mark.parametrize("answers", [(), ("",), ("  ",), ("1" * 5000,), (r"\notacommand{{{",)])
def test_a_reference_that_cannot_be_used_is_never_a_score(math_pool: JudgePool, answers: tuple[str, ...]) -> None:
    assert math_pool.judge(math_problem(*answers), boxed("12")).outcome is Outcome.BAD_REFERENCE


SETTINGS = [
    (VerifyConfig(tags="both"), "73", r"x</think>\boxed{73}", Outcome.NO_ANSWER, 0.0),
    (VerifyConfig(tags="none"), "73", r"\boxed{73}", Outcome.SCORED, 1.0),
    (VerifyConfig(window="whole"), "73", r"<think>\boxed{73}</think>so", Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(box="required")), "73", THINK + "The answer is 73.", Outcome.NO_ANSWER, 0.0),
    (VerifyConfig(math=MathConfig(several_boxes="agree")), "73", THINK + r"\boxed{74} \boxed{73}", Outcome.SCORED, 0.0),
    (VerifyConfig(math=MathConfig(several_boxes="agree")), "73", THINK + r"\boxed{73.0} \boxed{73}", Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(several_boxes="join")), "73,74", THINK + r"\boxed{74} \boxed{73}", Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(percent="value")), "73", boxed(r"73\%"), Outcome.SCORED, 0.0),
    (VerifyConfig(math=MathConfig(percent="value")), "0.73", boxed(r"73\%"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(percent="ignore")), "0.73", boxed(r"73\%"), Outcome.SCORED, 0.0),
    (VerifyConfig(math=MathConfig(units="ignore")), "5 cm", boxed("5 m"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(units="ignore")), "5", boxed(r"5 \text{ zorbs}"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(units="strict")), "5000000", boxed("5 million"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(units="strict")), "5 cm", boxed("5"), Outcome.SCORED, 0.0),
    (VerifyConfig(math=MathConfig(units="strict")), "5 cm", boxed(r"5\text{ cm}"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(rounding_digits=3)), "1/3", boxed("0.333"), Outcome.SCORED, 1.0),
    (VerifyConfig(math=MathConfig(choices="math")), "C", boxed("(C) 12"), Outcome.SCORED, 0.0),
    (VerifyConfig(math=MathConfig(max_answer_chars=10)), "73", boxed("73" + " " * 20 + "0"), Outcome.NO_ANSWER, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("cfg", "gold", "response", "outcome", "score"), SETTINGS)
def test_each_setting_does_what_it_says(
    cfg: VerifyConfig, gold: str, response: str, outcome: Outcome, score: float
) -> None:
    patient = cfg.math.model_copy(update={"cpu_s": 60.0})
    with JudgePool(cfg.model_copy(update={"math": patient, "runtime": VerifyRuntime(math_workers=1)})) as pool:
        verdict = pool.judge(math_problem(gold), response)
    assert (verdict.outcome, verdict.score) == (outcome, score), verdict.detail


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"\pi(R^2-r^2)", r"\pi(R-r)(R+r)", "0"),  # MV accepts all wrong ones: it reads both letters as one
        (r"\frac{m}{M+m}", r"\frac{m}{m+M}", r"\frac{M}{M+m}"),
        (r"\binom{N}{n}", r"\frac{N!}{n!(N-n)!}", "1"),
        (r"\Delta-\delta", r"-\delta+\Delta", "0"),
        ("A_1-a_1", "-a_1+A_1", "0"),
        ("2R", "2r", "R+r"),
    ],
)
def test_a_capital_and_its_small_letter_in_one_text_differ(
    math_pool: JudgePool, gold: str, right: str, wrong: str
) -> None:
    assert is_right(math_pool, gold, right)
    assert not is_right(math_pool, gold, wrong)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("(1+r)^T", "(r+1)^{T}", "1+r"),  # MV accepts all wrong ones
        ("2^T", "2^{T}", "2"),
        ("A^T", "A^{T}", "A"),
        ("-2f'(0)", r"f'(0)\cdot(-2)", "-2f(0)"),
        ("h''(b)", r"h^{\prime\prime}(b)", "h'(b)"),
        ("y'=2y", "2y=y'", "y=2y"),
        ("y_1y_2'-y_2y_1'", "y_2'y_1-y_1'y_2", "0"),
        ("f'_n(x)", "f_n'(x)", "f_n(x)"),
        ("(1+r)^Tx", "x(1+r)^T", "x(1+r)"),
        (
            r"\begin{pmatrix}t\\1\end{pmatrix}",
            r"\begin{pmatrix}t&1\end{pmatrix}^T",
            r"\begin{pmatrix}1&t\end{pmatrix}^T",
        ),
    ],
)
def test_neither_a_power_t_nor_a_prime_is_dropped(math_pool: JudgePool, gold: str, right: str, wrong: str) -> None:
    assert is_right(math_pool, gold, right)
    assert not is_right(math_pool, gold, wrong)


@pytest.mark.parametrize(
    ("gold", "formula", "score"), [("f'(0)", "$f'(0)$", 1.0), ("f'(0)", "$f(0)$", 0.0), ("f(0)", "$f'(0)$", 0.0)]
)
def test_primes_count_in_a_sentence_too(math_pool: JudgePool, gold: str, formula: str, score: float) -> None:
    verdict = math_pool.judge(math_problem(gold), f"{THINK}Hence the model's slope is {formula} there.")
    assert verdict.score == score


HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "factorial": "(10^9)!",
    "double factorial": "((10^5)!)!",
    "binomial": r"\binom{10^9}{10^8}",
    "sum": r"\sum_{i=1}^{10^9} i^{i}",
    "power": "2^{10^{10}}",
    "deep brackets": "(" * 2000 + "1" + ")" * 2000,
    "deep fractions": r"\frac{1}{" * 100 + "1" + "}" * 100,
    "unclosed boxes": r"\boxed{" * 5000,
    "unclosed braces": "{" * 20000,
    "a megabyte of digits": "1" * (1 << 20),
    "a megabyte of boxes": r"\boxed{1}" * (1 << 17),
    "a megabyte of spaces": " " * (1 << 20),
    "a megabyte of dollars": "$" * (1 << 20),
    "matrix": r"\begin{pmatrix}" + r"\\".join("&".join(["x^{99}"] * 15) for _ in range(15)) + r"\end{pmatrix}",
    "NUL": "7\x003",
    "surrogate": "7\ud8003",
    "right to left": "\u202e37",
    "combining marks": "7" + "\u0301" * 5000 + "3",
    "zalgo": "7̷̨̛̖͌3̶̡̛",
    "commas": "1," * 400,
    "equals": "1=" * 400,
    "regex flood": "a" * 500 + "!",
    "thousands": "1,000" * 150,
    "code": "__import__('os').system('true')",
    "infinity": r"\infty",
    "not a number": r"\frac{0}{0}",
    "nested roots": r"\sqrt{" * 28 + "2" + "}" * 28,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_earns_nothing_and_comes_back(hostile_pool: JudgePool, name: str) -> None:
    verdict = hostile_pool.submit(math_problem("73"), boxed(HOSTILE[name])).result(timeout=120)
    assert verdict.outcome in (Outcome.SCORED, Outcome.NO_ANSWER), verdict
    assert verdict.score == 0.0


def test_good_answers_are_judged_while_hostile_ones_burn_their_time() -> None:
    """Two of three workers burn; whatever the order, the third has one second for what takes a fiftieth of it."""
    cfg = VerifyConfig(math=MathConfig(cpu_s=1.0), runtime=VerifyRuntime(math_workers=3))
    with JudgePool(cfg) as pool:
        burning = [pool.submit(math_problem("73"), boxed(HOSTILE["tower"] + f"+{i}")) for i in range(2)]
        verdicts: list[Verdict] = [pool.submit(math_problem("1/2"), boxed(f"0.5+{i}-{i}")).result() for i in range(5)]
        assert [v.score for v in verdicts] == [1.0] * 5
        assert {(f.result().outcome, f.result().score) for f in burning} == {(Outcome.SCORED, 0.0)}


@pytest.fixture(scope="module")
def hostile_pool() -> Iterator[JudgePool]:
    """One second a comparison."""
    with JudgePool(VerifyConfig(math=MathConfig(cpu_s=1.0), runtime=VerifyRuntime(math_workers=2))) as pool:
        yield pool


@pytest.mark.parametrize(
    ("gold", "response", "detail"),
    [
        ("12", r"</think>\boxed{12}", 'answer "12" matches the reference, by text rules'),
        ("12", r"</think>\boxed{13}", 'answer "13" does not match the reference, by text rules'),
        ("2,3", r"</think>\boxed{2} or \boxed{3}", 'answer "2, 3" matches the reference, by text rules'),
        ("7", r"</think>\boxed{5}, no: \boxed{7}", 'answer "7" matches the reference, by text rules'),
        (r"\sqrt{8}", r"</think>\boxed{2\sqrt2}", r'answer "2\sqrt2" equals the reference, by algebra'),
        ("x+1", r"</think>\boxed{x+2}", 'answer "x+2" does not equal the reference, by algebra'),
        ("yes", "</think>\\boxed{\x1b[31m no}", 'answer "\ufffd[31m no" does not match the reference, by text rules'),
        ("7", r"</think>The answer is 7.", 'answer "7" matches the reference, by text rules'),
    ],
)
def test_a_verdict_says_what_was_compared_with_the_reference_and_how(
    math_pool: JudgePool, gold: str, response: str, detail: str
) -> None:
    assert math_pool.judge(math_problem(gold), response).detail == detail
