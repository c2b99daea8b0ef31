"""Define the settings of judging: math, programs, the sandbox, functions of the user's own, and overrides by stage."""

from __future__ import annotations

import ast
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, create_model, model_validator

from klear_core.config.settings import Settings
from klear_core.errors import ConfigError

# ---- user code ----
# Define the settings of a user's function, and find its source files without importing them.


FUNCTION_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""`package.module:function`."""

_OURS = "klear_core"
"""Package whose imports are not followed, because a stage's code version already covers our code."""


class UserFunction(Settings):
    """A function of the user's own, which is called in worker processes."""

    function: str = Field(pattern=FUNCTION_PATTERN)
    """`package.module:function`, in the working directory or an installed package. Its source is hashed."""
    timeout_s: float = Field(default=30, gt=0, le=600)
    """Seconds for one answer, less those spent waiting for a core, after which the worker is killed and the call has
    failed. The import of the module does not count; imports inside the function do, in each worker's first call."""
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


# ---- verify ----


JUDGE_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]*$"


class MathConfig(Settings):
    """Comparison of a math answer with its reference."""

    box: Literal["required", "optional"] = "optional"
    """`optional`: without any `\\boxed{}`, read the answer from a complete final sentence that states it ("The answer
    is 7."); a number that is merely mentioned does not count. Klear-Reasoner lets math-verify search the whole text. An
    empty or unclosed last box is never an answer."""
    several_boxes: Literal["last", "agree", "join"] = "last"
    """`last`: the last box counts (all of them if the reference is a list of as many values); `agree`: every box must
    be correct; `join`: all boxes are read as one comma-separated list."""
    percent: Literal["either", "value", "ignore"] = "either"
    """Value of 73%. `either`: 73 or 0.73 (math-verify 0.9); `value`: 0.73 only; `ignore`: 73 only."""
    units: Literal["compatible", "ignore", "strict"] = "compatible"
    """`compatible`: a known unit may be omitted, but another unit must give the same quantity (5 cm is 0.05 m, not 5
    m), and words that are no unit (`4 or more`) are wrong; `ignore`: drop units and such words (math-verify); `strict`:
    both must have the same unit, or none."""
    rounding_digits: int = Field(default=6, ge=1, le=15)
    """Significant digits to which a decimal must agree with an inexact value: 0.333333 is 1/3, 0.333 is not. Integers
    and fractions must agree exactly (math-verify rounds to 6 decimal places, which makes all tiny numbers equal)."""
    choices: Literal["letter", "math"] = "letter"
    """For references A to J. `letter`: read the letter of a single option from `(B)`, `B. 12`, `Option B`; `math`: let
    math-verify compare."""
    references: Literal["any", "first"] = "any"
    """Reference answers that are accepted, if there are several (Klear-Reasoner: any)."""
    max_answer_chars: int = Field(default=1000, ge=10, le=100_000)
    """Longer answers are not parsed: no benchmark answer is longer, and parsing time grows with length."""
    max_nesting: int = Field(default=30, ge=5, le=200)
    """Bracket depth beyond which an answer is not parsed."""
    max_prose_chars: int = Field(default=2000, ge=100, le=100_000)
    """Characters to search at the end of a text without a box."""
    cpu_s: float = Field(default=5.0, gt=0, le=120)
    """CPU seconds for one comparison (Klear-Reasoner: 5 s of wall clock); an answer that needs more is wrong."""
    wall_factor: float = Field(default=30.0, ge=1, le=1000)
    """Wall-clock limit of a comparison as a multiple of `cpu_s` (plus 10 s). It is for hanging machines only: high load
    must not change a verdict."""
    memory_mb: int = Field(default=4096, ge=1024)
    """Address space of a math worker in MB; an answer that needs more is wrong, too."""


