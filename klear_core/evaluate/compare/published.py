"""Show our results beside published ones: scores of benchmarks, and tables of ablations."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from klear_core.config.evaluate import SamplingConfig, ServedModelConfig
from klear_core.config.grids import PaperRows
from klear_core.config.known_benchmarks import KNOWN_BENCHMARKS
from klear_core.config.load import explained
from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError, ConfigError
from klear_core.evaluate.compare.ablation import TOKEN_SHARES, RunResult, TableRow, rows_of
from klear_core.evaluate.stats.intervals import SeedSpread, largest_rate
from klear_core.evaluate.stats.significance import holm
from klear_core.scores import EvalReport

SIZES = {name: known.rows for name, known in KNOWN_BENCHMARKS.items()}
"""Problems of the published benchmarks; another number under the same name is another benchmark."""
_ROUNDING = 0.0005
"""Half of a tenth of a percent, to which published scores are rounded."""


class PublishedModel(Settings):
    """Scores of one model from one source, in percent, by benchmark."""

    model: str
    source: str
    scores: dict[str, float]
    num_samples: dict[str, Annotated[int, Field(ge=1)]]
    """n of avg@n, by benchmark."""
    prompts: dict[str, str] = {}
    """Prompt by benchmark, as `benchmarks.prompt` names it, as far as the source says."""
    sampling: dict[str, float] = {}
    """Settings of `evaluate.sampling` that the source states: `temperature`, `top_p`, `top_k`, `max_new_tokens`."""
    harness: str = ""
    """Program that judged the answers, `lcb_runner` for LiveCodeBench's own; empty if the source does not say."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.scores.keys() != self.num_samples.keys():
            raise ValueError(f"{self.model}: scores and num_samples name different benchmarks")
        foreign = self.sampling.keys() - SamplingConfig.model_fields.keys()
        if foreign:
            raise ValueError(f"{self.model}: sampling has no settings {', '.join(sorted(foreign))}")
        unknown = self.scores.keys() - SIZES.keys()
        if unknown:
            raise ValueError(
                f"{self.model}: unknown benchmarks {', '.join(sorted(unknown))}; known: {', '.join(SIZES)}"
            )
        if any(not 0 <= score <= 100 for score in self.scores.values()):
            raise ValueError(f"{self.model}: scores are in percent, 0 to 100")
        return self


