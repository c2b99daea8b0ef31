"""Define the settings of the math and code judges."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from klear_core.config.settings import Settings
from klear_core.config.user_code import UserFunction

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
    """CPU seconds for one comparison (Klear-Reasoner: 5 s of wall clock); beyond them the outcome is `timed_out`."""
    wall_factor: float = Field(default=30.0, ge=1, le=1000)
    """Wall-clock limit of a comparison as a multiple of `cpu_s` (plus 10 s). It is for hanging machines only: high load
    must not change a verdict."""
    memory_mb: int = Field(default=4096, ge=1024)
    """Address space of a math worker in MB; beyond it the outcome is `timed_out` too."""


class CodeConfig(Settings):
    """Choice of the program in a response, of its tests and of its score."""

    fence: Literal["python", "any"] = "any"
    """Fenced blocks to consider, of which the last one counts. `python`: only those tagged so (Klear-Reasoner); `any`:
    also `py`, `python3` and untagged ones."""
    compare: Literal["tokens", "whitespace", "exact", "decimal"] = "tokens"
    """Comparison of standard output. `tokens`: line by line and token by token, decimals within the tolerances;
    `whitespace`: tokens as text; `exact`: the stripped text (Klear-Reasoner); `decimal`: stripped lines, equal as text
    or as exact decimals (LiveCodeBench)."""
    abs_tolerance: float = Field(default=1e-9, ge=0, le=1)
    """Absolute tolerance for decimals in `tokens`, and for floats in a call's result."""
    rel_tolerance: float = Field(default=1e-6, ge=0, le=0.1)
    """Relative tolerance for decimals in `tokens`, and for floats in a call's result. Integers must agree exactly, and
    an expected decimal of more than 36 significant digits (more than any float has) to one unit in its last place."""
    score: Literal["soft", "hard", "plus_minus"] = "soft"
    """`soft`: the fraction p of tests passed (paper, section 3.2.4); `hard`: 1 if all pass, else 0, stopping at the
    first failure; `plus_minus`: 2p-1, what Klear-Reasoner's code computes."""
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
    max_program_kb: int = Field(default=256, ge=1, le=4096)
    """Larger programs are not run."""
    max_test_mb: int = Field(default=64, ge=1, le=1024)
    """Maximum total size of a problem's tests; larger ones make the reference invalid."""


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

    An answer on which it fails has no verdict, as if a judge of ours had failed.
    """

    name: str = Field(pattern=JUDGE_NAME_PATTERN)
    """Name by which references choose it: `{"kind": "custom", "judge": NAME, "value": ...}`."""
    min_value: ClassVar[float] = 0.0
    max_value: ClassVar[float] = 1.0

    @property
    def key(self) -> str:
        """Its place in the config, for messages."""
        return f"verify.judges, name = {self.name!r}, function = {self.function!r}"


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
    """The stage stops above this share of verdicts that failed on our side (judge_failed, sandbox_failed,
    timed_out)."""
    min_failed_count: int = Field(default=20, ge=1)
    """Failures before `max_failed_frac` is checked, so that a small sample does not stop the stage."""
    judges: tuple[CustomJudge, ...] = ()
    """Judges of the user's own, for problems whose reference names one of them."""
    runtime: VerifyRuntime = VerifyRuntime()

    @model_validator(mode="after")
    def _judges_have_different_names(self) -> VerifyConfig:
        names = [judge.name for judge in self.judges]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"judges: two have the name {name!r}, by which references choose one")
        return self

    def files(self) -> tuple[str, ...]:
        """Return the sources of the user's judges. Raise ConfigError if one is missing or no valid Python."""
        files = [path for judge in self.judges for path in judge.all_files()]
        return tuple(dict.fromkeys(files))
