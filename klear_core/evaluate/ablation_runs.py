"""Read the result of one run of an ablation grid from its artifacts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from klear_core.artifacts.manifest import read_manifest
from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.metrics import METRICS_FILE, read_metrics
from klear_core.scores import EvalReport, read_reports

TOKEN_SHARES = {
    "A<0, r low": "rl/clip/low_frac",
    "A>0, r high": "rl/clip/high_frac",
    "A>0, r low": "rl/outside/positive_below_frac",
    "A<0, r high": "rl/outside/negative_above_frac",
    "dual clip": "rl/clip/dual_frac",
}
"""Metrics with the share of trained tokens whose ratio r left the clip range, by sign of the advantage A and side of
the range. PPO's clip drops the gradient of the first two kinds."""

_MAX_RATIO, _ENTROPY = "rl/ratio/max", "rl/entropy/mean"


class RunResult(Settings):
    """The result of one run, from its training stage and the evaluations before and after it."""

    before: float | None
    """avg@n of the model that RL started from, averaged over benchmarks; None for SFT."""
    after: float
    """avg@n after training, averaged over benchmarks."""
    scores: dict[str, float] = {}
    """avg@n after training by benchmark; empty in files of earlier versions."""
    token_shares: dict[str, float]
    """Shares by the names of `TOKEN_SHARES`, averaged over the RL steps that trained; empty for SFT."""
    max_ratio: float | None = None
    """Largest ratio of new to old probability over all tokens and steps; None for SFT."""
    entropy: float | None = None
    """Mean entropy in nats per token, at the last step that trained; None for SFT."""
    num_steps: int = 0
    """Number of RL steps that trained, or of SFT updates."""
    num_tokens: int | None = None
    """Tokens that SFT trained on; None for RL."""
    num_lacking: int = 0
    """Number of those steps that lack one of the metrics above (skipped updates, in files of earlier versions). Means
    are over the steps that have the metric."""
    greedy: float | None = None
    """Share of right greedy answers after RL, averaged over benchmarks; None if none were asked for."""
    commit: str | None = None
    """Git commit of the code that trained; None outside a git checkout."""

    @property
    def has_collapsed(self) -> bool:
        """Whether RL lost more than half of the score that it started from."""
        return self.before is not None and self.after < self.before / 2


def read_run(
    *, rl: Path, before: Path, after: Path, commit: str | None = None, scored_on: Collection[str] = ()
) -> RunResult:
    """Read a run's result from the artifact folders of its RL stage and of the evaluations before and after it.

    Scores are means over the benchmarks `scored_on`, all if none. Raise ArtifactError if RL trained on no token.
    """
    # only rows of steps that trained have the entropy
    steps = [row for row in read_metrics(rl / METRICS_FILE) if _ENTROPY in row]
    columns = {name: _numbers(steps, name) for name in (*TOKEN_SHARES.values(), _MAX_RATIO, _ENTROPY)}
    if not all(columns.values()):
        raise ArtifactError(
            f"{rl}: this RL stage trained on no token, or every update was skipped, so there is nothing to compare"
        )
    token_shares = {name: fmean(columns[metric]) for name, metric in TOKEN_SHARES.items()}
    num_complete = 0
    for row in steps:
        num_complete += all(row.get(name) is not None for name in columns)
    scores = _scores(_reports(after, scored_on))
    return RunResult(
        before=fmean(_scores(_reports(before, scored_on)).values()),
        after=fmean(scores.values()),
        scores=scores,
        greedy=_greedy(_reports(after, scored_on)),
        commit=commit,
        token_shares=token_shares,
        max_ratio=max(columns[_MAX_RATIO]),
        entropy=columns[_ENTROPY][-1],
        num_steps=len(steps),
        num_lacking=len(steps) - num_complete,
    )


def read_sft_run(*, sft: Path, after: Path, scored_on: Collection[str] = ()) -> RunResult:
    """Read a run's result from the artifact folders of its SFT stage and of the evaluation after it.

    The score is the mean over the benchmarks `scored_on`, all if none.
    """
    manifest, reports = read_manifest(sft), _reports(after, scored_on)
    scores = _scores(reports)
    return RunResult(
        before=None,
        after=fmean(scores.values()),
        scores=scores,
        greedy=_greedy(reports),
        commit=manifest.git_commit,
        token_shares={},
        num_steps=int(manifest.counts.get("steps", 0)),
        num_tokens=int(manifest.counts.get("tokens", 0)),
    )


def _reports(evaluation: Path, scored_on: Collection[str]) -> list[EvalReport]:
    """Return the reports of the benchmarks `scored_on`, all if none. ArtifactError if one is missing."""
    reports = [report for report in read_reports(evaluation) if not scored_on or report.benchmark in scored_on]
    if not reports or len(reports) < len(scored_on):
        raise ArtifactError(f"{evaluation}: this evaluation lacks benchmarks of {', '.join(scored_on) or 'any name'}")
    return reports


def _scores(reports: Sequence[EvalReport]) -> dict[str, float]:
    """Return avg@n by benchmark."""
    return {report.benchmark: report.avg.value for report in reports}


def _greedy(reports: Sequence[EvalReport]) -> float | None:
    """Return the mean share of right greedy answers; None if none were asked for."""
    values = [report.greedy.value for report in reports if report.greedy is not None]
    return fmean(values) if values else None


def _numbers(steps: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    """Return the metric's values at the steps that have one."""
    return [value for row in steps if (value := row.get(name)) is not None]
