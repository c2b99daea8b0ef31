"""Keep what a distillation spends within its budget."""

from __future__ import annotations

from klear_core.config.distill import BudgetConfig, TeacherEndpoint
from klear_core.distill.teacher import Usage


class Budget:
    """Adds up tokens and cost. The longest reply of every open request is reserved, so that the sum never exceeds the
    budget."""

    def __init__(self, cfg: BudgetConfig) -> None:
        self._cfg = cfg
        self._spent, self._reserved = Usage(), Usage()

    def spend(self, usage: Usage) -> None:
        """Count what was used."""
        self._spent += usage

    def fits(self, request: Usage) -> bool:
        """Return whether a request fits beside what is spent and reserved."""
        return self._is_within(self._spent + self._reserved + request)

    def will_never_fit(self, request: Usage) -> bool:
        """Return whether a request would not fit even if all open ones cost nothing."""
        return not self._is_within(self._spent + request)

    def reserve(self, request: Usage) -> None:
        """Reserve the most that a request can use."""
        self._reserved += request

    def release(self, request: Usage) -> None:
        """Return the reservation of a finished request."""
        self._reserved = Usage(
            input_tokens=self._reserved.input_tokens - request.input_tokens,
            output_tokens=self._reserved.output_tokens - request.output_tokens,
            cost=self._reserved.cost - request.cost,
        )

    def _is_within(self, usage: Usage) -> bool:
        cfg = self._cfg
        has_tokens = cfg.max_tokens is None or usage.tokens <= cfg.max_tokens
        # a billionth of slack, because adding and subtracting reservations in floating point leaves rounding errors
        has_money = cfg.max_cost is None or usage.cost <= cfg.max_cost * (1 + 1e-9)
        return has_tokens and has_money


def cost_of(endpoint: TeacherEndpoint, *, input_tokens: int, output_tokens: int) -> float:
    """Return the price of tokens at an endpoint, in the currency of its prices."""
    return (input_tokens * endpoint.input_price + output_tokens * endpoint.output_price) / 1e6
