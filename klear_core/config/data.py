"""Define the settings of data sources and benchmarks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from klear_core.config.benchmark_prompts import check_prompt
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS, DateWindow, with_known_facts
from klear_core.config.settings import Settings
from klear_core.config.verify import JUDGE_NAME_PATTERN

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
    "mbpp_benchmark",
    "mbpp_plus",
    "humaneval",
    "leetcode",
    "math_benchmark",
    "gpqa",
    "mmlu_pro",
    "ifeval",
    "ifeval_loose",
    "problem_answer",
    "big_math",
    "numinamath",
    "numinamath_cot",
    "code_contests",
    "codeforces",
    "open_thoughts",
    "open_thoughts_metadata",
    "acereason_sft",
    "open_code_reasoning",
    "open_code_reasoning_2",
    "problem",
    "mapped",
]
"""Published row formats. `auto` detects the format from the keys of the first row, `problem` is Klear's own, `mapped`
reads the places in `fields`."""


class ProceduralSource(Settings):
    """Generated chains of + - * modulo a number, with exact answers; the number of operations is the difficulty."""

    kind: Literal["procedural"] = "procedural"
    name: str = Field(default="chain", min_length=1)
    """Name under which the problems are counted; it also enters their random seed."""
    modulus: int = Field(default=10, ge=2, le=10)
    """Answers are in 0..modulus-1."""
    num_operations: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    """The difficulty levels, mixed evenly. Models hardly generalise to omitted lengths: trained on even ones only, a
    model fails at 3, 5 and 7."""
    num_problems: int = Field(default=4096, ge=1)
    """Distinct questions, spread evenly over the levels."""
    split: Literal["train", "heldout"] = "train"
    """Split to draw from. A hash of a problem's text decides its split, so the two never overlap for any
    seeds."""


PuzzleFamily = Literal["brackets", "residues", "programs"]
"""`brackets`: nested + - * modulo 7, rewritten step by step; `residues`: the least x with b+ax=c modulo 11 or 13,
found by trying; `programs`: a Python function over a list, judged by calls."""


class PuzzleSource(Settings):
    """Generated problems with long solutions, of one family; the level is the difficulty."""

    kind: Literal["puzzles"] = "puzzles"
    family: PuzzleFamily
    """Kind of puzzle, all of one source."""
    name: str = Field(min_length=1)
    """Name under which the problems are counted; it also enters their random seed."""
    levels: tuple[int, ...]
    """The difficulty levels, mixed evenly: operations (`brackets`, `programs`), or the answer, at most 12
    (`residues`)."""
    num_problems: int = Field(ge=1)
    """Distinct questions, spread evenly over the levels."""
    split: Literal["train", "heldout"] = "train"
    """Split to draw from, decided by a hash of a problem's text as for chains."""


REASONING_GYM: Final = "0.1.25"
"""Version of reasoning-gym that the extra `gym` pins: another one may make other problems from the same seed."""
GymValue = bool | int | float | str
"""A value of a task's configuration."""


class GymSource(Settings):
    """Problems of one task of reasoning-gym, which generates them from a seed; needs the extra `gym`.

    Its own scorer judges the answers; no rows are downloaded.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name of the task, such as `chain_sum`; docs/data/reasoning_gym.md lists them."""
    name: str = Field(min_length=1)
    """Name under which the problems are counted, by default the task's; it also enters their random seed."""
    levels: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Levels of the task's curriculum, mixed evenly; the level over the highest one is the difficulty. Empty: the
    task's default configuration, and no difficulty."""
    config: dict[str, GymValue | tuple[GymValue, ...]] = {}
    """Settings of the task's configuration (`max_terms = 3`), over those of the level."""
    num_problems: int = Field(ge=1)
    """Problems that differ in more than their words and names, spread evenly over the levels."""
    split: Literal["train", "heldout"] = "train"
    """Split to draw from. A hash of the task, its numbers and the answer decides a problem's split (its text without
    names, where the numbers do not tell problems apart), so the two never share a problem in other words."""
    judge: Literal["own", "math"] = "own"
    """`own`: the task's scorer, which may give part of the score; `math`: the math judge, for tasks with one answer
    that it reads, which docs/data/reasoning_gym.md names."""
    instruction: str = "Put your final answer within \\boxed{}."
    """Appended to each question; empty appends nothing."""
    version: Literal["0.1.25"] = REASONING_GYM
    """Version of reasoning-gym, which is in the fingerprint."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_task(cls, given: object) -> object:
        return {"name": given["task"], **given} if isinstance(given, dict) and "task" in given else given


GeneratedSource = ProceduralSource | PuzzleSource | GymSource
"""Sources without files."""


class FieldMap(Settings):
    """Maps the values of a row to their places, for row formats that are not built in.

    A place is a key, or several joined by dots for nested values; a number counts elements of a list from 0. Values
    that are JSON text are read on the way: `reward_model.ground_truth`, `messages.0.content`.
    """

    question: str = Field(min_length=1)
    """Place of the question: a text, or a list of messages with one user turn."""
    answer: str = ""
    """Place of the math answer: a text, a number, or a list of accepted answers."""
    judge: str = Field(default="", pattern=f"^$|{JUDGE_NAME_PATTERN}")
    """Name of a judge of one's own (`verify.judges`) to judge these problems; `answer` is then the place of the value
    that it gets, which may be any JSON."""
    tests: str = ""
    """Place of the tests of a code problem, in a format that klear_core/data/formats/references.py reads."""
    fn_name: str = ""
    """Place of the name of the function that the tests call; empty: the tests name it, or use standard input."""
    starter_code: str = ""
    """Place of code to complete, which is appended to the question."""
    solution: str = ""
    """Place of a published program that solves the problem, by which curation tries the tests; empty: `solution` or
    `solutions`, where a row has them."""
    rating: str = ""
    """Place of the difficulty: a number, or easy, medium or hard."""
    rating_top: float = Field(default=1.0, gt=0)
    """The rating of the hardest problems; ratings start at 0."""
    cluster: str = Field(default="", exclude_if=lambda place: not place)
    """Place of the cluster of a benchmark's problem (its contest, subject or template), for intervals and tests; empty:
    the row's own `cluster`, `contest_id`, `subject`, `family` or `template`, if it has one."""

    as_before = {"solution": ""}

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if self.answer and self.tests:
            raise ValueError("a row has an answer or tests, not both: split the source by domain")
        if self.judge and not self.answer:
            raise ValueError(f"judge = {self.judge!r} needs `answer`, the place of the value that it compares with")
        return self


