import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import klear_core

HEAVY = {
    "torch",
    "transformers",
    "ray",
    "vllm",
    "prefect",
    "mlflow",
    "pyarrow",
    "math_verify",
    "pebble",
    "matplotlib",
    "pandas",
    "datatrove",
    "peft",
}

OWN_DOORS = {
    "klear_core.cluster": {"ray"},
    "klear_core.generate.vllm_engine": {"vllm"},
    "klear_core.data.curation.executors": {"ray", "datatrove"},
    "klear_core.train.model": {"peft"},
}


def modules_loaded_by(modules: str) -> set[str]:
    code = f"import sys, {modules}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def all_core_modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(klear_core.__path__, prefix="klear_core.")]


def test_a_fresh_import_of_the_core_loads_nothing_heavy():
    assert (
        not modules_loaded_by(
            "klear_core, klear_core.types, klear_core.config.pipeline, klear_core.artifacts.manifest, klear_core.artifacts.records"
        )
        & HEAVY
    )


def test_the_command_line_starts_without_anything_heavy():
    assert not modules_loaded_by("flows.cli") & HEAVY


def test_learner_losses_and_torch_engine_need_torch_and_transformers_only():
    heavy = (
        modules_loaded_by(
            "klear_core.rl.learner, klear_core.rl.losses, klear_core.sft.loop, klear_core.generate.decoder.torch_engine"
        )
        & HEAVY
    )
    assert heavy <= {"torch", "transformers", "pandas"}, (
        heavy
    )  # transformers itself imports pandas where it is installed


def test_training_starts_where_only_torch_transformers_and_pydantic_are_installed():
    """What tests/gpu/README.md promises. Libraries that transformers would use if they were there do not come into it."""
    modules = modules_loaded_by(
        "klear_core.rl.learner, klear_core.rl.objective, klear_core.sft.loop, klear_core.train.distributed"
    )
    allowed = needs_of("torch", "transformers") | needs_of("pydantic")
    providers = metadata.packages_distributions()
    loaded = {canonicalize_name(d) for m in modules if not m.startswith("_") for d in providers.get(m, [])}
    assert "pydantic" in loaded  # the settings are its models
    assert loaded - allowed <= {"klear", "dill"}  # torch takes dill, which datatrove brings, where it is installed


def needs_of(*names: str) -> set[str]:
    """These distributions and all that they cannot do without."""
    found, todo = set(), [canonicalize_name(n) for n in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(r) for r in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue  # needed on other platforms only
        todo += [canonicalize_name(r.name) for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.parametrize("library", ["prefect", "mlflow", "ray", "vllm", "datatrove", "peft"])
def test_each_orchestration_library_has_one_door_in_the_core(library):
    doors = {name for name, allowed in OWN_DOORS.items() if library in allowed}
    users = {m for m in all_core_modules() if _names(m, library)}
    assert all(any(user == door or user.startswith(f"{door}.") for door in doors) for user in users), users


def _names(module: str, library: str) -> bool:
    import ast
    import importlib.util

    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as f:
        tree = ast.parse(f.read())
    for node in ast.walk(tree):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if any(name.partition(".")[0] == library for name in names):
            return True
    return False
