"""Signals that are sent to this process, and heeded in its main thread."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from klear_core.stopping import Requeued, at_once, checkpoint_first, is_asked, requeued_by_signal, signals_held


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises here."""


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    def terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    with requeued_by_signal():
        yield
    signal.signal(signal.SIGTERM, before)


BOTH = pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, Terminated), (signal.SIGUSR1, Requeued)], ids=["term", "usr1"]
)


def send(*numbers: signal.Signals, then: BaseException | None = None) -> None:
    for number in numbers:
        signal.raise_signal(number)
    if then is not None:
        raise then


@BOTH
def test_a_signal_asks_a_loop_to_stop_and_ends_the_block_that_has_stopped(number: signal.Signals, end: type):
    steps: list[int] = []

    def loop() -> None:
        while not is_asked():
            steps.append(len(steps))
            if len(steps) == 3:
                send(number)

    with pytest.raises(end), checkpoint_first():
        loop()
    assert steps == [0, 1, 2]
    assert not is_asked()


@BOTH
def test_an_error_after_a_signal_is_its_consequence(number: signal.Signals, end: type):
    with pytest.raises(end), checkpoint_first():
        send(number, then=RuntimeError("the actor died"))


def test_an_error_without_a_signal_stays_itself():
    with pytest.raises(RuntimeError, match="the actor died"), checkpoint_first():
        send(then=RuntimeError("the actor died"))


@BOTH
def test_a_second_signal_ends_a_step_at_once(number: signal.Signals, end: type):
    with pytest.raises(end), checkpoint_first():
        send(signal.SIGUSR1, number, then=pytest.fail.Exception("the step went on"))


def test_sigterm_leaves_a_step_only_its_grace():
    def step() -> None:
        send(signal.SIGTERM)
        while True:
            time.sleep(60)

    with pytest.raises(Terminated), checkpoint_first(grace_s=0.01):
        step()


def test_a_signal_that_is_to_act_at_once_does():
    with pytest.raises(Terminated), at_once(signal.SIGTERM), checkpoint_first():
        send(signal.SIGTERM, then=pytest.fail.Exception("the step went on"))


def test_handlers_are_as_they_were_after_the_block():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with suppress(Requeued), checkpoint_first():
        send(signal.SIGUSR1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


@BOTH
def test_a_signal_that_is_held_takes_effect_after_the_block(number: signal.Signals, end: type):
    done: list[str] = []

    def work() -> None:
        send(number)
        done.append("the rest of the block")

    with pytest.raises(end), signals_held():
        work()
    assert done
    with pytest.raises(end):
        send(number)


@BOTH
def test_a_second_signal_is_not_held(number: signal.Signals, end: type):
    done: list[str] = []

    def work() -> None:
        send(number, number)
        done.append("the rest of the block")

    with pytest.raises(end), signals_held():
        work()
    assert not done
