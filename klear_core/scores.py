"""Define the results of an evaluation, as stored in `report.json`: scores with their interval and decoding profile."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist, fmean, stdev

from pydantic import Field, TypeAdapter, ValidationError

from klear_core.artifacts.records import read_shards
from klear_core.config.engine import EngineConfig
from klear_core.config.evaluate import EvaluateSamplingConfig
from klear_core.config.settings import Settings
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ArtifactError
from klear_core.types import Difficulty, Outcome, PassRate

REPORT_FILE = "report.json"
RATES_FOLDER = "pass_rates"
"""Folder of a tag artifact that holds a `PassRate` for each problem with a judged answer."""


class DecodingProfile(Settings):
    """All settings of sampling that a score depends on; two scores are comparable if these are equal."""

    sampling: EvaluateSamplingConfig
    engine: EngineConfig
    seed_policy: str
    """The derivation of each sample's seed, in words."""


class JudgeRecord(Settings):
    """The judge of a score, and the machine and concurrency that its time limits were met on."""

    settings: VerifyConfig
    cpu: str
    """Name of the processor; empty if the system does not say."""
    num_cores: int = Field(ge=1)
    math_workers: int = Field(ge=1)
    """Processes that compared math answers at a time."""
    code_workers: int = Field(ge=1)
    """Programs that ran at a time."""


class Range(Settings):
    """The two ends of an interval."""

    low: float = Field(ge=-1, le=1)
    high: float = Field(ge=-1, le=1)


class Score(Settings):
    """A mean over problems of values in 0..1, with two confidence intervals."""

    value: float = Field(ge=0, le=1)
    new_problems: Range
    """Interval over other problems of this kind, of which these are a random draw; models are compared with it."""
    rerun: Range | None
    """Interval over other samples of the same problems; published scores are compared with it. None for greedy
    answers, which would be the same again."""
    num_problems: int = Field(ge=1)
    """Problems with at least one scored sample."""
    num_samples: int = Field(ge=1)
    """Scored samples, over all problems."""


class PassAtK(Settings):
    """The chance that at least one of k samples is right: the unbiased estimate, averaged over problems."""

    k: int = Field(ge=1)
    score: Score
    """The estimate; its `num_problems` are those with at least k scored samples, as others cannot be estimated."""


class StablePass(Settings):
    """G-Pass@k: the chance that at least a given share of k samples is right, averaged over problems."""

    k: int = Field(ge=1)
    threshold: float = Field(gt=0, le=1)
    """Least share of right samples; 1: all k."""
    score: Score


class DifficultyScore(Settings):
    """The scores of the problems of one difficulty; None if none of them could be scored."""

    difficulty: Difficulty
    num_problems: int = Field(ge=1)
    avg: Score | None
    greedy: Score | None


class TemplateScore(Settings):
    """avg@n of the same problems, asked in another prompt template."""

    name: str
    text: str
    """The template; `{question}` is the question."""
    avg: Score
    truncated_frac: float = Field(ge=0, le=1)
    no_answer_frac: float = Field(ge=0, le=1)
    unscored: dict[Outcome, int]
    """Samples that could not be judged, by outcome."""


class TemplateSpread(Settings):
    """Spread of avg@n over several prompt templates, the plain question among them."""

    num_templates: int = Field(ge=2)
    least: float = Field(ge=0, le=1)
    most: float = Field(ge=0, le=1)
    std: float = Field(ge=0, le=1)
    """Standard deviation of the scores, divided by their number less one."""
    sampling_std: float | None = Field(ge=0, le=1)
    """The standard deviation to expect if all templates were equally good, from the re-run intervals; None without."""


class EvalReport(Settings):
    """One benchmark's scores of one model. Answers that could not be judged are in no mean; they are counted here."""

    benchmark: str
    decoding: DecodingProfile
    seed: int
    """The run seed that all sample seeds were derived from."""
    confidence: float = Field(gt=0, lt=1)
    """Confidence level of every interval here, 0.95 for 95 %."""
    num_problems: int = Field(ge=1)
    """Problems asked, scored or not."""
    num_samples: int = Field(ge=1)
    """n: samples per problem."""
    avg: Score
    """avg@n, also known as pass@1: the mean over problems of the share of right samples."""
    pass_at: tuple[PassAtK, ...]
    """For k = 1, 2, 4, ... up to n."""
    stable_pass: tuple[StablePass, ...] = ()
    """G-Pass@k for half, three quarters and all of k = min(16, n) samples; empty for n = 1."""
    majority: Score | None = None
    """maj@n: how often the most common of a problem's n answers is right; None without a math problem, or for n = 1."""
    greedy: Score | None
    """Score of one greedy answer per problem; None if none was asked for."""
    truncated_frac: float = Field(ge=0, le=1)
    """Share of the samples, scored or not, that ran out of tokens."""
    greedy_truncated_frac: float | None = Field(ge=0, le=1)
    no_answer_frac: float | None = Field(default=None, ge=0, le=1)
    """Share of the samples in which the judge found no answer; None in reports of earlier versions."""
    mean_tokens: float = Field(ge=0)
    """Mean number of tokens per sample."""
    unscored: dict[Outcome, int]
    """Samples that could not be judged, by outcome; empty if all could."""
    greedy_unscored: dict[Outcome, int]
    unscored_problems: tuple[str, ...]
    """Ids of the problems without one scored sample: they are missing from `avg`."""
    by_difficulty: tuple[DifficultyScore, ...]
    judge: JudgeRecord | None = None
    """The judge and its machine; None if the answers were counted without it."""
    templates: tuple[TemplateScore, ...] = ()
    """Scores of the same problems in other prompt templates; empty if none was asked for."""

    @property
    def template_spread(self) -> TemplateSpread | None:
        """Spread of avg@n over the plain question and all templates; None if there is no template."""
        if not self.templates:
            return None
        scores = [self.avg, *(template.avg for template in self.templates)]
        values = [score.value for score in scores]
        widths = [score.rerun.high - score.rerun.low for score in scores if score.rerun]
        # an interval is about z standard errors wide on each side; scores of n samples have nearly the same width
        z = NormalDist().inv_cdf(0.5 + self.confidence / 2)
        sampling_std = fmean(widths) / (2 * z) if widths else None
        return TemplateSpread(
            num_templates=len(values), least=min(values), most=max(values), std=stdev(values), sampling_std=sampling_std
        )


_REPORTS: TypeAdapter[tuple[EvalReport, ...]] = TypeAdapter(tuple[EvalReport, ...])


def write_reports(folder: Path, reports: tuple[EvalReport, ...]) -> None:
    """Write `report.json` of an evaluation, atomically."""
    beside = folder / (REPORT_FILE + ".tmp")
    beside.write_bytes(_REPORTS.dump_json(reports, indent=2))
    beside.replace(folder / REPORT_FILE)


def read_reports(folder: Path) -> tuple[EvalReport, ...]:
    """Return the reports of an evaluation's artifact folder, one per benchmark; ArtifactError names the file."""
    path = folder / REPORT_FILE
    try:
        return _REPORTS.validate_json(path.read_bytes())
    except OSError as e:
        raise ArtifactError(f"{path}: cannot be read ({e.strerror}); an evaluation writes it last") from e
    except ValidationError as e:
        raise ArtifactError(f"{path}: not an evaluation report: {e}") from e


def read_pass_rates(artifact: Path) -> dict[str, PassRate] | None:
    """Return the pass rates of an artifact's problems, by problem id; None if they were not measured."""
    folder = artifact / RATES_FOLDER
    if not folder.is_dir():
        return None
    return {rate.problem_id: rate for rate in read_shards(folder, PassRate)}
