import json
from collections import Counter

import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig, CurateRuntime, DecontaminateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.data_jobs import BenchmarksRuntime
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.data.candidates import DroppedRow
from klear_core.data.curation.curate import check_curation, curate
from klear_core.data.curation.decontaminate import Leak
from klear_core.errors import ConfigError, DataError
from klear_core.metrics import NullTelemetry
from klear_core.types import Difficulty, Dropped, Problem

LEAK = "A train leaves the old station at noon and runs at sixty miles an hour for two hours"


def file_source(tmp_path, name, rows):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return FileSource(path=str(path))


def row(question, answer="1"):
    return {"problem": question, "answer": answer, "difficulty": 9.0}


def bench_folder(tmp_path):
    source = file_source(tmp_path, "bench", [{"question": LEAK + ". How far?", "answer": "#### 120"}])
    prepare_benchmarks(
        [BenchmarkConfig(name="bench", source=source)],
        seed=0,
        runtime=BenchmarksRuntime(),
        workdir=tmp_path / "bench",
        telemetry=NullTelemetry(),
    )
    return tmp_path / "bench"


def run(cfg, tmp_path, *, seed=0, out="out"):
    benchmarks = tmp_path / "bench" if (tmp_path / "bench").is_dir() else bench_folder(tmp_path)
    summary = curate(cfg, benchmarks=benchmarks, seed=seed, workdir=tmp_path / out, telemetry=NullTelemetry())
    problems = list(read_shards(tmp_path / out / "problems", Problem))
    return summary, problems, _dropped(tmp_path / out)


def _dropped(folder):
    from klear_core.artifacts.records import read_shard

    return [d for shard in sorted((folder / "dropped").glob("*.parquet")) for d in read_shard(shard, Dropped)]


def test_every_row_is_a_problem_or_a_drop_with_a_reason(tmp_path):
    one = file_source(tmp_path, "one", [row("Find a."), row("Find b."), "broken\n", row("x" * 101), row("find  A")])
    two = file_source(tmp_path, "two", [row("Find b.", "2"), row(f"{LEAK}. How many miles?"), row("Find c.", "")])
    summary, problems, dropped = run(CurateConfig(sources=(one, two), max_question_chars=100), tmp_path)
    assert sorted(p.question for p in problems) == ["Find a.", "Find b."]
    assert Counter((d.step, d.reason) for d in dropped) == {
        ("read", "not_json"): 1,
        ("read", "no_reference"): 1,
        ("length", "question_too_long"): 2,  # the leak is longer than 100 characters, too
        ("dedup", "repeated_question"): 2,
    }
    assert [(s.step, s.num_in, s.num_out) for s in summary.ledger] == [
        ("read", 8, 6),
        ("length", 6, 4),
        ("dedup", 4, 2),
        ("decontaminate", 2, 2),
        ("difficulty", 2, 2),
    ]
    assert summary.ledger[2].noted == {"repeats_in_one": 1, "repeats_in_two": 1, "repeats_with_another_answer": 1}
    assert summary.counts == {"rows": 8, "problems": 2, "protected_questions": 1}
    assert any("two: no row was left" in note for note in summary.notes)


def test_benchmark_questions_never_reach_training(tmp_path):
    source = file_source(tmp_path, "one", [row(f"{LEAK}. How many miles?"), row("Find a.")])
    _, problems, dropped = run(CurateConfig(sources=(source,)), tmp_path)
    assert [p.question for p in problems] == ["Find a."]
    assert [d.reason for d in dropped] == ["in_bench"]


