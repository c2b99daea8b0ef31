"""Parse published test formats into a CodeReference. A malformed row raises DataError; nothing is guessed.

| source | shape |
|---|---|
| APPS, TACO, CodeContests repacked, KlearReasoner-CodeSub | `{"inputs": [...], "outputs": [...], "fn_name"?}` |
| KlearReasoner-CodeSub, rLLM/DeepCoder | `{"functional": program or [programs]}`, `{"pytest": program}` |
| rLLM/DeepCoder, Codeforces | `[{"input", "output", "testtype"?, "metadata"?: {"func_name"}, "fn_name"?}]` |
| Skywork-OR1 | `{"import_prefix", "test_code", "entry_point"}`, `{"assert_case": [programs]}`, or as APPS |
| LiveCodeBench | `public_test_cases`, `private_test_cases` (JSON; private also packed, see `_inflate`), `metadata` |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: `{"input": [...], "output": [...]}`, `time_limit` |
| MBPP, HumanEval, LeetCodeDataset | `test_list`; `prompt`, `test`, `entry_point` |
| Klear | `{"kind": "code", "tests": {"type": "stdin" or "call" or "asserts", ...}}` |

A problem for a judge of the user's own has `{"kind": "custom", "judge": NAME, "value": any JSON, "domain"?}`.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from klear_core.config.verify import JUDGE_NAME_PATTERN
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

MAX_TESTS_BYTES = 256 << 20
"""Limit for the unpacked tests of one problem, in bytes.

KlearReasoner-CodeSub has 278 KB a row, the largest LiveCodeBench problem about 100 MB.
"""

_KLEAR_KEYS = {"kind", "tests", "time_limit_s", "memory_limit_mb", "is_order_free", "checker"}
_TEST_KEYS = {"stdin": {"type", "cases"}, "call": {"type", "fn_name", "cases"}, "asserts": {"type", "code"}}
_IO_KEYS = {"inputs", "outputs", "fn_name", "timeout", "max_test_cases", "time_limit", "memory_limit", "testtype"}
_TEST_COLUMNS = ("tests", "input_output", "ground_truth")
_CONTEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")


def reference_from_json(value: object) -> Reference:
    """Parse Klear's own format: `{"kind": "math", "answers": [...]}`, `{"kind": "code", "tests": {...}}` and so on."""
    if isinstance(value, Mapping) and value.get("kind") == "code":
        return _klear_code(value)
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
    """Parse Klear's own format as a cell of a file holds it: an object, its JSON text, or a struct of a Parquet file.

    A struct has the keys of all rows; those that a row has not are null.
    """
    if not isinstance(value, str):
        return reference_from_json(_without_nulls(value))
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"reference is not JSON: {e}") from e
    return reference_from_json(parsed)


def _without_nulls(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(held) for key, held in value.items() if held is not None}


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


def code_reference_from_row(row: Mapping[str, object]) -> CodeReference:
    """Parse the tests of one row, in the format above that its columns indicate.

    Raise DataError if no format fits or the tests are malformed.
    """
    if row.get("kind") == "code":
        return _klear_code(row)
    if "public_test_cases" in row or "private_test_cases" in row:
        return _livecodebench(row)
    if any(column in row for column in _CONTEST_COLUMNS):
        return _code_contests(row)
    if "test_list" in row:
        return _mbpp(row)
    if "entry_point" in row and "test" in row:
        return _entry_point(row)
    if isinstance(row.get("reward_model"), Mapping):
        return code_reference_from_row(row["reward_model"])  # type: ignore[arg-type]
    for column in _TEST_COLUMNS:
        if column in row:
            return code_reference_from_tests(row[column], fn_name=_fn_name(row))
    return code_reference_from_tests(row)


