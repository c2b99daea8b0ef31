"""Track the progress of an RL stage in plain numbers that a checkpoint can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from klear_core.artifacts.floors import Share
from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.metrics import skipped_note
from klear_core.rl.groups import CANCELLED, SURPLUS, TRAINED, DropCounts

_DROPS, _UNFINISHED = "fate/", "unfinished/"
"""Prefixes of keys in checkpoints. A new name would make a killed run lose these counts when it resumes."""
_NOT_COUNTERS = ("drops", "unfinished", "learner_notes")
"""Fields that are not one number: the first two are saved key by key, the notes not at all."""
ONE_TOLERANCE = 1e-4
"""Ratios closer to 1 than this differ from it by rounding alone."""


@dataclass(slots=True, kw_only=True)
class Progress:
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
    learner_notes: tuple[str, ...] = ()
    """Notes of the learner for the manifest; not saved, since a learner that resumes has its own."""

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
    def of(cls, counters: Mapping[str, int | float] | None) -> Progress:
        """Rebuild progress from `counters`; None means that no step is finished."""
        if counters is None:
            return cls()
        drops = {k.removeprefix(_DROPS): int(v) for k, v in counters.items() if k.startswith(_DROPS)}
        unfinished = sorted(int(k.removeprefix(_UNFINISHED)) for k in counters if k.startswith(_UNFINISHED))
        plain = {k: v for k, v in counters.items() if not k.startswith((_DROPS, _UNFINISHED))}
        return cls(**plain, unfinished=tuple(unfinished), drops=DropCounts(Counter(drops)))  # type: ignore[arg-type]

    def trained_share(self, *, example: str) -> Share:
        """Return the share of prompts whose group was trained on; surplus and cancelled groups do not count."""
        drops = self.drops.of("group")
        # A surplus group was informative and only had no room, so it is neither trained on nor lost. Whether a
        # cancelled one was informative is unknown.
        lost = {reason: n for reason, n in drops.items() if reason not in (TRAINED, SURPLUS, CANCELLED)}
        what = f"prompts were trained on in {self.step} steps (last pass rate {self.pass_rate:.2f})"
        return Share(what=what, num_in=drops.get(TRAINED, 0) + sum(lost.values()), lost=lost, example=example)

    def summary(self, choice: LedgerStep, *, minibatches_per_step: int, seed: int) -> StageSummary:
        """Return counts, ledger and notes for the stage's manifest and report."""
        notes = list(self.learner_notes)
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
            counts=counts, ledger=(choice, *self.drops.ledger()), seeds={"rl": seed}, notes=tuple(notes)
        )


def ratios_one_note(minibatches_per_step: int) -> str:
    """Explain what it means that every ratio was 1, and which setting would change it."""
    return (
        f"every ratio was 1: nothing was ever clipped, and all clip losses are the same. "
        f"minibatches_per_step is {minibatches_per_step}; ratios move only with several, or with stale samples"
    )