class _PublishedFile(Settings):
    """The file of published scores."""

    score: tuple[PublishedModel, ...] = Field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Our score beside a published one; all values in 0..1."""

    published: float
    num_samples: int
    bound: float
    """Largest difference of two runs of one model with this score, in 95 of 100 cases, whatever its problems."""
    difference: float
    """Our score minus the published one."""
    agrees: bool | None
    """Whether two runs of one model on these problems may differ so much, according to our re-run interval; None if
    something else differs, too."""
    differs: tuple[str, ...]
    """Settings that differ from those that the source states: `max_new_tokens 65536, here 32768`."""


def read_published(file: Path) -> tuple[PublishedModel, ...]:
    """Return the published scores in a file. Raise ConfigError that names the file and what is wrong."""
    try:
        return _PublishedFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig"))).score
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, _PublishedFile)}") from e


def agreement_with(published: PublishedModel, ours: EvalReport) -> Agreement | None:
    """Return the comparison of our score with the published one; None if it has none of this benchmark."""
    name = ours.benchmark
    if name not in published.scores or ours.num_problems != SIZES[name] or ours.avg.rerun is None:
        return None
    value, n = published.scores[name] / 100, published.num_samples[name]
    difference = ours.avg.value - value
    # our re-run interval is that of one run with our n: the published run adds its own noise, with its n
    widening = math.sqrt(1 + ours.num_samples / n)
    differs = tuple(_different(published, ours))
    low = (ours.avg.rerun.low - ours.avg.value) * widening - _ROUNDING
    high = (ours.avg.rerun.high - ours.avg.value) * widening + _ROUNDING
    return Agreement(
        published=value,
        num_samples=n,
        bound=rerun_bound(value, ours.num_problems, n, ours.num_samples, confidence=ours.confidence),
        difference=difference,
        agrees=None if differs else low <= -difference <= high,
        differs=differs,
    )


def _different(published: PublishedModel, ours: EvalReport) -> Iterator[str]:
    """Yield what is otherwise than the source states; what it does not state is not compared."""
    prompt = published.prompts.get(ours.benchmark, ours.prompt)
    if prompt != ours.prompt:
        yield f"prompt {prompt}, here {ours.prompt}"
    sampling = ours.decoding.sampling.model_dump()
    is_served = isinstance(ours.decoding.engine, ServedModelConfig)
    for name, value in published.sampling.items():
        if is_served and name in ("top_k", "repetition_penalty"):
            yield f"{name} {value:g}, here as the server sets it"  # chat requests do not have it
        elif sampling[name] != value:
            yield f"{name} {value:g}, here {sampling[name]:g}"
    has_its_verdicts = ours.judge is not None and ours.judge.settings.code.compare == "decimal"
    if published.harness and not (published.harness == "lcb_runner" and has_its_verdicts):
        yield f"harness {published.harness}, here Klear's judge"


def rerun_bound(score: float, num_problems: int, *num_samples: int, confidence: float) -> float:
    """Return the most that two runs of one model may differ by: the noise if all its problems were equally hard.

    For problems of different difficulty the noise is smaller, as p(1-p) is concave. 90.5 % on 30 problems with n = 64
    twice: 1.9 points.
    """
    from scipy.special import ndtri

    variance = score * (1 - score) / num_problems * sum(1 / n for n in num_samples)
    return float(ndtri(0.5 + confidence / 2)) * math.sqrt(variance)


# ---- beside paper ----
# Put the results of an ablation beside published ones of the same comparison.


CAUTION = "Scale and task differ: only the direction of a difference can be compared, not its size."


ALPHA = 0.05
"""Corrected p-value below which a difference of ours is shown."""


class BesideRow(Settings):
    """One variant: our score and the published ones, each with the difference from the same reference."""

    variant: str
    reference: str
    ours: SeedSpread | None = None
    """avg@n over seeds, in 0..1; None without a result."""
    our_difference: SeedSpread | None = None
    """Difference from the reference, paired by seed; None for the reference itself, and without a result."""
    p: float | None = None
    """Holm-corrected p-value of our difference, by Student's t test over seeds; None without one, or with collapses."""
    our_scores: dict[str, float]
    """Our mean scores on those of the published benchmarks that we have, in percent."""
    paper: dict[str, float]
    """Published scores by benchmark, in percent."""
    paper_difference: dict[str, float]
    """Published differences by benchmark, in points; empty for the reference itself."""

    @property
    def direction(self) -> str:
        """Compare the signs of our difference and the published ones, in words; empty for the reference."""
        if not self.paper_difference:
            return ""
        if self.our_difference is None or self.p is None or self.p >= ALPHA:
            return "not shown by ours"
        same = [name for name, points in self.paper_difference.items() if points * self.our_difference.mean > 0]
        return f"same in {len(same)} of {len(self.paper_difference)}"


class BesidePaper(Settings):
    """Published results of the same comparison beside ours."""

    source: str
    about: str
    """Scale and scoring of the published runs, in words."""
    caution: str = CAUTION
    """What can be compared."""
    rows: tuple[BesideRow, ...]