def code_reference_from_tests(value: object, *, fn_name: str = "") -> CodeReference:
    """Parse tests given as JSON text, a dict of lists or programs, or a list of cases."""
    tests = _unpack(value)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        return _inputs_outputs(tests, fn_name)
    match tests:
        case {"functional": programs} | {"assert_case": programs}:
            return _asserts(programs)
        case {"pytest": program}:
            return _pytest(program)
        case {"test_code": str(test), "entry_point": str(entry_point), **more}:
            return _entry_point({"test": test, "entry_point": entry_point, "prompt": more.get("import_prefix", "")})
        case {"inputs_file": _}:
            raise DataError("tests in separate files (inputs_file, outputs_file) are not supported: inline them")
        case {"fn_name": str(name), "tests": cases} | {"func_name": str(name), "tests": cases}:
            return code_reference_from_tests(cases, fn_name=name)
        case [str(), *_]:
            return _asserts(tests)
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
    tests = _unpack_or_none(value) if isinstance(value, str) and value.strip() else value
    match tests:
        case None:
            return not isinstance(value, str) or not value.strip() or value.strip() == "null"
        case {"inputs": [], "outputs": []}:
            return True
        case _:
            return tests in ("", [], {})


def has_half_character(reference: Reference) -> bool:
    """Return whether a text of a reference has a lone surrogate, which JSON text inside of a row's text can escape."""
    try:
        for text in _texts_of(reference):
            text.encode()
    except UnicodeEncodeError:
        return True
    return False


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


def _klear_code(value: Mapping[str, object]) -> CodeReference:
    _refuse_unknown(value, _KLEAR_KEYS, "reference")
    tests = value.get("tests")
    if not isinstance(tests, Mapping):
        raise DataError(f"reference.tests must be one object with a type, not {type(tests).__name__}: {tests!r:.200}")
    if tests.get("type") not in _TEST_KEYS:
        raise DataError(f'reference.tests must have "type" stdin, call or asserts, not {tests!r:.200}')
    kind = str(tests["type"])
    _refuse_unknown(tests, _TEST_KEYS[kind], f"reference.tests of type {kind}")
    parsed = _klear_tests(kind, tests)
    time_limit, memory_limit = value.get("time_limit_s"), value.get("memory_limit_mb")
    if time_limit is not None and not (_is_number(time_limit) and time_limit > 0):
        raise DataError(f"reference.time_limit_s must be a positive number, not {time_limit!r}")
    if memory_limit is not None and not (_is_integer(memory_limit) and memory_limit > 0):
        raise DataError(f"reference.memory_limit_mb must be a positive integer, not {memory_limit!r}")
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
        return AssertTests(programs=_programs(tests.get("code")))
    cases = tests.get("cases")
    keys = {"input", "output"} if kind == "stdin" else {"args", "expected"}
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError("reference.tests.cases must be a non-empty list")
    for i, case in enumerate(cases):
        if not isinstance(case, Mapping) or set(case) != keys:
            raise DataError(f"reference.tests.cases[{i}] must have exactly {sorted(keys)}, not {case!r:.200}")
    if kind == "stdin":
        return StdinTests(cases=tuple(_stdin_case(c["input"], c["output"], i) for i, c in enumerate(cases)))
    fn_name = tests.get("fn_name")
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise DataError(f"reference.tests.fn_name must be a Python name, not {fn_name!r}")
    calls = tuple(_call_case(c["args"], c["expected"], i) for i, c in enumerate(cases))
    return CallTests(fn_name=fn_name, cases=calls)


