"""The same stored answers judged by us and by other harnesses' own graders: how far apart the scores are.

The answers are those of published files (shared/data beside the checkout). Graders: the verdict published with the
answers; math-verify with its defaults; lm-evaluation-harness (the rule of aime and hendrycks_math, gsm8k), lighteval
(pass@1 of math_500 and aime24, gsm8k) and LiveCodeBench's `run_test`. Each harness grades in a process of its own:

    HARNESS_PYTHON=PYTHON_WITH_LM_EVAL  LIGHTEVAL_PYTHON=PYTHON_WITH_LIGHTEVAL  LCB_FOLDER=FOLDER_OF_TESTING_UTIL \\
        klear bench harness_gap

A grader whose variable is missing is left out; MAX_ANSWERS is the number of answers of a set, by default an even choice
of about 60, because a harness grades a few a second. Writes docs/data/harness_gap.jsonl, from which
tests/verify/test_harness_gap.py computes the table of docs/benchmarks.md.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klear_core.config.verify import BENCHMARK_CODE, VerifyConfig, VerifyRuntime
from klear_core.errors import ConfigError
from klear_core.types import (
    CallCase,
    CallTests,
    CodeReference,
    Difficulty,
    Domain,
    MathReference,
    Problem,
    StdinCase,
    StdinTests,
)
from klear_core.verify import JudgePool

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared/data"
ROWS = ROOT / "docs/data/harness_gap.jsonl"
MATH_FILES = {
    "AIME 24, Sky-T1": "cot-skythought/aime24.Sky-T1-math-reflection-0.2-32B.jsonl.gz",
    "AMC 23, Sky-T1": "cot-skythought/amc23.Sky-T1-math-reflection-0.2-32B.jsonl.gz",
    "MATH-500, Qwen2.5-14B": "graded-math-outputs/math500.Qwen2.5-14B-Instruct.jsonl.gz",
    "Minerva, gemma-2": "graded-math-outputs/minerva_math.gemma-2-27b-it.jsonl.gz",
    "MATH-500, Sky-T1": "cot-skythought/math500.Sky-T1-math-correct-5K-27B.jsonl.gz",
    "MATH, 8 samples": "graded-math-8x/math_cot_100.jsonl.gz",
}
GSM8K, CODE = "GSM8K, GPT-3 175B", "LiveCodeBench programs"
HARNESSES = {
    "math-verify": "",
    "lm-eval hendrycks_math": "HARNESS_PYTHON",
    "lm-eval gsm8k": "HARNESS_PYTHON",
    "lighteval": "LIGHTEVAL_PYTHON",
    "lcb_runner": "LCB_FOLDER",
}
"""The environment variable that says where a grader is; math-verify comes with Klear."""
CPU_S = 6
MAX_ANSWERS = int(os.environ.get("MAX_ANSWERS", "60"))
LCB_COMMIT = "28fef95"
"""Commit of LiveCodeBench that `testing_util.py` is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A published answer, or a program with its tests."""

    problem: str
    gold: str
    solution: str
    """The worked solution with the answer in a box or behind `####`."""
    response: str
    published: bool
    tests: str = ""
    """For a program, `input_output` as LiveCodeBench has it."""


def answers_of(name: str) -> list[Answer]:
    """Return the answers of a set, or an even choice of about `MAX_ANSWERS` of them, in the order of its file."""
    others = {GSM8K: _gsm8k, CODE: _programs}
    found = list(others[name]() if name in others else _math(MATH_FILES[name]))
    return found[:: max(1, len(found) // MAX_ANSWERS)]


def _lines(file: str) -> Iterator[Any]:
    with gzip.open(DATA / file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _math(file: str) -> Iterator[Answer]:
    for row in _lines(file):
        answer = row.get("answer")
        gold = answer if isinstance(answer, str) else str(row["gt"])  # AMC 23 has 27.0 for 27
        gold = str(int(gold)) if gold.isdigit() else gold  # AIME 24 has 073; lm-eval's own data 73
        solution = str(row.get("solution") or "")
        if "\\boxed" not in solution:
            solution = rf"The answer is $\boxed{{{gold}}}$."
        for response, score in zip(row["code"], row["score"], strict=True):
            yield Answer(
                problem=str(row["question"]), gold=gold, solution=solution, response=response, published=bool(score)
            )


def _gsm8k() -> Iterator[Answer]:
    for row in _lines("graded-gsm8k-gpt3/gsm8k_gpt3.jsonl.gz"):
        answer = row["175b_verification"]
        yield Answer(
            problem=row["question"],
            gold=row["ground_truth"].rpartition("A:")[2].strip(),
            solution=row["ground_truth"].replace("\nA: ", "\n#### "),  # as in the benchmark itself
            response=answer["solution"],
            published=bool(answer["is_correct"]),
        )


def _programs() -> Iterator[Answer]:
    problems = {row["question_id"]: row for row in _lines("graded-lcb/problems.jsonl.gz")}
    for row in _lines("graded-lcb/solutions.jsonl.gz"):
        problem = problems[row["question_id"]]
        given, wanted = ([test[key] for test in problem["tests"]] for key in ("input", "output"))
        tests: dict[str, object] = {"inputs": given, "outputs": wanted}
        if problem["fn_name"]:
            lines = ["\n".join(json.dumps(value) for value in arguments) for arguments in given]
            tests = {"inputs": lines, "outputs": [json.dumps(value) for value in wanted], "fn_name": problem["fn_name"]}
        yield Answer(
            problem=row["question_id"],
            gold="",
            solution="",
            response=row["code"],
            published=row["expected"] == "pass",
            tests=json.dumps(tests),
        )


# ---- ours ----


def _judge() -> JudgePool:
    rules = BENCHMARK_CODE.model_copy(update={"cpu_s": float(CPU_S)})
    return JudgePool(VerifyConfig(tags="none", code=rules, runtime=VerifyRuntime(math_workers=1, code_workers=1)))


def _ours(pool: JudgePool, name: str, answers: Sequence[Answer]) -> list[bool]:
    verdicts = [pool.submit(_problem(name, answer), _said(name, answer)) for answer in answers]
    return [verdict.result().is_correct for verdict in verdicts]


def _said(name: str, answer: Answer) -> str:
    if name == CODE:
        return f"```python\n{answer.response}\n```"
    opened, closed = "<|begin_of_thought|>", "<|end_of_thought|>"
    if opened in answer.response:
        return answer.response.rpartition(closed)[2]
    return answer.response


def _problem(name: str, answer: Answer) -> Problem:
    reference: MathReference | CodeReference = MathReference(answers=(answer.gold,))
    if name == CODE:
        reference = _code_reference(json.loads(answer.tests))
    domain = Domain.CODE if name == CODE else Domain.MATH
    return Problem(
        problem_id=answer.problem[:80],
        source="bench",
        domain=domain,
        question=answer.problem,
        reference=reference,
        difficulty=Difficulty.EASY,
    )


def _code_reference(tests: Any) -> CodeReference:
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    if "fn_name" in tests:
        calls = [
            CallCase(args_json=f"[{','.join(given.splitlines())}]", expected_json=wanted) for given, wanted in pairs
        ]
        return CodeReference(tests=CallTests(fn_name=tests["fn_name"], cases=tuple(calls)))
    return CodeReference(
        tests=StdinTests(cases=tuple(StdinCase(input=given, output=wanted) for given, wanted in pairs))
    )


# ---- theirs, each in a process that has the harness ----


def grades(harness: str, name: str, answers: Sequence[Answer]) -> list[bool]:
    """Grade by the harness, which this process can import."""
    if harness == "math-verify":
        return [_guarded(_math_verify, answer) for answer in answers]
    if harness == "lighteval":
        return _lighteval(name, answers)
    if harness == "lcb_runner":
        return [_lcb(answer) for answer in answers]
    grader = _gsm8k_flexible if harness == "lm-eval gsm8k" else _hendrycks
    return [_guarded(grader, answer) for answer in answers]


def _guarded(grader: Callable[[Answer], bool], answer: Answer) -> bool:
    """An answer on which a grader fails has no point in that harness either: its run would end."""
    try:
        return bool(grader(answer))
    except Exception as e:  # noqa: BLE001  # whatever the grader raises
        print(f"{type(e).__name__}: {e}"[:200], file=sys.stderr)
        return False


def _math_verify(answer: Answer) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(rf"\boxed{{{answer.gold}}}"), parse(answer.response)))


def _hendrycks(answer: Answer) -> bool:
    """The rule of the tasks aime24, aime25 and hendrycks_math500."""
    from lm_eval.tasks.aime import utils

    return bool(utils.process_results({"answer": answer.gold}, [answer.response])["exact_match"])


def _gsm8k_flexible(answer: Answer) -> bool:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    found = RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1).apply([[answer.response]], [{}])
    said = next(iter(found))[0]
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
    score = exact_match_hf_evaluate([said], [answer.solution], regexes_to_ignore=ignored, ignore_case=True)
    return float(score["exact_match"]) == 1.0


def _lighteval(name: str, answers: Sequence[Answer]) -> list[bool]:
    from lighteval.metrics.metrics import Metrics
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc

    one_of_one = Metrics.pass_at_k_math(sample_params={"k": 1, "n": 1})
    metric = Metrics.expr_gold_metric.value if name == GSM8K else one_of_one

    def grade(answer: Answer) -> bool:
        gold = answer.gold
        if name == GSM8K:
            gold = f" {answer.solution}"
        elif name.startswith(("MATH", "Minerva")):
            gold = f"ANSWER: {answer.solution}"
        doc = Doc(query=answer.problem, choices=[gold], gold_index=0, task_name="task")
        return float(metric.sample_level_fn.compute(doc=doc, model_response=ModelResponse(text=[answer.response]))) == 1

    return [_guarded(grade, answer) for answer in answers]


def _lcb(answer: Answer) -> bool:
    """A program in a child of its own, ended after the time that lcb_runner gives it."""
    num_tests = len(json.loads(answer.tests)["inputs"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            signal.alarm((CPU_S + 1) * num_tests + 5)
            from testing_util import run_test

            results, _ = run_test({"input_output": answer.tests}, test=answer.response, timeout=CPU_S)
            is_right = bool(results) and all(result is True or result > 0 for result in results)
            os.write(writer, b"1" if is_right else b"0")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        verdict = said.read()
    os.waitpid(child, 0)
    return verdict == b"1"


# ---- all of them ----


def measure() -> list[dict[str, object]]:
    """Judge all sets by all graders, write the rows, and return the gap of each in points."""
    if not DATA.is_dir():
        raise ConfigError(f"{DATA} has the published answers; it is not there")
    rows: list[dict[str, Any]] = []
    harnesses = {
        harness: _started(harness) for harness, variable in HARNESSES.items() if not variable or variable in os.environ
    }
    with _judge() as pool:
        for name in (*MATH_FILES, GSM8K, CODE):
            answers = answers_of(name)
            ours = _ours(pool, name, answers)
            rows.append(_row(name, "published", "", answers, ours, [answer.published for answer in answers]))
            for harness, process in harnesses.items():
                if name in sets_of(harness):
                    version, theirs = _asked(process, name)
                    rows.append(_row(name, harness, version, answers, ours, theirs))
            ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows))  # after each set: it takes minutes
            print(name, file=sys.stderr, flush=True)
    for process in harnesses.values():
        process.kill()
        process.wait()
    versions = {"math-verify": importlib.metadata.version("math-verify")}
    return [
        {
            "name": f"harness_gap/{row['set']}/{row['harness']}",
            "value": row["ours_only"] - row["theirs_only"],
            "unit": f"answers of {row['answers']}",
            "target": "-",
            "ok": True,
            "versions": versions,
        }
        for row in rows
    ]


def _started(harness: str) -> subprocess.Popen[str]:
    """Start a process that has the harness, and grades the sets that it is asked for."""
    where = os.environ.get(HARNESSES[harness], "")
    python = sys.executable if harness in ("math-verify", "lcb_runner") else where
    path = os.pathsep.join([str(ROOT), *([where] if harness == "lcb_runner" else [])])
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, harness]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, text=True, env=env)


def _asked(process: subprocess.Popen[str], name: str) -> tuple[str, list[bool]]:
    """Return a harness's version and its verdicts on a set."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(name, file=process.stdin, flush=True)
    said = process.stdout.readline()
    if not said:
        raise ConfigError(f"it graded nothing of {name}; to see why: echo '{name}' | PYTHONPATH=. {process.args}")
    version, verdicts = json.loads(said)
    return version, verdicts


