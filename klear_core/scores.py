"""Define the results of an evaluation, as stored in `report.json`, and write numbers as text for people."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from klear_core.artifacts.records import read_shards
from klear_core.config.evaluate import EngineConfig, EvaluateSamplingConfig, ServedModelConfig
from klear_core.config.settings import Settings, result_settings
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ArtifactError
from klear_core.types import Difficulty, Outcome, PassRate

REPORT_FILE = "report.json"
SAMPLES_FOLDER = "samples"
"""Folder of an evaluation with the answers to the plain questions."""
SHOWN_FILE = "sample_rollouts.parquet"
"""The answers of an RL artifact that a person may look at."""
RATES_FOLDER = "pass_rates"
"""Folder of a tag artifact that holds a `PassRate` for each problem with a judged answer."""


class DecodingProfile(Settings):
    """All settings of sampling that a score depends on; two scores are comparable if these are equal."""

    sampling: EvaluateSamplingConfig
    engine: EngineConfig | ServedModelConfig
    seed_policy: str
    """The derivation of each sample's seed, in words."""

    def compared(self) -> dict[str, Any]:
        """Return the settings that two scores must share to be comparable.

        The name of a served model says which model it is, not how it was decoded.
        """
        settings = result_settings(self)
        if isinstance(self.engine, ServedModelConfig):
            settings["engine"] = {"kind": self.engine.kind}
        return settings


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


class Estimate(Settings):
    """A mean over problems with its two confidence intervals: of a score, or of a difference of two."""

    value: float = Field(ge=-1, le=1)
    new_problems: Range
    """Interval over other problems of this kind, of which these are a random draw. Which of two models is better, a
    test decides."""
    rerun: Range | None
    """Interval over other samples of the same problems; published scores are compared with it. None for greedy
    answers, which would be the same again, and for maj@n and G-Pass@k."""
    num_problems: int = Field(ge=1)
    """Problems with at least one scored sample."""
    num_clusters: int | None = Field(default=None, exclude_if=lambda num: num is None)
    """Clusters of problems that `new_problems` and tests are over; None if none are known, so that the problems are
    taken as independent."""


class Score(Estimate):
    """A mean over problems of values in 0..1."""

    value: float = Field(ge=0, le=1)
    num_samples: int = Field(ge=1)
    """Scored samples, over all problems."""

    @property
    def estimate(self) -> Estimate:
        """The score without the number of its samples, for files that have other counts beside it."""
        return Estimate(
            value=self.value,
            new_problems=self.new_problems,
            rerun=self.rerun,
            num_problems=self.num_problems,
            num_clusters=self.num_clusters,
        )


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
    prompt: str = Field(default="plain", exclude_if=lambda prompt: prompt == "plain")
    """Name or template of the prompt that the questions were asked in."""
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


# ---- text ----
# Format numbers for people, and spell out hidden characters of model output.


NBSP = "\u00a0"
NONE = "\u2013"
"""En dash in place of a missing value."""
MINUS = "\u2212"
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})  # Cf has the bidirectional overrides, which reorder text


def percent(fraction: float, decimals: int = 1) -> str:
    """Format a fraction in percent: 0.671 as `67.1 %`."""
    return f"{_signless_zero(fraction * 100, decimals)}{NBSP}%".replace("-", MINUS)


def points(difference: float) -> str:
    """Format a difference of fractions in percentage points, always signed: 0.307 as `+30.7`."""
    value = _signless_zero(difference * 100, 1)
    return value.replace("-", MINUS) if value.startswith("-") else f"+{value}"


def interval_text(ends: Range) -> str:
    """Format an interval of a score in percent: `61.0 to 64.2`."""
    return f"{100 * ends.low:.1f} to {100 * ends.high:.1f}"


def range_text(ends: Range) -> str:
    """Format an interval of a difference in percentage points: `+27.9 to +33.6`."""
    return f"{points(ends.low)} to {points(ends.high)}"


def spread_text(spread: TemplateSpread) -> str:
    """Format the spread of a score over templates: `61.0 to 64.2, standard deviation 1.6 points`."""
    return f"{100 * spread.least:.1f} to {100 * spread.most:.1f}, standard deviation {100 * spread.std:.1f} points"


def p_value(p: float) -> str:
    """Format a p-value with its relation: `p = 0.031`, `p < 0.0001`."""
    if p < 1e-4:
        return "p < 0.0001"
    if p < 0.01:
        return f"p = {p:.4f}"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def number(value: float) -> str:
    """Format counts in full with separators, other numbers with four significant digits."""
    # 1e15 is the largest power of ten below 2^53, up to which a float is an exact integer.
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace("-", MINUS)
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", MINUS)
    text = f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}".replace("e-0", "e-")
    return text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """Format seconds: `0.4 s`, `48 s`, `2 min 05 s`, `3 h 12 min`."""
    if seconds < 59.5:
        return f"{seconds:.1f}{NBSP}s" if seconds < 9.95 else f"{seconds:.0f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest:02d}{NBSP}s"
    return f"{minutes // 60}{NBSP}h {minutes % 60:02d}{NBSP}min"


def shares(counts: Sequence[int]) -> list[str]:
    """Format counts in percent of their sum, rounded so that they add up to exactly 100 (largest remainder method).

    Uses one to four decimals, as many as needed so that no count above zero is printed as zero.
    """
    total = sum(counts)
    if total == 0:
        return [NONE for _ in counts]
    for decimals in (1, 2, 3, 4):
        parts = _apportioned(counts, total, 100 * 10**decimals)
        if all(part or not count for part, count in zip(parts, counts, strict=True)):
            break
    return [f"{part / 10**decimals:.{decimals}f}{NBSP}%" for part in parts]


def _apportioned(counts: Sequence[int], total: int, units: int) -> list[int]:
    """Distribute `units` in proportion to the counts: integer parts first, then one each to the largest remainders."""
    parts = [count * units // total for count in counts]
    # A tie goes to the earlier count, so that the same counts are always printed alike.
    by_remainder = sorted(range(len(counts)), key=lambda i: (-(counts[i] * units % total), i))
    for i in by_remainder[: units - sum(parts)]:
        parts[i] += 1
    return parts


def visible(text: str) -> str:
    """Spell out control characters in model output (`\\u202e`), so that none can hide or reorder text."""
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN_CATEGORIES or char in "\n\t":
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _signless_zero(value: float, decimals: int) -> str:
    """Format with fixed decimals, and zero without a minus sign."""
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text
