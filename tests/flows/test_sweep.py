"""Dead runs are found and brought back, healthy ones are left alone; on a clock of the tests' own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import pytest

from flows.sweep import (
    LONG_S,
    RECENT_S,
    SETTLE_S,
    SILENT_S,
    START_S,
    Change,
    QuietTimes,
    SeenRun,
    StateType,
    Sweeper,
    new_state_of,
)

RUN = UUID(int=1)
EVERY_S = 5.0


def seen(
    state: StateType = "RUNNING", *, heartbeat: int | None = 1, state_id: int = 1, age_s: float = 0.0, history: str = ""
) -> SeenRun:
    beat = None if heartbeat is None else UUID(int=heartbeat)
    changes = tuple(Change(state=name, at_s=at_s) for name, at_s in parsed(history))
    return SeenRun(
        run_id=RUN,
        name="smoke",
        state=state,
        state_id=UUID(int=state_id),
        state_age_s=age_s,
        heartbeat=beat,
        history=changes,
    )


def parsed(history: str) -> list[tuple[str, float]]:
    """`pending running 20 crashed`: states, and the seconds that pass between them (one where none are given)."""
    names = {
        "pending": "PENDING",
        "running": "RUNNING",
        "crashed": "CRASHED",
        "failed": "FAILED",
        "cancelling": "CANCELLING",
        "scheduled": "SCHEDULED",
    }
    at_s, found = 0.0, []
    for word in history.split():
        if word in names:
            found.append((names[word], at_s))
        at_s += 1.0 if word in names else float(word)
    return found


def after_crash(history: str, *, quiet_s: float = SETTLE_S, age_s: float = SETTLE_S) -> str | None:
    verdict = new_state_of(seen("CRASHED", heartbeat=None, age_s=age_s, history=history), quiet_s=quiet_s)
    return None if verdict is None else verdict.state


def swept(runs: list[SeenRun | None], *, gap_s: float = EVERY_S) -> list[str | None]:
    """The verdicts of sweeps at even times; None is a sweep in which the server does not answer."""
    watch, found = QuietTimes(), []
    for sweep, run in enumerate(runs):
        if run is None:
            watch.forget()
            found.append(None)
            continue
        quiet_s = watch.look([run], now_s=1000.0 + sweep * gap_s)[RUN]
        verdict = new_state_of(run, quiet_s=quiet_s)
        found.append(None if verdict is None else verdict.state)
    return found


def first(verdicts: list[str | None]) -> tuple[float, str | None]:
    """When the first verdict came, in seconds, and which it was."""
    return next(((i * EVERY_S, v) for i, v in enumerate(verdicts) if v is not None), (-1.0, None))


def test_a_run_whose_heartbeat_stops_is_crashed_after_three_were_missed():
    assert first(swept([seen()] * 40)) == (SILENT_S + EVERY_S, "CRASHED")


def test_a_run_that_sends_heartbeats_is_left_alone_for_ever():
    beats = [seen(heartbeat=1 + i // 6) for i in range(2000)]
    assert set(swept(beats)) == {None}


def test_silence_does_not_count_while_the_server_is_away():
    away: list[SeenRun | None] = [None] * 200
    quiet_before = [seen()] * 15
    returns = [*[seen()] * 17, seen(heartbeat=2)]
    assert set(swept([*quiet_before, *away, *returns])) == {None}


def test_a_run_that_died_while_the_server_was_away_is_found_after_its_return():
    verdicts = swept([seen(), *[None] * 60, *[seen()] * 40])
    assert first(verdicts) == (61 * EVERY_S + SILENT_S + EVERY_S, "CRASHED")


def test_a_sweeper_that_was_stopped_itself_does_not_take_its_own_sleep_for_silence():
    assert set(swept([seen(), seen()], gap_s=3600.0)) == {None}


def test_a_state_change_counts_as_a_sign_of_life():
    retried = [seen(state_id=1)] * 15 + [seen(state_id=2)] * 15
    assert set(swept(retried)) == {None}


def test_a_run_that_has_not_sent_a_heartbeat_yet_has_time_to_start():
    run = seen(heartbeat=None)
    assert first(swept([run] * 200)) == (START_S + EVERY_S, "CRASHED")


def test_a_run_that_never_leaves_pending_is_crashed():
    assert first(swept([seen("PENDING", heartbeat=None)] * 200)) == (START_S + EVERY_S, "CRASHED")


def test_a_run_whose_process_died_before_it_could_be_cancelled_is_cancelled():
    assert first(swept([seen("CANCELLING")] * 40)) == (SILENT_S + EVERY_S, "CANCELLED")


def test_runs_do_not_disturb_each_other():
    watch, other = QuietTimes(), uuid4()
    for now_s in range(0, 200, 5):
        alive = SeenRun(
            run_id=other, name="b", state="RUNNING", state_id=UUID(int=9), state_age_s=0, heartbeat=UUID(int=10 + now_s)
        )
        quiet_s = watch.look([seen(), alive], now_s=float(now_s))
    assert quiet_s == {RUN: 195.0, other: 0.0}


@pytest.mark.parametrize(
    ("history", "then"),
    [
        ("pending running crashed", "RETRY"),
        ("pending crashed", "RETRY"),
        ("pending pending running crashed", "RETRY"),  # Pending and InfrastructurePending are one attempt
        ("pending running crashed scheduled pending running crashed", "RETRY"),
        ("pending running crashed scheduled pending running crashed scheduled pending running crashed", "FAILED"),
        (
            "pending crashed scheduled pending crashed scheduled pending crashed",
            "FAILED",
        ),  # never got as far as Running
        ("pending running crashed scheduled pending crashed scheduled pending running crashed", "FAILED"),
        ("pending running crashed crashed crashed", "RETRY"),  # told three times, crashed once
        ("pending running failed scheduled pending running crashed scheduled pending running crashed", "RETRY"),
    ],
)
def test_a_crashed_run_is_retried_until_its_third_crash(history: str, then: str):
    assert after_crash(history) == then


def test_a_run_that_crashed_while_it_was_being_cancelled_is_cancelled_and_not_retried():
    assert after_crash("pending running cancelling crashed") == "CANCELLED"
    assert after_crash("pending running crashed scheduled pending cancelling crashed") == "CANCELLED"
    assert (
        after_crash("pending running cancelling crashed scheduled pending running crashed") == "RETRY"
    )  # Retry was pressed


def test_an_attempt_that_ran_for_long_begins_a_new_row_of_crashes():
    long = f"pending running {LONG_S} crashed scheduled "
    assert after_crash(long * 3) == "RETRY"
    assert after_crash("pending running crashed scheduled " * 2 + long + "pending crashed") == "RETRY"
    assert after_crash(long + "pending running crashed scheduled " * 3) == "FAILED"


def test_a_run_that_crashes_after_long_attempts_is_failed_in_the_tenth():
    long = f"pending running {LONG_S} crashed scheduled "
    assert [after_crash(long * n) for n in range(1, 11)] == ["RETRY"] * 9 + ["FAILED"]


def test_a_crashed_run_is_retried_once_its_process_had_time_to_end():
    assert after_crash("pending running crashed", quiet_s=SETTLE_S - 1) is None


def test_old_crashes_are_left_as_they_are():
    assert after_crash("pending running crashed", age_s=RECENT_S + 1) is None


def test_a_run_that_dies_each_time_it_starts_ends_failed_and_not_in_a_loop():
    history, verdicts = "", []
    for _ in itertools.repeat(None, 20):
        history += " pending crashed"
        verdicts.append(after_crash(history))
        if verdicts[-1] == "FAILED":
            break
        history += " scheduled"
    assert verdicts == ["RETRY", "RETRY", "FAILED"]


class FakeServer:
    """A client whose first request meets the next of these: an error to raise, or None for an empty pool."""

    def __init__(self, *replies: Exception | None) -> None:
        self.replies = list(replies)

    def __enter__(self):
        error = self.replies.pop(0)
        if error is not None:
            raise error
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_work_pool(self, pool: str) -> SimpleNamespace:
        return SimpleNamespace(concurrency_limit=1)

    def read_flow_runs(self, **filters: object) -> list[object]:
        return []


def said_over(*replies: Exception | None) -> list[str]:
    """What the sweeper says, sweep by sweep, if the server's replies are these."""
    said: list[str] = []
    server = FakeServer(*replies)
    sweeper = Sweeper("klear", said.append, connect=lambda: server)
    for _ in replies:
        sweeper.sweep()
    return said


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server/api/flow_runs/filter")
    return httpx.HTTPStatusError(f"status {status}", request=request, response=httpx.Response(status))


