"""Hold the state of an RL stage between its steps: what a checkpoint counts, and the scores of the policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from klear_core.artifacts.manifest import DropCounts, LedgerStep, StageSummary
from klear_core.config.rl import RlConfig
from klear_core.generate.engine import InferenceEngine
from klear_core.metrics import METRICS_FILE, Telemetry, skipped_note
from klear_core.rl.groups import CANCELLED, SURPLUS, TRAINED, drop_ledger
from klear_core.train.inline_eval import logged_points, point_metrics

_DROPS, _UNFINISHED = "fate/", "unfinished/"
"""Prefixes of keys in checkpoints. A new name would make a killed run lose these counts when it resumes."""
_NOT_COUNTERS = ("drops", "unfinished", "notes")
"""Fields that are not one number: the first two are saved key by key, the notes not at all."""
ONE_TOLERANCE = 1e-4
"""Ratios closer to 1 than this differ from it by rounding alone."""


@dataclass(slots=True, kw_only=True)
class RlState:
    """Counts of finished steps and of what they consumed; saved with every checkpoint."""

    step: int = 0
    position: int = 0
    """Position of the prompt stream after the last prompt used by a finished step."""
    unfinished: tuple[int, ...] = ()
    """Positions before `position` whose groups are in no finished step."""
    drops: DropCounts = field(default_factory=DropCounts)
    sampled_tokens: int = 0
    trained_tokens: int = 0
    steps_without_update: int = 0
    skipped_updates: int = 0
    """Updates skipped because loss or gradient was not finite."""
    largest_ratio_gap: float = 0.0
    """Largest |ratio - 1| of any update; 0 before the first."""
    pass_rate: float = 0.0
    """Pass rate of the last step with a judged answer."""
    notes: tuple[str, ...] = ()
    """Notes of the learner and of the watch for the manifest; not saved, since a run that resumes makes its own."""

    def after(
        self,
        metrics: Mapping[str, float],
        drops: DropCounts,
        *,
        position: int,
        sampled_tokens: int,
        unfinished: tuple[int, ...] = (),
    ) -> None:
        """Count one finished step."""
        self.step += 1
        # This is the position of this step's batch; the stream may be further on, with prompts sampled for later steps.
        self.position, self.unfinished = position, unfinished
        self.drops.add(drops)
        self.sampled_tokens += sampled_tokens
        self.trained_tokens += int(metrics.get("rl/batch/tokens", 0))
        # Both keys are in the metrics of every step, also of one without samples.
        self.steps_without_update += metrics["rl/optim/updates"] == 0
        self.skipped_updates += int(metrics["rl/optim/skipped"])
        if "rl/ratio/max" in metrics:  # absent from a step without an applied update
            self.largest_ratio_gap = max(
                self.largest_ratio_gap, metrics["rl/ratio/max"] - 1, 1 - metrics["rl/ratio/min"]
            )
        self.pass_rate = metrics.get("rl/pass/rate", self.pass_rate)

    def are_ratios_one(self) -> bool:
        """Return whether there were updates and every ratio stayed at 1."""
        return self.step > self.steps_without_update and self.largest_ratio_gap < ONE_TOLERANCE

    def counters(self) -> dict[str, int | float]:
        """Return all fields with numbers as a flat dict."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_COUNTERS}
        drops = {_DROPS + name: n for name, n in self.drops.counts.items()}
        # A checkpoint holds a flat dict of numbers, so each position becomes a key.
        return plain | drops | {f"{_UNFINISHED}{position}": 1 for position in self.unfinished}

    @classmethod
    def of(cls, counters: Mapping[str, int | float] | None) -> RlState:
        """Rebuild progress from `counters`; None means that no step is finished."""
        if counters is None:
            return cls()
        drops = {k.removeprefix(_DROPS): int(v) for k, v in counters.items() if k.startswith(_DROPS)}
        unfinished = sorted(int(k.removeprefix(_UNFINISHED)) for k in counters if k.startswith(_UNFINISHED))
        plain = {k: v for k, v in counters.items() if not k.startswith((_DROPS, _UNFINISHED))}
        return cls(**plain, unfinished=tuple(unfinished), drops=DropCounts(Counter(drops)))  # type: ignore[arg-type]

    def trained(self) -> LedgerStep:
        """Return how many prompts had a group that was trained on; surplus and cancelled groups do not count."""
        drops = dict(sorted(self.drops.of("group").items()))
        # A surplus group was informative and only had no room, so it is neither trained on nor lost. Whether a
        # cancelled one was informative is unknown.
        lost = {reason: n for reason, n in drops.items() if reason not in (TRAINED, SURPLUS, CANCELLED)}
        return LedgerStep.of("trained", "group", num_in=drops.get(TRAINED, 0) + sum(lost.values()), dropped=lost)

    def summary(self, choice: LedgerStep, *, minibatches_per_step: int, seed: int) -> StageSummary:
        """Return counts, ledger and notes for the stage's manifest and report."""
        notes = list(self.notes)
        if self.are_ratios_one():
            notes.append(ratios_one_note(minibatches_per_step))
        if self.steps_without_update:
            notes.append(
                f"{self.steps_without_update} of {self.step} steps changed nothing: "
                f"no informative group, or only skipped updates"
            )
        if self.skipped_updates:
            notes.append(skipped_note(self.skipped_updates))
        counts: dict[str, int | float] = {
            "steps": self.step,
            "prompts": sum(self.drops.of("group").values()),
            "rollouts": sum(self.drops.of("rollout").values()),
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "last_pass_rate": self.pass_rate,
        }
        return StageSummary(
            counts=counts, ledger=(choice, *drop_ledger(self.drops)), seeds={"rl": seed}, notes=tuple(notes)
        )


