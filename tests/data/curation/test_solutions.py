import json
from contextlib import contextmanager

import pytest
from curations import Stopper

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig, CurateRuntime
from klear_core.config.data import FieldMap, FileSource
from klear_core.config.settings import config_digest
from klear_core.config.verify import VerifyConfig
from klear_core.data.curation.curate import curate
from klear_core.data.curation.solutions import FailingSolution, judges_here
from klear_core.data.formats.fields import program_in
from klear_core.data.sources import read_source
from klear_core.metrics import NullTelemetry
from klear_core.verify import JudgePool

TESTS = {"type": "stdin", "cases": [{"input": "2\n", "output": "4\n"}, {"input": "-3\n", "output": "9\n"}]}
APPS_TESTS = json.dumps({"inputs": ["2"], "outputs": ["4"]})
SQUARE = "x = int(input())\nprint(x * x)"
DOUBLE = "print(2 * int(input()))"  # passes the first test alone


def rows(*solutions: object) -> list[dict[str, object]]:
    return [
        {
            "question": f"Print the square of the integer, in the {i}th of these ways.",
            "reference": {"kind": "code", "tests": TESTS},
            **({} if solution is None else {"solution": solution}),
        }
        for i, solution in enumerate(solutions)
    ]


def source(folder, *solutions: object) -> FileSource:
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(*solutions)))
    return FileSource(path=str(path), name="mine")


def run(folder, *solutions: object, telemetry=None, open_judges=judges_here, **runtime):
    cfg = CurateConfig(sources=(source(folder, *solutions),), runtime=CurateRuntime(**runtime))
    # Every question names its way, so that none is a near-duplicate of another.
    cfg = cfg.model_copy(
        update={"dedup": cfg.dedup.model_copy(update={"near": cfg.dedup.near.model_copy(update={"enabled": False})})}
    )
    verify = VerifyConfig(sandbox="rlimits-only")
    return curate(
        cfg, workdir=folder / "out", verify=verify, open_judges=open_judges, telemetry=telemetry or NullTelemetry()
    )


def failing(folder) -> list[FailingSolution]:
    return list(read_shards(folder / "out" / "failing_solutions", FailingSolution))


def test_a_published_solution_that_fails_is_listed_with_its_row_and_the_problem_stays(tmp_path):
    summary = run(tmp_path, SQUARE, DOUBLE, None, "import no_such_module\n" + SQUARE)
    assert summary.counts["problems"] == 4
    step = summary.ledger[-1]
    assert (step.step, step.num_in, step.num_out, step.noted) == ("failing_solutions", 3, 3, {"fails_its_tests": 2})
    found = {one.row.rpartition(":")[2]: one.detail for one in failing(tmp_path)}
    assert found.keys() == {"2", "4"}
    assert found["2"].startswith("1 of 2 tests passed")
    assert "no_such_module" in found["4"]
    assert "2 of 3 published solutions do not pass the tests" in summary.notes[-1]


def test_the_judges_of_a_cluster_are_opened_only_if_there_is_a_solution(tmp_path):
    opened = []

    @contextmanager
    def open_judges():
        opened.append("judges")
        yield JudgePool

    run(tmp_path / "without", None, open_judges=open_judges)
    assert opened == []
    run(tmp_path / "with", DOUBLE, open_judges=open_judges)
    assert opened == ["judges"]
    assert len(failing(tmp_path / "with")) == 1


@pytest.mark.parametrize("options", [{"solutions": [None, None]}, {"solutions": [DOUBLE], "check_solutions": False}])
def test_without_solutions_or_without_the_check_nothing_is_judged_or_written(tmp_path, options):
    solutions = options.pop("solutions")
    summary = run(tmp_path, *solutions, **options)
    assert summary.ledger[-1].step == "difficulty"
    assert not (tmp_path / "out" / "failing_solutions").exists()


def test_the_check_is_no_part_of_a_stage_s_identity():
    plain, unchecked = CurateConfig(), CurateConfig(runtime=CurateRuntime(check_solutions=False))
    assert config_digest(plain) == config_digest(unchecked)


def test_a_curation_that_is_killed_while_it_judges_goes_on_and_lists_the_same(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    reports = Stopper()
    run(whole, SQUARE, DOUBLE, telemetry=reports)
    at = [note for note, _, _ in reports.seen].index("solutions") + 1
    with pytest.raises(KeyboardInterrupt):
        run(killed, SQUARE, DOUBLE, telemetry=Stopper(stop_at=at))
    assert not (killed / "out" / "failing_solutions").exists()
    run(killed, SQUARE, DOUBLE)
    assert [(one.row[-1:], one.detail) for one in failing(killed)] == [
        (one.row[-1:], one.detail) for one in failing(whole)
    ]


@pytest.mark.parametrize(
    ("published", "program"),
    [
        (SQUARE, SQUARE),
        (f"A square is a product.\n```python\n{SQUARE}\n```", f"{SQUARE}\n"),
        (["print x", SQUARE], SQUARE),  # the first is of Python 2
        (json.dumps(["#include <iostream>", SQUARE]), SQUARE),  # as APPS and TACO have them
        ({"language": [2, 3], "solution": ["int main() {}", SQUARE]}, SQUARE),  # as CodeContests has them
        ({"language": [3, 3], "solution": ["print 1", SQUARE]}, SQUARE),
        ({"language": [1, 4], "solution": [SQUARE, SQUARE]}, ""),
        ("See the editorial.", ""),
        ("# nothing but a comment", ""),
        ("x = '\ud800'", ""),
        ("x = '\x00'", ""),
        ("[" * 10_000, ""),
        ("(" * 10_000, ""),
        (None, ""),
        (7, ""),
        ([], ""),
        ({"solution": None}, ""),
    ],
)
def test_a_published_solution_is_the_first_program_in_python(published, program):
    assert program_in(published) == program


@pytest.mark.parametrize(
    ("row", "program"),
    [
        ({"text": "Square.", "code": "def f(x):\r\n  return x*x", "test_list": ["assert f(2) == 4"]}, "def f(x):\r\n  return x*x"),
        (
            {
                "prompt": "def f(x):\n",
                "entry_point": "f",
                "canonical_solution": "    return x * x\n",
                "test": "def check(candidate):\n    assert candidate(2) == 4\n",
            },
            "def f(x):\n    return x * x\n",
        ),
        (
            {
                "prompt": "import math",
                "query": "Square.",
                "completion": "def f(x): return math.pow(x, 2)",
                "entry_point": "f",
                "test": "def check(candidate):\n    assert candidate(2) == 4\n",
            },
            "import math\ndef f(x): return math.pow(x, 2)",
        ),
        ({"problem": "Square.", "tests": TESTS["cases"], "solutions": [SQUARE]}, SQUARE),
        ({"question": "Square.", "input_output": APPS_TESTS, "solutions": json.dumps([SQUARE])}, SQUARE),
    ],
)  # fmt: skip
def test_published_formats_have_their_solutions(tmp_path, row, program):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (candidate,) = read_source(FileSource(path=str(path)), seed=0)
    assert candidate.solution == program


def test_a_mapped_source_names_the_place_of_its_solution_and_rows_may_lack_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    kept = {"q": "Square.", "t": TESTS["cases"]}
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (kept | {"meta": {"right": SQUARE}}, kept | {"q": "Two."}))
    )
    places = FieldMap(question="q", tests="t", solution="meta.right")
    assert [c.solution for c in read_source(FileSource(path=str(path), fields=places), seed=0)] == [SQUARE, ""]
    assert config_digest(FieldMap(question="q", tests="t")) != config_digest(places)
