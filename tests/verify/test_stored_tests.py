"""Programs judged on stored tests get the verdicts of tests in memory, and only a worker reads the tests."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from verify_builders import asserts_reference, call_reference, fenced, problem, stdin_reference

from klear_core.artifacts.records import INLINE_BYTES, StoredTestsWriter
from klear_core.config.verify import CodeConfig, VerifyConfig
from klear_core.errors import JudgeError
from klear_core.types import CodeReference, Outcome, StoredTests, Verdict
from klear_core.verify import JudgeHealth, JudgePool, faulty_references
from klear_core.verify.blame import code_task
from klear_core.verify.client import CodeTask
from klear_core.verify.code.program import reference_fault

PADDING = "# " + "x" * 2000 + "\n"
CHECKER = "def check(input, output, expected):\n    return output.split() == expected.split()"
NUM_TESTS = 40
"""More than `max_tests`, so that 16 of them are drawn."""
STDIN = [(f"{i} {'7 ' * 1000}\n", f"{i + 7000}\n") for i in range(NUM_TESTS)]
REFERENCES = {
    "stdin": stdin_reference(*STDIN),
    "stdin with a checker": stdin_reference(*STDIN, checker=CHECKER),
    "call": call_reference("total", *((json.dumps([[i] + [7] * 1000]), str(i + 7000)) for i in range(NUM_TESTS))),
    "asserts": asserts_reference(*(f"{PADDING}assert total([{i}, 7]) == {i + 7}" for i in range(NUM_TESTS))),
}
TOTAL = "def total(x):\n    return sum(x){wrong}\n"
STDIN_PROGRAM = "x = list(map(int, input().split()))\nprint(sum(x){wrong})\n"
WRONG_IN_SOME = " + (x[0] % 3 == 0)"


@pytest.mark.parametrize("kind", REFERENCES)
def test_stored_tests_give_the_verdict_of_the_same_tests_in_memory(tmp_path: Path, code_pool: JudgePool, kind: str):
    inline = REFERENCES[kind]
    program = STDIN_PROGRAM if kind.startswith("stdin") else TOTAL
    with StoredTestsWriter(tmp_path / "a.tests") as writer:
        stored = writer.stored(inline)
    assert isinstance(stored, CodeReference)
    assert isinstance(stored.tests, StoredTests)
    answer = fenced(program.format(wrong=WRONG_IN_SOME))
    expected, found = (code_pool.judge(problem(reference), answer) for reference in (inline, stored))
    assert found == expected
    assert 0 < found.score < 1


def test_a_task_with_stored_tests_is_small_and_says_how_many_will_run(tmp_path: Path):
    with StoredTestsWriter(tmp_path / "a.tests") as writer:
        stored = writer.stored(stdin_reference(*STDIN))
    task = code_task("p", stored, b"print(1)", VerifyConfig())
    assert isinstance(task, CodeTask)
    assert len(pickle.dumps(task)) < 1000 < INLINE_BYTES
    assert task.num_tests == CodeConfig().max_tests


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_tests_file_is_a_failure_of_the_judge_that_names_it(
    tmp_path: Path, code_pool: JudgePool, damage: str
):
    file = tmp_path / "a.tests"
    with StoredTestsWriter(file) as writer:
        stored = writer.stored(stdin_reference(*STDIN))
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    verdict = code_pool.judge(problem(stored), fenced(STDIN_PROGRAM.format(wrong="")))
    assert verdict.outcome is Outcome.JUDGE_FAILED
    assert not verdict.outcome.counts_for_model
    assert str(file) in verdict.detail
    with pytest.raises(JudgeError, match=r"a\.tests"):  # so that many of them stop a stage
        JudgeHealth(max_failed_frac=0.1, min_failed_count=1).record(verdict)


def test_faults_of_a_stored_reference_are_found_without_reading_its_tests(tmp_path: Path):
    with StoredTestsWriter(tmp_path / "a.tests") as writer:
        large = writer.stored(stdin_reference(("x" * (2 << 20), "1")))
        asserts = writer.stored(dataclasses.replace(REFERENCES["asserts"], checker=CHECKER))
    (tmp_path / "a.tests").unlink()
    assert isinstance(large, CodeReference)
    assert isinstance(asserts, CodeReference)
    assert reference_fault(large, CodeConfig()) is None
    assert "max_test_mb" in str(reference_fault(large, CodeConfig(max_test_mb=1)))
    assert "neither a checker" in str(reference_fault(asserts, CodeConfig()))


def test_the_check_of_references_reads_stored_tests(tmp_path: Path, code_pool: JudgePool):
    with StoredTestsWriter(tmp_path / "a.tests") as writer:
        checked = problem(writer.stored(REFERENCES["stdin with a checker"]), "good")
        broken = problem(writer.stored(stdin_reference(*STDIN, checker="def check(:")), "bad")
    faults: list[tuple[str, Verdict]] = [
        (p.problem_id, v) for p, v in faulty_references([checked, broken], code_pool, run_tests=True)
    ]
    assert [(name, v.outcome) for name, v in faults] == [("bad", Outcome.BAD_REFERENCE)]
