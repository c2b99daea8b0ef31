"""Parse published test formats into a CodeReference. A malformed row raises DataError; nothing is guessed.

| source | shape |
|---|---|
| APPS, TACO, CodeContests repacked, KlearReasoner-CodeSub | `{"inputs": [...], "outputs": [...], "fn_name"?}` |
| KlearReasoner-CodeSub, rLLM/DeepCoder | `{"functional": program or [programs]}`, `{"pytest": program}` |
| rLLM/DeepCoder, Codeforces | `[{"input", "output", "testtype"?, "metadata"?: {"func_name"}, "fn_name"?}]` |
| Skywork-OR1 | `{"import_prefix", "test_code", "entry_point"}`, `{"assert_case": [programs]}`, or as APPS |
| LiveCodeBench | `public_test_cases`, `private_test_cases` (JSON; private also packed: `code_tests`), `metadata` |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: `{"input": [...], "output": [...]}`, `time_limit` |
| MBPP, HumanEval, LeetCodeDataset | `test_list`; `prompt`, `test`, `entry_point` |
| Klear (see below) | `{"kind": "code", "tests": {"type": "stdin" or "call" or "asserts", ...}}` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from klear_core.config.verify import JUDGE_NAME_PATTERN
from klear_core.data.formats.code_tests import (
    asserts_reference,
    call_case,
    checked_programs,
    entry_point_reference,
    finite,
    inflate,
    is_number,
    is_packed,
    lcb_call,
    parse_json,
    pytest_reference,
    refuse_unknown,
    stdin_case,
    unpack,
    unpack_or_none,
)
from klear_core.data.formats.fields import has_surrogate, megabytes_in, seconds_in
from klear_core.errors import DataError
from klear_core.types import (
    AssertTests,
    CallCase,
    CallTests,
    CodeReference,
    CustomReference,
    Domain,
    MathReference,
    Reference,
    StdinCase,
    StdinTests,
    Tests,
    UnverifiableReference,
)

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
                f"unknown test keys {sorted(map(str, tests))[:8]}; "
                "see klear_core/data/formats/references.py for what is read"
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


# ---- own references ----
# Parse references in Klear's own format. A malformed one raises DataError.
#
# | problem | shape |
# |---|---|
# | math | `{"kind": "math", "answers": [...]}` |
# | code | `{"kind": "code", "tests": {"type": "stdin" or "call" or "asserts", ...}, "time_limit_s"?, ...}` |
# | for a judge of the user's own | `{"kind": "custom", "judge": NAME, "value": any JSON, "domain"?}` |
# | distilled and not judged | `{"kind": "unverifiable", "domain", "why"}` |


_KLEAR_KEYS = {"kind", "tests", "time_limit_s", "memory_limit_mb", "is_order_free", "checker"}
_TEST_KEYS = {"stdin": {"type", "cases"}, "call": {"type", "fn_name", "cases"}, "asserts": {"type", "code"}}


def reference_from_json(value: object) -> Reference:
    """Parse Klear's own format: `{"kind": "math", "answers": [...]}`, `{"kind": "code", "tests": {...}}` and so on."""
    if isinstance(value, Mapping) and value.get("kind") == "code":
        return klear_code_reference(value)
    match value:
        case {"kind": "unverifiable", "domain": "math" | "code" as domain, "why": str(why), **more} if not more:
            return UnverifiableReference(domain=Domain(domain), why=why)
        case {"kind": "math", "answers": [*answers], **more} if not more:
            if not answers or not all(isinstance(a, str) for a in answers):
                raise DataError(f"reference.answers must be a non-empty list of strings, not {answers!r:.200}")
            return MathReference(answers=tuple(answers))
        case {"kind": "custom", "judge": str(judge), "value": held, **more} if set(more) <= {"domain"}:
            return custom_reference(judge, held, domain=more.get("domain", Domain.MATH))
        case _:
            raise DataError(
                'reference must be {"kind": "math", "answers": [...]}, {"kind": "code", "tests": ...}, '
                '{"kind": "custom", "judge": NAME, "value": ...} or '
                '{"kind": "unverifiable", "domain": "math" or "code", "why": ...}, '
                f"not {value!r:.200}"
            )


def reference_from_cell(value: object) -> Reference:
    """Parse Klear's own format as a cell of a file holds it: an object, its JSON text, a struct of a Parquet file, or
    the JSON text that Klear itself writes (`kept.parquet` of `klear curate`).

    A struct has the keys of all rows; a key that a row lacks is null.
    """
    if not isinstance(value, str):
        return reference_from_json(_without_nulls(value))
    try:
        parsed = _with_kind(parse_json(value))
    except DataError:  # which is a ValueError, too
        raise
    except (ValueError, RecursionError) as e:
        raise DataError(f"reference is not JSON: {e}") from e
    return reference_from_json(parsed)


