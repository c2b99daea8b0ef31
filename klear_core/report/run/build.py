"""Write the report: one self-contained HTML file that shows what a run did and where each number comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from klear_core.artifacts.manifest import Manifest, StageSummary
from klear_core.config.opd_jobs import OpdJob
from klear_core.config.pipeline import InlineEvalJob
from klear_core.config.stage import Job, RlJob, SftJob
from klear_core.report import charts
from klear_core.report.charts import LineChart, Series, Timeline, line_chart, sparkline, timeline
from klear_core.report.run import lineage
from klear_core.report.run.claims import Headline, headline
from klear_core.report.run.facts import Facts, MissingStage, ReportInputs, StageFacts, read_facts
from klear_core.report.run.scores_view import BenchmarkView, SideBySide, benchmark_views, overview
from klear_core.report.run.sections import (
    FLOW_WIDTH,
    Flow,
    Setting,
    StageLedger,
    Times,
    changed_settings,
    ledger_flows,
    stage_ledger,
    stage_ledgers,
    stage_times,
)
from klear_core.report.run.shown_answers import Examples, Product, ProductMap, pick_examples, product_maps, product_of
from klear_core.report.run.warnings import Notice, notices
from klear_core.scores import duration, number, percent
from klear_core.waits import TRACE_FILE, read_trace

# ---- curves ----
# Choose which metrics share a chart, and under which title. Metrics without a chart are listed in a table.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """One chart: pairs of metric name (without the stage prefix) and label, in drawing order."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    note: str = ""
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Total time that the stage spent in one phase."""

    name: str
    seconds: str
    fraction: float
    tone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMetric:
    """A metric that no chart shows."""

    name: str
    first: str
    last: str
    low: str
    high: str
    spark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCurves:
    """Charts and numbers of all metrics that a training stage logged."""

    stage: str
    title: str
    charts: tuple[LineChart, ...]
    phases: tuple[Phase, ...]
    timeline: Timeline | None
    others: tuple[OtherMetric, ...]


SCORE = ChartSpec(
    title="Score on a fixed set",
    metrics=(("eval/avg", "score"), ("eval/avg_rerun_low", "re-run, low"), ("eval/avg_rerun_high", "re-run, high")),
    note="while it trained",
    is_share=True,
)
SFT_CHARTS = (
    SCORE,
    ChartSpec(title="Loss, nats per token", metrics=(("loss/train", "training"), ("loss/validation", "validation"))),
    ChartSpec(title="Gradient norm", metrics=(("grad/norm", ""),), note="before it is cut to the bound"),
    ChartSpec(title="Learning rate", metrics=(("optim/lr", ""),)),
    ChartSpec(title="Tokens per second", metrics=(("time/tokens_per_s", ""),)),
)
_RERUN = ", with the interval over other samples of these problems"
RL_CHARTS = (
    SCORE,
    ChartSpec(title="Reward, mean", metrics=(("reward/mean", ""),), note="of all judged answers"),
    ChartSpec(
        title="Pass rate", metrics=(("pass/rate", ""),), note="share of sampled answers that are right", is_share=True
    ),
    ChartSpec(
        title="Clipped tokens by side",
        metrics=(("clip/high_frac", "high"), ("clip/low_frac", "low"), ("clip/dual_frac", "dual")),
        note="share of trained tokens beyond the bounds of the loss",
        is_share=True,
    ),
    ChartSpec(
        title="Pull of clipped tokens",
        metrics=(("clip/pull_frac", ""),),
        note="their share of the gradient's weight",
        is_share=True,
    ),
    ChartSpec(title="Entropy, nats per token", metrics=(("entropy/mean", ""),)),
    ChartSpec(
        title="Response length, tokens", metrics=(("response/mean_tokens", "mean"), ("response/max_tokens", "longest"))
    ),
    ChartSpec(
        title="Answers that cannot be right",
        metrics=(
            ("answers/malformed_frac", "without tags"),
            ("response/truncated_frac", "cut off"),
            ("answers/repeated_frac", "looping"),
            ("answers/empty_frac", "empty"),
        ),
        note="a stage stops when one runs away",
        is_share=True,
    ),
    ChartSpec(
        title="Answers that look odd",
        metrics=(
            ("answers/same_frac", "the most common"),
            ("answers/extra_tags_frac", "tags twice"),
            ("answers/other_script_frac", "letters of other scripts"),
        ),
        is_share=True,
    ),
    ChartSpec(
        title="Groups of answers",
        metrics=(("groups/asked", "asked"), ("groups/kept", "kept")),
        note="a group whose answers are equally good teaches nothing",
    ),
    ChartSpec(
        title="Ratio of new to old probability",
        metrics=(("ratio/max", "largest"), ("ratio/mean", "mean"), ("ratio/min", "smallest")),
        note="by token; 1 is no change",
    ),
    ChartSpec(
        title="Gradient norm",
        metrics=(("grad/norm", "mean"), ("grad/max", "largest")),
        note="before it is cut to the bound",
    ),
    ChartSpec(title="Sampler and learner disagree", metrics=(("mismatch/k3", "k3 divergence, nats"),)),
    ChartSpec(
        title="Answers not judged",
        metrics=(("judge/failed_frac", ""),),
        note="the judge's fault; never rewarded",
        is_share=True,
    ),
    ChartSpec(title="Staleness, versions", metrics=(("staleness/mean", "mean"), ("staleness/max", "largest"))),
    ChartSpec(
        title="Seconds per step",
        metrics=(
            ("time/rollout_s", "sampling"),
            ("time/wait_s", "waiting for it"),
            ("time/train_s", "learning"),
            ("time/sync_s", "weights"),
        ),
    ),
    ChartSpec(
        title="Tokens per second",
        metrics=(("speed/sampled_tokens_per_s", "sampled"), ("speed/trained_tokens_per_s", "trained")),
    ),
)
PHASES = (("time/wait_s", "waiting for answers"), ("time/train_s", "learning"), ("time/sync_s", "handing over weights"))


def stage_curves(stages: Sequence[StageFacts | MissingStage]) -> list[StageCurves]:
    """Return the curves of the stages that logged a metric at more than one step, in pipeline order."""
    return [_curves(stage) for stage in stages if any(len(series.steps) > 1 for series in stage.metrics)]


def _curves(stage: StageFacts | MissingStage) -> StageCurves:
    by_name = {s.name.partition("/")[2]: s for s in stage.metrics if s.finite}
    drawn = []
    named: set[str] = set()
    for spec in _charts_of(stage.stage.job):
        series = [(label, by_name[metric]) for metric, label in spec.metrics if metric in by_name]
        named |= {metric for metric, _ in spec.metrics}
        note = spec.note + (_RERUN + problems_note(_inline_eval_of(stage)) if spec is SCORE else "")
        chart = line_chart(spec.title, series, note=note, is_share=spec.is_share)
        if chart is not None:
            drawn.append(chart)
    phases = _phases(by_name)
    others = [_other(s) for name, s in by_name.items() if name not in named]
    title = stage.stage.title + (" (failed)" if isinstance(stage, MissingStage) else "")
    spans = read_trace(stage.folder / TRACE_FILE) if isinstance(stage, StageFacts) else []
    return StageCurves(
        stage=stage.name,
        title=title,
        charts=tuple(drawn),
        phases=phases,
        timeline=timeline(spans),
        others=tuple(others),
    )


def _inline_eval_of(stage: StageFacts | MissingStage) -> InlineEvalJob | None:
    if isinstance(stage, StageFacts):
        # the artifact's own settings, because it may be older than this run
        return recorded_inline_eval(stage.manifest)
    return stage.stage.job.runtime.curve if isinstance(stage.stage.job, SftJob | RlJob) else None


def recorded_inline_eval(manifest: Manifest) -> InlineEvalJob | None:
    """Return the settings of the scores that were taken while a stage trained; None if none were."""
    runtime = manifest.config.get("runtime")
    held = runtime.get("curve") if isinstance(runtime, dict) else None
    return None if held is None else InlineEvalJob.model_validate(held)


def problems_note(job: InlineEvalJob | None) -> str:
    """Say which benchmark the problems of the scores during training are from: its scores are reported, too."""
    if job is None:
        return ""
    return (
        f"; at most {job.curve.num_problems} problems of {job.curve.benchmark}, whose score is reported: a checkpoint "
        "that is chosen by this curve is chosen on its benchmark"
    )


OPD_CHARTS = (
    ChartSpec(
        title="Distance from the teacher, nats per token",
        metrics=(("distill/kl", ""),),
        note="KL(teacher, student) over the teacher's likeliest tokens; with top_k = 0 mean log(student / teacher)",
    ),
    ChartSpec(title="Entropy, nats per token", metrics=(("entropy/mean", ""),)),
    ChartSpec(
        title="Ratio of new to old probability",
        metrics=(("ratio/max", "largest"), ("ratio/mean", "mean"), ("ratio/min", "smallest")),
        note="by token; 1 is no change",
    ),
    ChartSpec(title="Gradient norm", metrics=(("grad/norm", "mean"), ("grad/max", "largest"))),
)


def _charts_of(job: Job) -> tuple[ChartSpec, ...]:
    match job:
        case OpdJob():
            return OPD_CHARTS
        case SftJob():
            return SFT_CHARTS
        case RlJob():
            return RL_CHARTS
        case _:
            return ()


def _phases(by_name: dict[str, Series]) -> tuple[Phase, ...]:
    """Return wall-clock time by phase, summed over steps.

    Sampling is no phase: it overlaps with training, so only the wait for its answers costs time.
    """
    totals = {name: sum(by_name[metric].finite) for metric, name in PHASES if metric in by_name}
    whole = sum(totals.values())
    if not whole:
        return ()
    return tuple(
        Phase(name=name, seconds=duration(t), fraction=t / whole, tone=i) for i, (name, t) in enumerate(totals.items())
    )


def _other(series: Series) -> OtherMetric:
    finite = series.finite
    return OtherMetric(
        name=series.name,
        first=number(finite[0]),
        last=number(finite[-1]),
        low=number(min(finite)),
        high=number(max(finite)),
        spark=sparkline(series),
    )


# ---- build ----


HERE = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All data that the template shows."""

    facts: Facts
    headline: Headline
    notices: list[Notice]
    overview: list[SideBySide]
    benchmarks: list[BenchmarkView]
    curves: list[StageCurves]
    products: list[ProductMap]
    examples: Examples | None
    ledgers: list[StageLedger]
    flows: list[Flow]
    times: Times
    settings: list[Setting]
    config_json: str
    graph: lineage.Graph
    product: Product | None
    versions: dict[str, str]

    @property
    def models(self) -> tuple[tuple[int, str], ...]:
        """Tone and label of every evaluated model."""
        return tuple((m.tone, m.maker.label) for m in self.facts.models)


