"""Answers that other programs wrote, in rows as they publish them, and in rows of any layout by their places."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.config.benchmark_prompts import MATH_PROMPTS, QUESTION
from klear_core.data.formats.code_rows import with_instructions
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.layouts import bare_question, foreign_answers
from klear_core.evaluate.answers.mapped_rows import places_in, suggested_option
from klear_core.evaluate.answers.stored import AnswerSource, Generation, UnreadRow
from klear_core.report.answers import write_viewer
from klear_core.types import CodeReference, Domain, MathReference, UnverifiableReference, problem_id_of


def read(source: AnswerSource) -> list[Generation]:
    rows = list(source.read())
    assert not [row for row in rows if isinstance(row, UnreadRow)]
    return [row for row in rows if isinstance(row, Generation)]


def written(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def scores_of(answers: list[Generation]) -> list[float | None]:
    return [None if answer.verdict is None else answer.verdict.score for answer in answers]


def accepted(answer: Generation) -> tuple[str, ...]:
    assert isinstance(answer.reference, MathReference)
    return answer.reference.answers


# ---- any file ----


def test_any_file_is_read_by_the_places_of_its_values(tmp_path: Path) -> None:
    row = {
        "task": {"text": "1+1?"},
        "truth": {"value": 2},
        "runs": [{"said": "two", "ok": False}, {"said": "2", "ok": 1}],
    }
    places = places_in("question=task.text answer=truth.value response=runs.*.said score=runs.*.ok")
    source = foreign_answers(written(tmp_path / "mine.jsonl", row), places=places)
    answers = read(source)
    assert [(a.benchmark, a.question, a.response) for a in answers] == [("mine", "1+1?", "two"), ("mine", "1+1?", "2")]
    assert scores_of(answers) == [0.0, 1.0]
    assert accepted(answers[0]) == ("2",)


def test_scores_in_cells_of_text_are_read_and_what_is_no_score_is_counted(tmp_path: Path) -> None:
    """A cell of CSV is text. A score that was asked for and cannot be read must not be dropped in silence."""
    places = places_in("question=q answer=a response=r score=ok")
    file = tmp_path / "mine.csv"
    file.write_text("q,a,r,ok\n1+1?,2,2,1\n1+2?,3,4,0.0\n1+3?,4,4,True\n1+4?,5,5,\n1+5?,6,6,0.7\n")
    rows = list(foreign_answers(file, places=places).read())
    assert scores_of([row for row in rows if isinstance(row, Generation)]) == [1.0, 0.0, 1.0, None]
    assert [row.reason for row in rows if isinstance(row, UnreadRow)] == [
        "ok: '0.7' is neither 0 nor 1, true nor false; leave score= out"
    ]
    lists = written(tmp_path / "lists.jsonl", {"q": "1+1?", "a": "2", "r": ["2", "3"], "ok": [1]})
    (unread,) = foreign_answers(lists, places=places).read()
    assert isinstance(unread, UnreadRow)
    assert unread.reason == "ok: 1 scores for 2 answers"


def test_a_place_may_hold_one_text_a_list_or_a_conversation(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    for name, value, said in (("text", "2", ["2"]), ("list", ["2", "3"], ["2", "3"]), ("chat", chat, ["2"]),
                              ("chats", [chat, chat], ["2", "2"])):  # fmt: skip
        file = written(tmp_path / f"{name}.jsonl", {"q": "1+1?", "gold": "2", "x": value})
        answers = read(foreign_answers(file, places=places_in("question=q answer=gold response=x")))
        assert [a.response for a in answers] == said, name


def test_a_list_in_brackets_that_a_model_said_is_its_one_answer(tmp_path: Path) -> None:
    places = places_in("question=q answer=gold response=x")
    for i, said in enumerate(("[2, 3]", "['2', '3']", "[]", "[2]")):
        file = written(tmp_path / f"{i}.jsonl", {"q": "Which primes are below 4?", "gold": "[2, 3]", "x": said})
        assert [a.response for a in read(foreign_answers(file, places=places))] == [said]


def test_rows_in_a_list_of_one_object_and_a_problem_with_tests_are_read_by_places(tmp_path: Path) -> None:
    rows = [{"q": "Print 1.", "tests": [{"input": "", "output": "1"}], "code": "print(1)"}]
    file = written(tmp_path / "all.json", {"meta": 1, "run": {"rows": rows}})
    (answer,) = read(foreign_answers(file, places=places_in("question=q tests=tests response=code rows=run.rows")))
    assert (answer.question, answer.response) == ("Print 1.", "print(1)")
    assert answer.problem_id == problem_id_of("Print 1.", Domain.CODE)
    with pytest.raises(DataError, match="rows=run"):
        read(foreign_answers(file, places=places_in("question=q tests=tests response=code rows=run.other")))


def test_a_file_of_no_known_layout_names_the_option_that_reads_it(tmp_path: Path) -> None:
    row = {"problem": "What is 1+1, in digits?", "gold": "2", "generation": "It is 2.", "is_correct": True}
    file = written(tmp_path / "plain.jsonl", row)
    with pytest.raises(DataError, match="fits none of the layouts") as refused:
        foreign_answers(file)
    option, value = shlex.split(str(refused.value).rpartition("are: ")[2])
    assert (option, value) == ("--fields", "question=problem answer=gold response=generation score=is_correct")
    (answer,) = read(foreign_answers(file, places=places_in(value)))
    assert (answer.question, answer.response, accepted(answer)) == (row["problem"], "It is 2.", ("2",))
    assert scores_of([answer]) == [1.0]


@pytest.mark.parametrize(
    ("row", "places"),
    [
        (
            {"instruction": "Compute 3*4.", "gold_solution": "12", "samples": [{"text": "12", "ok": True}]},
            "question=instruction answer=gold_solution response=samples.*.text score=samples.*.ok",
        ),
        (
            {"meta": 1, "items": [{"question": "Which number?", "answer": "2", "response": "It is 2."}]},
            "question=question answer=answer response=response rows=items",
        ),
        (
            {"prompt": "1+1?", "label": 2, "output": ["It is 2.", "3"], "score": [1, 0]},
            "question=prompt answer=label response=output score=score",
        ),
        ({"x": {"y": [1]}}, "question=PLACE_OF_THE_QUESTION answer=x.y response=PLACE_OF_THE_RESPONSE"),
    ],
)
def test_places_are_guessed_in_lists_and_where_rows_are_in_one_object(row: dict[str, object], places: str) -> None:
    assert shlex.split(suggested_option(row)) == ["--fields", places]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("question=a answer=b", "response: missing"),
        ("question=a response=b", "neither answer nor tests"),
        ("question=a answer=b respons=c", "respons: unknown key"),
        ("question", "'question' is not KEY=PLACE"),
        ("question='a", "No closing quotation"),
    ],
)
def test_unusable_places_are_refused_with_the_remedy(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        places_in(text)


def test_a_key_with_a_space_is_a_place_in_quotes() -> None:
    assert places_in("question=q 'answer=Correct Answer' response=r").answer == "Correct Answer"


# ---- one problem in several programs' files ----


@pytest.mark.parametrize(
    "prompt",
    [
        *MATH_PROMPTS.values(),
        MATH_PROMPTS["lighteval"].replace("{{", "{").replace("}}", "}"),
        "Question: {question}\nAnswer:",
        "Problem: {question}\nMark your solution with \\boxed\nAnswer:",
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n",
        "{question}",
    ],
)
@pytest.mark.parametrize("question", ["Find $x$ in {1, 2}.\n\nUse it.", "Question: why?", "Solve it. Answer: or not?"])
def test_a_prompt_of_a_known_harness_has_the_question_in_it(prompt: str, question: str) -> None:
    assert bare_question(prompt.replace(QUESTION, question)) == question


def test_the_same_problems_of_three_programs_are_one_problem_each_on_the_page(tmp_path: Path) -> None:
    questions = [f"Find the least $x > {i}$." for i in range(6)]
    harness = [
        {"doc_id": i, "doc": {"ID": f"2024-I-{i}", "Problem": q, "Answer": i + 1}, "target": str(i + 1),
         "resps": [[f"a{i}", f"b{i}"]], "filter": "none", "metrics": ["exact_match"], "exact_match": 0}
        for i, q in enumerate(questions)
    ]  # fmt: skip
    lm_eval = tmp_path / "samples_aime24_2026-01-31T10-00-00.1.jsonl"
    lm_eval.write_text("".join(json.dumps(row) + "\n" for row in harness))
    table = [
        {"problem_idx": i, "problem": q, "model_name": name, "idx_answer": 0, "answer": "1", "gold_answer": str(i + 1),
         "correct": i == 0}
        for name in ("m", "n") for i, q in enumerate(questions)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(table[:6]), tmp_path / "matharena.parquet")
    details = [
        {"doc": {"query": MATH_PROMPTS["lighteval"].replace(QUESTION, q), "choices": [str(i + 1)], "gold_index": [0]},
         "model_response": {"text": ["1"]}, "metric": {"pass@1": 0}}
        for i, q in enumerate(questions)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(details), tmp_path / "details_aime24.parquet")
    files = [lm_eval, tmp_path / "matharena.parquet", tmp_path / "details_aime24.parquet"]
    viewer = write_viewer([foreign_answers(file) for file in files], tmp_path / "page")
    assert (viewer.num_answers, viewer.num_problems) == (6 * 2 + 6 + 6, 6)

    # a source that has a question in two benchmarks, here of two models, has it twice
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "matharena.parquet")
    for order in (files, files[::-1]):
        viewer = write_viewer([foreign_answers(file) for file in order], tmp_path / "page")
        assert (viewer.num_answers, viewer.num_problems) == (6 * 2 + 12 + 6, 12)


# ---- layouts of single programs ----


def test_programs_of_lm_eval_have_the_tests_of_their_benchmark(tmp_path: Path) -> None:
    """A model continues the prompt of HumanEval, and the harness's filter joins the two."""
    prompt = 'def add(a, b):\n    """Return a + b."""\n'
    doc = {
        "task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": "    return a + b\n", "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    }  # fmt: skip
    row = {
        "doc_id": 0, "doc": doc, "target": doc["test"] + "\ncheck(add)", "resps": [["    return b + a"]],
        "filtered_resps": [[prompt + "    return b + a"]], "filter": "create_test", "metrics": ["pass@1"], "pass@1": 1.0,
    }  # fmt: skip
    source = foreign_answers(written(tmp_path / "samples_humaneval.jsonl", row))
    (answer,) = read(source)
    assert answer.response == f"```python\n{prompt}    return b + a\n```"
    assert isinstance(answer.reference, CodeReference)
    assert answer.question == f"Complete this function:\n```python\n{prompt.strip()}\n```"  # as our benchmark asks it
    assert scores_of([answer]) == [1.0]
    mbpp: dict[str, object] = {
        "task_id": 11,
        "text": "Add.",
        "code": "x",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "",
    }
    row_of_mbpp = row | {
        "doc": mbpp,
        "target": "",
        "resps": [["def f"]],
        "filtered_resps": [["def f(x): return x + 1"]],
    }
    (answer,) = read(foreign_answers(written(tmp_path / "samples_mbpp.jsonl", row_of_mbpp)))
    assert "assert f(1) == 2" in answer.question  # as our benchmark shows it
    assert answer.response == "```python\ndef f(x): return x + 1\n```"
    bare = row | {"doc": {"prompt": prompt, "entry_point": "add"}}
    (unread,) = foreign_answers(written(tmp_path / "samples_bare.jsonl", bare)).read()
    assert isinstance(unread, UnreadRow)
    assert "a programming task without tests" in unread.reason


def test_evalchemy_has_the_answers_in_its_file_of_scores_by_file_and_by_folder(tmp_path: Path) -> None:
    examples = [
        {
            "id": 7,
            "problem": "1+1?",
            "expected_answer": "2",
            "model_outputs": ["\\boxed{2}", "3"],
            "model_answers": ["2"],
        }
    ]
    single = [{"problem": "2+2?", "answer": "4", "model_output": "4", "model_answer": "4"}]
    judged = [{"question": "3+3?", "gold": "6", "model_outputs": ["6", "7"], "score": [1, 0.0]}]
    results = {
        "AIME24": {"examples": examples, "accuracy_avg": 0.5},
        "MATH500": {"examples": single, "num_solved": 1},
        "JEEBench": {"examples": judged},
        "LiveCodeBench": {"examples": [{"content": ["print(1)"], "correctness": True}]},  # which has no question
        "gsm8k": {"exact_match,none": 0.5},
    }
    file = written(tmp_path / "model" / "results_2026-01-31T10-00-00.1.json", {"results": results, "config": {}})
    expected = [
        ("AIME24", "1+1?", "\\boxed{2}", None, ("2",)), ("AIME24", "1+1?", "3", None, ("2",)),
        ("MATH500", "2+2?", "4", None, ("4",)), ("JEEBench", "3+3?", "6", 1.0, ("6",)),
        ("JEEBench", "3+3?", "7", 0.0, ("6",)),
    ]  # fmt: skip
    for path in (file, tmp_path):
        source = foreign_answers(path)
        answers = read(source)
        assert source.layout == "evalchemy"
        seen = [(a.benchmark, a.question, a.response, a.verdict and a.verdict.score, accepted(a)) for a in answers]
        assert seen == expected
    written(tmp_path / "other" / "results_2026-01-31T10-00-00.1.json", {"results": {"AIME24": {"examples": examples}}})
    benchmarks = {a.benchmark for a in read(foreign_answers(tmp_path))}
    assert benchmarks == {"AIME24, model", "MATH500, model", "JEEBench, model", "AIME24, other"}


def test_a_file_of_scores_alone_is_no_file_of_answers(tmp_path: Path) -> None:
    file = written(tmp_path / "results_2026-01-31T10-00-00.1.json", {"results": {"gsm8k": {"acc": 1}}})
    with pytest.raises(DataError, match="holds scores and no answers; name the files of samples"):
        foreign_answers(file)


def lcb_problem(**graded: object) -> dict[str, object]:
    return {
        "question_title": "One", "question_content": "Print one.", "platform": "atcoder", "question_id": "abc300_a",
        "contest_id": "abc300", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "output_list": ["```python\nprint(1)\n```", "no code"], "code_list": ["print(1)", ""],
    } | graded  # fmt: skip


def test_livecodebench_answers_are_programs_with_its_verdicts_and_are_read_once(tmp_path: Path) -> None:
    written(tmp_path / "Scenario.codegeneration_2_0.2.json", [lcb_problem()])
    written(tmp_path / "Scenario.codegeneration_2_0.2_eval.json", [{"pass@1": 0.5}, {}, [[]]])
    graded = lcb_problem(graded_list=[True, False], metadata=["{}", "{}"], **{"pass@1": 0.5})
    file = written(tmp_path / "Scenario.codegeneration_2_0.2_eval_all.json", [graded])
    for path in (file, tmp_path):
        source = foreign_answers(path)
        answers = read(source)
        assert source.layout == "livecodebench"
        assert [a.response for a in answers] == lcb_problem()["output_list"]
        assert scores_of(answers) == [1.0, 0.0]
        assert isinstance(answers[0].reference, UnverifiableReference)
        # the question as our own benchmark LiveCodeBench has it
        question = with_instructions("Print one.", "")
        assert answers[0].problem_id == problem_id_of(question, Domain.CODE)
    ungraded = read(foreign_answers(tmp_path / "Scenario.codegeneration_2_0.2.json"))
    assert scores_of(ungraded) == [None, None]
    submission = written(tmp_path / "submission.json", [lcb_problem(output_list=None, graded_list=[True, False])])
    assert [a.response for a in read(foreign_answers(submission))] == ["```python\nprint(1)\n```", "```python\n\n```"]


def test_choices_and_units_of_qwen_math_are_compared_as_the_harness_does(tmp_path: Path) -> None:
    """MMLU-STEM has the number of the option in `answer`, ASDiv a unit; else `gt` has lost parts of the answer."""
    for answer, compared, expected in ((1, "B", "B"), ("9 (apples)", "9", "9"), ("(a+5)(b+2)", "(+5)(b+2)", None)):
        row = {"idx": 0, "question": "?", "gt": compared, "answer": answer, "code": ["9"], "score": [True]}
        (read_answer,) = read(foreign_answers(written(tmp_path / "mmlu_stem.jsonl", row)))
        assert accepted(read_answer) == (expected or answer,)


def test_nemo_skills_files_of_one_folder_are_samples_of_one_benchmark(tmp_path: Path) -> None:
    folder = tmp_path / "eval-results" / "aime24"
    row = {"problem": "1+1?", "expected_answer": "2", "generation": "\\boxed{2}", "predicted_answer": "2"}
    written(folder / "output-rs0.jsonl", row | {"symbolic_correct": True, "num_generated_tokens": 9})
    written(folder / "output-rs1.jsonl", row | {"generation": "3", "symbolic_correct": False})
    for path, benchmark in ((folder, "aime24"), (folder.parent, "aime24")):
        source = foreign_answers(path)
        answers = read(source)
        assert source.layout == "nemo-skills"
        assert [(a.benchmark, a.sample_idx, a.response, a.num_tokens) for a in answers] == [
            (benchmark, 0, "\\boxed{2}", 9), (benchmark, 1, "3", None),
        ]  # fmt: skip
        assert scores_of(answers) == [1.0, 0.0]
    assert read(foreign_answers(folder / "output-rs1.jsonl"))[0].benchmark == "aime24"


def test_inspect_logs_in_json_have_epochs_reasoning_and_ends(tmp_path: Path) -> None:
    def sample(epoch: int, content: object, value: object, end: str) -> dict[str, object]:
        choice = {"message": {"role": "assistant", "content": content}, "stop_reason": end}
        output = {"model": "m", "choices": [choice], "usage": {"input_tokens": 3, "output_tokens": 5}}
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
        return {"id": 1, "epoch": epoch, "input": asked, "target": ["2", "two"], "output": output,
                "scores": {"match": {"value": value, "answer": "2"}}}  # fmt: skip

    parts = [{"type": "reasoning", "reasoning": "add"}, {"type": "text", "text": "2"}]
    samples = [sample(1, parts, "C", "stop"), sample(2, "3", "I", "max_tokens")]
    failed = {"id": 2, "epoch": 1, "input": "2+2?", "target": "4", "output": {"choices": []}, "error": {}}
    log = {"version": 2, "status": "success", "eval": {"task": "toy", "model": "openai/m"}}
    source = foreign_answers(written(tmp_path / "2026-01-31_toy_x.json", log | {"samples": samples}))
    answers = read(source)
    assert source.layout == "inspect"
    assert [(a.benchmark, a.question, a.response, a.finish_reason, a.num_tokens) for a in answers] == [
        ("toy, openai/m", "1+1?", "<think>\nadd\n</think>\n\n2", "stop", 5),
        ("toy, openai/m", "1+1?", "3", "length", 5),
    ]
    assert scores_of(answers) == [1.0, 0.0]
    assert accepted(answers[0]) == ("2", "two")
    rows = list(foreign_answers(written(tmp_path / "f.json", log | {"samples": [*samples, failed]})).read())
    (unread,) = [row for row in rows if isinstance(row, UnreadRow)]
    assert unread.where.endswith("f.json:samples.2")
    assert "the sample failed" in unread.reason


def test_an_empty_answer_in_an_inspect_log_is_an_answer(tmp_path: Path) -> None:
    """A model that spends its window and says nothing has an empty list of parts, and is not left out of the score."""
    samples = []
    for i, content in enumerate(([], [{"type": "text", "text": "2"}]), start=1):
        choice = {"message": {"role": "assistant", "content": content}, "stop_reason": "model_length"}
        sample = {"id": 1, "epoch": i, "input": "1+1?", "target": "2", "scores": {"match": {"value": "I"}}}
        samples.append(sample | {"output": {"choices": [choice]}})
    log = {"eval": {"task": "toy", "model": "m"}, "samples": samples}
    answers = read(foreign_answers(written(tmp_path / "x.json", log)))
    assert [(a.response, a.finish_reason) for a in answers] == [("", "length"), ("2", "length")]


def test_programs_in_inspect_logs_have_the_tests_of_their_metadata(tmp_path: Path) -> None:
    """The target is the published solution or the list of tests, and no answer to a math problem."""
    output = {"choices": [{"message": {"role": "assistant", "content": "```python\nadd = sum\n```"}}]}
    humaneval = {
        "target": "    return a + b\n",
        "metadata": {
            "prompt": "def add(a, b):\n",
            "test": "def check(f):\n    assert f(1, 2) == 3\n",
            "entry_point": "add",
        },
    }
    mbpp = {
        "target": ["assert add(1, 2) == 3"],
        "metadata": {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"], "task_id": 11},
    }
    bare = {"target": "return 3", "metadata": {"entry_point": "add"}}
    for part in (humaneval, mbpp, bare):
        sample = {"id": 1, "epoch": 1, "input": "Add.", "output": output, "scores": {}} | part
        log = {"eval": {"task": "code", "model": "m"}, "samples": [sample]}
        (row,) = foreign_answers(written(tmp_path / "x.json", log)).read()
        if part is bare:
            assert isinstance(row, UnreadRow)
            assert "a programming task without tests" in row.reason
        else:
            assert isinstance(row, Generation)
            assert isinstance(row.reference, CodeReference)


# ---- files that the programs wrote here ----

WRITTEN = Path(__file__).parents[2] / "files" / "written"
"""Of two or three problems each, answered by a random model of 168 thousand parameters: lm-evaluation-harness 0.4.13 with its
tasks gsm8k, aime24 (two samples), hendrycks_math500 and humaneval on local copies of the data, and Inspect 0.3.285."""


@pytest.mark.parametrize(
    ("name", "num_problems", "num_samples", "reference"),
    [
        ("samples_gsm8k", 3, 1, ("18",)),
        ("samples_aime24", 2, 2, ("73",)),
        ("samples_hendrycks_math500", 2, 1, (r"\left( 3, \frac{\pi}{2} \right)",)),
        ("samples_humaneval", 2, 1, None),
        ("inspect", 2, 2, ("18",)),
    ],
)
def test_files_that_lm_eval_and_inspect_wrote_here_are_read(
    name: str, num_problems: int, num_samples: int, reference: tuple[str, ...] | None
) -> None:
    (file,) = WRITTEN.glob(f"{name}*")
    answers = read(foreign_answers(file))
    assert len({a.problem_id for a in answers}) == num_problems
    assert len(answers) == num_problems * num_samples
    assert all(a.question and a.response for a in answers)
    if reference is None:
        assert isinstance(answers[0].reference, CodeReference)
        assert answers[0].response.startswith("```python\nfrom typing import List")
    else:
        assert accepted(answers[0]) == reference
    has_verdicts = name != "samples_aime24"  # its metric is of both samples together
    assert all((a.verdict is not None) == has_verdicts for a in answers)
