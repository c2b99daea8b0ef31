"""Plan a fine-tuning run: the rows that are held out, the rows of each step, and the number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.artifacts.ledger import LedgerStep
from klear_core.config.sft import SftConfig
from klear_core.sft.examples import TokenStore
from klear_core.sft.order import RowOrder, Split, split_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The rows of a run. It depends on rows, settings and seed alone, so all ranks and a resumed run agree on it."""

    split: Split
    order: RowOrder
    num_steps: int
    """Steps to train for: all of `order`, or `max_steps` if that is less."""

    def ledger(self) -> tuple[LedgerStep, ...]:
        """Return the counts of rows that are held out, and of those that are never trained on, by setting."""
        return self._held_out(), self._weighed()

    def _held_out(self) -> LedgerStep:
        num_train, num_held_out = len(self.split.train), len(self.split.validation)
        return LedgerStep(
            step="hold_out",
            unit="row",
            num_in=num_train + num_held_out,
            num_out=num_train,
            dropped={"validation": num_held_out},
        )

    def _weighed(self) -> LedgerStep:
        """Count the rows that are trained on at least once, and the others by the setting that excludes them."""
        num_rows = len(self.split.train)
        # Without `max_steps` all of `order` is trained on, so what that lacks is left out by source_weights.
        num_wanted, num_seen = self.order.num_distinct(self.order.num_steps), self.order.num_distinct(self.num_steps)
        dropped = {"source_weights": num_rows - num_wanted, "max_steps": num_wanted - num_seen}
        return LedgerStep(
            step="weigh", unit="row", num_in=num_rows, num_out=num_seen, dropped={k: n for k, n in dropped.items() if n}
        )


def plan_training(cfg: SftConfig, store: TokenStore, *, seed: int) -> TrainingPlan:
    """Split the rows and order those to train on. Raise DataError if none are left."""
    split = split_rows(store.problem_ids, frac=cfg.validation_frac, max_rows=cfg.max_validation_rows, seed=seed)
    order = RowOrder(
        split.train,
        store.sources,
        weights=cfg.source_weights,
        num_epochs=cfg.num_epochs,
        rows_per_step=cfg.rows_per_step,
        seed=seed,
    )
    # The learning rate's schedule ends with these steps, too, and not with the epochs.
    num_steps = min(order.num_steps, cfg.max_steps or order.num_steps)
    return TrainingPlan(split=split, order=order, num_steps=num_steps)
