"""Parse published test formats into a CodeReference. A malformed row raises DataError; nothing is guessed.

| source | shape |
|---|---|
| APPS, TACO, CodeContests repacked, KlearReasoner-CodeSub | `{"inputs": [...], "outputs": [...], "fn_name"?}` |
| KlearReasoner-CodeSub, rLLM/DeepCoder | `{"functional": program or [programs]}`, `{"pytest": program}` |
| rLLM/DeepCoder, Codeforces | `[{"input", "output", "testtype"?, "metadata"?: {"func_name"}, "fn_name"?}]` |
| Skywork-OR1 | `{"import_prefix", "test_code", "entry_point"}`, `{"assert_case": [programs]}`, or as APPS |
| LiveCodeBench | `public_test_cases`, `private_test_cases` (JSON; private also packed: `packed_tests`), `metadata` |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: `{"input": [...], "output": [...]}`, `time_limit` |
| MBPP, HumanEval, LeetCodeDataset | `test_list`; `prompt`, `test`, `entry_point` |
| Klear (see `own_references`) | `{"kind": "code", "tests": {"type": "stdin" or "call" or "asserts", ...}}` |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from klear_core.code_tests import AssertTests, CallCase, CallTests, CodeReference, StdinCase, StdinTests
from klear_core.data.assertions import asserts_reference, entry_point_reference, pytest_reference
from klear_core.data.cases import call_case, finite, is_number, lcb_call, refuse_unknown, stdin_case
from klear_core.data.fields import has_surrogate
from klear_core.data.limits import megabytes_in, seconds_in
from klear_core.data.own_references import klear_code_reference
from klear_core.data.packed_tests import inflate, is_packed, unpack, unpack_or_none
from klear_core.errors import DataError
from klear_core.types import MathReference, Reference

_IO_KEYS = {"inputs", "outputs", "fn_name", "timeout", "max_test_cases", "time_limit", "memory_limit", "testtype"}
_TEST_COLUMNS = ("tests", "input_output", "ground_truth")
_CONTEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")


def code_reference_from_row(row: Mapping[str, object]) -> CodeReference:
    """Parse the tests of one row, in the format above that its columns indicate.

    Raise DataError if no format fits or the tests are malformed.
    """
    if row.get("kind") == "code":
        return klear_code_reference(row)
    if "public_test_cases" in row or "private_test_cases" in row:
        return _livecodebench(row)
    if any(column in row for column in _CONTEST_COLUMNS):
        return _code_contests(row)
    if "test_list" in row:
        return _mbpp(row)
    if "entry_point" in row and "test" in row:
        return entry_point_reference(row)
    if isinstance(row.get("reward_model"), Mapping):
        return code_reference_from_row(row["reward_model"])  # type: ignore[arg-type]
    for column in _TEST_COLUMNS:
        if column in row:
            return code_reference_from_tests(row[column], fn_name=_fn_name(row))
    return code_reference_from_tests(row)


def code_reference_from_tests(value: object, *, fn_name: str = "") -> CodeReference:
    """Parse tests given as JSON text, a dict of lists or programs, or a list of cases."""
    tests = unpack(value)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        return _inputs_outputs(tests, fn_name)
    match tests:
        case {"functional": programs} | {"assert_case": programs}:
            return asserts_reference(programs)
        case {"pytest": program}:
            return pytest_reference(program)
        case {"test_code": str(test), "entry_point": str(entry_point), **more}:
            return entry_point_reference(
                {"test": test, "entry_point": entry_point, "prompt": more.get("import_prefix", "")}
            )
        case {"inputs_file": _}:
            raise DataError("tests in separate files (inputs_file, outputs_file) are not supported: inline them")
        case {"fn_name": str(name), "tests": cases} | {"func_name": str(name), "tests": cases}:
            return code_reference_from_tests(cases, fn_name=name)
        case [str(), *_]:
            return asserts_reference(tests)
        case [{"input": _, "output": _, "fn_name": str(name)}, *_] if name:  # DeepCoder from PrimeIntellect
            return _inputs_outputs(_columns(tests), name)
        case [{"input": _, "output": _}, *_]:
            return _case_list(tests, fn_name)
        case [] | dict() if not tests:
            raise DataError("the test list is empty")
        case dict():
            raise DataError(
                f"unknown test keys {sorted(map(str, tests))[:8]}; see klear_core/data/references.py for what is read"
            )
        case _:
            raise DataError(f"tests must be an object or a list, not {type(tests).__name__}: {tests!r:.200}")


def has_no_tests(value: object) -> bool:
    """Return whether a field for tests holds none: null, empty text, or lists without an element."""
    tests = unpack_or_none(value) if isinstance(value, str) and value.strip() else value
    match tests:
        case None:
            return not isinstance(value, str) or not value.strip() or value.strip() == "null"
        case {"inputs": [], "outputs": []}:
            return True
        case _:
            return tests in ("", [], {})


def has_half_character(reference: Reference) -> bool:
    """Return whether a text of a reference has a lone surrogate, which JSON text inside of a row's text can escape."""
    return any(map(has_surrogate, _texts_of(reference)))


def _texts_of(reference: Reference) -> Iterator[str]:
    match reference:
        case MathReference(answers=answers):
            yield from answers
        case CodeReference(tests=StdinTests(cases=cases)):
            yield reference.checker
            for case in cases:
                yield case.input
                yield case.output
        case CodeReference(tests=AssertTests(programs=programs)):
            yield reference.checker
            yield from programs
        case CodeReference(tests=CallTests(fn_name=fn_name)):  # arguments and results are escaped
            yield reference.checker
            yield fn_name


