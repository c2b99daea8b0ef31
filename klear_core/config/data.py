"""Define the settings of benchmarks and curation."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS, DateWindow, with_known_facts
from klear_core.config.settings import Floor, Settings
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
    """Which split to draw from. A hash of a problem's text decides its split, so the two never overlap for any
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


GeneratedSource = ProceduralSource | PuzzleSource
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
    """Place of the tests of a code problem, in a format that klear_core/data/references.py reads."""
    fn_name: str = ""
    """Place of the name of the function that the tests call; empty: the tests name it, or use standard input."""
    starter_code: str = ""
    """Place of code to complete, which is appended to the question."""
    rating: str = ""
    """Place of the difficulty: a number, or easy, medium or hard."""
    rating_top: float = Field(default=1.0, gt=0)
    """The rating of the hardest problems; ratings start at 0."""

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
    """Places of the values in a row, with `row_schema = "mapped"`."""
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

    @model_validator(mode="after")
    def _mapped_or_not(self) -> Self:
        if (self.row_schema == "mapped") != (self.fields is not None):
            raise ValueError('`fields` and row_schema = "mapped" belong together: set both or neither')
        return self


class FileSource(RowSource):
    """Local JSONL, JSON (also .gz or .zst), Parquet or Arrow files in a published schema."""

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


