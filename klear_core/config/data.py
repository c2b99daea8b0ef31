"""Settings of benchmarks and of curation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from klear_core.config.base import Floor, Settings

RowSchema = Literal[
    "auto",
    "klear_rl",
    "verl",
    "deepscaler",
    "deepmath",
    "gsm8k",
    "math500",
    "amc23",
    "nemo",
    "klear_bench",
    "rllm_code",
    "lcb",
    "apps",
    "mbpp",
    "humaneval",
    "leetcode",
    "problem",
]
"""Published row formats; `auto` decides by the keys of the first row, `problem` is Klear's own."""


class ProceduralSource(Settings):
    """Chains of + - * modulo a number, written by us, with a known answer and difficulty (the number of operations)."""

    kind: Literal["procedural"] = "procedural"
    name: str = Field(default="chain", min_length=1)
    """By this its problems are counted and seeded."""
    modulus: int = Field(default=10, ge=2, le=10)
    """Answers are in 0..modulus-1."""
    num_operations: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    """The difficulty levels, mixed evenly. A length left out is hardly learnt: trained on even ones alone, a model fails at 3, 5 and 7."""
    num_problems: int = Field(default=4096, ge=1)
    """Distinct questions, spread evenly over the levels."""
    split: Literal["train", "heldout"] = "train"
    """A problem belongs to one split by a hash of its text, so the two never share one, whatever the seeds."""


class FileSource(Settings):
    """A local JSONL, JSON or Parquet file (also .gz) in a published schema."""

    kind: Literal["file"] = "file"
    name: str = ""
    """Empty: the file's stem."""
    path: str
    """Relative paths are taken from the working directory."""
    row_schema: RowSchema = "auto"
    """Must be named only where the keys of the first row fit several formats."""
    limit: int | None = Field(default=None, ge=1)
    """Take this many rows from the start; None takes all."""


def _path_as_source(value: object) -> object:
    return {"kind": "file", "path": value} if isinstance(value, str) else value


Source = Annotated[Annotated[ProceduralSource | FileSource, Field(discriminator="kind")], BeforeValidator(_path_as_source)]
"""A bare path stands for a file whose schema is told from its first row."""


class DedupConfig(Settings):
    """Exact removal of repeated questions after normalisation (Klear-Reasoner section 3.1; its rule is undisclosed)."""

    normalise: bool = True
    """Compare NFKC, lower-cased text with white space, punctuation and LaTeX typesetting folded; False compares the text as it is."""


class DecontaminateConfig(Settings):
    """Removal of training prompts that share word n-grams with a benchmark question (Klear-Reasoner section 3.1: 9-grams)."""

    ngram: int = Field(default=9, ge=3, le=50)
    """Words in a gram. Benchmark questions of fewer words are looked for whole."""
    min_overlap: int = Field(default=1, ge=1)
    """Shared grams that condemn a prompt. Undisclosed in the paper; one is the strictest."""
    min_coverage: float = Field(default=0.0, ge=0, le=1)
    """Share of one benchmark question's grams that a prompt must have. 0 is the paper's rule; statements of programming
    contests share so many phrases that 0.3 keeps prompts which the paper's rule loses."""
    max_questions_per_gram: int = Field(default=10, ge=1)
    """A gram of more benchmark questions than this is a manner of speaking ("the input is given from standard input in the
    following format" opens every AtCoder problem) and condemns nothing. Ours: the paper does not say."""
    also: tuple[FileSource, ...] = ()
    """Question sets to keep out of training besides the benchmarks; they need no references."""


class DifficultyConfig(Settings):
    """Tags from the source's own rating in [0, 1] (the share of its scale); sources without one are tagged unknown."""

    easy_below: float = Field(default=0.34, ge=0, le=1)
    """Share of the scale below which a problem is easy. Thirds: the paper's thresholds are undisclosed."""
    hard_from: float = Field(default=0.67, ge=0, le=1)
    """Share of the scale from which a problem is hard; in between it is medium."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.easy_below > self.hard_from:
            raise ValueError(f"easy_below = {self.easy_below} is above hard_from = {self.hard_from}")
        return self


class ReadFloor(Floor):
    """The share of a source's rows that can be used."""

    warn_below: float = Field(default=0.99, ge=0, le=1)
    """A smaller share is a warning on the terminal and in the report. Measured: the published sets lose 0.2 % at most."""


class CurateRuntime(Settings):
    """What does not change the problems."""

    rows_per_shard: int = Field(default=4096, ge=1)
    """Problems, or drops, in one Parquet file."""
    read: ReadFloor = ReadFloor()
    """Of each source by itself: rows that can be read and have a question and a reference."""


class CurateConfig(Settings):
    """Which prompts to train on: sources, then dedup, decontamination, difficulty tags. No accuracy filter."""

    sources: tuple[Source, ...] = Field(default=(ProceduralSource(),), min_length=1)
    """Where two have the same question, the one that stands first here keeps it."""
    dedup: DedupConfig = DedupConfig()
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    max_question_chars: int = Field(default=20_000, ge=1)
    """Longer questions are dropped: about 5000 tokens, a little more than the 4096 of prompt in the published RL scripts."""
    runtime: CurateRuntime = CurateRuntime()


class BenchmarkConfig(Settings):
    """A named set of problems that is never trained on."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """How scores and reports call it."""
    source: Source
    expected_rows: int | None = Field(default=None, ge=1)
    """Checked when the benchmark is loaded, and again when it is reused (AIME 30, LiveCodeBench v5 279, v6 131)."""
    num_samples: int = Field(default=4, ge=1)
    """n of avg@n. The paper: 64 for AIME and HMMT, 8 for LiveCodeBench (Table 1)."""