def _inputs_outputs(tests: Mapping[Any, Any], fn_name: str) -> CodeReference:
    refuse_unknown(tests, _IO_KEYS, "tests")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError("tests.inputs and tests.outputs must be lists of one length")
    if not inputs:
        raise DataError("the test list is empty")
    timeout = tests.get("timeout")
    limit = seconds_in(timeout) if is_number(timeout) else None
    name = tests.get("fn_name") or fn_name
    if not name:
        stdin: list[StdinCase] = []
        for i, (given, output) in enumerate(zip(inputs, outputs, strict=True)):
            stdin.append(stdin_case(_lines(given), _lines(output), i))
        return CodeReference(tests=StdinTests(cases=tuple(stdin)), time_limit_s=limit)
    if not isinstance(name, str):
        raise DataError(f"tests.fn_name must be a string, not {name!r:.100}")
    results = outputs
    if all(isinstance(output, list) and len(output) == 1 for output in outputs):
        results = [output[0] for output in outputs]  # APPS wraps each result in a list
    calls: list[CallCase] = []
    for i, (args, result) in enumerate(zip(inputs, results, strict=True)):
        # Skywork-OR1 writes a call as LiveCodeBench does: a text with one JSON argument per line.
        is_text = isinstance(args, str) and isinstance(result, str)
        calls.append(lcb_call(args, result, i) if is_text else call_case(args, result, i))
    return CodeReference(tests=CallTests(fn_name=name, cases=tuple(calls)), time_limit_s=limit)


def _columns(cases: Sequence[object]) -> dict[str, object]:
    for i, case in enumerate(cases):
        if not isinstance(case, Mapping) or "input" not in case or "output" not in case:
            raise DataError(f"test {i} must have input and output, not {case!r:.200}")
    rows = [case for case in cases if isinstance(case, Mapping)]
    inputs = [row["input"] for row in rows]
    outputs = [row["output"] for row in rows]
    return {"inputs": inputs, "outputs": outputs}


def _case_list(cases: Sequence[object], fn_name: str) -> CodeReference:
    stdin: list[StdinCase] = []
    calls: list[CallCase] = []
    for i, case in enumerate(cases):
        if not isinstance(case, Mapping) or "input" not in case or "output" not in case:
            raise DataError(f"test {i} must have input and output, not {case!r:.200}")
        metadata = case.get("metadata")
        if not fn_name and isinstance(metadata, Mapping):
            fn_name = str(metadata.get("func_name") or "")
        if fn_name and case.get("testtype", "functional") == "functional":
            calls.append(lcb_call(case["input"], case["output"], i))
        else:
            stdin.append(stdin_case(case["input"], case["output"], i))
    if stdin and calls:
        raise DataError(f"{len(stdin)} tests by standard input and {len(calls)} by calls in one problem")
    if calls:
        return CodeReference(tests=CallTests(fn_name=fn_name, cases=tuple(calls)))
    return CodeReference(tests=StdinTests(cases=tuple(stdin)))


def _livecodebench(row: Mapping[str, object]) -> CodeReference:
    cases: list[object] = []
    for column in ("public_test_cases", "private_test_cases"):
        value = row.get(column)
        if not value:
            continue
        if column == "private_test_cases" and is_packed(value):
            value = inflate(value)
        unpacked = unpack(value)
        if not isinstance(unpacked, list):
            raise DataError(f"{column} must be a list, not {type(unpacked).__name__}")
        cases += unpacked
    if not cases:
        raise DataError("the test list is empty")
    return _case_list(cases, _fn_name(row))


def _code_contests(row: Mapping[str, object]) -> CodeReference:
    cases: list[StdinCase] = []
    for column in _CONTEST_COLUMNS:
        tests = row.get(column) or {"input": [], "output": []}
        match tests:
            case {"input": list() as inputs, "output": list() as outputs} if len(inputs) == len(outputs):
                for given, output in zip(inputs, outputs, strict=True):
                    cases.append(stdin_case(given, output, len(cases)))
            case _:
                raise DataError(f"{column} must hold lists input and output of one length, not {tests!r:.200}")
    if not cases:
        raise DataError("the test list is empty")
    num_bytes = row.get("memory_limit_bytes")
    memory_limit_mb = megabytes_in(num_bytes >> 20) if isinstance(num_bytes, int) else None
    return CodeReference(
        tests=StdinTests(cases=tuple(cases)),
        time_limit_s=_seconds_of(row.get("time_limit")),
        memory_limit_mb=memory_limit_mb,
    )


def _seconds_of(limit: object) -> float | None:
    """Return a time limit that is a number, or protobuf's Duration; a part of it that is null counts zero."""
    if isinstance(limit, Mapping):
        limit = _part(limit.get("seconds")) + _part(limit.get("nanos")) / 1e9
    return seconds_in(limit) if is_number(limit) else None


def _part(value: object) -> float:
    number = finite(value) if is_number(value) else None
    return number or 0.0


def _mbpp(row: Mapping[str, object]) -> CodeReference:
    tests = unpack(row["test_list"])
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise DataError(f"test_list must be a non-empty list of assertions, not {tests!r:.200}")
    imports = row.get("test_imports")
    setup = [*imports] if isinstance(imports, list) else []
    setup.append(str(row.get("test_setup_code") or ""))
    before = "\n".join(setup).strip()
    if not before:
        return asserts_reference(tests)
    return asserts_reference([f"{before}\n{test}" for test in tests])


def _lines(value: object) -> object:
    """Join a list of lines into one text: some APPS and TACO rows store text this way."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value


def _fn_name(row: Mapping[str, object]) -> str:
    for holder in (row, unpack_or_none(row.get("metadata"))):
        if isinstance(holder, Mapping):
            for key in ("fn_name", "func_name"):
                name = holder.get(key)
                if isinstance(name, str) and name:
                    return name
    return ""