def ratios_one_note(minibatches_per_step: int) -> str:
    """Explain what it means that every ratio was 1, and which setting would change it."""
    return (
        f"every ratio was 1: nothing was ever clipped, and all clip losses are the same. "
        f"minibatches_per_step is {minibatches_per_step}; ratios move only with several, or with stale samples"
    )


# ---- curve ----
# Score the policy on a fixed set every few steps, by the engines that sample, while training goes on.


class InlineEval(Protocol):
    """Answers and judges a fixed set of problems with the weights that an engine has."""

    async def score(self, engine: InferenceEngine) -> dict[str, float]:
        """Return the score with its intervals and shares, by the names in `POINT`."""
        ...


OpenInlineEval = Callable[[Path], AbstractContextManager[InlineEval | None]]
"""Returns a context of the exam, with its judges, for the model in a folder; of None if no scores are to be taken."""


def no_inline_eval(_folder: Path) -> AbstractContextManager[InlineEval | None]:
    """Return a context of None."""
    return nullcontext()


class Curve:
    """Make the points of the curve, one at a time; leaving the context cancels the one that is being made.

    A point belongs to one version of the weights: its requests are sent once the engines have loaded that version, run
    beside the next rollouts and the learner's update, and are awaited before the engines load the next version.
    """

    def __init__(self, inline_eval: InlineEval | None, telemetry: Telemetry, cfg: RlConfig, *, workdir: Path) -> None:
        self._exam = inline_eval
        self._metrics_file = workdir / METRICS_FILE
        self._telemetry = telemetry
        self._curve = cfg.runtime.curve
        self._num_steps = cfg.num_steps
        self._running: tuple[int, asyncio.Task[dict[str, float]]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            _, task = self._running
            self._running = None
            task.cancel()
            # Wait for it and retrieve its error: the loop is already ending for another reason.
            await asyncio.gather(task, return_exceptions=True)

    def resume(self, engine: InferenceEngine, *, step: int) -> None:
        """Start the point of the weights that training resumes from, unless an earlier attempt has logged it."""
        # Only this step is looked up: rows of later steps, which are trained again, stay in the metrics file until the
        # next step is logged.
        logged = logged_points(self._metrics_file, "rl")
        if step not in logged:
            self.start(engine, step=step)

    def start(self, engine: InferenceEngine, *, step: int) -> None:
        """Start the point of the weights after `step` steps, if one is due."""
        if self._exam is None or self._curve is None:
            return
        if self._curve.is_due(step, num_steps=self._num_steps):
            assert self._running is None, step  # the loop calls `finish` before the engines load new weights
            # Not awaited here: `finish` collects the result, while rollouts and update go on.
            self._running = (step, asyncio.create_task(self._exam.score(engine)))

    async def finish(self) -> None:
        """Wait for the point that is being made, if there is one, and log it."""
        if self._running is None:
            return
        step, task = self._running
        metrics = await task
        self._running = None  # only now: if the wait fails or is cancelled, `__aexit__` still has the task
        # `add`, because `log` would replace the rows of that step and of later ones.
        self._telemetry.add(point_metrics("rl", metrics), step=step)
