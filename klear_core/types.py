"""Define the records that flow through Klear. Importing this loads nothing heavy.

Axis letters used with tensors and ragged lists: R rows, T tokens, G samples of one prompt, P prompts, H hidden, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """One run of a program: its standard input and the expected standard output."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """One call: a JSON array of arguments and the expected JSON value."""

    args_json: str
    expected_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTests:
    """Test cases for a program that reads standard input and writes standard output."""

    cases: tuple[StdinCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """Calls of `fn_name`, a function or a method of the class `Solution` (LeetCode, LiveCodeBench)."""

    fn_name: str
    cases: tuple[CallCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTests:
    """Python source of assertions, one test per entry (HumanEval, MBPP)."""

    programs: tuple[str, ...]


Tests = StdinTests | CallTests | AssertTests
TestKind = Literal["stdin", "call", "asserts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTests:
    """A handle to large tests in a file, from which `load_tests` of `artifacts.records` reads them for judging."""

    path: str
    """The file; in a shard its name alone, because it is in the shard's folder."""
    offset: int
    num_bytes: int
    """Size in the file, compressed."""
    kind: TestKind
    num_tests: int
    num_chars: int
    """Characters of all tests together, uncompressed."""
    digest: str
    """BLAKE2b of the compressed bytes, 32 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReference:
    """The tests of a code problem. `checker` is Python source of a special judge, empty if answers are unique."""

    tests: StdinTests | CallTests | AssertTests | StoredTests
    time_limit_s: float | None = None
    memory_limit_mb: int | None = None
    is_order_free: bool = False
    checker: str = ""

    @property
    def test_kind(self) -> TestKind:
        """Return how the tests run a program; stored tests are not read for it."""
        tests = self.tests
        match tests:
            case StdinTests():
                return "stdin"
            case CallTests():
                return "call"
            case AssertTests():
                return "asserts"
            case StoredTests():
                return tests.kind
            case _:
                assert_never(tests)

    @property
    def num_tests(self) -> int:
        """Return the number of test cases, or of assertion programs; stored tests are not read for it."""
        tests = self.tests
        match tests:
            case StdinTests() | CallTests():
                return len(tests.cases)
            case AssertTests():
                return len(tests.programs)
            case StoredTests():
                return tests.num_tests
            case _:
                assert_never(tests)


# ---- records ----


class Domain(StrEnum):
    """The domain of a problem, which decides the verifier."""

    MATH = "math"
    CODE = "code"


class Difficulty(StrEnum):
    """The difficulty of a problem, for the reference model or by its source's rating."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """The outcome of judging one answer. Only SCORED and NO_ANSWER say something about the model.

    No answer can bring about another outcome: BAD_REFERENCE is the result of a trial of the reference alone, and the
    last three are the machine's or the judge's.
    """

    SCORED = "scored"
    NO_ANSWER = "no_answer"
    BAD_REFERENCE = "bad_reference"
    UNVERIFIABLE = "unverifiable"
    """The problem has no reference: a property of its source, not a fault."""
    JUDGE_FAILED = "judge_failed"
    SANDBOX_FAILED = "sandbox_failed"
    TIMED_OUT = "timed_out"

    @property
    def counts_for_model(self) -> bool:
        """Whether the score may reward or punish the model (the rest is counted and left out)."""
        return self in (Outcome.SCORED, Outcome.NO_ANSWER)


FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token; `length`: the token budget ran out; `abort`: stopped by Klear (new weights, shutdown)."""
TeacherFinish = Literal["stop", "length", "content_filter", "tool_calls", "other"]
"""`stop` and `length` as above; `content_filter`: the teacher or its provider refused to answer; `tool_calls`: it
called a tool instead; `other`: the reply has a shape that is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReference:
    """The accepted answers of a math problem; each of them is right."""

    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnverifiableReference:
    """Stands for the reference of a problem whose source has none: it can be distilled, not judged."""

    domain: Domain
    why: str
    """The thing that the source lacks, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomReference:
    """The reference of a problem for a judge of the user's own; `verify.judges` binds the name to a function."""

    judge: str
    domain: Domain
    value_json: str
    """JSON text of the value that the judge compares answers with; only the judge knows its form."""


