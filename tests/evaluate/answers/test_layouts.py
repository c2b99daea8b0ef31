"""Files of answers that other programs wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.layouts import foreign_answers
from klear_core.evaluate.answers.stored import Generation, UnreadRow
from klear_core.types import problem_id_of

SHARED = Path(__file__).parents[4] / "shared" / "data"


def read(path: Path, **options: object) -> tuple[str, list[Generation], list[UnreadRow]]:
    source = foreign_answers(path, **options)  # type: ignore[arg-type]
    rows = list(source.read())
    answers = [row for row in rows if isinstance(row, Generation)]
    return source.layout, answers, [row for row in rows if isinstance(row, UnreadRow)]


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lm_eval_row(**changes: object) -> dict[str, object]:
    row = {
        "doc_id": 3,
        "doc": {"question": "2+3?", "answer": "2+3=5\n#### 5"},
        "target": "2+3=5\n#### 5",
        "arguments": {"gen_args_0": {"arg_0": "Q: 2+3?\nA:", "arg_1": {"until": ["Q:"]}}},
        "resps": [["It is 5. #### 5"]],
        "filtered_resps": ["5"],
        "filter": "strict-match",
        "metrics": ["exact_match"],
        "exact_match": 1.0,
    }
    return row | changes


def test_lm_eval_samples_are_read_once_though_each_filter_repeats_them(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "samples_gsm8k_2026-01-31T10-00-00.123456.jsonl",
        lm_eval_row(),
        lm_eval_row(filter="flexible-extract", exact_match=0.0),
    )
    layout, (answer,), unread = read(file)
    assert (layout, unread) == ("lm-eval", [])
    assert (answer.benchmark, answer.question, answer.response) == ("gsm8k", "2+3?", "It is 5. #### 5")
    assert answer.reference.answers == ("5",)  # type: ignore[union-attr]
    assert answer.verdict is not None
    assert answer.verdict.is_correct
    assert (answer.num_tokens, answer.finish_reason) == (None, None)


def test_lm_eval_repeats_are_several_answers_whose_common_metric_says_nothing_of_each(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "samples_aime24.jsonl", lm_eval_row(resps=[["a", "b", "c"]], exact_match=1.0))
    _, answers, _ = read(file)
    assert [(a.sample_idx, a.response, a.verdict) for a in answers] == [(0, "a", None), (1, "b", None), (2, "c", None)]


@pytest.mark.parametrize(
    "resps", [[[[-1.5, False]], [[-0.1, True]]], [[["-1.5", "False"]], [["-0.1", "True"]]]], ids=["numbers", "texts"]
)
def test_tasks_that_score_given_choices_have_no_answers_and_are_counted(tmp_path: Path, resps: object) -> None:
    """The harness writes the log-likelihood of each choice, and all numbers as texts."""
    file = jsonl(tmp_path / "samples_mmlu.jsonl", lm_eval_row(resps=resps))
    _, answers, (row,) = read(file)
    assert answers == []
    assert "no generated text" in row.reason


def test_lm_eval_has_a_list_of_accepted_answers_as_its_text(tmp_path: Path) -> None:
    """An interval stays what it is."""
    targets = ["['1/2', '0.5']", "[1, 2]", "['a'"]
    rows = [lm_eval_row(doc_id=i, target=target) for i, target in enumerate(targets)]
    _, answers, unread = read(jsonl(tmp_path / "samples_x.jsonl", *rows))
    references = [a.reference.answers for a in answers]  # type: ignore[union-attr]
    assert (references, unread) == ([("1/2", "0.5"), ("[1, 2]",), ("['a'",)], [])


def test_commas_are_dropped_from_the_number_of_a_worked_solution_and_not_from_a_pair(tmp_path: Path) -> None:
    rows = [lm_eval_row(doc_id=i, target=target) for i, target in enumerate(["#### 1,234,567", "#### (1, 2)"])]
    _, answers, _ = read(jsonl(tmp_path / "samples_x.jsonl", *rows))
    assert [a.reference.answers for a in answers] == [("1234567",), ("(1, 2)",)]  # type: ignore[union-attr]


def test_headings_of_a_worked_solution_are_not_its_answer(tmp_path: Path) -> None:
    """`####` states the answer on the last line alone; before that it is a heading of Markdown."""
    targets = ["#### Step 1\nAdd.\n\nSo it is $\\boxed{2}$.", "#### Sum\n1+1\n#### 2", "1+1\n#### so \\boxed{2}"]
    rows = [lm_eval_row(doc_id=i, target=target) for i, target in enumerate(targets)]
    _, answers, _ = read(jsonl(tmp_path / "samples_x.jsonl", *rows))
    # the three rows have one question, and so three problems
    assert [a.reference.answers for a in answers] == [("2",)] * 3  # type: ignore[union-attr]


def test_lighteval_details_of_both_versions_give_the_same_answers(tmp_path: Path) -> None:
    new = {
        "doc": {"query": "1+1?", "choices": ["2", "3"], "gold_index": [0], "task_name": "lighteval|toy|0"},
        "model_response": {"text": ["\\boxed{2}", "\\boxed{3}"], "output_tokens": [[1, 2], [3]]},
        "metric": {"pass@1": 0.5},
    }
    old = {"example": "1+1?", "predictions": ["\\boxed{2}", "\\boxed{3}"], "gold": ["2"], "metrics": {"em": 0.5}}
    seen = []
    for name, row in (("details_toy_2026-01-31T10-00-00.1.parquet", new), ("details_toy.parquet", old)):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name)
        layout, answers, unread = read(tmp_path / name)
        assert (layout, unread) == ("lighteval", [])
        seen.append([(a.benchmark, a.problem_id, a.sample_idx, a.response, a.reference, a.verdict) for a in answers])
    assert seen[0] == seen[1]
    assert [part[3] for part in seen[0]] == ["\\boxed{2}", "\\boxed{3}"]


def test_lighteval_before_0_10_wrote_lists_and_metrics_as_text(tmp_path: Path) -> None:
    row = {
        "full_prompt": "1+1?",
        "predictions": "['\\\\boxed{2}']",
        "gold": "['2']",
        "metrics": "{'extractive_match': 1}",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "details_x.parquet")
    _, (answer,), _ = read(tmp_path / "details_x.parquet")
    assert (answer.response, answer.verdict and answer.verdict.score) == ("\\boxed{2}", 1.0)


def test_matharena_is_read_from_its_table_and_from_a_file_a_problem(tmp_path: Path) -> None:
    table = [
        {
            "problem_idx": "1", "problem": "Find x.", "model_name": "m", "idx_answer": i, "answer": f"\\boxed{{{i}}}",
            "gold_answer": "1", "parsed_answer": str(i), "correct": i == 1, "output_tokens": 10 + i,
        }
        for i in range(2)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "aime_2026_outputs.parquet")
    folder = tmp_path / "aime_2026"
    folder.mkdir()
    conversations = [
        [{"role": "user", "content": "Find x."}, {"role": "assistant", "content": r["answer"]}] for r in table
    ]
    single = {
        "idx": 1, "problem": "Find x.", "gold_answer": "1", "N": 2, "answers": ["0", "1"], "correct": [False, True],
        "messages": conversations, "detailed_costs": [{"output_tokens": 10}, {"output_tokens": 11}],
    }  # fmt: skip
    (folder / "1.json").write_text(json.dumps(single, indent=4))
    packed = tmp_path / "packed" / "aime_2026"
    packed.mkdir(parents=True)
    with pa.output_stream(str(packed / "1.json.zst"), compression="zstd") as f:
        f.write(json.dumps(single, indent=4).encode())  # as the repository's scripts write them since 2026
    facts = []
    table_file = tmp_path / "aime_2026_outputs.parquet"
    for path, benchmark in (
        (table_file, "aime_2026_outputs, m"), (folder, "aime_2026"), (packed, "aime_2026"),
    ):  # fmt: skip
        layout, answers, unread = read(path)
        assert (layout, unread) == ("matharena", [])
        assert {a.benchmark for a in answers} == {benchmark}
        facts.append([(a.problem_id, a.response, a.num_tokens, a.verdict) for a in answers])
    assert facts[0] == facts[1] == facts[2]
    assert [verdict and verdict.is_correct for *_, verdict in facts[0]] == [False, True]


def test_klear_generations_of_one_problem_are_rows_apart_and_are_numbered(tmp_path: Path) -> None:
    def row(question: str, answer: str) -> dict[str, object]:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": f"<think></think>{answer}"}]
        return {"id": "x", "meta": {"answer": "7"}, "messages": chat}

    file = jsonl(tmp_path / "aime24_inference_avg64.jsonl", row("p", "1"), row("q", "2"), row("p", "3"))
    layout, answers, _ = read(file)
    assert layout == "klear"
    assert [(a.question, a.sample_idx, a.response[-1]) for a in answers] == [
        ("p", 0, "1"),
        ("q", 0, "2"),
        ("p", 1, "3"),
    ]
    assert answers[0].problem_id == problem_id_of("p", "math")  # type: ignore[arg-type]


def test_bad_rows_are_counted_with_their_place_and_the_others_are_read(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "samples_x.jsonl", lm_eval_row(), {"doc_id": 1}, lm_eval_row(target=None))
    with file.open("a") as f:
        f.write("{broken\n")
    _, answers, unread = read(file)
    assert len(answers) == 1
    assert [row.where.rpartition(":")[2] for row in unread] == ["2", "3", "4"]


def test_a_row_that_repeats_or_contradicts_an_earlier_one_is_left_out_by_its_place(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "samples_x.jsonl", lm_eval_row(), lm_eval_row(doc_id=4), lm_eval_row())
    _, answers, (row,) = read(file)
    assert len(answers) == 2
    assert (row.where, row.reason) == (f"{file}:3", f"doc_id 3 is in {file}:1 already")

    said = {"id": "a", "response": "1", "reference": {"kind": "math", "answers": ["1"]}}
    other = said | {"reference": {"kind": "math", "answers": ["2"]}}
    file = jsonl(tmp_path / "mine.jsonl", said, said, other)
    _, answers, (row,) = read(file)
    assert [(a.problem_id, a.sample_idx) for a in answers] == [("a", 0), ("a", 1)]  # rows of an id are its samples
    assert row.reason == f"has another reference than {file}:1, which has the same problem a"

    sample = {"problem": "Find x.", "gold_answer": "1", "answer": "1", "problem_idx": 1, "idx_answer": 0}
    _, answers, (row,) = read(jsonl(tmp_path / "table.jsonl", sample, sample, sample | {"idx_answer": 1}))
    assert len(answers) == 2
    assert "problem 1, idx_answer 0 is in" in row.reason


def test_two_documents_with_one_question_are_two_problems(tmp_path: Path) -> None:
    other = lm_eval_row(doc_id=4, target="6")  # such as one question with other choices
    _, answers, unread = read(jsonl(tmp_path / "samples_x.jsonl", lm_eval_row(), other))
    question = problem_id_of("2+3?", "math")  # type: ignore[arg-type]
    assert [a.problem_id for a in answers] == [question, f"{question}-4"]
    assert unread == []


def test_files_of_one_task_are_runs_apart_and_files_of_scores_hold_no_answers(tmp_path: Path) -> None:
    for model in ("a", "b"):
        folder = tmp_path / model
        folder.mkdir()
        jsonl(folder / "samples_gsm8k_2026-01-31T10-00-00.1.jsonl", lm_eval_row())
        (folder / "results_2026-01-31T10-00-00.1.json").write_text('{"results": {}}')
    layout, answers, unread = read(tmp_path)
    assert (layout, unread) == ("lm-eval", [])
    assert [a.benchmark for a in answers] == ["gsm8k, a", "gsm8k, b"]
    jsonl(tmp_path / "a" / "samples_gsm8k_2026-02-01T10-00-00.1.jsonl", lm_eval_row())
    _, answers, _ = read(tmp_path / "a")
    assert [a.benchmark for a in answers] == [
        "gsm8k, samples_gsm8k_2026-01-31T10-00-00.1",
        "gsm8k, samples_gsm8k_2026-02-01T10-00-00.1",
    ]


def test_a_folder_of_several_layouts_and_a_file_without_rows_are_refused_by_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", lm_eval_row())
    jsonl(tmp_path / "b.jsonl", {"id": "a", "response": "1", "reference": {"kind": "math", "answers": ["1"]}})
    with pytest.raises(DataError, match=r"b.jsonl: has the layout rows, but .*a.jsonl has lm-eval"):
        foreign_answers(tmp_path)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match=r"b.jsonl: has no row"):
        foreign_answers(tmp_path)
    (tmp_path / "b.jsonl").write_text("{half a row")
    with pytest.raises(DataError, match=r"b.jsonl: has no row that can be read; the first, .*b.jsonl:1: cut_short"):
        foreign_answers(tmp_path)


def test_an_incomplete_problem_a_failed_answer_and_a_program_are_named(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "Find x."}, {"role": "assistant", "content": "1"}
    problem = {"idx": 1, "problem": "Find x.", "gold_answer": "1", "N": 2, "messages": [[asked, said]]}
    failed = problem | {"idx": 2, "messages": [[asked, said], [asked, said | {"content": None}]]}
    unanswered = problem | {"idx": 3, "messages": [[asked, said], [asked]]}
    thought = problem | {"idx": 4, "messages": [[asked, said], [asked, said | {"type": "cot"}]]}
    _, answers, unread = read(jsonl(tmp_path / "a.jsonl", problem, failed, unanswered, thought))
    assert answers == []
    assert [row.reason for row in unread] == [
        "messages: hold 1 of the N = 2 answers",
        "messages.1.content: an answer must be text, not NoneType",
        "messages.1: ends with a message of user, not with the model's answer",
        "messages.1: ends with a message of assistant (cot), not with the model's answer",
    ]
    program = lm_eval_row(doc={"prompt": "def f():", "entry_point": "f"}, target="check(f)")
    _, _, (row,) = read(jsonl(tmp_path / "samples_humaneval.jsonl", program))
    assert "a programming task without tests" in row.reason


def test_half_a_character_inside_of_a_text_costs_its_row_alone(tmp_path: Path) -> None:
    """No file could hold it: lists in Parquet and references may be texts that escape it."""
    rows = [
        {"example": f"{i}?", "predictions": said, "gold": "['2']"} for i, said in enumerate(["['\\ud800']", "['2']"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "details_x.parquet")
    _, answers, (row,) = read(tmp_path / "details_x.parquet")
    assert [a.response for a in answers] == ["2"]
    assert "half a character" in row.reason

    reference = '{"kind": "math", "answers": ["\\ud800"]}'
    said = {"id": "a", "response": "1", "reference": reference}
    _, answers, (row,) = read(jsonl(tmp_path / "mine.jsonl", said))
    assert answers == []
    assert "half a character" in row.reason


def test_compressed_files_are_read_and_damaged_ones_are_named(tmp_path: Path) -> None:
    packed = gzip.compress("".join(json.dumps(lm_eval_row(doc_id=i)) + "\n" for i in range(500)).encode())
    (tmp_path / "samples_x.jsonl.gz").write_bytes(packed)
    _, answers, _ = read(tmp_path / "samples_x.jsonl.gz")
    assert len(answers) == 500
    (tmp_path / "samples_x.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"samples_x.jsonl.gz: cannot be read beyond row"):
        read(tmp_path / "samples_x.jsonl.gz")


def test_an_unknown_layout_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fits none of the layouts klear, lm-eval"):
        foreign_answers(jsonl(tmp_path / "a.jsonl", {"x": 1}))
    both = dict.fromkeys(["id", "response", "reference", "question", "code", "answer"])
    with pytest.raises(ConfigError, match=r"could be any of qwen-math, rows; choose one with --layout"):
        foreign_answers(jsonl(tmp_path / "b.jsonl", both))
    with pytest.raises(ConfigError, match="without data files"):
        foreign_answers(tmp_path / "nothing")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not beside the checkout")
def test_published_verdicts_of_real_harness_files_are_read() -> None:
    file = SHARED / "graded-math-8x" / "math_cot_100.jsonl.gz"
    layout, answers, unread = read(file)
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert (layout, len(answers), unread) == ("qwen-math", 8 * len(rows), [])
    stated = [bool(score) for row in rows for score in row["score"]]
    assert [a.verdict is not None and a.verdict.is_correct for a in answers] == stated
