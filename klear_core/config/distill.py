"""Define the settings of distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.evaluate import (
    ChatRuntime,
    ChatSettings,
    LocalEngineConfig,
    PoolRuntime,
    SamplingConfig,
    TorchEngineConfig,
)
from klear_core.config.settings import RareYieldLimits, Settings, YieldLimits
from klear_core.config.train import GivenModel
from klear_core.types import Difficulty

IncompleteReason = Literal["no_reasoning", "no_answer", "refused"]


class ProceduralTeacherConfig(Settings):
    """Solves chain problems step by step in R1's response format, with random slips and a systematic blind spot."""

    kind: Literal["procedural"] = "procedural"
    slip_rate: float = Field(default=0.03, ge=0, le=1)
    """Probability of a wrong result at each step; longer problems are therefore wrong more often."""
    blind_spot_rate: float = Field(default=0.6, ge=0, le=1)
    """Probability of a wrong result at a blind-spot step. The wrong result is always one too high, so that a student
    learns it. Above 0.5 the student's greedy answer is wrong too, and only RL can correct it."""
    blind_spot_factors: tuple[int, ...] = (7, 8, 9)
    """Multiplications by these factors are the blind spot."""

    @property
    def keep_incomplete(self) -> tuple[IncompleteReason, ...]:
        """Return no reasons: its replies are complete."""
        return ()


class PuzzleTeacherConfig(Settings):
    """Solves puzzles and chains step by step in R1's response format, with random slips and systematic blind spots."""

    kind: Literal["puzzles"] = "puzzles"
    slip_rate: float = Field(default=0.02, ge=0, le=1)
    """Probability of a wrong result at each step; longer solutions are therefore wrong more often."""
    blind_spot_rate: float = Field(default=0.6, ge=0, le=1)
    """Probability of the wrong result where the family has its blind spot: products by 4, 5 and 6 and sums that end in
    7, 8 or 9 are one too high, "at least" and "at most" lose their equal sign. Above 0.5 the student's greedy answer is
    wrong too."""

    @property
    def keep_incomplete(self) -> tuple[IncompleteReason, ...]:
        """Return no reasons: its replies are complete."""
        return ()


class HttpTeacherConfig(ChatSettings):
    """A reasoning model behind OpenAI-compatible chat endpoints (DeepSeek-R1-0528 in the paper).

    `base_url`, key and prices directly under the teacher are short for one endpoint under `runtime.endpoints`.
    """

    kind: Literal["http"] = "http"
    model: str = Field(min_length=1)
    """Model name at the endpoints (`deepseek-reasoner`, `DeepSeek-R1-0528`)."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature. Undisclosed in the paper; DeepSeek's recommendation for R1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling threshold. Undisclosed in the paper; DeepSeek's recommendation for R1."""
    max_tokens: int = Field(default=32_768, ge=1)
    """Tokens of one reply, reasoning included. Undisclosed in the paper; its SFT rows have at most 32K (section
    4.1). A longer reply of a server that ignores the limit is cut and counts as truncated."""
    math_instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Appended to math questions for the teacher only; DeepSeek's recommendation for R1. Empty appends nothing."""
    code_instruction: str = ""
    """Appended to code questions for the teacher only. Empty appends nothing."""
    send_seed: bool = True
    """Send a seed with every request, which vLLM and SGLang accept; False for endpoints that refuse the field."""
    keep_incomplete: tuple[IncompleteReason, ...] = ()
    """Incomplete replies that become traces all the same: without reasoning, without an answer, or refused by a content
    filter. Truncated ones follow `distill.select.keep_truncated`; empty ones are never used."""
    runtime: ChatRuntime