def test_the_report_shows_what_each_rule_would_drop_beside_the_benchmark(tmp_path):
    source = file_source(tmp_path, "one", [row(f"{LEAK}. How many <b>miles</b>?"), row("Find a.")])
    summary, _, _ = run(CurateConfig(sources=(source,)), tmp_path)
    step = next(step for step in summary.ledger if step.step == "decontaminate")
    assert (step.noted["rule_ngram_matches"], step.noted["rule_ngram_alone"]) == (1, 0)
    (leak,) = read_shards(tmp_path / "out" / "leaks", Leak)
    assert (leak.is_dropped, leak.question[-8:]) == (True, "How far?")
    page = (tmp_path / "out" / "leaks.html").read_text()
    assert "1 prompts match at least one rule; 1 were dropped" in page
    assert "How many &lt;b&gt;miles&lt;/b&gt;?" in page
    assert "How far?" in page


def test_a_contest_problem_of_a_benchmark_is_known_by_its_slug(tmp_path):
    test = "def check(candidate):\n    assert candidate(1) == 1"
    common = {"entry_point": "Solution().f", "test": test}
    bench = {**common, "task_id": "two-sum", "query": "Add both."}
    prepare_benchmarks(
        [BenchmarkConfig(name="lcb", source=file_source(tmp_path, "lcb", [bench]))],
        seed=0,
        runtime=BenchmarksRuntime(),
        workdir=tmp_path / "bench",
        telemetry=NullTelemetry(),
    )
    same = {**common, "task_id": "two-sum", "query": "Return the indices of two numbers that add up."}
    other = {**common, "task_id": "three-sum", "query": "Return the indices of some numbers that add up."}
    cfg = CurateConfig(
        sources=(file_source(tmp_path, "rows", [same, other]),), decontaminate=DecontaminateConfig(rules=("contest",))
    )
    _, problems, dropped = run(cfg, tmp_path)
    assert [p.question for p in problems] == [other["query"]]
    assert [(d.reason, d.problem_id == problems[0].problem_id) for d in dropped] == [("in_lcb", False)]


def test_a_copy_of_a_leak_is_dropped_as_a_copy(tmp_path):
    rows = [
        row(f"{LEAK}. How many miles?"),
        row(f"{LEAK.replace('old', 'big')}. How many miles?"),
    ]
    _, _, dropped = run(CurateConfig(sources=(file_source(tmp_path, "one", [*rows, row("Find a.")]),)), tmp_path)
    assert Counter(drop.reason for drop in dropped) == {"near_duplicate": 1, "in_bench": 1}


def test_questions_without_references_can_be_kept_out_too(tmp_path):
    source = file_source(
        tmp_path, "one", [row("Count the ways to tile a three by eight board with dominoes"), row("Find a.")]
    )
    also = file_source(
        tmp_path,
        "other",
        [{"problem": "count the ways to tile a three by eight board with dominoes!", "expected_answer": None}],
    )
    summary, problems, dropped = run(
        CurateConfig(sources=(source,), decontaminate=DecontaminateConfig(also=(also,))), tmp_path
    )
    assert [p.question for p in problems] == ["Find a."]
    assert [d.reason for d in dropped] == ["in_other"]
    assert summary.counts["protected_questions"] == 2


def test_difficulty_is_the_sources_own(tmp_path):
    source = file_source(tmp_path, "one", [row("Find a.")])
    summary, problems, _ = run(
        CurateConfig(sources=(source, ProceduralSource(num_operations=(2, 4, 6, 8), num_problems=4))), tmp_path
    )
    assert Counter(p.difficulty for p in problems) == {Difficulty.EASY: 1, Difficulty.MEDIUM: 2, Difficulty.HARD: 2}
    assert summary.ledger[-1].noted == {"easy": 1, "hard": 2, "medium": 2}


def test_the_seed_decides_the_order_and_the_shard_size_does_not(tmp_path):
    cfg = CurateConfig(sources=(ProceduralSource(num_problems=50),))
    small = cfg.model_copy(update={"runtime": CurateRuntime(rows_per_shard=7)})
    _, first, _ = run(cfg, tmp_path)
    _, again, _ = run(small, tmp_path, out="again")
    assert first == again
    assert len(list((tmp_path / "again" / "problems").glob("*.parquet"))) == 8
    assert [p.problem_id for p in first] != sorted(p.problem_id for p in first)
    _, other, _ = run(cfg, tmp_path, seed=1, out="other")
    assert other != first


