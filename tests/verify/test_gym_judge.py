"""Answers to reasoning-gym's problems are judged by the package's own scorers, in workers that can be killed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_gym_judges import numbers_asked, value_alone
from pydantic import ValidationError
from verify_builders import boxed, problem

from klear_core.config.curate import DifficultyConfig
from klear_core.config.data import REASONING_GYM, GymSource
from klear_core.config.verify import GYM_JUDGE, VerifyConfig
from klear_core.data.candidates import problem_from
from klear_core.data.generated.gym_problems import as_candidates, problems_here
from klear_core.types import AnswerToJudge, CustomReference, Domain, Outcome, Problem
from klear_core.verify import JudgePool, gym

pytest.importorskip("reasoning_gym", reason="needs the extra `gym`")

EVALUATED = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "simple_integration",
             "intermediate_integration", "polynomial_multiplication"]  # fmt: skip
"""Tasks whose scorers evaluate text."""


def problems(task: str, num_problems: int = 2, **config: object) -> list[Problem]:
    """The first problems of a task; they are made in this process, as a source's process starts for seconds."""
    dataset = gym.open_dataset(task, config, seed=1, size=num_problems)
    values = [gym.reference_value(task, config, None, dataset[i]) for i in range(num_problems)]
    return [
        problem(CustomReference(judge=GYM_JUDGE.name, domain=Domain.MATH, value_json=json.dumps(v))) for v in values
    ]


def value_of(problem: Problem) -> dict:
    assert isinstance(problem.reference, CustomReference)
    return json.loads(problem.reference.value_json)


@pytest.fixture(scope="module")
def pool() -> Iterator[JudgePool]:
    with JudgePool(VerifyConfig.model_validate({"runtime": {"reward_workers": 1}})) as made:
        yield made


def think(answer: str) -> str:
    return f"<think>\nhm\n</think>\n{answer}"


def test_a_problem_of_a_source_is_judged_by_its_answer(pool):
    source = GymSource.model_validate({"task": "chain_sum", "num_problems": 1})
    (row,) = as_candidates(source, problems_here(source, seed=0))
    asked = problem_from(row, DifficultyConfig())
    assert pool.judge(asked, think(boxed(value_of(asked)["answer"]))).is_correct
    assert not pool.judge(asked, think(boxed("no"))).is_correct


@pytest.mark.parametrize("task", ["chain_sum", "n_queens", "rotate_matrix", "countdown", "arc_agi", "power_function"])
def test_the_references_own_answer_is_right_and_another_problems_is_not(pool, task):
    first, second = problems(task)
    own, other = (value_of(p)["answer"] for p in (first, second))
    assert pool.judge(first, think(boxed(own))).is_correct
    assert not pool.judge(first, think(boxed(other))).is_correct


def test_a_problem_without_one_reference_answer_is_judged_by_its_rules(pool):
    (coloured,) = problems("graph_color", 1)
    entry = gym._decoded(value_of(coloured)["entry"])
    assert entry["answer"] is None
    right = json.dumps(entry["metadata"]["possible_answer"])
    assert pool.judge(coloured, think(f"<answer>{right}</answer>")).is_correct
    assert pool.judge(coloured, think(f"<answer>{json.dumps({'0': 99})}</answer>")).score < 0.1


@pytest.mark.parametrize("answer", ["nan", "NaN", "-nan", "nan+nanj", "1+nanj", "nan, nan"])
def test_an_answer_that_is_no_number_is_wrong(pool, answer):
    # The scorer of complex numbers gave 1 to it: its bounds are min and max.
    (asked,) = problems("complex_arithmetic", 1)
    assert pool.judge(asked, think(boxed(answer))).score == 0.0
    assert pool.judge(asked, think(boxed(value_of(asked)["answer"]))).is_correct


def test_part_of_the_score_is_not_right(pool):
    # The scorer of puzzles of numbers gives 0.01 to any answer.
    (puzzle,) = problems("puzzle24", 1)
    verdict = pool.judge(puzzle, think(boxed("1 + 1")))
    assert (verdict.outcome, verdict.score, verdict.is_correct) == (Outcome.SCORED, 0.01, False)


def test_a_right_answer_that_is_only_mentioned_is_wrong(pool):
    (lcm,) = problems("lcm", 1)
    assert pool.judge(lcm, think(f"It is {value_of(lcm)['answer']}.")).score == 0


def test_the_last_answer_tag_counts_and_a_box_comes_before_it(pool):
    (lcm,) = problems("lcm", 1)
    right = value_of(lcm)["answer"]
    assert pool.judge(lcm, think(f"<answer>1</answer> <answer> {right} </answer>")).is_correct
    assert pool.judge(lcm, think(f"{boxed(right)} <answer>1</answer>")).is_correct


def test_text_commands_around_an_answer_are_taken_off(pool):
    (day,) = problems("calendar_arithmetic", 1, tasks=("weekday_of_date",))
    assert pool.judge(day, think(boxed(rf"\text{{{value_of(day)['answer']}}}"))).is_correct