def beside_paper(paper: PaperRows, rows: Sequence[TableRow], references: Mapping[str, str]) -> BesidePaper:
    """Return the published rows with ours. `references` names the reference of each variant.

    Of a variant with several rates, ours is the row at its own rates.
    """
    ours: dict[str, TableRow] = {}
    for row in rows:
        # The row at own rates comes last and replaces the first of the others.
        if row.learning_rate is None or row.variant not in ours:
            ours[row.variant] = row
    found = [_beside(paper, variant, references[variant], ours.get(variant)) for variant in paper.scores]
    # Where a run collapsed the test is one of collapses, and says nothing about the direction of scores.
    tests = {row.variant: ours[row.variant].test for row in found if row.variant in ours}
    p_values = {variant: test.p for variant, test in tests.items() if test is not None and test.by == "t"}
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return BesidePaper(
        source=paper.source,
        about=paper.about,
        rows=tuple(row.model_copy(update={"p": corrected.get(row.variant)}) for row in found),
    )


def _beside(paper: PaperRows, variant: str, reference: str, row: TableRow | None) -> BesideRow:
    scores, base = paper.scores[variant], paper.scores.get(reference, {})
    difference: dict[str, float] = {}
    our_scores: dict[str, float] = {}
    for name, score in scores.items():
        if name in base and variant != reference:
            difference[name] = round(score - base[name], 2)  # published scores have two decimals at most
        runs = row.runs.values() if row else ()
        ours = [run.scores[name] for run in runs if name in run.scores]
        if ours:
            our_scores[name] = 100 * fmean(ours)
    result = {"ours": row.score, "our_difference": row.difference} if row else {}
    return BesideRow(
        variant=variant,
        reference=reference,
        our_scores=our_scores,
        paper=scores,
        paper_difference=difference,
        **result,
    )


# ---- ablation table ----
# Show an ablation's table as Markdown.


class AblationTable(Settings):
    """The rows of the table, and the runs without a result."""

    reference: str
    benchmarks: tuple[str, ...] = ()
    """Benchmarks whose mean is the score; empty in tables of earlier versions."""
    rows: tuple[TableRow, ...]
    beside: BesidePaper | None = None
    """Published results of the same comparison beside ours."""
    failures: dict[str, str]
    """Reasons by run, for the runs without a result."""


def as_markdown(table: AblationTable) -> str:
    """Format the table as Markdown: scores and token shares in per cent, differences in percentage points.

    Behind each mean is the range over seeds. The columns `95 %` hold Student's t intervals of the mean.
    """
    runs = [run for row in table.rows for run in row.runs.values()]
    can_collapse = any(run.before is not None for run in runs)
    is_rl = bool(runs) and all(run.token_shares for run in runs)
    # Files of earlier versions lack the counts, and their tables stay as they were.
    has_yield = is_rl and all(run.sampled_tokens and run.informative_groups is not None for run in runs)
    others = [row for row in table.rows if row.reference not in ("", table.reference, row.variant)]
    minus = "minus its reference" if others else f"minus {table.reference}"
    head = ["variant", "lr", "avg@n (range)", "95 %", f"{minus} (range)", "95 %", "p (test)"]
    head += ["collapsed (at most)"] if can_collapse else []
    head += [*TOKEN_SHARES, "max r", "entropy"] if is_rl else ["steps" if can_collapse else "updates", "tokens"]
    head += ["sampled tokens", "informative groups per million"] if has_yield else []
    lines = [_line(head), _line(["---"] * len(head))]
    for row in table.rows:
        cells = [*_cells(row), *(_collapse_cells(row) if can_collapse else ())]
        cells += _rl_cells(row) if is_rl else _token_cells(row)
        lines.append(_line([*cells, *(_yield_cells(row) if has_yield else ())]))
    lines.append("")
    for row in table.rows:
        if row.learning_rate is not None:  # a row without a rate repeats runs of other rows
            lines += _lines_of_missing_metrics(row)
    # Once for each variant, which has a row at each of its rates.
    lines += dict.fromkeys(f"- {row.variant} is compared with {row.reference}" for row in others)
    lines += _lines_of_other_rates(table)
    lines += _lines_of_choice(table)
    lines += [f"- no result: {run}: {why}" for run, why in table.failures.items()]
    if table.beside:
        lines += ["", *_lines_beside(table.beside, table.benchmarks)]
    return "\n".join(lines).rstrip() + "\n"