def test_the_order_of_sources_does_not_decide_the_order_of_problems(tmp_path):
    one, two = (file_source(tmp_path, name, [row(f"Find {name}{i}.") for i in range(20)]) for name in ("one", "two"))
    _, forward, _ = run(CurateConfig(sources=(one, two)), tmp_path)
    _, backward, _ = run(CurateConfig(sources=(two, one)), tmp_path, out="backward")
    assert forward == backward


def test_shards_of_a_killed_try_do_not_survive(tmp_path):
    stale = tmp_path / "out" / "problems" / "00007-of-00009.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    _, problems, _ = run(CurateConfig(sources=(ProceduralSource(num_problems=5),)), tmp_path)
    assert len(problems) == 5
    assert not stale.exists()


def test_a_source_without_a_usable_row_is_an_error_that_counts_why(tmp_path):
    bad = file_source(tmp_path, "bad", [row("q", ""), row("", "1")])
    with pytest.raises(ConfigError, match="none of the first 2 rows can be used"):
        run(CurateConfig(sources=(bad,)), tmp_path)


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"left no problem of 1 rows: \{'question_too_long': 1\}"):
        run(CurateConfig(sources=(file_source(tmp_path, "one", [row("Find a.")]),), max_question_chars=3), tmp_path)


def test_an_unreadable_protected_question_stops_curation(tmp_path):
    also = file_source(
        tmp_path, "other", [{"problem": "fine", "expected_answer": "1"}, {"problem": "", "expected_answer": "1"}]
    )
    cfg = CurateConfig(sources=(ProceduralSource(num_problems=5),), decontaminate=DecontaminateConfig(also=(also,)))
    check_curation(cfg)
    with pytest.raises(DataError, match=r"kept out of training cannot be read.*other\.jsonl:2"):
        run(cfg, tmp_path)


def test_training_and_held_out_chains_share_nothing_and_none_is_mistaken_for_a_leak(tmp_path):
    held_out = BenchmarkConfig(name="chains", source=ProceduralSource(split="heldout", num_problems=256))
    prepare_benchmarks(
        [held_out], seed=3, runtime=BenchmarksRuntime(), workdir=tmp_path / "bench", telemetry=NullTelemetry()
    )
    _, problems, dropped = run(CurateConfig(sources=(ProceduralSource(),)), tmp_path, seed=3)
    assert len(problems) + len(dropped) == 4096
    assert len(dropped) <= 2


def rows_with_broken(tmp_path, *, num_good, num_broken):
    good = [row(f"Find the number {n}.") for n in range(num_good)]
    return file_source(tmp_path, "rows", [*good, *[row(f"What is {n}?", "") for n in range(num_broken)]])


def test_a_source_of_which_most_rows_are_broken_stops_with_the_reasons_the_first_row_and_the_remedy(tmp_path):
    source = rows_with_broken(tmp_path, num_good=10, num_broken=90)
    with pytest.raises(DataError) as caught:
        run(CurateConfig(sources=(ProceduralSource(num_problems=8), source)), tmp_path)
    told = str(caught.value)
    assert "10 of 100 rows of source 'rows' can be used; lost: 90 no_reference" in told
    assert f"the first: {source.path}:11: answer: the answer is empty" in told
    assert "10.0%, less than curate.runtime.read.stop_below = 0.5" in told
    assert "Repair the file" in told


