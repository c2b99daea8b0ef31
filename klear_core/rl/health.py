"""Notice that a run goes wrong: shares of bad answers by step, limits that stop the stage, warnings with a cause.

docs/when_a_run_goes_wrong.md has a picture of each case, from real runs.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from klear_core.config.rl import RlConfig
from klear_core.errors import CollapseError
from klear_core.metrics import Telemetry, finite, read_metrics
from klear_core.prompts import THINK_CLOSE, THINK_OPEN, split_response
from klear_core.rl.rewards import is_well_formed
from klear_core.types import Completion, Rollout, RolloutGroup

log = logging.getLogger(__name__)

WINDOW = 5
"""Steps whose mean is taken at the start of a run and at its end, so that one odd step decides nothing."""
_RISE = 0.2
"""A share counts as risen only by as much: a model that starts with bad answers may be learning to write good ones."""

# ---- answers ----
# Describe the answers of a step by their form.

_LOOP_TOKENS, _LOOP_TIMES, _LONGEST_PERIOD = 32, 4, 64
_COMMON_SCRIPTS = {"LATIN", "GREEK", "MODIFIER"}
"""Writing systems that mathematics uses in every language."""


def describe_answers(groups: Sequence[RolloutGroup], cfg: RlConfig) -> dict[str, float]:
    """Return shares of all sampled answers of a step; empty without answers.

    `same_frac` is the share of the most common final answer, over all problems. `other_script_frac` is the mean share
    of letters in a writing system that neither the question nor mathematics uses.
    """
    answers = [(group, rollout) for group in groups for rollout in group.rollouts]
    if not answers:
        return {}
    completions = [rollout.completion for _, rollout in answers]
    counts = {
        "malformed": sum(not is_well_formed(c, cfg.reward) for c in completions),
        "repeated": sum(ends_in_loop(_without_end(c)) for c in completions),
        "empty": sum(not _final(c.text).strip() for c in completions),
        "extra_tags": sum(_has_extra_tags(c.text) for c in completions),
        "same": Counter(_final(c.text) for c in completions).most_common(1)[0][1],
        "other_script": sum(_other_script(group.problem.question, rollout) for group, rollout in answers),
    }
    return {f"rl/answers/{name}_frac": count / len(answers) for name, count in counts.items()}


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Return whether the last 32 tokens or more are one piece of up to 64 tokens, four times or more in a row."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_LOOP_TOKENS, _LOOP_TIMES * period)
        tail = token_ids[-length:]
        # Shifted by one period, a loop is equal to itself.
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def _without_end(completion: Completion) -> tuple[int, ...]:
    """Return the tokens without the end of the turn, which would hide a loop before it."""
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


def _final(text: str) -> str:
    """Return what follows the thinking; without `</think>` the whole text."""
    split = split_response(text)
    return split.answer if split.is_closed else text


def _has_extra_tags(text: str) -> bool:
    return text.count(THINK_OPEN) > 1 or text.count(THINK_CLOSE) > 1


def _other_script(question: str, rollout: Rollout) -> float:
    text = rollout.completion.text
    if text.isascii():
        return 0.0
    known = _COMMON_SCRIPTS | {_script_of(char) for char in set(question) if char.isalpha()}
    letters = {char: count for char, count in Counter(text).items() if char.isalpha()}
    others = sum(count for char, count in letters.items() if _script_of(char) not in known)
    return others / max(1, sum(letters.values()))


@cache
def _script_of(char: str) -> str:
    """Return the first word of a letter's Unicode name, which is its writing system; variants count as their letter."""
    return unicodedata.name(unicodedata.normalize("NFKC", char)[0], "").partition(" ")[0]


# ---- run ----
# Compare a run's last steps with its first.

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


class Watch:
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
        for name, (metric, what, remedy) in _STOPPING.items():
            limit = float(getattr(self._cfg.runtime.bad_answers, name))
            ends = self._risen(metric, limit)
            if ends is not None:
                raise CollapseError(
                    f"step {step}: {_shares(ends)} {what}, more than rl.runtime.bad_answers.{name} = {limit:g}. "
                    f"{remedy}. The last checkpoint is kept: to go on from it all the same, set "
                    f"rl.runtime.bad_answers.{name} = 1 and run again"
                )
        for cause, text in self._warnings():
            if cause not in self._told:
                self._told.add(cause)
                log.warning("step %d: %s", step, text)

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
        kept = self._column("rl/groups/kept")[-WINDOW:]
        if len(kept) == WINDOW and not any(kept):
            pass_rate = self._column("rl/pass/rate")[-1:]
            yield (
                "kept",
                f"no group of the last {WINDOW} steps was trained on, at a pass rate of "
                f"{pass_rate[0] if pass_rate else 0:.2f}: their rewards are all equal, and nothing is learnt",
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
        if ends[1] < ends[0] / 10:
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


SOLVED = 0.9
"""Pass rate from which low entropy is what a model is for: it knows the answer."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shares(ends: tuple[float, float]) -> str:
    return f"{ends[1]:.0%} of the answers of the last {WINDOW} steps ({ends[0]:.0%} of the first {WINDOW})"


def _values(what: str, ends: tuple[float, float], unit: str) -> str:
    amount = f"{ends[1]:.3g} {unit}".strip()
    return f"{what} {amount} on average of the last {WINDOW} steps ({ends[0]:.3g} in the first {WINDOW})"
