"""Keep large tests of programs in a file, so that a problem in memory holds a handle to its tests.

The released KlearReasoner-CodeSub-15K has 278 KB of tests a problem, 4.2 GB in all. A stage that holds its problems
(curation, RL, evaluation) needs the number of tests at most; a judging process reads those of one problem at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, assert_never

from pydantic import TypeAdapter, ValidationError

from klear_core.code_tests import AssertTests, CallTests, CodeReference, StdinTests, StoredTests, TestKind, Tests
from klear_core.errors import ArtifactError
from klear_core.types import Reference

INLINE_BYTES = 16 << 10
"""Tests whose JSON is longer are stored; shorter ones stay in their record (those of HumanEval and MBPP all do)."""
_LEVEL = 1
"""zlib's fastest level halves the size of numbers; slower levels gain hardly more."""

_KINDS: dict[TestKind, TypeAdapter[Any]] = {
    "stdin": TypeAdapter(StdinTests),
    "call": TypeAdapter(CallTests),
    "asserts": TypeAdapter(AssertTests),
}
_REFERENCES: TypeAdapter[Reference] = TypeAdapter(Reference)


class StoredTestsWriter:
    """Appends large tests to a file, which is created for the first of them. Use as a context manager."""

    def __init__(self, file: Path, *, name: str = "") -> None:
        """Write to `file`, and call it `name` in the handles; by default `file`, where they can be read at once."""
        self._file = file
        self._name = name or str(file.absolute())
        self._out: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()

    @property
    def has_tests(self) -> bool:
        """Whether tests were stored, and so the file exists."""
        return self._out is not None

    def stored(self, reference: Reference) -> Reference:
        """Return the reference with a handle in place of large tests; tests that are stored elsewhere are copied."""
        if not isinstance(reference, CodeReference):
            return reference
        tests = reference.tests
        if isinstance(tests, StoredTests):
            # Copied as they are: the digest is that of the packed bytes.
            handle = dataclasses.replace(tests, path=self._name, offset=self._append(_packed(tests)))
            return dataclasses.replace(reference, tests=handle)
        content = _KINDS[reference.test_kind].dump_json(tests)
        if len(content) <= INLINE_BYTES:
            return reference
        packed = zlib.compress(content, _LEVEL)
        handle = StoredTests(
            path=self._name,
            offset=self._append(packed),
            num_bytes=len(packed),
            kind=reference.test_kind,
            num_tests=reference.num_tests,
            num_chars=sum(sizes_of_tests(tests)),
            digest=_digest(packed),
        )
        return dataclasses.replace(reference, tests=handle)

    def _append(self, packed: bytes) -> int:
        """Write to the end of the file and return where; unbuffered, so that it can be read at once."""
        if self._out is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._file.open("wb", buffering=0)
        offset = self._out.tell()
        rest = memoryview(packed)
        while rest:  # a write without a buffer may stop early
            rest = rest[self._out.write(rest) :]
        return offset


def load_tests(reference: CodeReference) -> Tests:
    """Return the tests of a reference. ArtifactError names a file that is missing, cut short or altered."""
    tests = reference.tests
    if not isinstance(tests, StoredTests):
        return tests
    try:
        loaded: Tests = _KINDS[tests.kind].validate_json(zlib.decompress(_packed(tests)))
    except (zlib.error, ValidationError) as e:
        raise ArtifactError(f"{_place(tests)}: not tests of kind {tests.kind} ({e})") from e
    return loaded


def sizes_of_tests(tests: Tests) -> list[int]:
    """Return the number of characters of each test."""
    match tests:
        case StdinTests():
            return [len(c.input) + len(c.output) for c in tests.cases]
        case CallTests():
            return [len(c.args_json) + len(c.expected_json) for c in tests.cases]
        case AssertTests():
            return [len(p) for p in tests.programs]
        case _:
            assert_never(tests)


def path_of_tests(shard: Path) -> Path:
    """Return the file of a shard's large tests; there is none if all are small."""
    return shard.with_suffix(".tests")


def located(reference: object, folder: Path) -> object:
    """Return a reference's JSON with the full path of its stored tests, which are in `folder`."""
    match reference:
        case {"tests": {"path": str(name), **handle}, **rest}:
            # An artifact may come from elsewhere; no record of it may make a judge read files of this machine.
            if Path(name).name != name:
                raise ArtifactError(f"{folder}: a record names a tests file outside of its folder: {name!r}")
            return {"tests": {"path": str(folder.absolute() / name), **handle}, **rest}
        case _:
            return reference


def with_tests(reference: object, folder: Path) -> str:
    """Return a reference's JSON as text with all tests in it; stored ones are read from `folder`."""
    record = _REFERENCES.validate_python(located(reference, folder))
    if isinstance(record, CodeReference):
        record = dataclasses.replace(record, tests=load_tests(record))
    return _REFERENCES.dump_json(record).decode()


def _packed(tests: StoredTests) -> bytes:
    """Return the compressed bytes of stored tests."""
    try:
        with Path(tests.path).open("rb", buffering=0) as f:
            f.seek(tests.offset)
            packed = f.read(tests.num_bytes)
    except OSError as e:
        raise ArtifactError(f"{_place(tests)}: cannot be read ({e.strerror})") from e
    if len(packed) < tests.num_bytes:
        raise ArtifactError(f"{_place(tests)}: the file is cut short")
    if _digest(packed) != tests.digest:
        raise ArtifactError(f"{_place(tests)}: altered since they were written")
    return packed


def _place(tests: StoredTests) -> str:
    return f"{tests.path}: tests at byte {tests.offset}"


def _digest(packed: bytes) -> str:
    return hashlib.blake2b(packed, digest_size=16).hexdigest()
