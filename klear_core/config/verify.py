"""Settings of the judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from klear_core.config.base import Settings


class MathConfig(Settings):
    """When a math answer counts as equal to its reference."""

    box: Literal["required", "optional"] = "optional"
    """`optional`: without any `\\boxed{}` a finished sentence at the end that states the answer is read ("The answer is 7."); a
    number that is merely mentioned is none. Klear-Reasoner lets math-verify search the whole text. An empty or unclosed last box
    is no answer either way."""
    several_boxes: Literal["last", "agree", "join"] = "last"
    """`last`: the last box counts (all of them where the reference is a list of as many values); `agree`: every box must be
    right; `join`: all boxes read as one comma list."""
    percent: Literal["either", "value", "ignore"] = "either"
    """What 73% equals: 73 as well as 0.73 (math-verify 0.9), 0.73 only, or 73 only."""
    units: Literal["compatible", "ignore", "strict"] = "compatible"
    """`compatible`: a known unit may be left out, but different ones are wrong (5 cm is not 5 m, and is 0.05 m), and so are words that
    are no unit (`4 or more`); `ignore` drops units and such words (math-verify); `strict` wants the same unit or the same absence."""
    rounding_digits: int = Field(default=6, ge=1, le=15)
    """Significant digits to which a decimal must agree with an inexact value: 0.333333 is 1/3, 0.333 is not. Integers and fractions
    agree exactly (math-verify rounds to 6 places after the point, which makes all tiny numbers equal)."""
    choices: Literal["letter", "math"] = "letter"
    """References A to J: read the one option's letter from `(B)`, `B. 12`, `Option B`; or leave it to math-verify."""
    references: Literal["any", "first"] = "any"
    """Which of several accepted answers count (Klear-Reasoner: any)."""
    max_answer_chars: int = Field(default=1000, ge=10, le=100_000)
    """Longer answers are not read: no answer of a benchmark is longer, and time grows with length."""
    max_nesting: int = Field(default=30, ge=5, le=200)
    """Depth of brackets beyond which an answer is not read."""
    max_prose_chars: int = Field(default=2000, ge=100, le=100_000)
    """How much of the end of a text without a box is searched."""
    cpu_s: float = Field(default=5.0, gt=0, le=120)
    """CPU time of one comparison (Klear-Reasoner: 5 s of wall clock); beyond it the outcome is `timed_out`."""
    wall_factor: float = Field(default=30.0, ge=1, le=1000)
    """Wall clock of a comparison in CPU limits (plus 10 s), for a machine that hangs; a loaded machine must change no verdict."""
    memory_mb: int = Field(default=4096, ge=1024)
    """Address space of a math worker; beyond it the outcome is `timed_out` too."""


class CodeConfig(Settings):
    """Which program is taken from a response, on which tests it runs, and what its score is."""

    fence: Literal["python", "any"] = "any"
    """Which fenced block counts, the last one of its kind: tagged `python` (Klear-Reasoner), or also `py`, `python3`, untagged."""
    compare: Literal["tokens", "whitespace", "exact", "decimal"] = "tokens"
    """How standard output is compared. `tokens`: line by line and token by token, decimals within the tolerances; `whitespace`:
    tokens as text; `exact`: the stripped text (Klear-Reasoner); `decimal`: stripped lines, equal as text or as exact decimals
    (LiveCodeBench)."""
    abs_tolerance: float = Field(default=1e-9, ge=0, le=1)
    """Of a decimal in `tokens`, and of a float in a call's result."""
    rel_tolerance: float = Field(default=1e-6, ge=0, le=0.1)
    """Of a decimal in `tokens`, and of a float in a call's result; integers agree exactly, and an expected decimal of more than
    36 significant digits (more than any float has) to one unit in its last place."""
    score: Literal["soft", "hard", "plus_minus"] = "soft"
    """`soft`: the fraction p of tests passed (paper, section 3.2.4); `hard`: 1 if all pass, else 0, stopping at the first
    failure; `plus_minus`: 2p-1, what Klear-Reasoner's code computes."""
    max_tests: int = Field(default=16, ge=0)
    """Tests a problem is judged on, chosen by its id and so the same for every sample (Klear-Reasoner draws 16 anew for each
    sample); 0 for all. For benchmark numbers use 0."""
    max_timeouts: int = Field(default=2, ge=1)
    """Tests that may run into a time limit; the rest then counts as failed without being run."""
    cpu_s: float = Field(default=10.0, gt=0, le=600)
    """CPU time of one test where the problem gives no limit (LiveCodeBench 6 s, Klear-Reasoner 35 s of wall clock)."""
    time_limit_scale: float = Field(default=3.0, ge=1, le=20)
    """A problem's own time limit is meant for C++; Python gets this many times as long."""
    wall_factor: float = Field(default=3.0, ge=1, le=20)
    """Wall clock of a test in CPU limits (plus 2 s), for programs that sleep; a loaded machine must not fail programs."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address space of a test's process where the problem gives no limit (Klear-Reasoner: 1024 MB)."""
    recursion_limit: int = Field(default=1000, ge=100, le=100_000)
    """Python's limit on nested calls when a program starts (frames); it may raise its own. 1,000 is the interpreter's default,
    which HumanEval's harness leaves as it is; LiveCodeBench's harness sets 50,000."""
    max_program_kb: int = Field(default=256, ge=1, le=4096)
    """Longer programs are not run."""
    max_test_mb: int = Field(default=64, ge=1, le=1024)
    """Tests that are larger in all make the reference bad."""