class TeacherSamplingConfig(SamplingConfig):
    """Sampling parameters of a local teacher; undisclosed in the paper, these are DeepSeek's for R1."""

    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature; 0 is greedy. DeepSeek's recommendation for R1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off. DeepSeek's recommendation
    for R1."""


class LocalTeacherConfig(Settings):
    """A reasoning model whose weights are here: engines of the pipeline sample from it, as in evaluation."""

    kind: Literal["local"] = "local"
    model: GivenModel | None = None
    """The teacher, by folder or by Hub id; None: the base model of this pipeline."""
    engine: LocalEngineConfig = TorchEngineConfig()
    sampling: TeacherSamplingConfig = TeacherSamplingConfig()
    math_instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Appended to math questions for the teacher only; DeepSeek's recommendation for R1. Empty appends nothing."""
    code_instruction: str = ""
    """Appended to code questions for the teacher only. Empty appends nothing."""
    keep_incomplete: tuple[IncompleteReason, ...] = ()
    """Incomplete replies that become traces all the same: without reasoning, or without an answer. Truncated ones
    follow `distill.select.keep_truncated`; empty ones are never used."""
    runtime: PoolRuntime = PoolRuntime()


TeacherConfig = Annotated[
    ProceduralTeacherConfig | PuzzleTeacherConfig | HttpTeacherConfig | LocalTeacherConfig, Field(discriminator="kind")
]

TracePolicy = Literal["all", "correct_only"]


class SelectConfig(Settings):
    """Selection of traces by difficulty. Paper: all (section 3.1); for easy ones its Table 2 favours correct only."""

    easy: TracePolicy = "all"
    """Traces of easy problems. Paper: all; its Table 2 favours `correct_only` for them."""
    medium: TracePolicy = "all"
    """Traces of medium problems. Paper: all."""
    hard: TracePolicy = "all"
    """Traces of hard problems. Paper: all; its Table 2 agrees that wrong answers to hard problems still help."""
    unknown: TracePolicy = "all"
    """Traces of problems without a rating. Paper: all."""
    keep_truncated: bool = False
    """Keep traces that ran out of tokens, which have no answer to learn from."""
    keep_unjudged: bool = False
    """Keep traces whose judge failed."""

    def policy_for(self, difficulty: Difficulty) -> TracePolicy:
        """Return the policy for traces of a difficulty."""
        policies: dict[Difficulty, TracePolicy] = {
            Difficulty.EASY: self.easy,
            Difficulty.MEDIUM: self.medium,
            Difficulty.HARD: self.hard,
            Difficulty.UNKNOWN: self.unknown,
        }
        return policies[difficulty]


class DistillRuntime(Settings):
    """Settings that do not change the traces."""

    traces_per_shard: int = Field(default=256, ge=1)
    """Traces per file. All samples of a problem are in one file."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Problems solved or judged at a time; the teacher bounds its requests itself."""
    fsync_s: float = Field(default=5.0, ge=0)
    """Seconds after which replies of a teacher over HTTP, written as they arrive, are forced to the disk. A killed
    process loses none of them; a power cut loses those of the last seconds."""
    complete: YieldLimits = YieldLimits()
    """Share of the requested answers that arrived complete (reasoning and answer, not cut off) and could be judged."""
    selected: RareYieldLimits = RareYieldLimits()
    """Share of the complete answers that `select` keeps."""


class DistillConfig(Settings):
    """Teacher traces for the curated problems."""

    teacher: TeacherConfig = ProceduralTeacherConfig()
    samples_per_problem: int = Field(default=1, ge=1, le=64)
    """Teacher replies per problem. Paper: up to 16."""
    difficulties: tuple[Difficulty, ...] = Field(default=(), exclude_if=lambda tags: not tags)
    """Tags of the problems to distill; empty: all. For comparisons by difficulty, as in the paper's Table 2."""
    max_problems: int | None = Field(default=None, ge=1)
    """Number of these problems to distill, drawn by the run's seed; None takes all."""
    select: SelectConfig = SelectConfig()
    max_failure_rate: float = Field(default=0.05, ge=0, le=1)
    """The stage stops above this share of failed requests or judgements."""
    runtime: DistillRuntime = DistillRuntime()
