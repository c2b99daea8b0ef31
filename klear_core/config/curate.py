"""Define the settings of curation (dedup, decontamination, selection, executors) and of difficulty tags by sampling."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, model_validator

from klear_core.config.data import FileSource, ProceduralSource, Source
from klear_core.config.evaluate import (
    EvaluateRuntime,
    EvaluateSamplingConfig,
    LocalEngineConfig,
    PoolRuntime,
    TorchEngineConfig,
)
from klear_core.config.settings import Settings, YieldLimits
from klear_core.config.train import GivenFolder, GivenGguf, GivenModel, GivenRepo
from klear_core.types import Difficulty


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
    threshold_reworded: float = Field(default=0.5, ge=0.1, le=1)
    """Share of the shorter question's shingles that two questions with the same numbers, signs and answer must have in
    common to be the same. Measured on 22,072 prompts: it drops six more, which are all copies; the next pair has 0.37
    and is none."""
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


class ReadYieldLimits(YieldLimits):
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
    read: ReadYieldLimits = ReadYieldLimits()
    """Share of each source's rows that are readable and have a question and a reference."""
    executor: ExecutorConfig = LocalExecutorConfig()
    """The machine or cluster that reads blocks of the sources and writes shards."""
    check_solutions: bool = True
    """Judge the published solutions of programming problems once, on this machine, and list those that fail."""


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


# ---- tag ----
# Define the settings of difficulty tags by sampling.


class TagRuntime(PoolRuntime, EvaluateRuntime):
    """Settings that do not change the tags, but for the endpoints: they draw other samples."""


class TagConfig(Settings):
    """Difficulty tags from the share of a model's answers that are right; a tag never drops a problem."""

    model: GivenModel | None = None
    """The tagger, by folder or by Hub id; None: the base model of this pipeline. Paper: Qwen3-8B (section 3.1)."""
    samples_per_problem: int = Field(default=16, ge=1, le=1024)
    """Answers per problem. Undisclosed for tags; 16 is the number that the paper's RL prompts were filtered by
    (section 3.2.1)."""
    engine: LocalEngineConfig = TorchEngineConfig()
    sampling: EvaluateSamplingConfig = EvaluateSamplingConfig()
    """Sampling parameters of the tagger; undisclosed in the paper."""
    hard_below: float = Field(default=0.34, ge=0, le=1)
    """Pass rate below which a problem is hard. Thirds, because the paper's thresholds are undisclosed."""
    easy_from: float = Field(default=0.67, ge=0, le=1)
    """Pass rate from which a problem is easy; between the two it is medium."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """The stage stops above this share of answers that could not be judged."""
    runtime: TagRuntime = TagRuntime()

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.hard_below > self.easy_from:
            raise ValueError(f"hard_below = {self.hard_below} is above easy_from = {self.easy_from}")
        return self

    def difficulty_at(self, pass_rate: float) -> Difficulty:
        """Return the tag of a problem with this pass rate."""
        if pass_rate >= self.easy_from:
            return Difficulty.EASY
        return Difficulty.HARD if pass_rate < self.hard_below else Difficulty.MEDIUM


class SampledModelRuntime(Settings):
    """The place of the model that a stage samples from; the model itself is an input."""

    model: GivenModel | None = None

    @property
    def name(self) -> str:
        """Return the model's name: its repository, or the end of its path; `base` for the pipeline's base model."""
        match self.model:
            case None:
                return "base"
            case GivenRepo(repo=repo, revision=revision):
                return f"{repo}@{revision[:7]}"
            case GivenGguf(path=path):
                return PurePath(path).name
            case GivenFolder(path=path):
                return "/".join(PurePath(path).parts[-2:])  # `model` alone would say little
            case _:
                assert_never(self.model)
