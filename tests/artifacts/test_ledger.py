import pytest
from pydantic import ValidationError

from klear_core.artifacts.manifest import LedgerStep


def test_a_step_that_adds_up_is_accepted():
    step = LedgerStep(
        step="dedup", unit="problem", num_in=10, num_out=7, dropped={"repeat": 2, "empty": 1}, noted={"cut": 4}
    )
    assert step.num_out == 7


def test_a_step_that_loses_a_row_silently_is_refused():
    with pytest.raises(ValidationError, match=r"'dedup' does not add up: 10 in, 7 out, 2 dropped"):
        LedgerStep(step="dedup", unit="problem", num_in=10, num_out=7, dropped={"repeat": 2})