def _without_nulls(value: object) -> object:
    """Return a struct without the keys that its row lacks. Nulls in the value for a judge of one's own are its own."""
    if not isinstance(value, Mapping):
        return value
    is_custom = value.get("kind") == "custom"
    kept = {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return kept | {"value": value["value"]} if is_custom and "value" in value else kept


def _with_kind(value: object) -> object:
    """Return a reference that Klear has written, a record's fields without a kind, in the format of rows."""
    if not isinstance(value, Mapping) or "kind" in value:
        return value
    match value:
        case {"answers": _}:
            return {"kind": "math", **value}
        case {"why": _}:
            return {"kind": "unverifiable", **value}
        case {"judge": judge, "domain": domain, "value_json": str(text)}:
            return {"kind": "custom", "judge": judge, "domain": domain, "value": parse_json(text)}
        case {"tests": {"offset": _}}:
            raise DataError("the tests are in another file, beside this one: read kept.parquet of `klear curate`")
        case {"tests": {"programs": programs}}:
            return {"kind": "code", **value, "tests": {"type": "asserts", "code": programs}}
        case {"tests": {"fn_name": name, "cases": [*cases]}}:
            tests = {"type": "call", "fn_name": name, "cases": [_call(case) for case in cases]}
            return {"kind": "code", **value, "tests": tests}
        case {"tests": {"cases": cases}}:
            return {"kind": "code", **value, "tests": {"type": "stdin", "cases": cases}}
        case _:
            return value


def _call(case: object) -> object:
    match case:
        case {"args_json": str(args), "expected_json": str(expected)}:
            return {"args": parse_json(args), "expected": parse_json(expected)}
        case _:
            return case


def custom_reference(judge: str, value: object, *, domain: object) -> CustomReference:
    """Return the reference for a judge of the user's own; DataError if it has another form."""
    if not re.fullmatch(JUDGE_NAME_PATTERN, judge):
        raise DataError(f"reference.judge must be the name of one of verify.judges, not {judge!r:.100}")
    if domain not in ("math", "code"):
        raise DataError(f"reference.domain must be math or code, not {domain!r:.100}")
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as e:  # a date of a Parquet file
        raise DataError(f"reference.value must be JSON, not {value!r:.200}: {e}") from e
    return CustomReference(judge=judge, domain=Domain(domain), value_json=text)


def klear_code_reference(value: Mapping[str, object]) -> CodeReference:
    """Parse the tests of a program in Klear's own format."""
    refuse_unknown(value, _KLEAR_KEYS, "reference")
    tests = value.get("tests")
    if not isinstance(tests, Mapping):
        raise DataError(f"reference.tests must be one object with a type, not {type(tests).__name__}: {tests!r:.200}")
    kind = str(tests.get("type"))
    if kind not in _TEST_KEYS:
        raise DataError(f'reference.tests must have "type" stdin, call or asserts, not {tests!r:.200}')
    refuse_unknown(tests, _TEST_KEYS[kind], f"reference.tests of type {kind}")
    parsed = _klear_tests(kind, tests)
    time_limit, memory_limit = value.get("time_limit_s"), value.get("memory_limit_mb")
    if time_limit is not None and not (is_number(time_limit) and seconds_in(time_limit)):
        raise DataError(f"reference.time_limit_s must be a positive number, a day at most, not {time_limit!r:.100}")
    if memory_limit is not None and not (_is_integer(memory_limit) and megabytes_in(memory_limit)):
        raise DataError(
            f"reference.memory_limit_mb must be a positive integer, a terabyte at most, not {memory_limit!r:.100}"
        )
    is_order_free, checker = value.get("is_order_free", False), value.get("checker", "")
    if not isinstance(is_order_free, bool) or not isinstance(checker, str):
        raise DataError("reference.is_order_free must be true or false, reference.checker a string")
    return CodeReference(
        tests=parsed,
        time_limit_s=None if time_limit is None else float(time_limit),
        memory_limit_mb=memory_limit,
        is_order_free=is_order_free,
        checker=checker,
    )


def _klear_tests(kind: str, tests: Mapping[str, object]) -> Tests:
    if kind == "asserts":
        return AssertTests(programs=checked_programs(tests.get("code")))
    cases = tests.get("cases")
    keys = {"input", "output"} if kind == "stdin" else {"args", "expected"}
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError("reference.tests.cases must be a non-empty list")
    for i, case in enumerate(cases):
        if not isinstance(case, Mapping) or set(case) != keys:
            raise DataError(f"reference.tests.cases[{i}] must have exactly {sorted(keys)}, not {case!r:.200}")
    if kind == "stdin":
        return StdinTests(cases=tuple(stdin_case(c["input"], c["output"], i) for i, c in enumerate(cases)))
    fn_name = tests.get("fn_name")
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise DataError(f"reference.tests.fn_name must be a Python name, not {fn_name!r}")
    calls = tuple(call_case(c["args"], c["expected"], i) for i, c in enumerate(cases))
    return CallTests(fn_name=fn_name, cases=calls)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