def _check_commit(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError(
            f"{value!r} is no commit: a revision has 40 hex digits, because a branch or a tag would change under the "
            "fingerprint; the repository's page on the Hub lists its commits"
        )
    return value


HubRepo = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
"""A repository on the Hugging Face Hub, `owner/name`."""
HubRevision = Annotated[str, BeforeValidator(_check_commit), Field(pattern=r"^[0-9a-f]{40}$")]
"""A commit, 40 hex digits."""


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


def _path_as_source(value: object) -> object:
    return {"kind": "file", "path": value} if isinstance(value, str) else value


Source = Annotated[
    Annotated[ProceduralSource | PuzzleSource | FileSource | HubSource, Field(discriminator="kind")],
    BeforeValidator(_path_as_source),
]
"""A source of prompts; a bare path means files whose row format is detected from their first row."""


class NearConfig(Settings):
    """Removal of near-duplicates, found by MinHash over token shingles; the question that comes first stays.

    A question whose numbers, signs, operators or reference answer differ is another problem and stays.
    """

    enabled: bool = True
    """False removes exact repeats only, as the paper did."""
    threshold: float = Field(default=0.7, ge=0.3, le=1)
    """Share of common shingles (Jaccard similarity) from which two questions with a common answer are the same. BigCode
    used 0.7, FineWeb's buckets have 0.72; pairs that pass our other conditions were all right down to 0.5
    (measured)."""
    threshold_unanswered: float = Field(default=0.85, ge=0.3, le=1)
    """The same for questions whose references have no answer to compare: programs with different tests. Measured: below
    it there are different programs that share a statement."""
    shingle: int = Field(default=3, ge=1, le=20)
    """Tokens of a shingle. FineWeb takes 5 words for web pages; questions are short, with a median of 40 tokens, and
    one changed word changes 3 shingles."""
    num_bands: int = Field(default=20, ge=1, le=256)
    """Bands of the MinHash signature; two questions are compared if they agree in one."""
    rows_per_band: int = Field(default=6, ge=1, le=32)
    """Hashes in a band. 20 bands of 6 find 93 % of the pairs at a similarity of 0.7, 99.8 % at 0.8."""


class DedupConfig(Settings):
    """Removal of repeated questions: exact match after normalisation (Klear-Reasoner section 3.1; rule undisclosed)."""

    normalise: bool = True
    """Compare NFKC, lower-cased text without differences in white space, punctuation and LaTeX typesetting; False
    compares the unchanged text."""
    near: NearConfig = NearConfig()


DecontaminationRule = Literal["ngram", "any_ngram", "share", "near", "contest"]
"""`ngram`: a shared word n-gram that is no common phrase; `any_ngram`: common phrases count, too; `share`: a share of
the shorter text's n-grams; `near`: a share of the shorter text's runs of three tokens, signs included; `contest`: the
same contest problem, where both rows say which one they are."""


class DecontaminateConfig(Settings):
    """Removal of prompts that share word n-grams with a benchmark question (Klear-Reasoner section 3.1: 9-grams)."""

    rules: tuple[DecontaminationRule, ...] = Field(default=("ngram",), min_length=1)
    """Rules that drop a prompt; any of them suffices. The default is the paper's rule. The report counts what each of
    all rules would drop. `("share", "near", "contest")` drops a fifth as many prompts and misses a few reworded leaks:
    see docs/decontamination.md."""

    ngram: int = Field(default=9, ge=3, le=50)
    """Words in an n-gram. Benchmark questions with fewer words are matched in full."""
    min_overlap: int = Field(default=1, ge=1)
    """Rule `ngram`: number of n-grams shared with one question from which a prompt is removed. Undisclosed in the
    paper; 1 is the strictest."""
    min_coverage: float = Field(default=0.0, ge=0, le=1)
    """Rule `ngram`: share of one benchmark question's n-grams that a prompt must contain. 0 is the paper's rule;
    contest statements share so many phrases that 0.3 keeps prompts which the paper's rule removes."""
    max_questions_per_gram: int = Field(default=10, ge=1)
    """An n-gram in more benchmark questions than this is a common phrase ("the input is given from standard input in
    the following format" opens every AtCoder problem) and removes no prompt. Ours; undisclosed in the paper."""
    min_share: float = Field(default=0.2, gt=0, le=1)
    """Rule `share`: share of the n-grams of the prompt or of the question, whichever has fewer. Measured: below 0.2
    shared answer formats ("where m and n are relatively prime") count as leaks."""
    near_share: float = Field(default=0.6, gt=0, le=1)
    """Rule `near`: the same share of runs of three tokens, numbers and signs included, and as many of them at least as
    `ngram` tokens have. It finds reworded questions."""
    also: tuple[FileSource, ...] = ()
    """Question sets to keep out of training in addition to the benchmarks; they need no references."""


class HashedEmbedding(Settings):
    """TF-IDF of a question's words, hashed to a short vector; needs no model."""

    kind: Literal["hashed"] = "hashed"
    dimensions: int = Field(default=256, ge=16, le=4096)
    """Length of a vector, one byte each: 1M questions take 0.26 GB."""


class SentenceEmbeddingRuntime(Settings):
    """Settings that do not change which problems stay, up to rounding."""

    batch_size: int = Field(default=32, ge=1)
    """Questions that the model reads at once."""


class SentenceEmbedding(Settings):
    """Embedding by a sentence-transformers model; needs the extra `embed`."""

    kind: Literal["sentence_transformer"] = "sentence_transformer"
    model: str = Field(min_length=1)
    """A folder, or a name on the Hugging Face Hub with its `revision`."""
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Commit on the Hub, 40 hex digits; None: `model` is a folder."""
    runtime: SentenceEmbeddingRuntime = SentenceEmbeddingRuntime()


EmbeddingConfig = Annotated[HashedEmbedding | SentenceEmbedding, Field(discriminator="kind")]
"""Vectors of questions by which a subset is chosen. The paper's embedding is undisclosed."""


class SelectConfig(Settings):
    """Choice among the problems that are left after decontamination; by default all stay. Sources are named as in the
    ledger. The order is: best sources, caps, then weights and `num_problems` together."""

    top_k_sources: int | None = Field(default=None, ge=1)
    """Number of sources to read, the best ones; None reads all. The paper was best with 1 or 2 (Tables 4 and 5)."""
    quality: dict[str, float] = {}
    """Quality of each source, higher is better, on any scale; empty: the first in the list of sources is the best."""
    caps: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Maximum number of problems of a source, drawn by the seed from all of its problems that are left; unlike
    `limit`, which reads the first rows only."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Relative number of problems of each source in the result, which is as large as these shares allow; empty: no
    fixed shares. Undisclosed in the paper."""
    num_problems: int | None = Field(default=None, ge=1)
    """Size of the result; None: no fixed size. The paper's ablations use 31,600 (Tables 4 and 5)."""
    method: Literal["k_center", "random"] = "k_center"
    """Choice of `num_problems`: `k_center` covers the space of questions by K-center greedy, as the paper's ablations
    did; `random` draws by the seed."""
    embedding: EmbeddingConfig = HashedEmbedding()
    """Vectors for `k_center`."""
    refine_steps: int = Field(default=2, ge=0, le=20)
    """Times that every centre moves to the middle of the questions nearest to it. 0 is plain K-center greedy, which
    takes outliers first: its largest distance is the smallest, and its mean distance is above that of a random draw
    (docs/data.md has figures). Ours."""

    @property
    def is_on(self) -> bool:
        """Return whether a problem can be dropped after decontamination."""
        return bool(self.caps or self.weights or self.num_problems)

    @property
    def model_folder(self) -> str | None:
        """Return the folder of the embedding model if one on disk is used."""
        is_used = self.num_problems is not None and self.method == "k_center"
        if is_used and isinstance(self.embedding, SentenceEmbedding) and self.embedding.revision is None:
            return self.embedding.model
        return None


class DifficultyConfig(Settings):
    """Difficulty tags from the source's rating, a share of its scale in [0, 1]; without a rating the tag is unknown."""

    easy_below: float = Field(default=0.34, ge=0, le=1)
    """Share of the scale below which a problem is easy. Thirds, because the paper's thresholds are undisclosed."""
    hard_from: float = Field(default=0.67, ge=0, le=1)
    """Share of the scale from which a problem is hard; between the two it is medium."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.easy_below > self.hard_from:
            raise ValueError(f"easy_below = {self.easy_below} is above hard_from = {self.hard_from}")
        return self


class ReadFloor(Floor):
    """Minimum share of a source's rows that must be usable."""

    warn_below: float = Field(default=0.99, ge=0, le=1)
    """A smaller share causes a warning on the terminal and in the report. Published sets lose 0.2 % at most
    (measured)."""


class LocalExecutorConfig(Settings):
    """Processes on this machine."""

    kind: Literal["local"] = "local"
    workers: int | None = Field(default=None, ge=1)
    """Number of processes; None: one for each core that this process may use. With 1 no process is started."""


class ClusterExecutorConfig(Settings):
    """Settings of all clusters. The sources, the workspace and Klear must be at the same paths on all machines."""

    workers: int | None = Field(default=None, ge=1)
    """Number of tasks at the same time; None: as many as the cluster can run."""
    cpus_per_task: int = Field(default=1, ge=1)
    """Cores reserved for a task, which uses one; more of them reserve more memory."""
    memory_gb_per_cpu: int = Field(default=2, ge=1)
    """Memory reserved for a core, in GB. A task needs less than 1.5."""


class RayExecutorConfig(ClusterExecutorConfig):
    """Tasks on a Ray cluster, by datatrove's `RayPipelineExecutor`."""

    kind: Literal["ray"] = "ray"
    address: str = ""
    """Address of the cluster (`auto`, `10.0.0.1:6379`); empty: RAY_ADDRESS, or else Ray is started on this machine."""


class SlurmExecutorConfig(ClusterExecutorConfig):
    """Job arrays on a Slurm cluster, by datatrove's `SlurmPipelineExecutor`; to be started on a machine with sbatch."""

    kind: Literal["slurm"] = "slurm"
    partition: str = Field(min_length=1)
    """Slurm partition."""
    time: str = Field(default="02:00:00", min_length=1)
    """Time limit of one task, as sbatch takes it. Most take a minute."""
    qos: str = ""
    """Quality of service; empty: the cluster's default."""
    setup: str = ""
    """Shell commands before a task; empty: put the folder of this Python into PATH."""
    sbatch: dict[str, str] = {}
    """Further options of sbatch, such as `account`."""


ExecutorConfig = Annotated[LocalExecutorConfig | RayExecutorConfig | SlurmExecutorConfig, Field(discriminator="kind")]


class CurateRuntime(Settings):
    """Settings that do not change the problems."""

    rows_per_shard: int = Field(default=4096, ge=1)
    """Problems (or drop records) in one Parquet file."""
    read: ReadFloor = ReadFloor()
    """Share of each source's rows that are readable and have a question and a reference."""
    executor: ExecutorConfig = LocalExecutorConfig()
    """The machine or cluster that reads blocks of the sources and writes shards."""


class CurateConfig(Settings):
    """Selection of training prompts: sources, dedup, decontamination, choice, difficulty tags. There is no accuracy
    filter."""

    sources: tuple[Source, ...] = Field(default=(ProceduralSource(),), min_length=1)
    """Prompt sources. If two have the same question, the first one in this list keeps it."""
    dedup: DedupConfig = DedupConfig()
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    select: SelectConfig = SelectConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    max_question_chars: int = Field(default=20_000, ge=1)
    """Longer questions are dropped. The default is about 5000 tokens; the published RL scripts allow 4096 per
    prompt."""
    runtime: CurateRuntime = CurateRuntime()


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
    published: date | None = Field(default=None, exclude_if=lambda day: day is None)
    """First day on which one of its problems was public, for sets of one's own; None: unknown, or that of `known`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: object) -> object:
        if isinstance(settings, dict) and settings.get("known"):
            return with_known_facts(settings)
        return settings

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
