"""Choose which metrics share a chart, and under which title. Metrics without a chart are listed in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klear_core.artifacts.manifest import Manifest
from klear_core.config.curve import CurveJob
from klear_core.config.jobs import RlJob, SftJob
from klear_core.config.stage import Job
from klear_core.report.charts import LineChart, Series, line_chart, sparkline
from klear_core.report.facts import MissingStage, StageFacts
from klear_core.report.text import duration, number


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
        title="Truncated answers", metrics=(("response/truncated_frac", ""),), note="ran out of tokens", is_share=True
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
    return [_curves(stage) for stage in stages if _has_curve(stage)]


def _has_curve(stage: StageFacts | MissingStage) -> bool:
    return any(len(series.steps) > 1 for series in stage.metrics)


def _curves(stage: StageFacts | MissingStage) -> StageCurves:
    by_name = {s.name.partition("/")[2]: s for s in stage.metrics if s.finite}
    drawn = []
    named: set[str] = set()
    for spec in _charts_of(stage.stage.job):
        series = [(label, by_name[metric]) for metric, label in spec.metrics if metric in by_name]
        named |= {metric for metric, _ in spec.metrics}
        note = spec.note + (_RERUN + problems_note(_curve_of(stage)) if spec is SCORE else "")
        chart = line_chart(spec.title, series, note=note, is_share=spec.is_share)
        if chart is not None:
            drawn.append(chart)
    phases = _phases(by_name)
    others = [_other(s) for name, s in by_name.items() if name not in named]
    title = stage.stage.title + (" (failed)" if isinstance(stage, MissingStage) else "")
    return StageCurves(stage=stage.name, title=title, charts=tuple(drawn), phases=phases, others=tuple(others))


def _curve_of(stage: StageFacts | MissingStage) -> CurveJob | None:
    if isinstance(stage, StageFacts):
        # the artifact's own settings, because it may be older than this run
        return recorded_curve(stage.manifest)
    return stage.stage.job.runtime.curve if isinstance(stage.stage.job, SftJob | RlJob) else None


def recorded_curve(manifest: Manifest) -> CurveJob | None:
    """Return the settings of the scores that were taken while a stage trained; None if none were."""
    runtime = manifest.config.get("runtime")
    held = runtime.get("curve") if isinstance(runtime, dict) else None
    return None if held is None else CurveJob.model_validate(held)


def problems_note(job: CurveJob | None) -> str:
    """Say which benchmark the problems of the scores during training are from: its scores are reported, too."""
    if job is None:
        return ""
    return (
        f"; at most {job.curve.num_problems} problems of {job.curve.benchmark}, whose score is reported: a checkpoint "
        "that is chosen by this curve is chosen on its benchmark"
    )


def _charts_of(job: Job) -> tuple[ChartSpec, ...]:
    match job:
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