def _inputs_outputs(tests: Mapping[Any, Any], fn_name: str) -> CodeReference:
    _refuse_unknown(tests, _IO_KEYS, "tests")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError("tests.inputs and tests.outputs must be lists of one length")
    if not inputs:
        raise DataError("the test list is empty")
    timeout = tests.get("timeout")
    limit = float(timeout) if _is_number(timeout) else None
    name = tests.get("fn_name") or fn_name
    if not name:
        stdin: list[StdinCase] = []
        for i, (given, output) in enumerate(zip(inputs, outputs, strict=True)):
            stdin.append(_stdin_case(_lines(given), _lines(output), i))
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
        calls.append(_lcb_call(args, result, i) if is_text else _call_case(args, result, i))
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
            calls.append(_lcb_call(case["input"], case["output"], i))
        else:
            stdin.append(_stdin_case(case["input"], case["output"], i))
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
        if column == "private_test_cases" and _is_packed(value):
            value = _inflate(value)
        unpacked = _unpack(value)
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
                    cases.append(_stdin_case(given, output, len(cases)))
            case _:
                raise DataError(f"{column} must hold lists input and output of one length, not {tests!r:.200}")
    if not cases:
        raise DataError("the test list is empty")
    seconds: Any = row.get("time_limit")
    if isinstance(seconds, Mapping):  # protobuf's Duration
        seconds = seconds.get("seconds", 0) + seconds.get("nanos", 0) / 1e9
    num_bytes = row.get("memory_limit_bytes")
    time_limit_s = float(seconds) if _is_number(seconds) and seconds > 0 else None
    memory_limit_mb = num_bytes >> 20 if isinstance(num_bytes, int) and num_bytes >= 1 << 20 else None
    return CodeReference(
        tests=StdinTests(cases=tuple(cases)), time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb
    )


def _mbpp(row: Mapping[str, object]) -> CodeReference:
    tests = _unpack(row["test_list"])
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise DataError(f"test_list must be a non-empty list of assertions, not {tests!r:.200}")
    imports = row.get("test_imports")
    setup = [*imports] if isinstance(imports, list) else []
    setup.append(str(row.get("test_setup_code") or ""))
    before = "\n".join(setup).strip()
    if not before:
        return _asserts(tests)
    return _asserts([f"{before}\n{test}" for test in tests])


def _entry_point(row: Mapping[str, object]) -> CodeReference:
    """Parse HumanEval and LeetCodeDataset rows, where `test` defines `check(candidate)`.

    Definitions in the prompt other than the entry point are helpers that the tests need, so they are prepended.
    """
    test, entry_point, prompt = row["test"], row["entry_point"], row.get("prompt", "")
    if isinstance(test, str) and isinstance(entry_point, str) and isinstance(prompt, str) and "def check(" in test:
        helpers = _definitions_besides(prompt, entry_point)
        return _asserts(f"{helpers}\n{test}\ncheck({entry_point})")
    raise DataError("prompt, test and entry_point must be strings and test must define check(candidate)")


def _definitions_besides(prompt: str, entry_point: str) -> str:
    if prompt.rstrip().endswith(('"""', "'''", ":")):
        # HumanEval prompts end in a signature or docstring; `pass` completes the body so that they parse.
        prompt = prompt.rstrip() + "\n    pass\n"
    try:
        body = ast.parse(prompt).body
    except SyntaxError:
        return ""  # LeetCodeDataset's older prompts are prose
    # The entry point is left out: its stub would shadow the solution that the tests check.
    kept = [node for node in body if not _defines(node, entry_point) and not _imports_package(node)]
    return "\n".join(ast.unparse(node) for node in kept)


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def _imports_package(node: ast.stmt) -> bool:
    """Return whether a statement imports a third-party package.

    LeetCodeDataset's prelude imports sortedcontainers for the programs; the tests need the standard library only.
    """
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module)):
            modules = [module]
        case _:
            return False
    return any(module.split(".")[0] not in sys.stdlib_module_names for module in modules)


def _asserts(programs: object) -> CodeReference:
    return CodeReference(tests=AssertTests(programs=_programs(programs)))


def _programs(programs: object) -> tuple[str, ...]:
    listed = [programs] if isinstance(programs, str) else programs
    if not isinstance(listed, list) or not listed or not all(isinstance(p, str) and p.strip() for p in listed):
        raise DataError(f"assertions must be a program or a non-empty list of programs, not {programs!r:.200}")
    for i, program in enumerate(listed):
        try:
            ast.parse(program)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise DataError(f"test program {i} is not Python: {e}") from e
    return tuple(listed)


