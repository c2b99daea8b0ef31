import pytest

from klear_core.errors import is_interrupt


def test_an_interrupt_is_known_behind_the_errors_that_it_became():
    behind = SystemError("returned a result with an exception set")
    behind.__cause__ = KeyboardInterrupt()
    assert is_interrupt(KeyboardInterrupt())
    assert is_interrupt(behind)
    with pytest.raises(KeyError) as tidying_up:
        fail_while_tidying_up()
    assert is_interrupt(tidying_up.value)


def fail_while_tidying_up():
    try:
        raise KeyboardInterrupt
    finally:
        {}["nothing here"]


def test_other_errors_are_no_interrupts():
    assert not is_interrupt(None)
    assert not is_interrupt(ValueError())
