"""A run waits at its end for a server that is away, and ends itself when it was cancelled and nobody ends it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from flows.outages import CancelWatch, ask_health, await_server, server_awaited

LONG_S = 60.0
MOMENT_S = 0.01


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    """Set once this process is asked to end."""
    event = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGTERM, before)


def answers(*replies: bool) -> tuple[Callable[[], bool], threading.Event]:
    """Gives these replies, the last one for ever, and sets an event after the last but one."""
    rest, used = list(replies), threading.Event()

    def reply() -> bool:
        if len(rest) == 1:
            used.set()
            return rest[0]
        return rest.pop(0)

    return reply, used


def test_a_run_that_stays_cancelling_ends_itself(ended: threading.Event):
    watch = CancelWatch(lambda: True, grace_s=MOMENT_S, every_s=MOMENT_S)
    with watch.running():
        assert ended.wait(LONG_S)
    assert watch.has_fired


def test_prefect_has_time_to_cancel_a_run_itself(ended: threading.Event):
    reply, used = answers(*[True] * 20)
    watch = CancelWatch(reply, grace_s=LONG_S, every_s=MOMENT_S)
    with watch.running():
        assert used.wait(LONG_S)
    assert (ended.is_set(), watch.has_fired) == (False, False)


def test_a_run_that_is_not_being_cancelled_goes_on(ended: threading.Event):
    reply, used = answers(*[True, False] * 20, False)
    watch = CancelWatch(reply, grace_s=0.0, every_s=MOMENT_S)
    with watch.running():
        assert used.wait(LONG_S)
    assert not ended.is_set()


def test_a_run_ends_at_once_where_the_server_answers(caplog: pytest.LogCaptureFixture):
    await_server(lambda: None, every_s=LONG_S * 1000)
    assert caplog.records == []


def test_a_run_waits_at_its_end_until_the_server_answers(caplog: pytest.LogCaptureFixture):
    replies: list[Exception | None] = [None, ConnectionError("away"), ConnectionError("away")]
    await_server(replies.pop, every_s=MOMENT_S)
    assert replies == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_run_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture):
    await_server(lambda: ConnectionError("gone"), patience_s=MOMENT_S, every_s=MOMENT_S)
    assert "going on without it" in caplog.text


def test_a_server_that_refuses_connections_does_not_answer():
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        assert isinstance(ask_health(), Exception)


def test_a_run_that_is_ended_from_outside_does_not_wait(caplog: pytest.LogCaptureFixture):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    caplog.set_level(logging.WARNING)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}),
        pytest.raises(KeyboardInterrupt),
        server_awaited(),
    ):
        raise KeyboardInterrupt
    assert "does not answer" not in caplog.text
