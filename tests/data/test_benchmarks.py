import json

import pytest

from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.data_jobs import BenchmarksJob, BenchmarksRuntime
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import config_digest
from klear_core.config.verify import CodeConfig, MathConfig, VerifyConfig
from klear_core.data.benchmarks import check_benchmarks, load_benchmark, prepare_benchmarks, read_benchmarks
from klear_core.data.generated.chains import is_held_out
from klear_core.errors import ConfigError, DataError
from klear_core.metrics import NullTelemetry
from klear_core.types import Difficulty, Domain, problem_id_of

PLAIN = BenchmarksRuntime()


def benchmark(tmp_path, rows, **settings):
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BenchmarkConfig(name="bench", source=FileSource(path=str(path)), **settings)


def row(i):
    return {"question": f"What is {i}+{i}?", "answer": f"#### {2 * i}"}


def prepare(benchmarks, workdir, runtime=PLAIN):
    return prepare_benchmarks(benchmarks, seed=0, runtime=runtime, workdir=workdir, telemetry=NullTelemetry())


def test_benchmarks_are_written_in_their_own_order_and_read_back_with_their_names(tmp_path):
    held_out = BenchmarkConfig(name="chains", source=ProceduralSource(split="heldout", num_problems=8))
    summary = prepare([benchmark(tmp_path, [row(3), row(1)], expected_rows=2), held_out], tmp_path / "out")
    found = list(read_benchmarks(tmp_path / "out"))
    assert [p.question for name, p in found if name == "bench"] == ["What is 3+3?", "What is 1+1?"]
    chains = [p for name, p in found if name == "chains"]
    assert all(is_held_out(p.question) for p in chains)
    assert {p.difficulty for p in chains} == {
        Difficulty.EASY,
        Difficulty.MEDIUM,
        Difficulty.HARD,
    }  # 2, 4 and 6, 8 operations of 10
    assert summary.counts == {"benchmarks": 2, "problems": 10}
    assert [(s.step, s.num_out) for s in summary.ledger] == [("read_bench", 2), ("read_chains", 8)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([row(1), row(2)], {"expected_rows": 3}, "expected_rows is 3, but its source has 2 rows"),
        ([row(1), row(2), row(1)], {}, "comes twice"),
        (
            [row(1), {"question": "q", "answer": "none"}, {"question": "r", "answer": 7}],
            {},
            r"1 of 3 rows of benchmark bench can be used; lost: 1 no_reference, 1 wrong_type.*jsonl:2.*jsonl:3",
        ),
    ],
)
def test_a_benchmark_that_is_not_whole_is_refused(tmp_path, rows, settings, message):
    with pytest.raises(DataError, match=message):
        prepare([benchmark(tmp_path, rows, **settings)], tmp_path / "out")


def chosen(number):
    return {"problem": f"Find x when x is {number}.", "expected_answer": str(number)}


UNBALANCED = {"problem": "Find the fraction.", "expected_answer": r"\frac{1}{2"}
LONG = {"problem": "Find the digits.", "expected_answer": "7" * 2000}


def named(tmp_path, name, rows):
    (tmp_path / name).mkdir()
    return benchmark(tmp_path / name, rows).model_copy(update={"name": name})


def test_one_bad_reference_of_fifty_is_named_and_its_problem_is_kept(tmp_path):
    rows = [*map(chosen, range(49)), UNBALANCED]
    summary = prepare([benchmark(tmp_path, rows)], tmp_path / "out")
    bad_id = problem_id_of(UNBALANCED["problem"], Domain.MATH)
    (note,) = summary.notes
    assert note.startswith("49 of 50 references of benchmark bench can be judged; lost: 1 bad_reference; answers to")
    assert f"problem {bad_id} ('Find the fraction.'): bad_reference: no usable reference" in note
    (step,) = summary.ledger
    assert (step.num_in, step.num_out, step.noted) == (50, 50, {"bad_reference": 1})
    assert bad_id in [p.problem_id for _, p in read_benchmarks(tmp_path / "out")]


def test_more_bad_references_than_evaluation_bears_stop_the_stage_with_all_of_them_named(tmp_path):
    good, bad = (
        named(tmp_path, "good", [chosen(1)]),
        named(tmp_path, "bad", [*map(chosen, range(47)), UNBALANCED, LONG]),
    )
    worse = named(tmp_path, "worse", [UNBALANCED])
    with pytest.raises(DataError) as stopped:
        prepare([good, bad, worse], tmp_path / "out")
    of_bad, of_worse = str(stopped.value).splitlines()
    assert of_bad.startswith("47 of 49 references of benchmark bad can be judged; lost: 2 bad_reference; evaluation")
    assert "evaluate.max_unscored_rate is 0.02" in of_bad
    assert all(f"problem {problem_id_of(row['problem'], Domain.MATH)}" in of_bad for row in (UNBALANCED, LONG))
    assert of_worse.startswith("0 of 1 references of benchmark worse")


