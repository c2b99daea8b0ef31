"""Read the git commit of the code and the versions of its libraries, for an artifact's manifest."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = (
    "klear",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "ray",
    "vllm",
    "math-verify",
    "pyarrow",
    "prefect",
    "mlflow",
    "pydantic",
)
_CODE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Commit of a git checkout, and whether tracked files differ from it."""

    sha: str
    is_dirty: bool


@cache
def code_commit() -> Commit | None:
    """Return the commit of the checkout that this code runs from; None if it was installed from a package."""
    if not (_CODE / ".git").exists():
        return None
    try:
        sha = _git("rev-parse", "HEAD")
        # Untracked files do not count: runs and notes are among them.
        return Commit(sha=sha.strip(), is_dirty=bool(_git("status", "--porcelain", "--untracked-files=no").strip()))
    except (OSError, subprocess.SubprocessError):
        return None  # no git on this machine, or a checkout without commits


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries, without importing them."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_CODE), *args], capture_output=True, text=True, check=True, timeout=10
    ).stdout
