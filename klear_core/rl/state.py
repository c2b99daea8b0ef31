"""Hold the state of an RL stage between its steps: what a checkpoint counts, how it goes, and scores of the policy."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from klear_core.artifacts.manifest import LedgerStep, ReasonCounts, StageSummary
from klear_core.config.rl import RlConfig
from klear_core.errors import CollapseError
from klear_core.generate.engine import InferenceEngine
from klear_core.metrics import METRICS_FILE, Telemetry, finite, read_metrics, skipped_note
from klear_core.rl.groups import CANCELLED, SURPLUS, TRAINED, reason_ledger
from klear_core.rl.stream import CurriculumState
from klear_core.train.inline_eval import inline_eval_metrics, scored_steps

log = logging.getLogger(__name__)

_REASONS, _UNFINISHED = "fate/", "unfinished/"
"""Prefixes of keys in checkpoints. A new name would make a killed run lose these counts when it resumes."""
_NOT_COUNTERS = ("reasons", "unfinished", "curriculum", "notes")
"""Fields that are not one number: the first three are saved key by key, the notes not at all."""
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
    curriculum: CurriculumState = field(default_factory=CurriculumState)
    """State of the curriculum after the last finished step."""
    reasons: ReasonCounts = field(default_factory=ReasonCounts)
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
    """Notes of the learner and of the guard for the manifest; not saved, since a run that resumes makes its own."""

    def add_step(
        self,
        metrics: Mapping[str, float],
        reasons: ReasonCounts,
        *,
        position: int,
        sampled_tokens: int,
        unfinished: tuple[int, ...] = (),
        curriculum: CurriculumState | None = None,
    ) -> None:
        """Count one finished step."""
        self.step += 1
        # This is the position of this step's batch; the stream may be further on, with prompts sampled for later steps.
        self.position, self.unfinished = position, unfinished
        self.curriculum = curriculum or CurriculumState()
        self.reasons.add(reasons)
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
        reasons = {_REASONS + name: n for name, n in self.reasons.counts.items()}
        # A checkpoint holds a flat dict of numbers, so each position becomes a key.
        unfinished = {f"{_UNFINISHED}{position}": 1 for position in self.unfinished}
        return plain | reasons | self.curriculum.counters() | unfinished

    @classmethod
    def of(cls, counters: Mapping[str, int | float] | None) -> RlState:
        """Rebuild the state from `counters`; None means that no step is finished."""
        if counters is None:
            return cls()
        reasons = {k.removeprefix(_REASONS): int(v) for k, v in counters.items() if k.startswith(_REASONS)}
        unfinished = sorted(int(k.removeprefix(_UNFINISHED)) for k in counters if k.startswith(_UNFINISHED))
        of_fields = {k: v for k, v in counters.items() if not k.startswith((_REASONS, _UNFINISHED))}
        plain = {k: v for k, v in of_fields.items() if not CurriculumState.holds(k)}
        return cls(
            **plain,  # type: ignore[arg-type]
            unfinished=tuple(unfinished),
            curriculum=CurriculumState.of(counters),
            reasons=ReasonCounts(Counter(reasons)),
        )

    def trained(self) -> LedgerStep:
        """Return how many prompts had a group that was trained on; surplus and cancelled groups do not count."""
        reasons = dict(sorted(self.reasons.of("group").items()))
        # A surplus group was informative and only had no room, so it is neither trained on nor lost. Whether a
        # cancelled one was informative is unknown.
        lost = {reason: n for reason, n in reasons.items() if reason not in (TRAINED, SURPLUS, CANCELLED)}
        return LedgerStep.of("trained", "group", num_in=reasons.get(TRAINED, 0) + sum(lost.values()), dropped=lost)

    def summary(self, choice: LedgerStep, *, minibatches_per_step: int, seed: int) -> StageSummary:
        """Return counts, ledger and notes for the stage's manifest and report."""
        notes = list(self.notes)
        if self.are_ratios_one():
            notes.append(ratios_one_note(minibatches_per_step))
        if self.steps_without_update:
            notes.append(
                f"{self.steps_without_update} of {self.step} steps changed nothing: "
                f"no group to train on, or only skipped updates"
            )
        if self.skipped_updates:
            notes.append(skipped_note(self.skipped_updates))
        counts: dict[str, int | float] = {
            "steps": self.step,
            "prompts": sum(self.reasons.of("group").values()),
            "rollouts": sum(self.reasons.of("rollout").values()),
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "last_pass_rate": self.pass_rate,
        }
        asked = []
        if self.curriculum.seen:
            never = {"never_finished": choice.num_out - len(self.curriculum.seen)}
            asked.append(LedgerStep.of("curriculum", "problem", num_in=choice.num_out, dropped=never))
        return StageSummary(
            counts=counts, ledger=(choice, *asked, *reason_ledger(self.reasons)), seeds={"rl": seed}, notes=tuple(notes)
        )