def test_the_limit_is_the_one_at_which_evaluation_stops(tmp_path):
    rows = [*map(chosen, range(48)), UNBALANCED]  # 1 of 49 is more than 0.02
    with pytest.raises(DataError, match="48 of 49"):
        prepare([benchmark(tmp_path, rows)], tmp_path / "out")
    lenient = BenchmarksRuntime(max_unscored_rate=0.03)
    assert len(prepare([benchmark(tmp_path, rows)], tmp_path / "out", lenient).notes) == 1
    strict = BenchmarksRuntime(max_unscored_rate=0.0)
    with pytest.raises(DataError, match="48 of 49"):
        prepare([benchmark(tmp_path, rows)], tmp_path / "out", strict)
    with pytest.raises(DataError, match="0 of 1 references"):
        prepare([benchmark(tmp_path, [UNBALANCED])], tmp_path / "out", BenchmarksRuntime(max_unscored_rate=1.0))


def test_code_without_tests_is_refused_with_the_place_of_each_row(tmp_path):
    def code(question, cases):
        return {"question": question, "reference": {"kind": "code", "tests": {"type": "stdin", "cases": cases}}}

    rows = [code("Add.", [{"input": "1 2", "output": "3"}]), code("Print.", []), code("Sort.", [{"input": 1}])]
    with pytest.raises(DataError, match=r"1 of 3 rows .* 2 bad_reference.*jsonl:2: .*jsonl:3: "):
        prepare([benchmark(tmp_path, rows)], tmp_path / "out")


def test_tests_larger_than_the_judge_takes_are_found_without_running_anything(tmp_path):
    cases = [{"input": "x" * 600_000, "output": "1"}] * 2
    tests = {"kind": "code", "tests": {"type": "stdin", "cases": cases}}
    runtime = BenchmarksRuntime(verify=VerifyConfig(code=CodeConfig(max_test_mb=1)), max_unscored_rate=0.5)
    with pytest.raises(DataError, match=r"bad_reference: .*verify\.code\.max_test_mb = 1"):
        prepare([benchmark(tmp_path, [{"question": "Add.", "reference": tests}])], tmp_path / "out", runtime)


def test_the_judge_of_a_run_checks_its_benchmarks_and_is_not_in_their_fingerprint():
    config = PipelineConfig(verify=VerifyConfig(math=MathConfig(max_answer_chars=50)))
    job = BenchmarksJob.of(config)
    assert job.runtime.verify == config.judge_of("evaluate")
    assert job.runtime.max_unscored_rate == config.evaluate.max_unscored_rate
    assert config_digest(job) == config_digest(BenchmarksJob.of(PipelineConfig()))


def test_two_benchmarks_of_one_name_are_refused(tmp_path):
    one = benchmark(tmp_path, [row(1)])
    with pytest.raises(ConfigError, match="two benchmarks are called 'bench'"):
        check_benchmarks([one, one])


def test_a_missing_benchmark_file_is_found_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        check_benchmarks([BenchmarkConfig(name="b", source=FileSource(path=str(tmp_path / "gone.jsonl")))])


def test_no_benchmark_is_no_error(tmp_path):
    assert prepare([], tmp_path / "out").counts == {"benchmarks": 0, "problems": 0}
    assert list(read_benchmarks(tmp_path / "out")) == []


def test_a_question_without_reference_makes_a_benchmark_unusable(tmp_path):
    path = tmp_path / "b.jsonl"
    reference = {"kind": "unverifiable", "domain": "math", "why": "the source asks for a proof"}
    path.write_text(json.dumps({"question": "Why?", "reference": reference}) + "\n")
    benchmark = BenchmarkConfig(name="b", source=FileSource(path=str(path)))
    with pytest.raises(DataError, match="A benchmark must be whole: 'Why\\?': the source asks for a proof"):
        load_benchmark(benchmark, seed=0)


def test_a_part_is_drawn_by_the_seed_keeps_its_order_and_counts_what_is_left_out(tmp_path):
    rows = [row(i) for i in range(20)]
    part = benchmark(tmp_path, rows, num_problems=5, expected_rows=20)
    summary = prepare([part], tmp_path / "out")
    found = [problem.question for _, problem in read_benchmarks(tmp_path / "out")]
    whole = [r["question"] for r in rows]
    assert found == [question for question in whole if question in found]
    assert (len(found), summary.ledger[0].dropped) == (5, {"not_in_part": 15})
    assert found == [problem.question for problem in load_benchmark(part, seed=0)]
    assert found != [problem.question for problem in load_benchmark(part, seed=1)]


def test_a_part_has_another_fingerprint_and_the_whole_that_of_before(tmp_path):
    whole = benchmark(tmp_path, [row(1)])
    part = whole.model_copy(update={"num_problems": 5})
    jobs = [BenchmarksJob.of(PipelineConfig(benchmarks=(b,))) for b in (whole, part)]
    assert "parts" not in jobs[0].model_dump(mode="json")
    assert jobs[1].benchmarks()[0].num_problems == 5
