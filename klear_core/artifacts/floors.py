"""Stop a stage that would lose almost all of its input, and warn of one that loses much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from klear_core.config.settings import Floor
from klear_core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of `num_in` items that were kept, and why the others were lost."""

    what: str
    """The items, in words that follow a number: `rows of source 'a' can be used`."""
    num_in: int
    lost: Mapping[str, int]
    """Count by reason."""
    example: str = ""
    """A lost item, with its id or place."""

    @property
    def num_out(self) -> int:
        """Number of items that were kept."""
        return self.num_in - sum(self.lost.values())

    def __str__(self) -> str:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.lost.items(), key=lambda item: -item[1]))
        lost = f"; lost: {reasons}" if reasons else ""
        example = f"; the first: {self.example}" if self.example else ""
        return f"{self.num_out:,} of {self.num_in:,} {self.what}{lost}{example}"


def check_floor(share: Share, floor: Floor, *, key: str, remedy: str) -> tuple[str, ...]:
    """Return a warning if the share is below `floor.warn_below`; `key` is the floor's place in the settings.

    DataError if nothing is left, whatever the floor, or less than `floor.stop_below`.
    """
    frac = share.num_out / share.num_in if share.num_in else 0.0
    # Also with `stop_below = 0`: nothing can be made from nothing.
    if share.num_out == 0:
        raise DataError(f"{share}. {remedy}")
    if frac < floor.stop_below:
        raise DataError(
            f"{share}; that is {frac:.1%}, less than {key}.stop_below = {floor.stop_below:g}. "
            f"{remedy}, or lower that setting"
        )
    if frac < floor.warn_below:
        return (f"{share}; that is {frac:.1%}, less than {key}.warn_below = {floor.warn_below:g}",)
    return ()