def _lines_of_choice(table: AblationTable) -> list[str]:
    """Return the note that the best row was chosen by its score; none if there is only one row."""
    if len(table.rows) < 2 or not table.benchmarks:
        return []
    names = ", ".join(table.benchmarks)
    chosen = (
        f"- chosen on this benchmark: whatever row is best here was chosen by its score on {names}, which is too high "
        "by that"
    )
    has_own = any(row.learning_rate is None for row in table.rows)
    return [f"{chosen}; the rates of `own` were chosen on the same problems, by other seeds" if has_own else chosen]


def _lines_of_missing_metrics(row: TableRow) -> list[str]:
    """Return a line for each run with steps that lack metrics."""
    lines: list[str] = []
    for seed, run in row.runs.items():
        if run.num_lacking:
            lines.append(
                f"- numbers are missing at {run.num_lacking} of {run.num_steps} steps: "
                f"{row.variant}, lr {row.learning_rate:g}, seed {seed}"
            )
    return lines


def _lines_of_other_rates(table: AblationTable) -> list[str]:
    """Return a line for each row whose difference is from the reference at another rate."""
    lines = []
    for row in table.rows:
        if not row.against_own_rate:
            continue
        reference = row.reference or table.reference
        rates = [other.learning_rate for other in table.rows if other.variant == reference and other.learning_rate]
        own = f"its rate, {rates[0]:g}" if len(rates) == 1 else "the rate that was best for it on the other seeds"
        lines.append(f"- {row.variant} at lr {row.learning_rate:g} is compared with {reference} at {own}")
    return lines


def _cells(row: TableRow) -> list[str]:
    """Return the cells that every table has."""
    rate = "own" if row.learning_rate is None else f"{row.learning_rate:g}"
    difference = ["", ""] if row.difference is None else _spread_cells(row.difference, sign="+")
    test = ""
    if row.test is not None:
        p = f"{row.test.corrected:.3f}" if row.test.corrected >= 0.001 else "< 0.001"
        test = f"{p} ({row.test.by})"
    return [row.variant, rate, *_spread_cells(row.score), *difference, test]


def _token_cells(row: TableRow) -> list[str]:
    """Return the mean numbers of steps, and of tokens that SFT trained on or that were sampled after it."""
    runs = row.runs.values()
    num_tokens = fmean(run.num_tokens or run.sampled_tokens or 0 for run in runs)
    return [f"{fmean(run.num_steps for run in runs):.0f}", f"{num_tokens:,.0f}"]


def _collapse_cells(row: TableRow) -> list[str]:
    """Return the number of collapses, and the largest rate that it leaves possible."""
    runs = list(row.runs.values())
    num_collapsed = sum(run.has_collapsed for run in runs)
    at_most = f"{100 * largest_rate(num_collapsed, len(runs)):.0f} %"
    return [f"{num_collapsed} of {len(runs)} ({at_most})"]


def _rl_cells(row: TableRow) -> list[str]:
    """Return token shares, the largest ratio and the entropy."""
    runs = list(row.runs.values())
    cells = []
    for name in TOKEN_SHARES:
        share = fmean(run.token_shares[name] for run in runs)
        cells.append(f"{100 * share:.2f}")
    max_ratio = max(run.max_ratio or 0 for run in runs)
    entropy = fmean(run.entropy or 0 for run in runs)
    return [*cells, f"{max_ratio:.3g}", f"{entropy:.3f}"]


def _yield_cells(row: TableRow) -> list[str]:
    """Return the mean number of sampled tokens, and the groups with right and wrong answers per million of them."""
    runs = row.runs.values()
    num_tokens = sum(run.sampled_tokens or 0 for run in runs)
    num_groups = sum(run.informative_groups or 0 for run in runs)
    return [f"{num_tokens / len(runs):,.0f}", f"{1e6 * num_groups / num_tokens:,.0f}"]