GREETING = "sweeping klear, which runs 1 at a time"


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
        http_error(500),
        http_error(503),
        http_error(429),
    ],
)
def test_an_outage_is_reported_once_and_as_one(error: Exception, caplog: pytest.LogCaptureFixture):
    away = f"the server does not answer ({type(error).__name__}); waiting for it, and no silence counts meanwhile"
    assert said_over(None, error, error, None) == [GREETING, away, "sweeping again"]
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [TypeError("two arguments"), KeyError("state"), ValueError("no such type"), http_error(422)]
)
def test_a_fault_of_our_own_is_no_outage_and_the_sweeping_goes_on(error: Exception, caplog: pytest.LogCaptureFixture):
    greeting, trouble, after = said_over(None, error, error, None)
    assert "does not answer" not in trouble
    assert trouble.startswith(f"a sweep failed ({type(error).__name__})")
    assert (greeting, after) == (GREETING, "sweeping again")
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_an_outage_that_shows_as_several_errors_is_reported_once():
    said = said_over(httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), http_error(503))
    assert len(said) == 1


def test_a_fault_after_an_outage_is_reported_as_well():
    said = said_over(httpx.ConnectError("refused"), TypeError("two arguments"), httpx.ConnectError("refused"))
    assert [line.split(" (")[0] for line in said] == [
        "the server does not answer",
        "a sweep failed",
        "the server does not answer",
    ]
