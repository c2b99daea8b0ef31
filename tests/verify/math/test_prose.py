# ruff: noqa: RUF001
"""Without a box a finished sentence at the end must state the answer; a number that is merely mentioned is none."""

import pytest
from verify_builders import math_problem

from klear_core.types import Outcome
from klear_core.verify import JudgePool

LOOPS = "For k=1 we get 5. For k=2 we get 4. " * 20

STATED = [
    ("3", "The answer is 3."),
    ("3", "The final answer is $3$."),
    ("3", "We add them up. The answer is 3"),
    ("3", "Some steps.\n\n#### 3"),
    ("70000", "He made a profit of 200,000-130,000=70000\nA: 70000"),
    ("3", "Steps.\n\nAnswer: 3"),
    ("3", "Steps.\n\n**Final Answer:** $3$"),
    ("3", "Steps.\n\n**Answer**:\n\n$3$"),
    ("3", "We checked all cases. Therefore, the number of cases is 3."),
    ("3", "We checked all cases. So, there are 3 cases.\n\nI think that's the final answer."),
    (r"\sqrt{53}", r"All is well. So, I think the final answer is \(\sqrt{53}\)."),
    ("2", "In conclusion, we have confirmed that:\n\n$$\n\\tan A = 2\n$$"),
    (r"\frac{1}{8}", "Therefore, the final result is:\n\n\\[\nx = \\frac{1}{8}\n\\]\n\n<|end_of_solution|>"),
    ("9", "Therefore, the number of trailing zeros in 42! is 9.\n\nI think that's the answer."),
    ("44", "This matches my result, so I'm confident that 44 is the correct answer."),
    ("3", "3"),
    ("3", "$x = 3$"),
    ("0.5", "0.5"),
    ("5", "答：小明一共有5个苹果。"),
    ("5", "答：5"),
    ("5", "解：设苹果有x个。x=5。\n答：5"),
    ("5", "解：略。\n\n答：一共有5个苹果。"),
    ("5", "Het antwoord is 5."),
    ("5", "Svaret är 5."),
    ("5", "Odpověď je 5."),
    ("5", "Răspunsul este 5."),
    ("5", "Vastaus on 5."),
    ("5", "Odpowiedź to 5."),
    ("\\frac12", "The probability is therefore $\\frac{1}{2}$."),
    ("42", "The answer is\n\n$$\n42.\n$$"),
    ("42", "The value of the sum is\n\\[42.\\]\nHence the answer is\n\\[42\\]"),
    ("D", "The best choice is option D."),
    ("42", "The area of the triangle is thus 42."),
    ("42", "Therefore, the total is\n\n$$42$$"),
    ("C", "The answer is C because the others fail."),
    ("C", "The answer is C, since all the others fail."),
    ("17", "Cevap 17'dir."),
    ("17", "The total cost is $17."),
    ("7", "The area of the triangle is 7."),
    ("\\frac12", "The probability is $\\frac{1}{2}$."),
    ("7", "The area of the triangle is **7** square units."),
    ("101", "La réponse est donc 101."),
    ("101", "La risposta è quindi 101."),
    ("101", "Die Antwort ist daher 101."),
    ("101", "A resposta é portanto 101."),
    ("5,6", "Therefore, x = 5 or x = 6."),
    ("(2,3)", "So the point is (2, 3)."),
    ("3:4", "Therefore, the ratio is 3:4."),
    ("x^2+1", "Thus f(x) = x^2 + 1."),
    ("x>6", "Hence x is greater than 6, so the solution is x > 6."),
    ("24", "Hence, the number of orders is 4!."),
]


@pytest.mark.parametrize(("gold", "text"), STATED, ids=[text[-40:] for _, text in STATED])
def test_a_stated_answer_is_read(math_pool: JudgePool, gold: str, text: str) -> None:
    verdict = math_pool.judge(math_problem(gold), "</think>" + text)
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 1.0), verdict.detail


WRONG = [
    ("3", "For k=3 it holds. Therefore, the answer is 4."),
    ("5", "Het antwoord is niet 5."),
    ("5", "Svaret är inte 5."),
    ("5", "答：6"),
    ("42", "The area of the triangle is thus 43."),
    ("C", "The answer is D because C fails."),
    ("7", "The area of the triangle is 8."),
    ("7", "The area is not 7."),
    ("7", "The area is 7 but the perimeter is wrong."),
    ("7", "The area is maybe 7."),
    ("6", "Therefore x is 5 or 6."),
    ("6", "Therefore, x = 5 or x = 6."),
    ("6", "So the total is at least $6$."),
    ("6", "So the total is greater than 6."),
    ("6", "So the total is between 5 and 6."),
    ("4", "So there are 4 or more."),
    ("3", "So the point is (2, 3)."),
    ("3", "Therefore, the ratio is 3:4."),
    ("1", "Thus f(x) = x^2 + 1."),
    ("4", "Hence, the number of orders is 4!."),
]


@pytest.mark.parametrize(("gold", "text"), WRONG, ids=[text for _, text in WRONG])
def test_another_value_or_a_denied_one_earns_nothing(math_pool: JudgePool, gold: str, text: str) -> None:
    assert math_pool.judge(math_problem(gold), "</think>" + text).score == 0.0


NOT_STATED = [
    "We look at small cases. Similarly, for k=3,",
    "We look at small cases. Similarly, for k=3",
    LOOPS + "For k=3",
    LOOPS + "Similarly, for k=3,",
    LOOPS + "For k=3 we get 3.",
    "We tried 3. I could not find an answer.",
    "I couldn't find the answer, the closest was 3.",
    "So the answer is 3. But this is wrong.",
    "The answer is not 3.",
    "I am not sure, maybe the answer is 3.",
    "So the answer is 3. Wait, let me check the case of 3.",
    "Therefore, for a > 2, f(x) is 3. Wait, but earlier I thought that f(a) = 3",
    "So, we need:\n\n3",
    "We have 3 apples and 4 pears.",
    "In this case, a = 10, b = 2 and n = 3. So, we need:",
    "The difference of squares formula is a^2 - b^2 = (a - b)(a + 3",
    "But earlier methods gave me 3, so",
    "So, area = 2 + 1 = 3 +",
    "Therefore, the answer is 3, because",
    "Next, we compute the partial derivatives:\n\n3.",
    "Does 3 divide 27?",
    "",
]


@pytest.mark.parametrize("text", NOT_STATED, ids=[text[-40:] for text in NOT_STATED])
def test_a_number_that_is_merely_mentioned_is_no_answer(math_pool: JudgePool, text: str) -> None:
    verdict = math_pool.judge(math_problem("3"), "</think>" + text)
    assert (verdict.outcome, verdict.score) == (Outcome.NO_ANSWER, 0.0), verdict
