"""What MLflow cannot be told waits, is bounded, and is told later; the run never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from klear_core.metrics import MetricsFile
from tasks.delivery import Connection, Limits, StageRun, Undelivered
from tasks.mlflow_backend import (
    MAX_POINTS_PER_REQUEST,
    MetricPoint,
    OpenRun,
    Refused,
    RunStatus,
    TrackedRun,
    Unreachable,
    server_name,
    without_password,
)
from tasks.tracking import flat_params


class FakeBackend:
    """Keeps what it is told, while it is up. Hangs in a request where `hangs` is set."""

    def __init__(self) -> None:
        self.is_up = True
        self.refuses = False
        self.hangs: threading.Event | None = None
        self.num_calls = 0
        self.fails_after: int | None = None
        """Number of requests with metrics that are taken."""
        self.sizes: list[int] = []
        self.points: dict[str, list[MetricPoint]] = {}
        self.ended: dict[str, RunStatus] = {}
        self.finished: list[str] = []

    def open(self, record: TrackedRun) -> OpenRun:
        self._answer()
        parent = f"{record.run_id}"
        return OpenRun(f"{parent}-{record.stage}", parent, self.ended.pop(parent, None))

    def last_step(self, run_id: str, name: str) -> int | None:
        self._answer()
        return max((p.step for p in self.points.get(run_id, []) if p.name == name), default=None)

    def log_metrics(self, run_id: str, points: list[MetricPoint]) -> None:
        self._answer()
        if self.fails_after == len(self.sizes):
            raise Unreachable("timed out")
        self.sizes.append(len(points))
        self.points.setdefault(run_id, []).extend(points)

    def finish(self, run: OpenRun, record: TrackedRun) -> None:
        self._answer()
        self.finished.append(run.run_id)

    def end(self, run_id: str, status: RunStatus, at_ms: int) -> None:
        self._answer()
        self.ended[run_id] = status

    def end_pipeline(self, record: TrackedRun) -> None:
        self._answer()
        self.ended[record.run_id] = record.status

    def _answer(self) -> None:
        self.num_calls += 1
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.refuses:
            raise Refused("no such run")
        if not self.is_up:
            raise Unreachable("connection refused")


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def connection(backend: FakeBackend, tmp_path: Path) -> Connection:
    return connect(backend, tmp_path)


def connect(backend: FakeBackend, folder: Path, **limits: float) -> Connection:
    quick = Limits(**{"retry_every_s": 0.02, "flush_every_s": 0.01} | limits)  # type: ignore[arg-type]
    return Connection(backend, Undelivered(folder / "undelivered"), "somewhere:5000", limits=quick)


class Stage:
    """A stage as `StageTelemetry` drives it: each row into the file, which is all that MLflow is fed from."""

    def __init__(self, connection: Connection, folder: Path, name: str = "sft", run_id: str = "r1") -> None:
        self.file = MetricsFile(folder / f"{run_id}-{name}.jsonl")
        self.record = TrackedRun(
            server="somewhere:5000",
            run_id=run_id,
            run_name="n",
            stage=name,
            kind="sft",
            metrics_file=str(self.file.path),
        )
        self.run = StageRun(connection, self.record)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.file.append({"loss": step / 10}, step=step)


def steps(backend: FakeBackend, run_id: str) -> list[int]:
    return [p.step for p in list(backend.points.get(run_id, []))]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_numbers_of_an_outage_are_sent_when_mlflow_is_back_in_order_and_once(backend, connection, tmp_path):
    stage = Stage(connection, tmp_path)
    stage.run.start()
    stage.log(0, 1)
    until(lambda: steps(backend, "r1-sft") == [0, 1])
    backend.is_up = False
    stage.log(2, 3)
    until(lambda: backend.num_calls > 8)  # it goes on trying
    stage.log(4)
    assert "a later run sends" in stage.run.trouble
    backend.is_up = True
    until(lambda: steps(backend, "r1-sft") == [0, 1, 2, 3, 4])
    stage.run.end("FINISHED")
    assert backend.ended == {"r1-sft": "FINISHED"}
    assert stage.run.trouble == ""
    assert connection.undelivered.records("somewhere:5000") == []


def test_a_stage_that_began_without_mlflow_is_told_whole_once_it_is_there(backend, connection, tmp_path):
    backend.is_up = False
    stage = Stage(connection, tmp_path)
    stage.run.start()
    assert stage.run.run_id is None
    stage.log(0, 1, 2)
    backend.is_up = True
    until(lambda: steps(backend, "r1-sft") == [0, 1, 2])
    assert stage.run.run_id == "r1-sft"
    stage.run.end("FINISHED")


def test_numbers_added_to_a_step_that_is_over_are_sent_after_a_kill(backend, connection, tmp_path):
    """A point of a curve is known some steps later, and is a row of its own."""
    killed = Stage(connection, tmp_path)
    killed.log(1, 2, 3)
    killed.file.append({"eval": 0.1}, step=0)
    killed.run.flush()
    killed.file.append({"eval": 0.2}, step=2)  # and it is killed before MLflow has this row
    resumed = Stage(connection, tmp_path)
    resumed.run.start()
    resumed.log(4)
    resumed.run.end("FINISHED")
    sent = [(p.name, p.step) for p in backend.points["r1-sft"]]
    assert sent == [("loss", 1), ("loss", 2), ("loss", 3), ("eval", 0), ("eval", 2), ("loss", 4)]


def test_a_stage_that_ends_without_mlflow_is_told_by_the_next_one(backend, connection, tmp_path):
    first = Stage(connection, tmp_path)
    first.run.start()
    backend.is_up = False
    first.log(0, 1)
    first.run.end("FINISHED")
    (waiting,) = connection.undelivered.records("somewhere:5000")
    assert (waiting.stage, waiting.status) == ("sft", "FINISHED")
    backend.is_up = True
    second = Stage(connection, tmp_path, "rl")
    connection.allow_try()
    second.run.start()
    until(lambda: backend.ended.get("r1-sft") == "FINISHED")
    second.run.end("FINISHED")
    assert steps(backend, "r1-sft") == [0, 1]
    assert "r1" not in backend.ended  # the pipeline goes on
    assert connection.undelivered.records("somewhere:5000") == []


def test_what_an_earlier_run_left_is_told_by_a_later_one_and_the_earlier_stays_ended(backend, connection, tmp_path):
    backend.is_up = False
    left = Stage(connection, tmp_path, run_id="old")
    left.run.start()
    left.log(0)
    left.run.end("FAILED")
    connection.undelivered.save(
        left.record.model_copy(update={"stage": "", "status": "FAILED", "ended_ms": time.time_ns()})
    )
    backend.is_up = True
    connection.allow_try()
    connection.deliver_waiting(current_run="new", except_stage="sft")
    assert steps(backend, "old-sft") == [0]
    assert backend.ended == {"old-sft": "FAILED", "old": "FAILED"}
    assert connection.undelivered.records("somewhere:5000") == []


def test_a_hanging_server_does_not_stall_the_loop_nor_the_end(backend, tmp_path):
    connection = connect(backend, tmp_path, close_timeout_s=0.1)
    stage = Stage(connection, tmp_path)
    stage.run.start()
    backend.hangs = threading.Event()
    calls = backend.num_calls
    stage.log(0)
    until(lambda: backend.num_calls > calls)  # the thread is in a request
    stage.log(*range(1, 1000))
    stage.run.end("FINISHED")
    assert [r.stage for r in connection.undelivered.records("somewhere:5000")] == ["sft"]
    backend.hangs.set()


def test_rows_of_a_long_outage_are_sent_in_requests_of_a_bounded_size(backend, connection, tmp_path):
    stage = Stage(connection, tmp_path)
    stage.run.start()
    backend.is_up = False
    stage.log(*range(1200))
    assert "sends 1200 metric values" in stage.run.trouble
    backend.is_up = True
    until(lambda: not stage.run.trouble)
    stage.run.end("FINISHED")
    assert steps(backend, "r1-sft") == list(range(1200))
    assert max(backend.sizes) <= MAX_POINTS_PER_REQUEST


def test_after_a_failed_request_the_rows_before_it_are_not_sent_again(backend, connection, tmp_path):
    stage = Stage(connection, tmp_path)
    stage.log(*range(1200))
    backend.fails_after = 1  # of three requests
    stage.run.flush()
    assert len(steps(backend, "r1-sft")) == MAX_POINTS_PER_REQUEST
    assert "sends 700 metric values" in stage.run.trouble
    backend.fails_after = None
    connection.allow_try()
    stage.run.flush()
    assert steps(backend, "r1-sft") == list(range(1200))


def test_steps_that_are_done_again_are_sent_again_if_their_values_are_others(backend, connection, tmp_path):
    """As when RL loses its learner: the file is rewound, also twice between two requests."""
    stage = Stage(connection, tmp_path)
    stage.log(0, 1, 2, 3)
    stage.run.flush()
    for loss in (7.0, 8.0):
        stage.file.rewind(2)
        for step in (2, 3):
            stage.file.append({"loss": loss}, step=step)
    stage.run.flush()
    assert [(p.step, p.value) for p in backend.points["r1-sft"]][4:] == [(2, 8.0), (3, 8.0)]
    stage.file.rewind(3)
    stage.log(3)  # with its first value
    stage.run.flush()
    assert [(p.step, p.value) for p in backend.points["r1-sft"]][6:] == [(3, 0.3)]


def test_a_line_that_is_being_written_is_sent_when_it_is_whole(backend, connection, tmp_path):
    stage = Stage(connection, tmp_path)
    stage.log(0)
    with stage.file.path.open("a") as half:
        half.write('{"step": 1, "lo')
    stage.run.flush()
    assert steps(backend, "r1-sft") == [0]
    stage.log(2)  # as after a kill: the half line stays, and is no row
    stage.run.flush()
    assert steps(backend, "r1-sft") == [0, 2]


def test_a_record_that_mlflow_refuses_is_said_and_not_tried_for_ever(backend, connection, tmp_path):
    stage = Stage(connection, tmp_path)
    stage.run.start()
    backend.refuses = True
    stage.log(0)
    until(lambda: bool(stage.run.refusal))
    assert "MLflow rejects further records (no such run)" in stage.run.trouble
    calls = backend.num_calls
    stage.log(1)
    stage.run.end("FINISHED")
    assert backend.num_calls == calls
    connection.deliver_waiting(current_run="", except_stage=None)
    assert connection.undelivered.records("somewhere:5000") == []


def test_records_on_disk_are_bounded_and_the_oldest_go_first(tmp_path):
    undelivered = Undelivered(tmp_path, max_records=3)
    for n in range(5):
        undelivered.save(TrackedRun(server="s", run_id=f"r{n}", run_name="n", stage="sft", ended_ms=n))
        time.sleep(0.01)  # file times
    assert [r.run_id for r in undelivered.records("s")] == ["r2", "r3", "r4"]


def test_a_record_that_another_process_delivers_meanwhile_stops_no_stage(tmp_path):
    undelivered = Undelivered(tmp_path)
    (tmp_path / "listed.json").symlink_to(tmp_path / "gone")  # a name in the folder, and no file any more
    undelivered.save(TrackedRun(server="s", run_id="r", run_name="n", stage="sft"))
    assert [r.run_id for r in undelivered.records("s")] == ["r"]


def test_records_of_another_server_and_unreadable_ones_stay_where_they_are(tmp_path):
    undelivered = Undelivered(tmp_path)
    undelivered.save(TrackedRun(server="one:1", run_id="r", run_name="n", stage="sft"))
    (tmp_path / "half.json").write_text('{"server": "two:2"')
    assert undelivered.records("two:2") == []
    assert {f.name for f in tmp_path.iterdir()} == {"r-sft.json", "half.unreadable"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/math-7.5k: part_1", "org/math-7.5k: part_1"),
        ("train (1)+é.jsonl", "train _1__é.jsonl"),
        ("a//b/../c/", "a_/b_../c_"),
        ("x" * 300, "x" * 191),
    ],
)
def test_a_setting_of_a_source_with_any_name_has_a_name_that_mlflow_takes(source: str, name: str):
    """Letters, digits, `_-. :` and slashes of a path without `..`; 250 characters."""
    assert flat_params({"sft": {"caps": {source: 5}}}) == {f"sft.caps.{name}": "5"}


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("http://user:secret@host:5000/path", "host:5000"),
        ("http://user:p@secret@host:5000", "host:5000"),
        ("https://host", "host"),
        ("sqlite:////data/mlflow.db", "/data/mlflow.db"),
        ("postgresql://me:secret@db/mlflow", "db"),
    ],
)
def test_an_address_is_shown_without_its_password(uri: str, name: str):
    assert server_name(uri) == name
    assert "secret" not in without_password(f"API request to {uri}/x failed")