def ratios_one_note(minibatches_per_step: int) -> str:
    """Explain what it means that every ratio was 1, and which setting would change it."""
    return (
        f"every ratio was 1: nothing was ever clipped, and all clip losses are the same. "
        f"minibatches_per_step is {minibatches_per_step}; ratios move only with several, or with stale samples and "
        'old_logps = "sampler"'
    )


# ---- collapse guard ----
# Notice that a run goes wrong by comparing its last steps with its first. docs/when_a_run_goes_wrong.md has pictures.


WINDOW = 5
"""Steps whose mean is taken at the start of a run and at its end, so that one odd step decides nothing."""
_RISE = 0.2
"""A share counts as risen only by as much: a model that starts with bad answers may be learning to write good ones."""
SOLVED = 0.9
"""Pass rate from which low entropy is what a model is for: it knows the answer."""

_STOPPING = {
    "repeated": (
        "rl/answers/repeated_frac",
        "end in a loop",
        "Lower rl.optim.lr, or start from a model that ends its answers",
    ),
    "truncated": (
        "rl/response/truncated_frac",
        "were cut off at max_new_tokens",
        "Lower rl.optim.lr, set rl.overlong.penalty_tokens, or give answers more tokens",
    ),
    "malformed": (
        "rl/answers/malformed_frac",
        "lack a tag that the reward asks for",
        "If rl.reward.missing_close or missing_open is above rl.reward.wrong, lower it; else lower rl.optim.lr",
    ),
    "empty": (
        "rl/answers/empty_frac",
        "have nothing after the thinking",
        "Lower rl.optim.lr; a reward of your own may pay for saying nothing",
    ),
}
"""Shares that can stop a stage, by their setting in `rl.runtime.bad_answers`, the most telling first: the metric, what
its answers do, and the remedy."""

_WARNING = {
    "rl/answers/extra_tags_frac": "have a think tag twice: is the judge or a reward misled by a second answer?",
    "rl/answers/same_frac": "are one and the same, whatever the problem: lower rl.optim.lr, look at rl.reward",
    "rl/answers/other_script_frac": "(as a share of letters) are in another writing system than the question",
}
"""Shares that only warn: the metric, and what its answers do."""


