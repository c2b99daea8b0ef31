"""Define the settings of distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.base import Floor, RareFloor, Settings
from klear_core.config.engine import HttpRuntime
from klear_core.types import Difficulty


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


class HttpTeacherConfig(Settings):
    """A reasoning model behind an OpenAI-compatible chat endpoint (DeepSeek-R1-0528 in the paper)."""

    kind: Literal["http"] = "http"
    base_url: str = Field(pattern=r"^https?://[^/\s]+")
    """URL before `/chat/completions`, such as `https://api.deepseek.com/v1`."""
    model: str = Field(min_length=1)
    """Model name at the endpoint (`deepseek-reasoner`, `DeepSeek-R1-0528`)."""
    api_key_env: str = ""
    """Name of the environment variable that holds the API key; the key itself is never a setting."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature. Undisclosed in the paper; DeepSeek's recommendation for R1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling threshold. Undisclosed in the paper; DeepSeek's recommendation for R1."""
    max_tokens: int = Field(default=32_768, ge=1)
    """Tokens of one reply, reasoning included. Undisclosed in the paper; its SFT rows have at most 32K (section
    4.1)."""
    math_instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Appended to math questions for the teacher only; DeepSeek's recommendation for R1. Empty appends nothing."""
    code_instruction: str = ""
    """Appended to code questions for the teacher only. Empty appends nothing."""
    send_seed: bool = True
    """Send a seed with every request, which vLLM and SGLang accept; False for endpoints that refuse the field."""
    runtime: HttpRuntime = HttpRuntime()


TeacherConfig = Annotated[ProceduralTeacherConfig | HttpTeacherConfig, Field(discriminator="kind")]

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
    """Traces per shard, the unit of resume: a killed distillation loses its unfinished shards.
    All samples of a problem are in one shard."""
    max_in_flight: int = Field(default=256, ge=1)
    """Problems solved or judged at a time; the teacher's `max_concurrency` bounds its requests."""
    whole: Floor = Floor()
    """Share of the requested answers that arrived complete (reasoning and answer, not cut off) and could be judged."""
    selected: RareFloor = RareFloor()
    """Share of the complete answers that `select` keeps."""


class DistillConfig(Settings):
    """Teacher traces for the curated problems."""

    teacher: TeacherConfig = ProceduralTeacherConfig()
    samples_per_problem: int = Field(default=1, ge=1, le=64)
    """Teacher replies per problem. Paper: up to 16."""
    max_problems: int | None = Field(default=None, ge=1)
    """Number of curated problems to distill, drawn by the run's seed; None takes all."""
    select: SelectConfig = SelectConfig()
    max_failure_rate: float = Field(default=0.05, ge=0, le=1)
    """The stage stops above this share of failed requests or judgements."""
    runtime: DistillRuntime = DistillRuntime()
