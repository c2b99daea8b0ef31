"""Measure how fast and at what cost a distillation proceeds."""

from __future__ import annotations

import time

from klear_core.distill.teacher import Usage


class Progress:
    """Measures this run's speed, and estimates the remaining time."""

    def __init__(self) -> None:
        self.num_done = 0
        """Problems, those of earlier runs included."""

    def start(self, used: Usage) -> None:
        """Begin to measure; `used` is what earlier runs used."""
        self._started, self._num_before, self._used_before = time.monotonic(), self.num_done, used

    def tokens_per_s(self, used: Usage) -> float:
        """Return the tokens of replies a second in this run."""
        num_tokens = used.output_tokens - self._used_before.output_tokens
        return num_tokens / max(time.monotonic() - self._started, 1e-9)

    def text(self, used: Usage, num_problems: int) -> str:
        """Return speed, cost and remaining time in words."""
        cost = f", cost {used.cost:,.2f}" if used.cost else ""
        num_new = self.num_done - self._num_before
        if not num_new:
            return cost
        elapsed_s = time.monotonic() - self._started
        left_h = elapsed_s / num_new * (num_problems - self.num_done) / 3600
        return f", {self.tokens_per_s(used):,.0f} tokens/s{cost}, {left_h:.1f} h left"