def _pytest(program: object) -> CodeReference:
    """Turn plain test functions into one program that calls them; fixtures and marks need pytest and are refused."""
    if not isinstance(program, str):
        raise DataError(f"tests.pytest must be a program, not {type(program).__name__}")
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError) as e:
        raise DataError(f"tests.pytest is not Python: {e}") from e
    kept = [node for node in tree.body if not _imports_solution_or_pytest(node)]
    functions = [n for n in kept if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    if not functions or any(n.args.args or n.decorator_list for n in functions):
        raise DataError("tests.pytest must hold plain test functions without fixtures or marks")
    calls = "\n".join(f"{n.name}()" for n in functions)
    return _asserts("\n".join(ast.unparse(node) for node in kept) + "\n" + calls)


def _imports_solution_or_pytest(node: ast.stmt) -> bool:
    match node:
        case ast.ImportFrom(module=module):
            return module in ("solution", "pytest")
        case ast.Import(names=names):
            return all(alias.name in ("solution", "pytest") for alias in names)
        case _:
            return False


def _lcb_call(raw_input: object, raw_output: object, i: int) -> CallCase:
    """Parse a LiveCodeBench call: one JSON argument per line of input, and a JSON result."""
    if isinstance(raw_input, list):
        return _call_case(raw_input, raw_output, i)
    if not isinstance(raw_input, str) or not isinstance(raw_output, str):
        raise DataError(f"test {i}: input and output of a call must be text or a list of arguments")
    try:
        args = [json.loads(line) for line in raw_input.split("\n") if line.strip()]
        return _call_case(args, json.loads(raw_output), i)
    except (ValueError, RecursionError) as e:
        raise DataError(f"test {i}: not JSON lines: {e}") from e


def _call_case(args: object, expected: object, i: int) -> CallCase:
    if not isinstance(args, list):
        raise DataError(f"test {i}: the arguments of a call must be a list, not {args!r:.200}")
    try:
        return CallCase(args_json=json.dumps(args), expected_json=json.dumps(expected))
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"test {i}: not JSON: {e}") from e


def _stdin_case(given: object, output: object, i: int) -> StdinCase:
    if not isinstance(given, str) or not isinstance(output, str):
        raise DataError(
            f"test {i}: input and output must be text, not {type(given).__name__} and {type(output).__name__}"
        )
    return StdinCase(input=given, output=output)


def _lines(value: object) -> object:
    """Join a list of lines into one text: some APPS and TACO rows store text this way."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value


def _fn_name(row: Mapping[str, object]) -> str:
    for holder in (row, _unpack_or_none(row.get("metadata"))):
        if isinstance(holder, Mapping):
            for key in ("fn_name", "func_name"):
                name = holder.get(key)
                if isinstance(name, str) and name:
                    return name
    return ""


def _unpack(value: object) -> object:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TESTS_BYTES:
        raise DataError(f"tests of {len(value)} characters; at most {MAX_TESTS_BYTES} are read")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"tests are not JSON: {e}") from e


def _unpack_or_none(value: object) -> object:
    try:
        return _unpack(value) if value else None
    except DataError:
        return None


def _is_packed(value: object) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith("[")


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise DataError(f"private_test_cases pickles {module}.{name}; only text is read")


def _inflate(value: object) -> str:
    """Unpack LiveCodeBench's private tests: base64 of zlib of a pickled JSON text.

    The unpickler refuses all classes and functions, because the file is untrusted, and the output size is limited.
    """
    assert isinstance(value, str)
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(base64.b64decode(value, validate=True), MAX_TESTS_BYTES)
        if inflater.unconsumed_tail:
            raise DataError(f"private_test_cases unpack to more than {MAX_TESTS_BYTES} bytes")
        text = _TextUnpickler(io.BytesIO(raw)).load()
    except (binascii.Error, ValueError, zlib.error, pickle.UnpicklingError, EOFError) as e:
        raise DataError(f"private_test_cases cannot be unpacked: {e}") from e
    if not isinstance(text, str):
        raise DataError(f"private_test_cases pickle a {type(text).__name__}, not text")
    return text


def _refuse_unknown(value: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(map(str, value)) - known)
    if unknown:
        raise DataError(f"unknown keys in {where}: {unknown[:8]}; known are {sorted(known)}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