class SandboxConfig(Settings):
    """What untrusted programs may use. Everything here is enforced by the kernel inside the jail."""

    processes: int = Field(default=64, ge=4, le=4096)
    """Processes and threads at one time, the supervisor's included."""
    open_files: int = Field(default=64, ge=60, le=4096)
    """File descriptors of a process."""
    output_mb: int = Field(default=16, ge=1, le=512)
    """Standard output, any file, and a call's result."""
    total_memory_mb: int = Field(default=3072, ge=256)
    """Resident memory of all processes of a jail together, polled 20 times a second."""
    python: str = ""
    """Interpreter inside the sandbox; empty: /usr/bin/python3 where there is one, else our own."""
    with_packages: bool = False
    """Let programs import the interpreter's site-packages (numpy); costs some milliseconds a jail."""
    user: str = ""
    """The ordinary user to become when we are root; empty: `klear-sandbox` where it exists, else `games`."""
    programs_per_jail: int = Field(default=50, ge=1, le=10_000)
    """Programs that run one after another in one jail, each test in a process of its own; 1: a jail for each program.
    A jail is also replaced after any test that hit a limit or died of a signal."""


class VerifyRuntime(Settings):
    """How much of the machine judging takes; changes no verdict."""

    math_workers: int = Field(default=0, ge=0)
    """Processes that compare math answers; 0: one per core."""
    code_workers: int = Field(default=0, ge=0)
    """Processes that drive a jail each; 0: two per core, for half of a jail's start is waiting."""
    tasks_per_worker: int = Field(default=2000, ge=1)
    """Tasks after which a worker process is replaced, so that nothing piles up in sympy's caches."""


class VerifyConfig(Settings):
    """How answers are judged; the same in distillation, RL and evaluation."""

    window: Literal["after_think", "whole"] = "after_think"
    """Where the answer may stand: after the last `</think>` (Klear-Reasoner's RL judge) or anywhere (its benchmark judge)."""
    tags: Literal["close", "both", "none"] = "close"
    """Think tags that a response must have: `</think>`; `<think>` as well (Klear-Reasoner's code); or none.
    Templates that open `<think>` in the prompt never show it in the response, hence the default."""
    math: MathConfig = MathConfig()
    code: CodeConfig = CodeConfig()
    sandbox: Literal["auto", "firejail", "bubblewrap", "rlimits-only"] = "auto"
    """What holds untrusted programs. `auto`: the first of firejail and bubblewrap that proves its isolation; without one nothing
    runs. `rlimits-only` has no namespaces: programs see the machine's files; it is logged and noted in the artifact."""
    limits: SandboxConfig = SandboxConfig()
    max_failed_frac: float = Field(default=0.1, gt=0, le=1)
    """Above this share of verdicts that failed for reasons of ours (judge_failed, sandbox_failed, timed_out) the stage stops."""
    min_failed_count: int = Field(default=20, ge=1)
    """Failures before the share is looked at, so that a small sample stops nothing."""
    runtime: VerifyRuntime = VerifyRuntime()