Reference = MathReference | CodeReference | CustomReference | UnverifiableReference


def domain_of(reference: Reference) -> Domain:
    """Return the domain of the problems that have such a reference."""
    match reference:
        case MathReference():
            return Domain.MATH
        case CodeReference():
            return Domain.CODE
        case CustomReference(domain=domain) | UnverifiableReference(domain=domain):
            return domain
        case _:
            assert_never(reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt with its reference. `problem_id` is `problem_id_of(question, domain)`."""

    problem_id: str
    source: str
    domain: Domain
    question: str
    reference: Reference
    difficulty: Difficulty


def problem_id_of(question: str, domain: Domain) -> str:
    """Return 16 hex digits of domain and question: the same text has the same id in every run and source."""
    return hashlib.blake2b(f"{domain}\x1f{question.strip()}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Counts of a reference model's right and judged answers to a problem."""

    problem_id: str
    num_correct: int
    num_scored: int
    """At least 1."""

    @property
    def value(self) -> float:
        """Share of right answers."""
        return self.num_correct / self.num_scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """One item that a step removed, and why (`reason` is a short slug that ledgers count by)."""

    problem_id: str
    step: str
    reason: str
    detail: str
    matched_id: str = ""
    """Id of the problem or benchmark question that it repeats; empty if it was dropped for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer. `logps` are the engine's, at its sampling temperature, one per token (nats)."""

    text: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: FinishReason
    policy_versions: tuple[int, ...]
    """The version of the weights that sampled each token; all equal unless the weights changed midway."""
    top_ids: tuple[int, ...] = ()
    """Of a teacher asked about given tokens: its K likeliest tokens in place of each, token after token."""
    top_logps: tuple[float, ...] = ()
    """The log-probs of `top_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's judgement of one answer. `score` has a meaning only if the outcome is the model's doing."""

    outcome: Outcome
    score: float
    detail: str = ""

    @property
    def is_correct(self) -> bool:
        """Whether the answer meets the complete reference: a program that passes only some of its tests is wrong."""
        return self.outcome is Outcome.SCORED and self.score >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """One sampled answer with its judgement: the argument of a reward function of the user's own."""

    problem_id: str
    source: str
    question: str
    answers: tuple[str, ...]
    """The accepted answers of a math problem; empty for others."""
    text: str
    """The complete model output, think tags included."""
    score: float
    """The verdict's score: 1 for a right answer, 0 for a wrong or missing one. Between them are programs, with the
    share of their tests that they passed (unless `code.score` is `hard`), and what judges of the user's own give."""
    num_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerToJudge:
    """One sampled answer with its reference: the argument of a judge of the user's own."""

    problem_id: str
    source: str
    question: str
    """Empty for the rows of `klear judge`, which have none."""
    reference: Any
    """The `value` of the problem's reference, as JSON holds it."""
    answer: str
    """The part of the response in which an answer may be: what follows the last `</think>`, unless `verify.window` is
    `whole`."""
    box: str | None
    r"""Content of the last `\boxed{}` of `answer`; None if there is none, or it is not closed."""
    response: str
    """The complete model output, think tags included."""


Judge = Callable[[Problem, str], Awaitable[Verdict]]
"""Returns the verdict on a complete model output, think tags included; the real one is `JudgePool.judge_async`."""

RewardFunction = Callable[[Problem, Completion, Verdict], Awaitable[Mapping[str, float | None]]]
"""Returns the values of the user's rewards by name, None for one that failed by itself, FAILED_ON_ANSWER for one that
failed on this answer alone; the real one is `UserRewards`."""
FAILED_ON_ANSWER = -math.inf
"""Value of a user's reward that failed on an answer, until the answer's group is complete (`with_failed_values`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherReply:
    """One unprocessed teacher sample: reasoning without its tags, the text after it, and how it ended."""

    reasoning: str
    answer: str
    finish_reason: TeacherFinish
    num_tokens: int
    """Tokens as counted by the teacher's endpoint, or estimated if it counts none; for teachers that
    are programs, whitespace-separated words."""
    defect: str = ""
    """What is wrong with the shape of the reply, for people; empty if nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTrace:
    """A teacher reply with its problem and verdict. Wrong replies are kept."""

    problem_id: str
    question: str
    difficulty: Difficulty
    source: str
    teacher: str
    sample_idx: int
    reasoning: str
    answer: str
    finish_reason: TeacherFinish
    num_tokens: int
    verdict: Verdict
    prompt_version: str


class TokenRow(Protocol):
    """A row that can be packed. Token i carries loss if `loss_mask[i]`; the first never does: nothing predicts it."""

    @property
    def token_ids(self) -> Sequence[int] | np.ndarray:
        """Return the tokens of prompt and response."""

    @property
    def loss_mask(self) -> Sequence[bool] | np.ndarray:
        """Return the loss mask, as long as `token_ids`."""

    @property
    def num_tokens(self) -> int:
        """Return the length of `token_ids`. Counts need no tokens, which only the rank of a row must have."""

    @property
    def num_loss_tokens(self) -> int:
        """Return how many tokens carry loss."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens before the first that carries loss; all if none does."""

    @property
    def prompt_key(self) -> Hashable:
        """Return what rows share if and only if their prompts are equal."""


class TokenCounts:
    """Counts of a row that has its tokens, by looking at them; a row whose tokens are elsewhere knows its own."""

    __slots__ = ()
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that carry loss."""
        return sum(self.loss_mask)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens before the first that carries loss; all if none does."""
        return self.loss_mask.index(True) if any(self.loss_mask) else len(self.token_ids)

    @property
    def prompt_key(self) -> Hashable:
        """Return what rows share if and only if their prompts are equal."""
        return tuple(self.token_ids[: self.num_prompt_tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample(TokenCounts):
    """One training row; `loss_mask` is True on the tokens to learn."""

    problem_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One judged completion. `reward` includes format terms and has a meaning only if the outcome counts for the
    model."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    verdict: Verdict
    reward: float
    is_positive: bool
    """Right and well-formed; a right answer without its tags is not."""
    custom_rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Values of the user's rewards by name, without their weights; None for one that failed by itself, and then
    `reward` has no meaning."""
    failed_rewards: tuple[str, ...] = ()
    """Names of the user's rewards that failed on this answer: `failed_value`, or the group's least gain, counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt in one step."""

    problem: Problem
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample(TokenCounts):
    """One rollout prepared for training: prompt and response. Mask and log-probs are zero on the prompt."""

    problem_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    sampler_logps: tuple[float, ...]
    """Log-probs reported by the engine that sampled the tokens."""
    advantage: float
    """Of the whole answer."""
    is_positive: bool
    """Copied from the rollout: the language-model loss learns from positive samples."""
    oldest_version: int
    """Oldest version of the weights that sampled one of its tokens."""
    teacher_logps: tuple[float, ...] = ()
    """A teacher's log-probs of these tokens, at the sampling temperature; empty without a teacher."""
    top_ids: tuple[int, ...] = ()
    """The teacher's K likeliest tokens in place of each loss token, token after token; empty if it was not asked."""
    top_logps: tuple[float, ...] = ()
    """The teacher's log-probs of `top_ids`."""

    @property
    def has_teacher(self) -> bool:
        """Return whether it has a teacher's log-probs."""
        return len(self.teacher_logps) > 0


TeacherLogps = Callable[[Sequence[TrainSample]], Awaitable[tuple[TrainSample, ...]]]
"""Returns answers with a teacher's log-probs of their tokens; the real one is that of `live_teacher`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """One judged benchmark answer. `decoding` is "sampled" or "greedy"; greedy has one sample, index 0."""

    benchmark: str
    problem_id: str
    question: str
    """As it was asked: in the benchmark's prompt, or in a template."""
    difficulty: Difficulty
    decoding: Literal["sampled", "greedy"]
    sample_idx: int
    response: str
    num_tokens: int
    finish_reason: FinishReason
    verdict: Verdict