def build_report(inputs: ReportInputs, out: Path, *, home: Path | None = None) -> StageSummary:
    """Write the report to the file `out` atomically, creating its parents.

    Its links start at the folder `home`, where it will be read if it is published from `out` to elsewhere.
    Raise ArtifactError if a stage's folder cannot be read.
    """
    page = _page(read_facts(inputs), home=out.parent if home is None else home)
    html = page_template("report.html.j2").render(
        page=page,
        started=_readable(page.facts.run.started_at),
        css=stylesheet(),
        charts=charts,
        lineage=lineage,
        flow_width=FLOW_WIDTH,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(out)
    return StageSummary(
        counts={
            "stages": len(page.facts.stages),
            "missing_stages": len(page.facts.missing),
            "bytes": out.stat().st_size,
        },
        seeds={"run": inputs.config.seed},
    )


def _page(facts: Facts, *, home: Path) -> Page:
    ledgers = stage_ledgers(facts.stages, home=home)
    return Page(
        facts=facts,
        headline=headline(facts),
        notices=notices(facts),
        overview=overview(facts),
        benchmarks=benchmark_views(facts),
        curves=stage_curves([*facts.stages, *facts.missing]),
        products=product_maps(facts),
        examples=pick_examples(facts),
        ledgers=ledgers,
        flows=ledger_flows(ledgers),
        times=stage_times(facts.stages, price=facts.config.hardware.price_per_gpu_hour),
        settings=changed_settings(facts.config),
        config_json=json.dumps(facts.config.model_dump(mode="json"), indent=2, ensure_ascii=False),
        graph=lineage.lineage_graph(facts.stages),
        product=product_of(facts),
        versions=_versions(facts),
    )


def _readable(moment: str) -> str:
    """Format an ISO 8601 time to the second, with its time zone."""
    return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S %Z}"


def _versions(facts: Facts) -> dict[str, str]:
    """Return versions by library; if stages differ, all versions in stage order, separated by commas."""
    met: dict[str, dict[str, None]] = {}  # the inner dict is an ordered set
    for stage in facts.stages:
        for library, version in stage.manifest.versions.items():
            met.setdefault(library, {})[version] = None
    return {library: ", ".join(versions) for library, versions in met.items()}


def stylesheet() -> str:
    """Return the CSS that all pages share."""
    return (HERE / "report.css").read_text()


@cache
def page_template(name: str) -> Template:
    """Return a template of this folder with our filters."""
    environment = Environment(
        # StrictUndefined: a misspelt name in a template fails, where it would leave an empty place on the page.
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "duration": duration,
        "python": repr,
    }
    return environment.get_template(name)


# ---- curation ----
# Write the page of a curation that was run alone.


def write_curation_page(summary: StageSummary, out: Path, *, title: str) -> None:
    """Write one self-contained HTML file with a bar for every step of a curation."""
    html = page_template("curation.html.j2").render(
        title=title,
        counts=summary.counts,
        notes=summary.notes,
        ledgers=[stage_ledger("curate", summary.ledger)],
        css=stylesheet(),
    )
    out.write_text(html, encoding="utf-8")
