"""Parse references in Klear's own format. A malformed one raises DataError.

| problem | shape |
|---|---|
| math | `{"kind": "math", "answers": [...]}` |
| code | `{"kind": "code", "tests": {"type": "stdin" or "call" or "asserts", ...}, "time_limit_s"?, ...}` |
| for a judge of the user's own | `{"kind": "custom", "judge": NAME, "value": any JSON, "domain"?}` |
| distilled and not judged | `{"kind": "unverifiable", "domain", "why"}` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from klear_core.code_tests import AssertTests, CallTests, CodeReference, StdinTests, Tests
from klear_core.config.verify import JUDGE_NAME_PATTERN
from klear_core.data.assertions import checked_programs
from klear_core.data.cases import call_case, is_number, refuse_unknown, stdin_case
from klear_core.data.limits import megabytes_in, seconds_in
from klear_core.data.packed_tests import parse_json
from klear_core.errors import DataError
from klear_core.types import CustomReference, Domain, MathReference, Reference, UnverifiableReference

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
