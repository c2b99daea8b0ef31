"""Curation on real published files, which lie beside the checkout in `shared/data`."""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig, DecontaminateConfig
from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.data.candidates import Candidate
from klear_core.data.curation.curate import curate
from klear_core.data.curation.decontaminate import Decontaminator, Protected
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.sources import check_source, read_questions, read_source
from klear_core.metrics import NullTelemetry
from klear_core.types import CallTests, CodeReference, Domain, Dropped, MathReference, Problem

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no published files in {SHARED}")

MATH = {
    "math-deepmath/math_deepmath_deal.jsonl": 3026,
    "math-deepscaler-aime/aime.json": 599,
    "math-deepscaler-math/math.json": 4462,
    "math-dsr-sub/dsr_sub.parquet": 738,
    "math-gsm8k/train.jsonl": 4529,
    "math-nemo-comp-24-25/test.jsonl": 256,
    "math-simplerl-math8k/simplerl_math8k.parquet": 5109,
}
CODE = {
    "code-codeforces/codeforces.json": 244,
    "code-contests/code_contests.json": 95,
    "code-leetcodedataset/LeetCodeDataset-v0.2.0-train.jsonl.gz": 1135,
    "code-leetcodedataset-2024h2/LeetCodeDataset-v0.3.1-test.jsonl.gz": 141,
    "code-mbpp/mbpp.jsonl": 610,
    "code-rllm-leetcode/leetcode.json": 1135,
    "graded-lcb/problems.jsonl.gz": 231,
}
BENCHMARKS = {
    "bench-aime24/aime24.qs.jsonl": 30,
    "bench-aime25/aime25.qs.jsonl": 30,
    "bench-amc23/test.jsonl": 40,
    "bench-gsm8k-test/test.jsonl": 1319,
    "bench-hmmt25/HMMT-202502.jsonl": 30,
    "bench-humaneval/HumanEval.jsonl.gz": 164,
    "bench-math500/test.jsonl": 500,
}
BARE_QUESTIONS = {
    "bench-lcb-v5-qwq/livecodebench_v5.jsonl": 279,
    "bench-lcb-v6-questions/livecodebench_v6_questions.jsonl.gz": 1055,
}
WITHOUT_ANSWER = {"deepscaler-math": 4, "dsr-sub": 1, "simplerl-math8k": 2}
"""Rows whose published answer is empty or null."""


def source(file):
    return FileSource(path=str(SHARED / file), name=re.sub(r"^(math|code|bench)-|/.*$", "", file))


@cache
def rows_of(file):
    return tuple(read_source(source(file), seed=0))


@pytest.mark.parametrize(("file", "num_rows"), (MATH | CODE | BENCHMARKS).items())
def test_every_row_is_read_or_dropped_for_want_of_an_answer(file, num_rows):
    rows = rows_of(file)
    assert len(rows) == num_rows
    reasons = Counter(r.reason for r in rows if isinstance(r, Dropped))
    assert reasons == Counter({"no_reference": WITHOUT_ANSWER.get(source(file).name, 0)}) - Counter()
    domain = Domain.CODE if file in CODE or "humaneval" in file else Domain.MATH
    assert {r.domain for r in rows if isinstance(r, Candidate)} == {domain}
    check_source(source(file))


@pytest.mark.parametrize(("file", "num_rows"), BARE_QUESTIONS.items())
def test_questions_without_tests_have_no_reference_but_can_be_protected(file, num_rows):
    assert Counter(r.reason for r in rows_of(file)) == {"no_reference": num_rows}
    questions = list(read_questions(source(file)))
    assert len(questions) == num_rows
    assert all(isinstance(q, str) for q in questions)
    assert not any(q.startswith("You will be given") for q in questions)


