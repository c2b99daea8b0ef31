"""No file from elsewhere is unpickled, and no code that comes with a model is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN_PROCESSES_OR_SCRATCH = {
    "klear_core/train/kernels/check.py": "a task on standard input, from the parent process",
    "klear_core/cluster/rank_actors.py": "tries whether an error of its own can be sent",
    "klear_core/data/curation/read.py": "the curation's own plan, in a scratch folder that no store gets",
    "klear_core/data/curation/work_plan.py": "the same",
    "klear_core/data/formats/code_tests.py": "published test cases, by an unpickler that refuses all classes and functions",
}
UNSAFE = {
    ("pickle", "load"), ("pickle", "loads"), ("torch", "load"), ("joblib", "load"), ("dill", "load"),
    ("cloudpickle", "load"), ("cloudpickle", "loads"), ("marshal", "load"), ("yaml", "load"), ("shelve", "open"),
    ("pd", "read_pickle"), ("pandas", "read_pickle"),
}  # fmt: skip


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def reads_pickles(source: str) -> bool:
    """Whether code calls a function that runs what a file says, or defines an unpickler."""
    tree = ast.parse(source)
    named = {
        (call.func.value.id, call.func.attr)
        for call in calls(tree)
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    }
    imported = {
        (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defines = any(
        "Unpickler" in ast.unparse(base) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for base in n.bases
    )
    allowed = [k for call in calls(tree) for k in call.keywords if k.arg == "allow_pickle"]  # numpy's default is False
    return bool(UNSAFE & (named | imported)) or defines or bool(allowed)


def trusts_code(source: str) -> bool:
    """Whether code gives `trust_remote_code` another value than False."""
    given = [k for call in calls(ast.parse(source)) for k in call.keywords if k.arg == "trust_remote_code"]
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and n.value == "trust_remote_code"]
    return bool(texts) or any(not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in given)


def modules() -> list[Path]:
    return [path for package in ("klear_core", "tasks", "flows") for path in sorted((ROOT / package).rglob("*.py"))]


def test_only_these_modules_unpickle_and_only_what_their_own_process_wrote_or_without_classes():
    found = {path.relative_to(ROOT).as_posix() for path in modules() if reads_pickles(path.read_text())}
    assert found == OWN_PROCESSES_OR_SCRATCH.keys()


def test_no_model_brings_code_along():
    assert [path for path in modules() if trusts_code(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b)",
        "from pickle import loads",
        "import torch\ntorch.load(f, weights_only=False)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import pickle\nclass Mine(pickle.Unpickler):\n    pass",
    ],
)
def test_the_scan_sees_each_way(source: str):
    assert reads_pickles(source)


@pytest.mark.parametrize(
    "source", ["f(trust_remote_code=True)", "f(trust_remote_code=x)", "o = {'trust_remote_code': 1}"]
)
def test_the_scan_sees_trust(source: str):
    assert trusts_code(source)
    assert not trusts_code("f(trust_remote_code=False)")