def _lines_beside(beside: BesidePaper, benchmarks: Sequence[str]) -> list[str]:
    """Return the published results beside ours. `benchmarks` are those of our score."""
    head = ["variant", f"ours: {', '.join(benchmarks) or 'avg@n'} (range)", "minus", "ours (range)", "95 %", "p"]
    names = list(beside.rows[0].paper)
    ours = {name for row in beside.rows for name in row.our_scores}
    for name in names:
        head += [f"ours: {name}"] if name in ours else []
        head += [f"paper: {name}", "difference"]
    head.append("direction")
    lines = [f"Beside {beside.source}: {beside.about}. {beside.caution}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for row in beside.rows:
        cells = [row.variant, *_our_cells(row)]
        for name in names:
            points, score = row.paper_difference.get(name), row.our_scores.get(name)
            if name in ours:
                cells.append("no result" if score is None else f"{score:.1f}")
            cells += [f"{row.paper[name]:g}", "" if points is None else f"{points:+g}"]
        lines.append(_line([*cells, row.direction]))
    return lines


def _our_cells(row: BesideRow) -> list[str]:
    """Return our score, the reference, and our difference from it with its interval and corrected p-value."""
    score = "no result" if row.ours is None else _spread_cells(row.ours)[0]
    if row.variant == row.reference:
        return [score, "", "", "", ""]
    if row.our_difference is None:
        return [score, row.reference, "no result", "none", ""]
    p = "none" if row.p is None else f"{row.p:.3f}"
    return [score, row.reference, *_spread_cells(row.our_difference, sign="+"), p]


def _spread_cells(spread: SeedSpread, *, sign: str = "") -> list[str]:
    """Return the mean with its range, and the interval of the mean."""
    mean, least, most = (format(100 * x, f"{sign}.1f") for x in (spread.mean, spread.least, spread.most))
    interval = "none"
    if spread.interval is not None:
        low, high = (format(100 * x, f"{sign}.1f") for x in (spread.interval.low, spread.interval.high))
        interval = f"{low} to {high}"
    return [f"{mean} ({least} to {most})", interval]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- cells ----
# Store the single runs of an ablation grid, one JSON line each, so that its table can be computed again.


class CellRecord(Settings):
    """One run of a grid: its variant, rate and seed, the main settings, and its result."""

    variant: str
    learning_rate: float
    seed: int
    minibatches_per_step: int | None
    """Optimizer updates per RL step; None for SFT."""
    steps: int
    """RL steps that the config asked for, or updates of SFT."""
    collapsed: bool
    """Whether less than half of the score before RL was left; False for SFT."""
    result: RunResult


def write_cells(cells: Sequence[CellRecord], file: Path) -> None:
    """Write the cells to `file`, one JSON object per line."""
    file.write_text("".join(cell.model_dump_json() + "\n" for cell in cells))


def read_cells(file: Path) -> list[CellRecord]:
    """Read a file that `write_cells` wrote. Raise ArtifactError with the number of the first invalid line."""
    cells = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            cells.append(CellRecord.model_validate_json(line))
        except ValidationError as e:
            raise ArtifactError(f"{file}, line {number}: not a run of a grid: {e}") from e
    return cells


def table_of(cells: Sequence[CellRecord], reference: str, references: Mapping[str, str] | None = None) -> AblationTable:
    """Compute the table from its cells, as `klear ablate` does from its runs. `references` are those by variant."""
    runs: dict[str, dict[float, dict[int, RunResult]]] = {}
    for cell in cells:
        runs.setdefault(cell.variant, {}).setdefault(cell.learning_rate, {})[cell.seed] = cell.result
    return AblationTable(reference=reference, rows=rows_of(runs, reference, references), failures={})