class CollapseGuard:
    """A telemetry that remembers what it passes on, stops a stage whose answers degenerate, and warns of other ends."""

    def __init__(self, cfg: RlConfig, telemetry: Telemetry, metrics_file: Path) -> None:
        """A run that resumes remembers the steps that are in `metrics_file`."""
        self._cfg = cfg
        self._telemetry = telemetry
        self._rows = {int(row["step"] or 0): dict(row) for row in read_metrics(metrics_file)}
        self._told: set[str] = set()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass on and remember; later steps are forgotten, because they are repeated."""
        self._rows = {s: row for s, row in self._rows.items() if s < step} | {step: dict(finite(metrics))}
        self._telemetry.log(metrics, step=step)

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass on and remember."""
        self._rows.setdefault(step, {}).update(finite(metrics))
        self._telemetry.add(metrics, step=step)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Pass on."""
        self._telemetry.progress(done, total, note)

    def check(self, step: int) -> None:
        """Raise CollapseError if a share of bad answers ran away; log warnings that are new.

        Steps after `step` are not looked at: a run that resumes will repeat them.
        """
        self._rows = {s: row for s, row in self._rows.items() if s <= step}
        # First, because a stop has often more than one sign.
        for cause, text in self._warnings():
            if cause not in self._told:
                self._told.add(cause)
                log.warning("step %d: %s", step, text)
        for name, (metric, what, remedy) in _STOPPING.items():
            limit = float(getattr(self._cfg.runtime.bad_answers, name))
            ends = self._risen(metric, limit)
            if ends is not None:
                raise CollapseError(
                    f"step {step}: {_shares(ends)} {what}, more than rl.runtime.bad_answers.{name} = {limit:g}. "
                    f"{remedy}. The last checkpoint is kept: to go on from it all the same, set "
                    f"rl.runtime.bad_answers.{name} = 1 and run again"
                )

    def notes(self) -> tuple[str, ...]:
        """Return the warnings that hold at the end of the run."""
        return tuple(text for _, text in self._warnings())

    def _warnings(self) -> Iterator[tuple[str, str]]:
        """Yield a key and a sentence for everything that looks wrong now."""
        warn_above = self._cfg.runtime.bad_answers.warn_above
        stopping = [(metric, what) for metric, what, _ in _STOPPING.values()]
        for metric, what in (*stopping, *_WARNING.items()):
            ends = self._risen(metric, warn_above)
            if ends is not None:
                yield metric, f"{_shares(ends)} {what} ({metric})"
        yield from self._endless()
        yield from self._without_gradient()
        yield from self._lengths()
        yield from self._entropies()
        yield from self._pass_rates()

    def _endless(self) -> Iterator[tuple[str, str]]:
        """Yield a warning for answers that were cut off from the start, which is no collapse."""
        ends = self._ends("rl/response/truncated_frac")
        if ends is not None and min(ends) > self._cfg.runtime.bad_answers.truncated:
            yield (
                "endless",
                f"{_shares(ends)} were cut off at max_new_tokens: give them more tokens, or start from a model whose "
                "SFT rows had an end of the turn",
            )

    def _without_gradient(self) -> Iterator[tuple[str, str]]:
        kept, asked = (self._ends(f"rl/groups/{name}") for name in ("kept", "asked"))
        rates = self._ends("rl/pass/rate")
        if kept is None or asked is None or rates is None or rates[1] >= SOLVED:
            return
        if kept[1] < asked[1] / 10:
            yield (
                "kept",
                f"{kept[1]:.1f} of {asked[1]:.0f} groups were trained on in each of the last {WINDOW} steps, at a pass "
                f"rate of {rates[1]:.2f}: the others have equal rewards, and teach nothing",
            )

    def _lengths(self) -> Iterator[tuple[str, str]]:
        ends = self._ends("rl/response/mean_tokens")
        rates = self._ends("rl/pass/rate")
        # An answer may well become longer or shorter as long as it becomes better.
        if ends is None or rates is None or rates[1] > rates[0]:
            return
        if ends[1] < ends[0] / 2:
            yield "short", f"{_values('answers have', ends, 'tokens')}, and are no better: a collapse of the length"
        if ends[1] > ends[0] * 2:
            yield "long", f"{_values('answers have', ends, 'tokens')}, and are no better: is length rewarded?"

    def _entropies(self) -> Iterator[tuple[str, str]]:
        ends = self._ends("rl/entropy/mean")
        rates = self._ends("rl/pass/rate")
        if ends is None or rates is None or rates[1] >= SOLVED:
            return
        if ends[1] < ends[0] / 5:
            yield "entropy", f"{_values('entropy is', ends, 'nats')}: the policy explores no more"
        if ends[1] > ends[0] * 3 and rates[1] < rates[0]:
            yield "noise", f"{_values('entropy is', ends, 'nats')}, and the pass rate falls: lower rl.optim.lr"

    def _pass_rates(self) -> Iterator[tuple[str, str]]:
        rates = self._column("rl/pass/rate")
        if len(rates) < 2 * WINDOW:
            return
        means = [_mean(rates[i : i + WINDOW]) for i in range(len(rates) - WINDOW + 1)]
        if means[-1] < max(means) / 2:
            gradient = self._ends("rl/grad/norm")
            norm = f"; {_values('the gradient norm is', gradient, '')}" if gradient else ""
            yield "fall", f"the pass rate fell from {max(means):.2f} to {means[-1]:.2f}{norm}: lower rl.optim.lr"
        scores = self._column("rl/eval/avg")
        rise = means[-1] - means[0]
        if len(scores) > 1 and rise > _RISE and scores[-1] - scores[0] < rise / 4:
            yield (
                "judge",
                f"the pass rate rose from {means[0]:.2f} to {means[-1]:.2f}, but the score on the fixed set went from "
                f"{scores[0]:.2f} to {scores[-1]:.2f}: is there a hole in the judge? Read the answers",
            )

    def _risen(self, metric: str, limit: float) -> tuple[float, float] | None:
        """Return the share at the start and now if it is above the limit and has risen; else None."""
        ends = self._ends(metric)
        return ends if ends is not None and ends[1] > limit and ends[1] > ends[0] + _RISE else None

    def _ends(self, metric: str) -> tuple[float, float] | None:
        """Return the means over the first and the last steps; None while they overlap."""
        values = self._column(metric)
        return None if len(values) < 2 * WINDOW else (_mean(values[:WINDOW]), _mean(values[-WINDOW:]))

    def _column(self, metric: str) -> list[float]:
        found = (self._rows[step].get(metric) for step in sorted(self._rows))
        return [value for value in found if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shares(ends: tuple[float, float]) -> str:
    return f"{ends[1]:.0%} of the answers of the last {WINDOW} steps ({ends[0]:.0%} of the first {WINDOW})"


def _values(what: str, ends: tuple[float, float], unit: str) -> str:
    amount = f"{ends[1]:.3g} {unit}".strip()
    return f"{what} {amount} on average of the last {WINDOW} steps ({ends[0]:.3g} in the first {WINDOW})"


# ---- inline evaluation ----
# Score the policy on a fixed set every few steps, by the engines that sample, while training goes on.


InlineEval = Callable[[InferenceEngine], Coroutine[Any, Any, dict[str, float]]]
"""Answers and judges a fixed set of problems with the weights that an engine has; returns the score with its intervals
and shares, by the names in `SCORES`."""
OpenInlineEval = Callable[[Path], AbstractContextManager[InlineEval | None]]
"""Returns a context of the evaluation, with its judges, for the model in a folder; of None if there is none to make."""


def no_inline_eval(_folder: Path) -> AbstractContextManager[InlineEval | None]:
    """Return a context of None."""
    return nullcontext()


class InlineEvals:
    """Make the inline evaluations of a run, one at a time; leaving the context cancels the one that is being made.

    Each is of one version of the weights: its requests are sent once the engines have loaded that version, run
    beside the next rollouts and the learner's update, and are awaited before the engines load the next version.
    """

    def __init__(self, inline_eval: InlineEval | None, telemetry: Telemetry, cfg: RlConfig, *, workdir: Path) -> None:
        self._inline_eval = inline_eval
        self._metrics_file = workdir / METRICS_FILE
        self._telemetry = telemetry
        self._cfg = cfg.runtime.curve
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
        """Score the weights that training resumes from, unless an earlier attempt has logged their scores."""
        # Only this step is looked up: rows of later steps, which are trained again, stay in the metrics file until the
        # next step is logged.
        logged = scored_steps(self._metrics_file, "rl")
        if step not in logged:
            self.start(engine, step=step)

    def start(self, engine: InferenceEngine, *, step: int) -> None:
        """Start to score the weights after `step` steps, if that is due."""
        if self._inline_eval is None or self._cfg is None:
            return
        if self._cfg.is_due(step, num_steps=self._num_steps):
            assert self._running is None, step  # the loop calls `finish` before the engines load new weights
            # Not awaited here: `finish` collects the result, while rollouts and update go on.
            self._running = (step, asyncio.create_task(self._inline_eval(engine)))

    async def finish(self) -> None:
        """Wait for the evaluation that is being made, if there is one, and log its scores."""
        if self._running is None:
            return
        step, task = self._running
        scores = await task
        self._running = None  # only now: if the wait fails or is cancelled, `__aexit__` still has the task
        # `add`, because `log` would replace the rows of that step and of later ones.
        self._telemetry.add(inline_eval_metrics("rl", scores), step=step)