@pytest.mark.parametrize(
    ("file", "index", "answer"),
    [
        ("bench-aime24/aime24.qs.jsonl", 0, "73"),
        ("bench-aime25/aime25.qs.jsonl", 1, "588"),
        ("bench-hmmt25/HMMT-202502.jsonl", 9, "\\frac{-1+\\sqrt{17}}{2}, \\frac{-1-\\sqrt{17}}{2}"),
        ("bench-amc23/test.jsonl", 0, "27"),
        ("bench-math500/test.jsonl", 0, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("math-dsr-sub/dsr_sub.parquet", 0, "\\frac{3}{7}"),
        ("math-gsm8k/train.jsonl", 0, "10"),
        ("math-deepmath/math_deepmath_deal.jsonl", 4, "-\\dfrac{1}{8}"),
    ],
)
def test_answers_are_those_published(file, index, answer):
    assert rows_of(file)[index].reference == MathReference(answers=(answer,))


def test_no_question_carries_its_sources_instruction():
    questions = [r.question for file in (*MATH, *CODE) for r in rows_of(file) if isinstance(r, Candidate)]
    wrappers = (
        "final answer within",
        "<|im_start|>",
        "self-contained code snippet",
        "You will be given a question (problem",
    )
    assert not [q for q in questions if any(w in q for w in wrappers)]


def test_call_based_problems_keep_their_function_name_and_starter_code():
    calls = [r for r in rows_of("graded-lcb/problems.jsonl.gz") if isinstance(r.reference.tests, CallTests)]
    assert len(calls) == 58
    assert all(
        isinstance(r.reference, CodeReference) and f"def {r.reference.tests.fn_name}(" in r.question for r in calls
    )


@pytest.fixture(scope="module")
def protected():
    return [
        Protected(benchmark=file, question_id=str(i), question=q)
        for file in (*BENCHMARKS, *BARE_QUESTIONS)
        for i, q in enumerate(read_questions(source(file)))
    ]


def disguised(question):
    """Another typesetting of the same words, inside a longer prompt."""
    spaced = re.sub(r"([-+=<>])", r" \1 ", question).replace("\\frac", "\\dfrac").replace("$", " $ ")
    spaced = re.sub(r"\.(?!\d)", " ;\n", spaced)
    shouted = spaced if "\\" in spaced else spaced.upper()
    return f"Solve the following with care!\n\n{shouted}\n\nThink first, then answer."


@pytest.mark.slow
def test_planted_benchmark_questions_are_found_as_they_are_and_in_disguise(protected):
    guard = Decontaminator(DecontaminateConfig(), protected)
    texts = [text for one in protected[::3] for text in (one.question, disguised(one.question))]
    answer = MathReference(answers=("1",))
    prompts = [
        Candidate(source="s", domain=Domain.MATH, question=text, reference=answer, rating=None) for text in texts
    ]
    leaks = guard.leaks_in(prompts, [tokens_of(text) for text in texts])
    assert not [text for text, leak in zip(texts, leaks, strict=True) if leak is None or not leak.is_dropped]


@pytest.fixture(scope="module")
def curated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curated")
    benchmarks = [
        BenchmarkConfig(name=re.sub(r"\W", "_", source(file).name), source=source(file), expected_rows=n)
        for file, n in BENCHMARKS.items()
    ]
    prepare_benchmarks(
        benchmarks, seed=0, runtime=BenchmarksRuntime(), workdir=folder / "bench", telemetry=NullTelemetry()
    )
    cfg = CurateConfig(sources=tuple(map(source, MATH)))
    summary = curate(cfg, benchmarks=folder / "bench", seed=0, workdir=folder / "out", telemetry=NullTelemetry())
    return (
        summary,
        list(read_shards(folder / "out" / "problems", Problem)),
        list(read_shards(folder / "out" / "dropped", Dropped)),
    )


@pytest.mark.slow
def test_the_ledger_of_all_math_sources_adds_up(curated):
    summary, problems, dropped = curated
    assert summary.counts["rows"] == sum(MATH.values()) == len(problems) + len(dropped)
    assert summary.ledger[0].dropped == {"no_reference": sum(WITHOUT_ANSWER.values())}
    assert summary.counts["protected_questions"] == sum(BENCHMARKS.values())
    for before, after in zip(summary.ledger, summary.ledger[1:], strict=False):
        assert before.num_out == after.num_in


@pytest.mark.slow
def test_no_benchmark_question_is_left_among_the_training_problems(curated):
    _, problems, _ = curated
    left = {" ".join(t for t in tokens_of(p.question) if t[0].isalnum()) for p in problems}
    asked = {
        " ".join(t for t in tokens_of(q) if t[0].isalnum()) for file in BENCHMARKS for q in read_questions(source(file))
    }
    assert not left & asked


@pytest.mark.slow
def test_aime_problems_in_other_words_and_typesetting_are_removed(curated):
    _, problems, _ = curated
    published = [json.loads(line) for line in (SHARED / "math-nemo-comp-24-25/test.jsonl").read_text().splitlines()]
    aime = {r["problem"].strip() for r in published if r["subset_for_metrics"].startswith("aime")}
    assert len(aime) == 60
    assert not aime & {p.question for p in problems}


@pytest.mark.slow
def test_repeats_across_sources_are_found(curated):
    summary, _, _ = curated
    repeats = summary.ledger[2].noted
    assert repeats["repeats_in_simplerl-math8k"] > 3000  # drawn from the same MATH problems as DeepScaleR's
    assert repeats["repeats_with_another_answer"] == 2


def test_leetcode_problems_of_two_packers_are_one():
    theirs, ours = (
        rows_of(file)
        for file in ("code-rllm-leetcode/leetcode.json", "code-leetcodedataset/LeetCodeDataset-v0.2.0-train.jsonl.gz")
    )
    assert len({c.problem_id for c in theirs} & {c.problem_id for c in ours}) > 1100


def test_aime_questions_that_aops_and_math_typeset_differently_are_one():
    """11 differ in AoPS's empty scripts (`n^{}_{}`), 2 in `\\dots` and `\\ldots`."""
    in_math = {
        tuple(tokens_of(c.question))
        for file in MATH
        if "aime" not in file
        for c in rows_of(file)
        if isinstance(c, Candidate)
    }
    aime = [c for c in rows_of("math-deepscaler-aime/aime.json") if isinstance(c, Candidate)]
    assert sum(tuple(tokens_of(c.question)) in in_math for c in aime) == 249
