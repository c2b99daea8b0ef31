import pytest
from pydantic import ValidationError

from klear_core.artifacts.manifest import LedgerStep, ReasonCounts


def test_a_step_that_adds_up_is_accepted():
    step = LedgerStep(
        step="dedup", unit="problem", num_in=10, num_out=7, dropped={"repeat": 2, "empty": 1}, noted={"cut": 4}
    )
    assert step.num_out == 7


def test_a_step_that_loses_a_row_silently_is_refused():
    with pytest.raises(ValidationError, match=r"'dedup' does not add up: 10 in, 7 out, 2 dropped"):
        LedgerStep(step="dedup", unit="problem", num_in=10, num_out=7, dropped={"repeat": 2})


def test_the_output_of_a_step_enters_the_next_and_reasons_come_in_name_order():
    drops = ReasonCounts()
    drops.count("read", "not_json", 2)
    drops.count("read", "empty")
    drops.count("dedup", "repeat", 0)
    read, dedup = drops.ledger({"read": "row", "dedup": "problem"}, num_in=10, noted={"dedup": {"cut": 4}})
    assert (read.unit, read.num_in, read.num_out, list(read.dropped.items())) == (
        "row",
        10,
        7,
        [("empty", 1), ("not_json", 2)],
    )
    assert (dedup.unit, dedup.num_in, dedup.num_out, dedup.dropped, dedup.noted) == ("problem", 7, 7, {}, {"cut": 4})


def test_counts_of_later_items_keep_the_example_of_the_earlier_ones():
    drops, later = ReasonCounts(), ReasonCounts()
    drops.count("judge", "failed", example="problem a")
    later.count("judge", "failed", example="problem b")
    later.count("select", "wrong", example="problem c")
    drops.add(later)
    assert drops.of("judge", "select") == {"failed": 2, "wrong": 1}
    assert drops.examples == {"judge": "problem a", "select": "problem c"}
