import ast
import importlib.util
import pkgutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

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
    "datasets",
    "gguf",
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


def test_the_command_line_and_the_doctor_start_without_anything_heavy():
    assert not modules_loaded_by("flows.cli, flows.doctor") & HEAVY


def test_commands_that_set_what_prefect_reads_are_loaded_without_it():
    """Prefect reads its settings when it is imported."""
    assert "prefect" not in modules_loaded_by("flows.ablate, flows.run, flows.runs, flows.servers")


def test_training_and_the_torch_engine_start_where_only_torch_transformers_and_pydantic_are_installed():
    """What tests/gpu/README.md promises. Libraries that transformers would use if they were there do not come into it."""
    modules = modules_loaded_by(
        "klear_core.rl.learner, klear_core.rl.losses, klear_core.rl.objective, klear_core.sft.loop, "
        "klear_core.train.distributed, klear_core.generate.decoder.torch_engine"
    )
    heavy = modules & HEAVY
    assert heavy <= {"torch", "transformers", "pandas"}, heavy  # transformers imports pandas where it is installed
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
    users = {module for module, libraries in libraries_named_by_modules().items() if library in libraries}
    assert all(any(user == door or user.startswith(f"{door}.") for door in doors) for user in users), users


@cache
def libraries_named_by_modules() -> dict[str, set[str]]:
    """The libraries that each module of the core imports anywhere, by the names of the modules."""
    return {module: imported_libraries(module) for module in all_core_modules()}


def imported_libraries(module: str) -> set[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(name)):
                found.add(name.partition(".")[0])
    return found