@pytest.mark.parametrize("task", EVALUATED)
@pytest.mark.parametrize(
    "program",
    [
        "__import__('pathlib').Path('{file}').touch()",
        "[open('{file}', 'w')]",
        "exec(\"open('{file}', 'w')\")",
        "(lambda: open('{file}', 'w'))()",
        "sympify(\"open('{file}', 'w')\")",
        "().__class__.__base__.__subclasses__()",
        "print(print)",
    ],
)
def test_a_program_in_an_answer_is_not_run(task, program, tmp_path: Path):
    (asked,) = problems(task, 1)
    touched = tmp_path / "touched"
    text = program.format(file=touched)
    answer = AnswerToJudge(
        problem_id="p", source="s", question="", reference=value_of(asked), answer=text, box=text, response=text
    )
    assert gym.score(answer) < 0.1
    assert not touched.exists()


def test_every_scorer_that_evaluates_text_is_known():
    folder = Path(pytest.importorskip("reasoning_gym").__file__).parent
    evaluates = {
        path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in folder.rglob("*.py")
        if _reads_by_eval(path.read_text())
    }
    assert evaluates == {f"algorithmic.{name}" for name in gym._LITERALS} | {"games.n_queens"} | set(gym._FORMULAS)


def _reads_by_eval(source: str) -> bool:
    """Return whether a method `score_answer` evaluates something that is not the reference's."""
    body = source.partition("def score_answer")[2].partition("\n    def ")[0].partition("\nclass ")[0]
    calls = [line for line in body.splitlines() if "eval(" in line or "parse_expr(" in line or "exec(" in line]
    return any("entry[" not in line for line in calls)


def test_formulas_of_numbers_names_and_functions_are_read():
    import sympy

    assert gym.read_formula("2*3 - sqrt(16)") == 2
    assert gym.read_formula("sin(x)**2 + cos(x)**2").simplify() == 1
    assert gym.read_formula("log(x)/2 + C", local_dict={"C": sympy.Symbol("C")}).has(sympy.log)


@pytest.mark.parametrize(
    "text", ["x.args", "[1]", "Symbol('x')", "f(x)", "_", "'1'", "{1: 2}", "x if 1 else 2", "sqrt(x, evaluate=0)"]
)
def test_formulas_of_anything_else_are_not_read(text):
    with pytest.raises(ValueError, match="a formula has no"):
        gym.read_formula(text)


def test_an_answer_that_takes_forever_is_wrong_because_the_references_own_is_judged(tmp_path):
    (puzzle,) = problems("puzzle24", 1)
    quick = VerifyConfig.model_validate({"runtime": {"reward_workers": 1}})
    with JudgePool(quick) as pool:
        judge, digest = pool._judges["reasoning_gym"]
        pool._judges["reasoning_gym"] = judge.model_copy(update={"timeout_s": 4.0, "memory_mb": 1024}), digest
        verdict = pool.judge(puzzle, think(boxed("9**9**9**9")))
    assert (verdict.outcome, verdict.score) == (Outcome.SCORED, 0.0), verdict
    assert "the judge works on another answer" in verdict.detail


def test_a_reference_of_another_version_gives_no_verdict(pool):
    (lcm,) = problems("lcm", 1)
    value = value_of(lcm) | {"version": "0.0.1"}
    other = problem(CustomReference(judge="reasoning_gym", domain=Domain.MATH, value_json=json.dumps(value)))
    verdict = pool.judge(other, think(boxed("1")))
    assert verdict.outcome is Outcome.JUDGE_FAILED
    assert f"of reasoning-gym 0.0.1, and {REASONING_GYM} is used" in verdict.detail


def test_a_judge_of_ones_own_cannot_take_its_name():
    with pytest.raises(ValidationError, match="'reasoning_gym' is a judge of Klear's own"):
        VerifyConfig.model_validate({"judges": [{"name": "reasoning_gym", "function": "a:b"}]})


@pytest.mark.parametrize(
    ("answer", "value"),
    [("94*4 - 61 - 6", "309"), ("2 × 3 × 7 × 19", "798"), ("6*4*4/4", "24"), ("8*(88 - 37 + 60)/6 + 56", "204")],  # noqa: RUF001
)
def test_the_bench_asks_for_the_value_of_a_calculation_alone(answer, value):
    assert list(value_alone(answer)) == [value]


@pytest.mark.parametrize(
    "answer", ["12", "-3", "0.25", "3/4", "0 1 0", "18:03", "(4.051, -5.487)", "2*x + C", "Chi", "139"]
)
def test_what_is_no_calculation_has_no_value_alone(answer):
    assert not list(value_alone(answer))


def test_the_bench_asks_for_each_number_of_the_question_that_is_not_the_answer():
    question = "Make 309 of 94, 4, 61 and 6.5."
    assert list(numbers_asked(question, "94*4 - 61 - 6")) == ["309", "94", "4", "61", "6.5"]
    assert list(numbers_asked(question, "4.0")) == ["309", "94", "61", "6.5"]
