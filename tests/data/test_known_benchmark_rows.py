"""Known benchmarks: real rows of those that we have, and the columns of the others."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import load_benchmark, prepare_benchmarks
from klear_core.data.candidates import Candidate
from klear_core.data.sources import read_source
from klear_core.errors import DataError
from klear_core.metrics import NullTelemetry
from klear_core.types import AssertTests, CodeReference, MathReference, Problem
from klear_core.verify import JudgePool

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")


def known(name: str, source: Path | str) -> BenchmarkConfig:
    return BenchmarkConfig.model_validate({"known": name, "source": str(source)})


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers_of(name: str, *rows: dict[str, object], tmp_path: Path) -> list[str]:
    """The answers of single rows, read in the format of a known benchmark."""
    source = {"kind": "file", "path": str(written(tmp_path / "b.jsonl", *rows)), "row_schema": "math_benchmark"}
    problems = load_benchmark(BenchmarkConfig.model_validate({"name": name, "source": source}), seed=0)
    assert all(isinstance(p.reference, MathReference) for p in problems)
    return [p.reference.answers[0] for p in problems]  # type: ignore[union-attr]


@needs_shared
@pytest.mark.parametrize(
    ("name", "file", "first"),
    [
        ("aime24", "bench-aime24/aime24.qs.jsonl", "73"),
        ("aime25", "bench-aime25/aime25.qs.jsonl", "70"),
        ("hmmt25", "bench-hmmt25/HMMT-202502.jsonl", "103"),
        ("amc23", "bench-amc23/test.jsonl", "27"),
        ("math500", "bench-math500/test.jsonl", r"\left( 3, \frac{\pi}{2} \right)"),
        ("gsm8k", "bench-gsm8k-test/test.jsonl", "18"),
    ],
)
def test_real_files_have_the_known_number_of_rows_and_their_answers(name: str, file: str, first: str) -> None:
    problems = load_benchmark(known(name, SHARED / file), seed=0)
    assert isinstance(problems[0].reference, MathReference)
    assert problems[0].reference.answers == (first,)


@needs_shared
def test_real_code_benchmarks_have_the_known_number_of_rows(tmp_path: Path) -> None:
    assert len(load_benchmark(known("humaneval", SHARED / "bench-humaneval" / "HumanEval.jsonl.gz"), seed=0)) == 164
    rows = [json.loads(line) for line in (SHARED / "code-mbpp" / "mbpp.jsonl").read_text().splitlines()]
    tests = [row for row in rows if 11 <= row["task_id"] <= 510]  # the split `test`, of which the copy has a part
    with pytest.raises(DataError, match=rf"expected_rows is 500 \(MBPP, test, .*\), but .* has {len(tests)} rows"):
        load_benchmark(known("mbpp", written(tmp_path / "mbpp.jsonl", *tests)), seed=0)


def live_rows(*, release: int) -> list[dict[str, object]]:
    """Real questions of LiveCodeBench with their dates, and a made-up test each. Release 5 has 279 of the v5 window."""
    folder = SHARED / "bench-lcb-v6-questions"
    rows = [json.loads(line) for line in gzip.decompress(next(folder.glob("*.jsonl.gz")).read_bytes()).splitlines()]
    in_v5 = (SHARED / "bench-lcb-v5-qwq" / "livecodebench_v5.jsonl").read_text().splitlines()
    of_v5 = {json.loads(line)["question_id"] for line in in_v5}
    tests = json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}])
    return [
        row | {"public_test_cases": tests, "private_test_cases": "[]", "metadata": "{}"}
        for row in rows
        if release == 6 or row["question_id"] in of_v5 or row["contest_date"] < "2024-08"
    ]


@needs_shared
def test_livecodebench_s_windows_choose_279_and_131_real_questions_and_the_ledger_counts_the_others(
    tmp_path: Path,
) -> None:
    v5 = known("lcb_v5", written(tmp_path / "release5.jsonl", *live_rows(release=5)))
    v6 = known("lcb_v6", written(tmp_path / "release6.jsonl", *live_rows(release=6)))
    assert len(load_benchmark(v5, seed=0)) == 279
    assert len(load_benchmark(v6, seed=0)) == 131
    with pytest.raises(
        DataError,
        match=r"expected_rows is 279 \(LiveCodeBench v5, of release 5; .*\), but its window 2024-08-01 to 2025-02-01 has "
        r"323 rows; 732 rows of 2023-05-07 to 2025-04-06 are outside",
    ):
        load_benchmark(known("lcb_v5", tmp_path / "release6.jsonl"), seed=0)


def contest(day: str, i: int) -> dict[str, object]:
    return {"problem": f"Count to {i}.", "answer": str(i), "contest_date": day}


def windowed(path: Path, expected_rows: int) -> BenchmarkConfig:
    window = {"start": "2024-08-01", "end": "2025-02-01"}
    settings = {"name": "live", "source": str(path), "window": window, "expected_rows": expected_rows}
    return BenchmarkConfig.model_validate(settings)


def test_a_window_has_its_first_day_and_not_its_last(tmp_path: Path) -> None:
    days = ["2024-07-31", "2024-08-01T00:00:00", "2025-01-31", "2025-02-01"]
    path = written(tmp_path / "b.jsonl", *(contest(day, i) for i, day in enumerate(days)))
    made = prepare_benchmarks(
        [windowed(path, 2)], seed=0, runtime=BenchmarksRuntime(), workdir=tmp_path / "out", telemetry=NullTelemetry()
    )
    (step,) = made.ledger
    assert (step.num_in, step.num_out, step.dropped) == (4, 2, {"outside_window": 2})
    with pytest.raises(
        DataError, match=r"expected_rows is 4, .* has 2 rows; 2 rows of 2024-07-31 to 2025-02-01 are out"
    ):
        load_benchmark(windowed(path, 4), seed=0)


@pytest.mark.parametrize(("day", "found"), [("", "no contest_date"), ("soon", "contest_date 'soon'")])
def test_a_row_without_a_date_belongs_to_no_window(tmp_path: Path, day: str, found: str) -> None:
    path = written(tmp_path / "b.jsonl", contest("2024-08-01", 1), contest(day, 2))
    with pytest.raises(DataError, match=rf"benchmark live: .*b\.jsonl:2 has {found}"):
        load_benchmark(windowed(path, 2), seed=0)


@pytest.mark.parametrize("key", ["id", "question_id", "unique_id", "task_id", "problem_id"])
def test_two_rows_of_one_id_are_refused_with_both_places(tmp_path: Path, key: str) -> None:
    rows = [{"problem": f"What is {i}?", "answer": str(i), key: [7, 8, "7"][i]} for i in range(3)]
    path = written(tmp_path / "b.jsonl", *rows)
    with pytest.raises(DataError, match=r"benchmark mine: .*:1 and .*:3 have the id '7' and different questions"):
        load_benchmark(BenchmarkConfig.model_validate({"name": "mine", "source": str(path)}), seed=0)


def test_math_benchmarks_are_read_whoever_packed_them(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"problem_idx": 1, "problem": "A?", "answer": 11, "problem_type": ["Algebra"]},  # MathArena
        {"question": "B?", "answer": r"\frac{1}{2}"},  # math-ai's Minerva
        {"problem": "C?", "solution": r"So it is $\boxed{3}$.", "type": "x", "idx": 1},  # Minerva of Qwen's harness
        {
            "question": "D?",
            "context": "Let x = 1.",
            "final_answer": ["4"],
            "is_multiple_answer": False,
        },  # OlympiadBench
        {"question": "E?", "context": None, "final_answer": ["$5, 6$"], "is_multiple_answer": True},
        {"problem": "F?", "expected_answer": "7"},
        {"messages": [{"role": "user", "content": "G?"}], "meta": {"answer": "8"}},  # Klear
        {"id": 61, "problem": "H?", "solution": "Long.", "answer": "025", "url": "u", "year": "2024"},  # H4's AIME 2024
    ]
    expected = ["11", r"\frac{1}{2}", "3", "4", "5, 6", "7", "8", "025"]
    assert answers_of("mixed", *rows, tmp_path=tmp_path) == expected


def test_the_question_of_an_olympiad_row_begins_with_what_it_shares_with_others(tmp_path: Path) -> None:
    row = {"question": "What is x + 1?", "context": "Let x = 1.", "final_answer": ["2"]}
    source = {"kind": "file", "path": str(written(tmp_path / "b.jsonl", row)), "row_schema": "math_benchmark"}
    (problem,) = load_benchmark(BenchmarkConfig.model_validate({"name": "o", "source": source}), seed=0)
    assert problem.question == "Let x = 1.\nWhat is x + 1?"


def test_columns_of_apex_arxivmath_and_beyondaime_are_those_on_their_cards(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"problem_idx": 1, "answer": "5", "source": "SMT", "problem": "A?"},  # Apex
        {"problem_idx": 1, "answer": "$2^n$", "problem": "B?", "source": "2605.1", "title": "t", "authors": "a"},
        {"problem": "C?", "answer": 33124147},  # BeyondAIME
    ]
    assert answers_of("mixed", *rows, tmp_path=tmp_path) == ["5", "2^n", "33124147"]


GPQA: dict[str, object] = {
    "Question": "Which is even?\n",
    "Correct Answer": "2\n",
    "Incorrect Answer 1": "1",
    "Incorrect Answer 2": "3",
    "Incorrect Answer 3": "5",
    "Subdomain": "Arithmetic",
}


def choices(path: Path, row_schema: str, *, seed: int = 0) -> list[Problem]:
    source = {"kind": "file", "path": str(path), "row_schema": row_schema}
    return load_benchmark(BenchmarkConfig.model_validate({"name": "b", "source": source}), seed=seed)


def test_gpqa_s_options_have_one_order_for_every_seed_and_the_right_one_is_not_always_first(tmp_path: Path) -> None:
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(GPQA))
        table.writeheader()
        table.writerows(GPQA | {"Question": f"Which is even? ({i})\n"} for i in range(40))
    problems = choices(path, "gpqa")
    assert problems == choices(path, "gpqa", seed=1)
    letters = []
    for problem in problems:
        question, _, *options = problem.question.splitlines()
        assert question.startswith("Which is even? (")
        assert sorted(option[3:] for option in options) == ["1", "2", "3", "5"]
        assert isinstance(problem.reference, MathReference)
        (letter,) = problem.reference.answers
        assert f"{letter}) 2" in options
        letters.append(letter)
    assert set(letters) == set("ABCD")


def test_a_gpqa_row_with_the_right_option_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "b.jsonl", GPQA | {"Incorrect Answer 2": "2"})
    with pytest.raises(DataError, match=r"two options of 'Which is even\?' are the same"):
        choices(path, "gpqa")


MMLU_PRO: dict[str, object] = {
    "question_id": 70,
    "question": "Which is odd?",
    "options": ["2", "4", "5"],
    "answer": "C",
    "answer_index": 2,
    "category": "math",
}


def test_mmlu_pro_keeps_its_order_and_a_row_must_name_one_option(tmp_path: Path) -> None:
    (problem,) = choices(written(tmp_path / "b.jsonl", MMLU_PRO), "auto")
    assert problem.question == "Which is odd?\n\nA) 2\nB) 4\nC) 5"
    assert problem.reference == MathReference(answers=("C",))
    for wrong in ({"answer_index": 1}, {"answer": "D", "answer_index": 3}):
        with pytest.raises(DataError, match="name no one option"):
            choices(written(tmp_path / "b.jsonl", MMLU_PRO | wrong), "auto")


def test_subdomain_and_category_are_the_clusters_of_multiple_choice(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [GPQA, MMLU_PRO]
    sources = [FileSource(path=str(written(tmp_path / f"{i}.jsonl", row))) for i, row in enumerate(rows)]
    found = [candidate for source in sources for candidate in read_source(source, seed=0)]
    assert [one.cluster for one in found if isinstance(one, Candidate)] == ["Arithmetic", "math"]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("The last is odd.\nAnswer: C", 1.0),
        ("**Answer: C**", 1.0),
        (r"So \boxed{C}.", 1.0),
        (r"\boxed{\text{C) 5}}", 1.0),
        ("Answer: B", 0.0),
        (r"\boxed{B}", 0.0),
        ("I think that 5 is odd.", 0.0),
    ],
)
def test_the_letter_of_a_choice_is_judged_in_a_box_and_after_answer(tmp_path: Path, said: str, score: float) -> None:
    (problem,) = choices(written(tmp_path / "b.jsonl", MMLU_PRO), "mmlu_pro")
    with JudgePool(VerifyConfig()) as judges:
        assert judges.judge(problem, f"<think>\n</think>\n\n{said}").score == score


@needs_shared
def test_list_answers_of_hmmt_are_right_in_any_order_and_only_whole() -> None:
    problems = load_benchmark(known("hmmt25", SHARED / "bench-hmmt25" / "HMMT-202502.jsonl"), seed=0)
    pair = problems[9]
    one, other = r"\frac{-1+\sqrt{17}}{2}", r"\frac{-1-\sqrt{17}}{2}"
    with JudgePool(VerifyConfig()) as judges:
        said = [f"{one}, {other}", f"{other}, {one}", one, f"{one}, {one}"]
        verdicts = [judges.judge(pair, f"<think>\n</think>\n\\boxed{{{text}}}").score for text in said]
    assert verdicts == [1.0, 1.0, 0.0, 0.0]


PLUS = """def assertion(out, exp):
    assert out == exp