QuestionSet = Literal["taco", "apps", "code_contests", "open-r1/codeforces"]
"""Data sets in which OpenCodeReasoning looks up its questions, as its column `dataset` calls them."""


class RowSource(Settings):
    """Settings of all sources that are made of files."""

    name: str = ""
    """Name under which the rows are counted; empty: the name of the file, folder or repository."""
    row_schema: RowSchema = "auto"
    """Row format; `auto` suffices unless the keys of the first row fit several formats."""
    fields: FieldMap | None = None
    """Places of the values in a row, for row formats that are not built in; `row_schema` is then "mapped"."""
    domain: Literal["math", "code"] | None = None
    """Domain of rows that do not state theirs and have no reference that shows it; without it they are dropped."""
    subset: str = ""
    """Folder of the data files inside the source, which a dataset card calls a subset or config (`metadata`)."""
    split: str = ""
    """Split to read, as it stands in the names of the data files (`train`); needed where there are several."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to read from the start; None reads all."""
    lookup: dict[QuestionSet, str] = {}
    """Files, folders or patterns of the data sets that hold the questions of OpenCodeReasoning where its rows have `-`;
    its columns `dataset`, `split` and `index` say where. Without an entry such a row is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _mapped_by_fields(cls, given: object) -> object:
        is_mapped = isinstance(given, dict) and given.get("fields") is not None
        return {"row_schema": "mapped", **given} if is_mapped else given  # type: ignore[dict-item]

    @model_validator(mode="after")
    def _mapped_or_not(self) -> Self:
        if (self.row_schema == "mapped") != (self.fields is not None):
            raise ValueError(
                '`fields` and row_schema = "mapped" belong together: leave out row_schema, or set `fields`'
            )
        return self


class FileSource(RowSource):
    """Local JSONL, JSON, CSV, TSV (also .gz or .zst), Parquet or Arrow files in a published schema."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """A file, a folder of shards, or a pattern such as `data/train-*.parquet`; relative paths start at the working
    directory. Shards are read in the order of their names."""


class HubRuntime(Settings):
    """Settings that do not change what is downloaded."""

    cache_dir: str = ""
    """Folder in the layout of the Hub's cache; empty: the one of huggingface_hub (HF_HUB_CACHE)."""
    endpoint: str = ""
    """Address of the Hub or of a mirror; empty: the one of huggingface_hub (HF_ENDPOINT)."""


NEWEST = "newest"
"""Revision of a repository whose commit is looked up at its first use in a workspace, and recorded there."""


def _check_commit(value: object) -> object:
    if isinstance(value, str) and value != NEWEST and not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError(
            f"{value!r} is no commit: a revision has 40 hex digits, because a branch or a tag would change under the "
            f"fingerprint; the repository's page on the Hub lists its commits, and {NEWEST!r} records today's"
        )
    return value


HubRepo = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
"""A repository on the Hugging Face Hub, `owner/name`."""
HubRevision = Annotated[str, BeforeValidator(_check_commit), Field(pattern=rf"^([0-9a-f]{{40}}|{NEWEST})$")]
"""A commit, 40 hex digits; or `newest`, the commit at the first use, which the workspace records."""


