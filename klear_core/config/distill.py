"""Settings of distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.base import Floor, RareFloor, Settings
from klear_core.config.engine import HttpRuntime
from klear_core.types import Difficulty


class ProceduralTeacherConfig(Settings):
    """Solves chain problems step by step in the R1 shape, with slips and a blind spot, so that errors are real errors."""

    kind: Literal["procedural"] = "procedural"
    slip_rate: float = Field(default=0.03, ge=0, le=1)
    """Chance of a wrong result at each step: longer problems are wrong more often."""
    blind_spot_rate: float = Field(default=0.6, ge=0, le=1)
    """Chance of a wrong result at a step of the blind spot: always one more than is right, so that who imitates the teacher
    believes it, greedily too. At more than 0.5 only RL can tell."""
    blind_spot_factors: tuple[int, ...] = (7, 8, 9)
    """Multiplications by these are the blind spot."""


class HttpTeacherConfig(Settings):
    """A reasoning model behind an OpenAI-compatible chat endpoint (DeepSeek-R1-0528 in the paper)."""

    kind: Literal["http"] = "http"
    base_url: str = Field(pattern=r"^https?://[^/\s]+")
    """Up to and without `/chat/completions`: `https://api.deepseek.com/v1`."""
    model: str = Field(min_length=1)
    """As the endpoint calls it (`deepseek-reasoner`, `DeepSeek-R1-0528`)."""
    api_key_env: str = ""
    """Name of the environment variable with the key; the key itself is never a setting."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """Undisclosed in the paper; DeepSeek's own recommendation for R1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Undisclosed in the paper; DeepSeek's own recommendation for R1."""
    max_tokens: int = Field(default=32_768, ge=1)
    """Of one reply, thinking included. Undisclosed in the paper; its SFT rows are at most 32K tokens long (section 4.1)."""
    math_instruction: str = "Please reason step by step, and put your final answer within \\boxed{}."
    """Added below a math question for the teacher alone; DeepSeek's own advice for R1. Empty adds nothing."""
    code_instruction: str = ""
    """Added below a code question for the teacher alone."""
    send_seed: bool = True
    """Send a seed with every request, as vLLM and SGLang take it; False for endpoints that refuse the field."""
    runtime: HttpRuntime = HttpRuntime()


TeacherConfig = Annotated[ProceduralTeacherConfig | HttpTeacherConfig, Field(discriminator="kind")]

TracePolicy = Literal["all", "correct_only"]


class SelectConfig(Settings):
    """Which traces to keep, by the problem's difficulty. The paper keeps all (section 3.1); for easy ones its Table 2 favours
    correct only."""

    easy: TracePolicy = "all"
    """Paper: all; `correct_only` is what its Table 2 favours for problems this easy."""
    medium: TracePolicy = "all"
    """Paper: all."""
    hard: TracePolicy = "all"
    """Paper: all, and its Table 2 agrees: wrong answers to hard problems still teach."""
    unknown: TracePolicy = "all"
    """Where the source has no rating. Paper: all."""
    keep_truncated: bool = False
    """Keep traces that ran out of tokens: they have no answer to learn."""
    keep_unjudged: bool = False
    """Keep traces whose judge failed."""

    def policy_for(self, difficulty: Difficulty) -> TracePolicy:
        """The policy of a difficulty's traces."""
        policies: dict[Difficulty, TracePolicy] = {
            Difficulty.EASY: self.easy,
            Difficulty.MEDIUM: self.medium,
            Difficulty.HARD: self.hard,
            Difficulty.UNKNOWN: self.unknown,
        }
        return policies[difficulty]


class DistillRuntime(Settings):
    """What does not change the traces."""

    traces_per_shard: int = Field(default=256, ge=1)
    """A shard is the unit of resume: a killed distillation loses what was in flight and the shards that waited for it.
    All samples of a problem are in one shard."""
    max_in_flight: int = Field(default=256, ge=1)
    """Problems being solved or judged at a time; the teacher's `max_concurrency` bounds its requests."""
    whole: Floor = Floor()
    """Of the answers asked for: those that came, with reasoning and answer, not cut off, and could be judged."""
    selected: RareFloor = RareFloor()
    """Of the whole answers: those that `select` keeps."""


class DistillConfig(Settings):
    """Teacher traces for the curated problems."""

    teacher: TeacherConfig = ProceduralTeacherConfig()
    samples_per_problem: int = Field(default=1, ge=1, le=64)
    """Paper: up to 16."""
    max_problems: int | None = Field(default=None, ge=1)
    """Ask the teacher about this many of the curated problems, drawn by the run's seed; None asks about all."""
    select: SelectConfig = SelectConfig()
    max_failure_rate: float = Field(default=0.05, ge=0, le=1)
    """Above this share of failed requests or judgements the stage stops."""
    runtime: DistillRuntime = DistillRuntime()
