"""Turn tests that are Python source into the assertion programs of a CodeReference; nothing is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping

from klear_core.code_tests import AssertTests, CodeReference
from klear_core.errors import DataError

_NO_PROGRAM = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of Python's parser: half a character and a NUL are ValueErrors, deep nesting causes the last two."""


def asserts_reference(programs: object) -> CodeReference:
    """Return the reference of one test program or a list of them."""
    return CodeReference(tests=AssertTests(programs=checked_programs(programs)))


def checked_programs(programs: object) -> tuple[str, ...]:
    """Return test programs as a tuple; DataError if there is none or one is not Python."""
    listed = [programs] if isinstance(programs, str) else programs
    if not isinstance(listed, list) or not listed or not all(isinstance(p, str) and p.strip() for p in listed):
        raise DataError(f"assertions must be a program or a non-empty list of programs, not {programs!r:.200}")
    for i, program in enumerate(listed):
        try:
            ast.parse(program)
        except _NO_PROGRAM as e:
            raise DataError(f"test program {i} is not Python: {e}") from e
    return tuple(listed)


def entry_point_reference(row: Mapping[str, object]) -> CodeReference:
    """Parse HumanEval and LeetCodeDataset rows, where `test` defines `check(candidate)`.

    Definitions in the prompt other than the entry point are helpers that the tests need, so they are prepended.
    """
    test, entry_point, prompt = row["test"], row["entry_point"], row.get("prompt", "")
    if isinstance(test, str) and isinstance(entry_point, str) and isinstance(prompt, str) and "def check(" in test:
        helpers = _definitions_besides(prompt, entry_point)
        return asserts_reference(f"{helpers}\n{test}\ncheck({entry_point})")
    raise DataError("prompt, test and entry_point must be strings and test must define check(candidate)")


def pytest_reference(program: object) -> CodeReference:
    """Turn plain test functions into one program that calls them; fixtures and marks need pytest and are refused."""
    if not isinstance(program, str):
        raise DataError(f"tests.pytest must be a program, not {type(program).__name__}")
    try:
        tree = ast.parse(program)
    except _NO_PROGRAM as e:
        raise DataError(f"tests.pytest is not Python: {e}") from e
    kept = [node for node in tree.body if not _imports_solution_or_pytest(node)]
    functions = [n for n in kept if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    if not functions or any(n.args.args or n.decorator_list for n in functions):
        raise DataError("tests.pytest must hold plain test functions without fixtures or marks")
    calls = "\n".join(f"{n.name}()" for n in functions)
    return asserts_reference("\n".join(ast.unparse(node) for node in kept) + "\n" + calls)


def _definitions_besides(prompt: str, entry_point: str) -> str:
    if prompt.rstrip().endswith(('"""', "'''", ":")):
        # HumanEval prompts end in a signature or docstring; `pass` completes the body so that they parse.
        prompt = prompt.rstrip() + "\n    pass\n"
    try:
        body = ast.parse(prompt).body
    except _NO_PROGRAM:
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


def _imports_solution_or_pytest(node: ast.stmt) -> bool:
    match node:
        case ast.ImportFrom(module=module):
            return module in ("solution", "pytest")
        case ast.Import(names=names):
            return all(alias.name in ("solution", "pytest") for alias in names)
        case _:
            return False
