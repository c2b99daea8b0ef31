"""Which program is taken from a response, and which tests it is judged on."""

import pytest
from verify_builders import stdin_reference

from klear_core.config.verify import CodeConfig
from klear_core.prompts import NoAnswer
from klear_core.types import StdinTests
from klear_core.verify.code.program import chosen_tests, find_program, reference_fault

ANY = CodeConfig()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor better\n```python\nx = 2\n```\n", "x = 2\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```bash\nrun it\n```", "x = 1\n"),
        ("- so:\n  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("````python\ns = '```'\n````", "s = '```'\n"),
        ("```cpp\nint x;\n```", None),
        ("```python\nx = 1", None),
        ("x = 1", None),
        ("```python\n\n```", None),
        ("```python\n" + "x" * (257 << 10) + "\n```", None),
    ],
)
def test_the_last_closed_python_block_counts(text: str, program: str | None) -> None:
    found = find_program(text, ANY)
    assert isinstance(found, NoAnswer) if program is None else found == program


def test_only_the_exact_tag_counts_where_the_setting_says_so() -> None:
    strict = CodeConfig(fence="python")
    assert find_program("```python\nx = 1\n```\n```\ny\n```", strict) == "x = 1\n"
    assert isinstance(find_program("```py\nx = 1\n```", strict), NoAnswer)


def test_tests_are_chosen_by_the_problem_alone() -> None:
    tests = stdin_reference(*((str(i), str(i)) for i in range(100))).tests
    first, again, other = (chosen_tests(tests, name, ANY) for name in ("a", "a", "b"))
    assert isinstance(first, StdinTests)
    assert first == again != other
    assert len(first.cases) == 16
    assert [int(c.input) for c in first.cases] == sorted(int(c.input) for c in first.cases)


def test_zero_means_all_tests() -> None:
    tests = stdin_reference(*((str(i), str(i)) for i in range(100))).tests
    assert chosen_tests(tests, "a", CodeConfig(max_tests=0)) is tests


def test_gigantic_tests_make_the_reference_bad() -> None:
    reference = stdin_reference(("x" * (2 << 20), "1"))
    assert reference_fault(reference, ANY) is None
    assert "max_test_mb" in str(reference_fault(reference, CodeConfig(max_test_mb=1)))