def test_a_source_that_is_repaired_or_a_floor_that_is_lowered_lets_curation_pass(tmp_path):
    source = rows_with_broken(tmp_path, num_good=10, num_broken=90)
    floor = CurateRuntime(read={"stop_below": 0.1})
    summary, problems, _ = run(CurateConfig(sources=(source,), runtime=floor), tmp_path)
    assert len(problems) == 10
    assert [note[:42] for note in summary.notes] == ["10 of 100 rows of source 'rows' can be use"]
    rows_with_broken(tmp_path, num_good=100, num_broken=0)
    summary, problems, _ = run(CurateConfig(sources=(source,)), tmp_path)
    assert (len(problems), summary.notes) == (100, ())


@pytest.mark.parametrize(("num_broken", "num_warnings"), [(0, 0), (1, 0), (2, 1), (60, 1)])
def test_some_broken_rows_are_a_warning(tmp_path, num_broken, num_warnings):
    summary, _, _ = run(
        CurateConfig(sources=(rows_with_broken(tmp_path, num_good=100, num_broken=num_broken),)), tmp_path
    )
    assert len(summary.notes) == num_warnings
    assert summary.ledger[0].dropped == ({"no_reference": num_broken} if num_broken else {})


UNREADABLE = ["\\frac{1}{", "}{", "$$", "\\boxed{}", "x" * 1001, "???", "\\frac{1}", "\\sqrt", "x=", "2^", "..."]
UNREADABLE += [
    "See solution", "See the explanation.", "\\text{see figure below}", "N/A", "$n/a$", "-", "\u2014", "Proof", "proof by induction",
    "Q.E.D.", "Answers will vary", "Answer may vary.",
    "![](https://a.b/c.png)", "<img src='a.png'>", "\\includegraphics[width=2cm]{a}", "[image]",
    "Not provided", "Solution omitted", "\\boxed{N/A}", "[asy] draw((0,0)--(1,1)); [/asy]",
    "prove it", "Prove that $a>b$.", "As shown", "Explained in the text", "solution in text", "See attached pdf", "Omitted.", "No answer",
    "Answer not available", "unknown", "null", "Varies", "image.png", "Answer:", "The statement is proved.", "Voir la solution",
    "siehe Lösung", "см. решение", "Beweis", "доказано", "略", "证明见解析", "详见解答", "暂无",
]  # fmt: skip
READABLE = [
    "-1", "1/2", "\\frac{1}{2}", "\\{\\}", "\\emptyset", "<", "+", "\\mathbb{R}^+", "(-\\infty, 2)", "yes", "A",
    "90^\\circ", "x=3", "50\\%", "5!", "1{,}000", "None", "undefined", "no solution", "\\text{DNE}", "()", "NA", "varies directly",
    "Figure 3", "12 (see figure)", "-x", "table", "3 images", "无", "None of these",
    "not enough information", "cannot be determined", "Infinite", "in 3 days", "answer 5",
]  # fmt: skip


def test_references_that_no_answer_could_ever_match_are_a_row_of_the_ledger(tmp_path):
    rows = [{"problem": f"Solve equation number {i}.", "answer": a} for i, a in enumerate([*UNREADABLE, *READABLE])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = CurateConfig(
        sources=(FileSource(path=str(tmp_path / "rows.jsonl")),),
        runtime=CurateRuntime(read={"stop_below": 0.1}),
    )
    (tmp_path / "benchmarks").mkdir()
    summary = curate(
        cfg, benchmarks=tmp_path / "benchmarks", seed=0, workdir=tmp_path / "out", telemetry=NullTelemetry()
    )
    (read,) = [step for step in summary.ledger if step.step == "read"]
    assert read.dropped == {"unreadable_reference": len(UNREADABLE)}
    assert read.num_out == len(READABLE)
    dropped = list(read_shards(tmp_path / "out" / "dropped", DroppedRow))
    assert {row.reason for row in dropped} == {"unreadable_reference"}
    assert sorted(row.row.rsplit(":")[-1] for row in dropped) == sorted(str(i + 1) for i in range(len(UNREADABLE)))
    assert all("rows.jsonl:" in row.detail for row in dropped)
