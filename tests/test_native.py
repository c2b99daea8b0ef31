import ctypes
import logging
from pathlib import Path

import pytest

from klear_core.native import compile_c, compiler_defines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scale.c"
    path.write_text("double scale(double x) { return FACTOR * x; }\n")
    return path


def test_sizes_are_macros_of_the_compiled_source(source: Path) -> None:
    for factor in (3, 5):
        library = compile_c(source, {"FACTOR": factor})
        assert library is not None
        library.scale.argtypes, library.scale.restype = [ctypes.c_double], ctypes.c_double
        assert library.scale(2.0) == 2 * factor


def test_without_a_compiler_there_is_a_warning_and_no_library(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compile_c(source, {"FACTOR": 1}, compilers=("no-such-compiler",)) is None
    assert "no-such-compiler" in caplog.text


def test_what_does_not_compile_gives_the_compilers_complaint(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("no C at all\n")
    with caplog.at_level(logging.WARNING):
        assert compile_c(source, {}) is None
    assert "scale.c" in caplog.text
    assert "error" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "timeout_s", "complaint"),
    [
        (
            'while [ "$1" != -o ]; do shift; done; : > "$2"',
            60,
            "scale.so",
        ),  # what it makes is empty and cannot be loaded
        ("exec sleep 600", 0.2, "nothing after 0.2 s"),
    ],
)
def test_a_compiler_that_makes_nothing_of_use_is_as_none(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, compiler: str, timeout_s: float, complaint: str
) -> None:
    """Nor can anything be loaded where temporary folders may not hold programs."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{compiler}\n")
    path.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert compile_c(source, {"FACTOR": 1}, compilers=(str(path),), timeout_s=timeout_s) is None
    assert "scale.c" in caplog.text
    assert complaint in caplog.text


def test_a_feature_that_the_compiler_does_not_know_is_missed(tmp_path: Path) -> None:
    """gcc 9 takes `-march=native` on every processor, and compiles for AVX512_BF16 on none."""
    old, new = (tmp_path / name for name in ("old", "new"))
    old.write_text("#!/bin/sh\necho '#define __AVX512F__ 1'\n")
    new.write_text("#!/bin/sh\necho '#define __AVX512F__ 1'\necho '#define __AVX512BF16__ 1'\n")
    for path in (old, new):
        path.chmod(0o755)
    assert compiler_defines("__AVX512BF16__", compilers=(str(new),))
    assert not compiler_defines("__AVX512BF16__", compilers=(str(old),))
    assert not compiler_defines("__AVX512BF16__", compilers=("no-such-compiler",))