class CodeConfig(Settings):
    """Choice of the program in a response, of its tests and of its score."""

    fence: Literal["python", "any"] = "any"
    """Fenced blocks to consider, of which the last one counts. `python`: only those tagged so (Klear-Reasoner); `any`:
    also `py`, `python3` and untagged ones."""
    compare: Literal["tokens", "whitespace", "exact", "decimal"] = "tokens"
    """Comparison of standard output. `tokens`: line by line and token by token, decimals within the tolerances;
    `whitespace`: tokens as text; `exact`: the stripped text (Klear-Reasoner); `decimal`: as LiveCodeBench's
    harness: stripped lines, equal as text or as lists of exact decimals; results of calls without a tolerance, in which
    tuples and iterators are no lists; any exit status."""
    abs_tolerance: float = Field(default=1e-9, ge=0, le=1)
    """Absolute tolerance for decimals in `tokens`, and for floats in a call's result."""
    rel_tolerance: float = Field(default=1e-6, ge=0, le=0.1)
    """Relative tolerance for decimals in `tokens`, and for floats in a call's result. Integers must agree exactly, and
    an expected decimal of more than 36 significant digits (more than any float has) to one unit in its last place."""
    score: Literal["soft", "hard"] = "soft"
    """`soft`: the fraction p of tests passed (paper, section 3.2.4), of which `reward.wrong = -1` and
    `reward.correct = 1` make 2p-1, the reward of Klear-Reasoner's code; `hard`: 1 if all pass, else 0, stopping at the
    first failure."""
    max_tests: int = Field(default=16, ge=0)
    """Number of tests per problem, chosen by problem id and so the same for every sample (Klear-Reasoner draws 16 anew
    for each sample); 0 runs all, as evaluation does by default (`judge.evaluate.code`)."""
    max_timeouts: int = Field(default=2, ge=1)
    """Number of tests that may time out; after them the remaining tests count as failed and are not run."""
    cpu_s: float = Field(default=10.0, gt=0, le=600)
    """CPU seconds for one test if the problem has no limit (LiveCodeBench 6 s, Klear-Reasoner 35 s of wall clock)."""
    time_limit_scale: float = Field(default=3.0, ge=1, le=20)
    """Factor on a problem's own time limit, which is meant for C++, to allow for Python."""
    wall_factor: float = Field(default=3.0, ge=1, le=20)
    """Wall-clock limit of a test as a multiple of its CPU limit (plus 2 s), for programs that sleep; high load must not
    fail a program."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address space in MB of a test process if the problem has no limit (Klear-Reasoner: 1024 MB)."""
    recursion_limit: int = Field(default=1000, ge=100, le=100_000)
    """Python's recursion limit (frames) at program start; a program may raise it. 1,000 is the interpreter's default,
    which HumanEval's harness keeps; LiveCodeBench's harness sets 50,000."""
    packages: bool = False
    """Let programs import what is installed for the sandbox's interpreter, above all numpy, which LiveCodeBench's
    harness has, whatever `verify.limits.with_packages` says."""
    max_program_kb: int = Field(default=256, ge=1, le=4096)
    """Larger programs are not run."""
    max_test_mb: int = Field(default=64, ge=1, le=1024)
    """Maximum total size of a problem's tests; larger ones make the reference invalid."""

    as_before: ClassVar[Mapping[str, JsonValue]] = {"packages": False}


class SandboxConfig(Settings):
    """Resource limits of untrusted programs, enforced inside the jail by the kernel (total memory: by polling)."""

    processes: int = Field(default=64, ge=4, le=4096)
    """Maximum concurrent processes and threads, including the supervisor's."""
    open_files: int = Field(default=64, ge=60, le=4096)
    """Maximum open file descriptors of a process."""
    output_mb: int = Field(default=16, ge=1, le=512)
    """Maximum size of standard output, of any file, and of a call's result."""
    total_memory_mb: int = Field(default=3072, ge=256)
    """Maximum resident memory of all processes of a jail together, polled 20 times per second."""
    python: str = ""
    """Interpreter inside the sandbox; empty: /usr/bin/python3 if it exists, else the one that runs Klear, without its
    virtual environment."""
    with_packages: bool = False
    """Let programs import the interpreter's site-packages (numpy); costs a few milliseconds per jail."""
    user: str = ""
    """Unprivileged user to switch to when running as root; empty: `klear-sandbox` if it exists, else `games`."""
    programs_per_jail: int = Field(default=50, ge=1, le=10_000)
    """Programs that run in sequence in one jail, each test in its own process; 1: a new jail for every program.
    A jail is also replaced after any test that hit a limit or was killed by a signal."""


