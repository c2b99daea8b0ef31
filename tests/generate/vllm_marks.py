"""Marks of the tests that run vLLM: left out where it is not installed, unless `make test-vllm` says that it has to be."""

import importlib.util
import os
from collections.abc import Callable
from typing import TypeVar

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
IS_REQUIRED = os.environ.get("KLEAR_REQUIRE_VLLM") == "1"
VLLM_MARKS = (
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not HAS_VLLM and not IS_REQUIRED, reason="vllm is not installed; make test-vllm installs and tests it"
    ),
)
Test = TypeVar("Test", bound=Callable[..., None])


def needs_vllm(test: Test) -> Test:
    for mark in VLLM_MARKS:
        test = mark(test)
    return test