def sets_of(harness: str) -> tuple[str, ...]:
    """Return the sets that a harness has a grader for."""
    match harness:
        case "lcb_runner":
            return (CODE,)
        case "lighteval":
            return (*MATH_FILES, GSM8K)
        case "lm-eval gsm8k":
            return (GSM8K,)
        case _:
            return tuple(MATH_FILES)


def _row(
    name: str, harness: str, version: str, answers: Sequence[Answer], ours: Sequence[bool], theirs: Sequence[bool]
) -> dict[str, Any]:
    """Count the problems by the numbers of answers that are right for us, for the other, and there are."""
    by_problem: dict[str, list[int]] = {}
    for answer, is_ours, is_theirs in zip(answers, ours, theirs, strict=True):
        counts = by_problem.setdefault(answer.problem, [0, 0, 0])
        for i, value in enumerate((is_ours, is_theirs, True)):
            counts[i] += value
    pairs = Counter(zip(ours, theirs, strict=True))
    return {
        "set": name,
        "harness": harness,
        "version": version,
        "answers": len(answers),
        "ours_only": pairs[True, False],
        "theirs_only": pairs[False, True],
        "problems": sorted([*counts, num] for counts, num in Counter(map(tuple, by_problem.values())).items()),
    }


if __name__ == "__main__":
    its_harness = sys.argv[1]
    its_answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the harness prints is no answer
    is_package = its_harness != "lcb_runner"
    its_version = importlib.metadata.version(its_harness.split()[0]) if is_package else LCB_COMMIT
    for line in sys.stdin:
        its_set = line.strip()
        print(
            json.dumps([its_version, grades(its_harness, its_set, answers_of(its_set))]), file=its_answers, flush=True
        )
