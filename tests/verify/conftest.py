"""What the judges' tests share: problems in a line, and one proven sandbox for all of them."""

import os
from collections.abc import Iterator

import pytest
from verify_builders import code_config

from klear_core.config.verify import MathConfig, VerifyConfig, VerifyRuntime
from klear_core.errors import SandboxError
from klear_core.verify import JudgePool


@pytest.fixture(scope="session")
def sandbox_name() -> str:
    """The sandbox that isolates here. Elsewhere tests skip and say why; in CI they must run."""
    with JudgePool(VerifyConfig(runtime=VerifyRuntime(math_workers=1, code_workers=1))) as pool:
        try:
            return pool.check_sandbox()
        except SandboxError as e:
            if os.environ.get("CI", "").lower() in ("1", "true"):
                pytest.fail(f"CI must have a sandbox: {e}")
            pytest.skip(str(e))


@pytest.fixture(scope="session")
def code_pool(sandbox_name: str) -> Iterator[JudgePool]:
    """One pool for all tests of code, soft scores."""
    with JudgePool(code_config()) as pool:
        yield pool


@pytest.fixture(scope="session")
def math_pool() -> Iterator[JudgePool]:
    """One pool for all tests of math: the default settings, and so much time that none runs out of it on a slow machine."""
    with JudgePool(VerifyConfig(math=MathConfig(cpu_s=60.0), runtime=VerifyRuntime(math_workers=2))) as pool:
        yield pool