inputs = [[1, 2], [3, 4]]
results = [3, 7]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(add(*inp), exp)
"""


def test_mbpp_plus_is_judged_by_its_one_program_and_sanitised_mbpp_by_its_assertions(tmp_path: Path) -> None:
    row = {"task_id": 2, "prompt": "Add.", "test_imports": [], "test_list": ["assert add(1, 2) == 3"]}
    plus = {"test": PLUS, "code": "c", "source_file": "s"}
    cases = [(plus, (PLUS.strip(),), "these tests"), ({}, ("assert add(1, 2) == 3",), "this test")]
    for more, programs, shown in cases:
        path = written(tmp_path / "b.jsonl", row | more)
        (problem,) = load_benchmark(BenchmarkConfig.model_validate({"name": "m", "source": str(path)}), seed=0)
        assert problem.question == f"Add.\n\nIt must pass {shown}:\n```python\nassert add(1, 2) == 3\n```"
        assert isinstance(problem.reference, CodeReference)
        assert problem.reference.tests == AssertTests(programs=programs)


def test_tests_that_import_what_programs_cannot_are_refused_before_the_first_token(tmp_path: Path) -> None:
    row = {
        "task_id": 2,
        "prompt": "Add.",
        "test_list": ["assert add(1, 2) == 3"],
        "test": f"import numpy_9 as np\n{PLUS}",
    }
    source = str(written(tmp_path / "b.jsonl", row))
    with pytest.raises(DataError, match="No module named 'numpy_9'"):
        prepare_benchmarks(
            [BenchmarkConfig.model_validate({"name": "plus", "source": source})],
            seed=0,
            runtime=BenchmarksRuntime(),
            workdir=tmp_path / "out",
            telemetry=NullTelemetry(),
        )