class CustomJudge(UserFunction):
    """A judge of the user's own: a function of an `AnswerToJudge` that returns a score between 0 and 1.

    An answer on which it fails is wrong if it works on an answer of ours; else there is no verdict.
    """

    name: str = Field(pattern=JUDGE_NAME_PATTERN)
    """Name by which references choose it: `{"kind": "custom", "judge": NAME, "value": ...}`."""
    min_value: ClassVar[float] = 0.0
    max_value: ClassVar[float] = 1.0

    @property
    def key(self) -> str:
        """Its place in the config, for messages."""
        return f"verify.judges, name = {self.name!r}, function = {self.function!r}"


GYM_JUDGE = CustomJudge(name="reasoning_gym", function="klear_core.verify.gym:score", timeout_s=20.0, memory_mb=4096)
"""The judge of reasoning-gym's problems, which is always there."""
IFEVAL_JUDGE = CustomJudge(name="ifeval", function="klear_core.verify.ifeval:score", timeout_s=20.0, memory_mb=4096)
"""The judge of IFEval's prompts, which is always there."""
_OUR_JUDGES = (GYM_JUDGE, IFEVAL_JUDGE)


class VerifyRuntime(Settings):
    """Processes for judging, on each node that judges; changes no verdict.

    A core is one that the process may use: of its affinity, within the quota of its control group and, on a Ray
    cluster, of the node's CPUs.
    """

    math_workers: int = Field(default=0, ge=0)
    """Processes that compare math answers; 0: one per core."""
    code_workers: int = Field(default=0, ge=0)
    """Processes that control one jail each; 0: two per core, because half of a jail's start-up time is waiting."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes for each reward or judge of the user's own; 0: one per core."""
    tasks_per_worker: int = Field(default=2000, ge=1)
    """Tasks after which a worker process is replaced, so that sympy's caches do not grow without limit."""


class VerifyConfig(Settings):
    """Judging of answers, common to all stages; `[judge.STAGE]` overrides these settings for one stage."""

    window: Literal["after_think", "whole"] = "after_think"
    """Part of the response that is searched for the answer. `after_think`: after the last `</think>` (Klear-Reasoner's
    RL judge); `whole`: all of it (its benchmark judge)."""
    tags: Literal["close", "both", "none"] = "close"
    """Think tags that a response must have. `close`: `</think>`; `both`: also `<think>` (Klear-Reasoner's code). The
    default is `close` because responses from elsewhere often lack the other. Where the chat template opens `<think>` in
    the prompt, responses have it."""
    math: MathConfig = MathConfig()
    code: CodeConfig = CodeConfig()
    sandbox: Literal["auto", "firejail", "bubblewrap", "rlimits-only"] = "auto"
    """Sandbox for untrusted programs. `auto`: the first of firejail and bubblewrap that passes an isolation test;
    without one no program runs. `rlimits-only` has no namespaces, so programs see the machine's files; this is logged
    and noted in the artifact."""
    limits: SandboxConfig = SandboxConfig()
    max_failed_frac: float = Field(default=0.1, gt=0, le=1)
    """The stage stops above this share of verdicts that are not the model's (judge_failed, sandbox_failed, timed_out,
    bad_reference)."""
    min_failed_count: int = Field(default=20, ge=1)
    """Failures before `max_failed_frac` is checked, so that a small sample does not stop the stage."""
    judges: tuple[CustomJudge, ...] = ()
    """Judges of the user's own, for problems whose reference names one of them."""
    runtime: VerifyRuntime = VerifyRuntime()

    @model_validator(mode="after")
    def _judges_have_different_names(self) -> VerifyConfig:
        names = [judge.name for judge in self.judges]
        for ours in _OUR_JUDGES:
            if ours.name in names:
                raise ValueError(
                    f"judges: {ours.name!r} is a judge of Klear's own ({ours.function}); take another name"
                )
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"judges: two have the name {name!r}, by which references choose one")
        return self

    @property
    def jail_limits(self) -> SandboxConfig:
        """Return the limits of this judge's jails, whose programs may import packages if either setting says so."""
        has_packages = self.limits.with_packages or self.code.packages
        return self.limits.model_copy(update={"with_packages": has_packages})

    @property
    def all_judges(self) -> tuple[CustomJudge, ...]:
        """Return the judges that references can name: the user's own, and those of reasoning-gym and IFEval."""
        return (*self.judges, *_OUR_JUDGES)

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's judges. Raise ConfigError if one is missing or no valid Python."""
        files = [path for judge in self.judges for path in judge.all_files()]
        return tuple(dict.fromkeys(files))