class HubSource(RowSource):
    """The data files of a dataset repository on the Hugging Face Hub, downloaded once into the Hub's cache."""

    kind: Literal["hub"] = "hub"
    repo: HubRepo
    """Dataset repository, `owner/name`."""
    revision: HubRevision
    """Commit, 40 hex digits. A branch would change under the fingerprint; the repository's page lists its commits."""
    files: str = ""
    """Pattern of the data files inside the repository (`data/train-*.parquet`); empty: all."""
    runtime: HubRuntime = HubRuntime()
    """The folder that keeps downloaded files, and the address that they come from."""


class DatasetsSource(RowSource):
    """Rows that the library `datasets` loads, of a folder in the Hub's layout or of a repository on the Hub."""

    kind: Literal["datasets"] = "datasets"
    path: str = ""
    """Folder in the layout of the Hub; relative to the working directory. Or name a `repo`."""
    repo: str = Field(default="", pattern=r"^$|^[\w.-]+/[\w.-]+$")
    """Dataset repository on the Hub, `owner/name`."""
    revision: str = ""
    """Commit of the repository, 40 hex digits, or `newest`."""
    streaming: bool = False
    """Fetch only the rows up to `limit`, and no whole files."""

    # `subset` is the name that the card gives to a config, and `split` to a split.

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.path) == bool(self.repo):
            raise ValueError('kind = "datasets" needs `path`, a folder, or `repo` and `revision`, a repository')
        if bool(self.repo) != bool(self.revision):
            raise ValueError("`repo` and `revision` belong together: a branch would change under the fingerprint")
        if self.revision:
            _check_commit(self.revision)
        return self


StoredSource = FileSource | HubSource | DatasetsSource
"""Sources whose rows are in files."""


def _path_as_source(value: object) -> object:
    return {"kind": "file", "path": value} if isinstance(value, str) else value


Source = Annotated[
    Annotated[ProceduralSource | PuzzleSource | GymSource | StoredSource, Field(discriminator="kind")],
    BeforeValidator(_path_as_source),
]
"""A source of prompts; a bare path means files whose row format is detected from their first row."""


# ---- benchmark ----
# Define the settings of one benchmark.


class BenchmarkConfig(Settings):
    """A named set of problems that is never trained on."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name in scores and reports."""
    known: str = Field(default="", exclude_if=lambda name: not name)
    """Published benchmark that this is, such as `aime24` (docs/data.md has the list). It fills in what else is left
    out: name, source, number of rows, window and n. Empty: a set of one's own."""
    source: Source
    expected_rows: int | None = Field(default=None, ge=1)
    """Number of rows, checked when the benchmark is loaded or reused (AIME 30, LiveCodeBench v5 279, v6 131)."""
    window: DateWindow | None = Field(default=None, exclude_if=lambda window: window is None)
    """Days of the contests whose problems are read, by the column `contest_date`; None: all."""
    num_samples: int = Field(default=4, ge=1)
    """n of avg@n. The paper: 64 for AIME and HMMT, 8 for LiveCodeBench (Table 1)."""
    num_problems: int | None = Field(default=None, ge=1, exclude_if=lambda count: count is None)
    """Size of the part to score, drawn by the run's seed; None: all of it. `expected_rows` counts the whole."""
    prompt: str = Field(default="plain", exclude_if=lambda prompt: prompt == "plain")
    """Prompt that the questions are asked in: `plain` (as they stand; Klear-Reasoner's protocol), `boxed` (Qwen's and
    DeepSeek-R1's model cards), `lighteval`, `lm_eval`, `simple_evals` (GPQA), `livecodebench`, or a template with
    `{question}` once. It belongs to the score: others are compared only if theirs is the same."""
    published: date | None = Field(default=None, exclude_if=lambda day: day is None)
    """First day on which one of its problems was public, for sets of one's own; None: unknown, or that of `known`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: object) -> object:
        if isinstance(settings, dict) and settings.get("known"):
            return with_known_facts(settings)
        return settings

    _is_a_prompt = field_validator("prompt")(check_prompt)

    @model_validator(mode="after")
    def _is_the_known_one(self) -> Self:
        known = KNOWN_BENCHMARKS.get(self.known)
        if known and (self.expected_rows, self.window) != (known.rows, known.window):
            found = f"expected_rows = {self.expected_rows} and window = {self.window}"
            raise ValueError(
                f"{known.title} has {known.rows} rows and the window {known.window}, not {found}: "
                f"leave out known = {self.known!r} for another set of problems"
            )
        return self

    @property
    def published_on(self) -> date | None:
        """First day on which one of its problems was public; None if it is not known."""
        known = KNOWN_BENCHMARKS.get(self.known)
        return self.published or (known.published if known else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUse:
    """A repository on the Hub whose files a stage's result depends on."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision[:7]}"
