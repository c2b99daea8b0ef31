"""Define the settings of a user's function, and find its source files without importing them."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from klear_core.config.settings import Settings
from klear_core.errors import ConfigError

FUNCTION_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""`package.module:function`."""

_OURS = "klear_core"
"""Package whose imports are not followed, because a stage's code version already covers our code."""


class UserFunction(Settings):
    """A function of the user's own, which is called in worker processes."""

    function: str = Field(pattern=FUNCTION_PATTERN)
    """`package.module:function`, in the working directory or an installed package. Its source is hashed."""
    timeout_s: float = Field(default=30, gt=0, le=600)
    """Seconds of wall clock for one answer, after which the worker is killed and the call has failed. The import of the
    module does not count; imports inside the function do, in each worker's first call."""
    memory_mb: int = Field(default=4096, ge=64)
    """Memory in MB that a worker may allocate for the function, imports included; a call that needs more has failed,
    and its worker is replaced. The default is that of a math worker. Files mapped read-only do not count."""
    files: tuple[str, ...] = ()
    """Further files and folders whose content changes the values: data, or modules imported by computed names. Imports
    from the function's own package or the working directory are found by themselves."""

    @property
    def module(self) -> str:
        """Dotted name of the function's module."""
        return self.function.partition(":")[0]

    def all_files(self) -> tuple[str, ...]:
        """Return all files that its values depend on. Raise ConfigError if the module is missing or no valid Python."""
        return (*source_files(self.module), *self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A module: its file (None for a package without `__init__.py`), and the folders with its submodules."""

    file: Path | None
    folders: tuple[Path, ...] = ()


def module_file(module: str) -> Path:
    """Return the file of a module in the working directory or among the installed packages.

    Raise ConfigError if there is none.
    """
    found = _find(module)
    if found is None or found.file is None:
        raise ConfigError(
            f"no Python file of module {module!r} in the working directory ({Path.cwd()}) or among the "
            "installed packages"
        )
    return found.file


def source_files(module: str) -> tuple[str, ...]:
    """Return the files of a module and of all modules that it imports from its own package or the working directory.

    Imports are read from the source and followed from module to module. Paths are relative to the working directory if
    they are inside. Raise ConfigError if there is no such module or one of the files is not valid Python.
    """
    module_file(module)
    package = module.partition(".")[0]
    files: dict[Path, None] = {}
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        parent = name.rpartition(".")[0]
        if name in seen or not _is_own(name, package):
            continue
        seen.add(name)
        found = _find(name)
        if found is None:
            continue  # the name of a function or class, see `_imports`
        if parent:
            waiting.append(parent)  # importing a module also runs the packages around it
        if found.file is not None:
            files[found.file] = None
            waiting += _imports(found.file, package=name if found.folders else parent)
    return tuple(sorted(map(_shown, files)))


def source_digest(module: str) -> str:
    """Return a hash of the content of `source_files`, to notice a change while a stage runs."""
    digest = hashlib.sha256()
    for path in source_files(module):
        content = Path(path).read_bytes()
        # With its length, so that text which moves from one file to the next changes the hash.
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _is_own(name: str, package: str) -> bool:
    """Return whether a module belongs to the user's code: to the function's package, or to the working directory."""
    top = name.partition(".")[0]
    return top != _OURS and (top == package or _within([Path.cwd()], top) is not None)


def _find(module: str) -> _Found | None:
    top, *inner = module.split(".")
    found = _find_top(top)
    for name in inner:
        if found is None:
            return None
        found = _within(found.folders, name)
    return found


def _find_top(name: str) -> _Found | None:
    # The working directory first, as when the function is imported.
    here = _within([Path.cwd()], name)
    if here is not None and here.file is not None:
        return here
    # As in Python, an installed module takes precedence over a folder without `__init__.py` of the same name.
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is None:
            continue
        origin = spec.origin
        if spec.submodule_search_locations is not None:
            folders = tuple(map(Path, spec.submodule_search_locations))
            if origin or here is None:
                return _Found(file=Path(origin) if origin else None, folders=folders)
        elif origin is not None and origin.endswith(".py"):
            return _Found(file=Path(origin))
    return here


def _within(folders: Sequence[Path], name: str) -> _Found | None:
    for folder in folders:
        init, file = folder / name / "__init__.py", folder / f"{name}.py"
        if init.is_file():
            return _Found(file=init, folders=(folder / name,))
        if file.is_file():
            return _Found(file=file)
    namespaces = tuple(folder / name for folder in folders if (folder / name).is_dir())
    return _Found(file=None, folders=namespaces) if namespaces else None


def _imports(file: Path, *, package: str) -> Iterator[str]:
    """Yield the absolute names of all modules that a file may import; some may be names of functions or classes."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"{file} is not valid Python: {e}") from e
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            # One dot (level 1) means the package itself, each further dot the one above; no dot is an absolute import.
            above = parts[: max(0, len(parts) - node.level + 1)] if node.level else []
            named = [node.module] if node.module else []
            base = ".".join([*above, *named])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