# ---- judge ----
# Define judge settings of single stages, which override the common ones of `[verify]`.


COMMON = ("sandbox", "limits", "judges")
"""Judge settings that no stage can override: they describe the machine, or define names that references use."""

BENCHMARK_CODE = CodeConfig(
    max_tests=0, compare="decimal", cpu_s=6.0, memory_mb=3072, recursion_limit=50_000, packages=True
)
"""LiveCodeBench's rules: all tests, its comparison, 6 s a test, its recursion limit, numpy, and of memory, for which it
has no limit, as much as a jail may use in all."""
_BENCHMARK_DEFAULTS: dict[str, Any] = {"code": BENCHMARK_CODE.model_dump(exclude_unset=True)}


def _partial(model: type[Settings], *, without: tuple[str, ...] = ()) -> type[Settings]:
    """Return a class with the same settings, all of which may be left out; None means the common value."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in without:
            continue
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            below = _partial(kind)
            fields[name] = (below, below())
            continue
        # The bounds belong to the value alone: on `kind | None` they would be compared with None, too.
        bounded = Annotated[(kind, *field.metadata)] if field.metadata else kind
        fields[name] = (bounded | types.NoneType, Field(default=None, description=field.description))
    name = model.__name__.removesuffix("Config") + "Overrides"
    doc = f"{model.__doc__} A setting that is left out has the value of `[verify]`."
    return create_model(name, __base__=Settings, __doc__=doc, __module__=__name__, **fields)


if TYPE_CHECKING:
    JudgeOverrides = VerifyConfig  # type checkers cannot see the fields of a class that is made when the module loads
else:
    JudgeOverrides = _partial(VerifyConfig, without=COMMON)


JudgedStage = Literal["distill", "tag", "tag_rl", "rl", "rl_code", "evaluate"]
"""Sections of the stages that judge answers."""


class StageJudges(Settings):
    """Judge settings of single stages, which override `[verify]`; changing one reruns that stage and later ones."""

    distill: JudgeOverrides = JudgeOverrides()
    tag: JudgeOverrides = JudgeOverrides()
    tag_rl: JudgeOverrides = JudgeOverrides()
    """Judging of the answers whose pass rates select the problems of RL."""
    rl: JudgeOverrides = JudgeOverrides()
    rl_code: JudgeOverrides = JudgeOverrides()
    evaluate: JudgeOverrides = JudgeOverrides()
    """Judging of benchmark answers. By default programs are judged as LiveCodeBench does, whatever `[verify]` says."""


def sections_of_evaluation(verify: VerifyConfig) -> dict[str, Any]:
    """Return the sections `verify` and `judge` by which evaluation has these complete judge settings.

    Evaluation's own defaults are left out, so that two runs with the same judge have the same sections.
    """
    common = verify.model_dump(mode="json")
    own: dict[str, Any] = {}
    for name, defaults in _BENCHMARK_DEFAULTS.items():
        values = {key: common[name].pop(key) for key in defaults}
        own[name] = {key: value for key, value in values.items() if value != defaults[key]}
    return {"verify": common, "judge": {"evaluate": own}}


def has_benchmark_default(key: str) -> bool:
    """Return whether evaluation has a value of its own for a setting `section.name` of `[verify]`."""
    section, _, name = key.partition(".")
    return name in _BENCHMARK_DEFAULTS.get(section, ())


def judge_of(stage: JudgedStage, common: VerifyConfig, judges: StageJudges) -> VerifyConfig:
    """Return the complete judge settings of a stage: its own over its defaults over the common ones."""
    own: Settings = getattr(judges, stage)
    settings = common.model_dump()
    # Over the common settings: those are chosen for training, and benchmarks have rules of their own.
    if stage == "evaluate":
        settings = _over(settings, _BENCHMARK_DEFAULTS)
    return VerifyConfig.model_validate(_over(settings, own.model_dump(exclude_none=True)))


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `own` in place of its own, table by table."""
    merged = dict(base)
    for key, value in own.items():
        merged[key] = _over(merged[key], value) if isinstance(value, dict) else value
    return merged
