"""The learner's processes on this machine: started, heard and ended by a parent that does not train itself."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging.handlers import QueueHandler
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar, assert_never

from klear_core.config.train import TrainRuntime
from klear_core.errors import KlearError, ResourceError
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.train.model import pick_device
from klear_core.train.parallel import World, join_world

R = TypeVar("R")
Body = Callable[[World, Telemetry], R]

_GRACE_S = 30.0
"""After a RuntimeError, which is also how torch reports a lost peer, the others have so long to show what came first."""
_LEAVE_S = 30.0
_LOGGER = "klear_core"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logged:
    metrics: dict[str, float]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progressed:
    done: int
    total: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Returned:
    value: Any
    """What rank 0's body returned; None from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    error: Exception
    at_s: float
    """On a clock that all processes share."""


_Message = _Logged | _Progressed | logging.LogRecord | _Returned | _Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    index: int
    process: SpawnProcess
    inbox: Connection
    """At its end when the process is: what it said before is still read first."""


def run_ranks(body: Body[R], runtime: TrainRuntime, telemetry: Telemetry) -> R:
    """Run `body` on every rank and return what rank 0 made of it, whose telemetry and log records come out here.

    Ranks are processes of their own: their GPU memory is free afterwards, and one that NCCL's watchdog or the kernel kills costs an
    error, not this process. `body` and its result must be picklable. A single rank on the CPU runs right here, for it would gain
    nothing and wait seconds for a second torch. What a rank raises is raised here; ResourceError if one dies without a word.
    No rank outlives this call, nor this process.
    """
    if runtime.num_workers == 1 and pick_device(runtime.device).type == "cpu":
        with join_world(runtime, rank=0, init_method="") as world:
            return body(world, telemetry)
    with tempfile.TemporaryDirectory() as folder, _started(body, runtime, f"file://{folder}/meet") as ranks:
        value: R = _hear_out(ranks, telemetry)
        return value


@contextmanager
def _started(body: Body[Any], runtime: TrainRuntime, init_method: str) -> Iterator[list[_Rank]]:
    spawn = multiprocessing.get_context("spawn")
    level = logging.getLogger(_LOGGER).getEffectiveLevel()
    ranks: list[_Rank] = []
    try:
        for index in range(runtime.num_workers):
            inbox, outbox = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_be_rank, args=(body, runtime, index, init_method, outbox, level), daemon=True)
            process.start()
            ranks.append(_Rank(index=index, process=process, inbox=inbox))
            outbox.close()  # the rank has the only one then, and its end is the pipe's
        yield ranks
        for rank in ranks:
            rank.process.join(_LEAVE_S)  # all have said their last word
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(_LEAVE_S)


def _hear_out(ranks: Sequence[_Rank], telemetry: Telemetry) -> Any:
    """Listen until all ranks have returned, and give rank 0's value; or raise what went wrong first."""
    talking = {rank.inbox: rank for rank in ranks}
    value = None
    failure: _Raised | None = None
    while talking:
        left_s = None if failure is None else max(0.0, failure.at_s + _GRACE_S - time.monotonic())
        ready = [talking[inbox] for inbox in connection.wait(list(talking), left_s) if isinstance(inbox, Connection)]
        if failure is not None and not ready:
            break
        dead = []
        for rank in ready:
            message = _next(rank)
            if message is None:
                dead.append(rank)
            elif isinstance(message, _Raised):
                del talking[rank.inbox]
                if isinstance(message.error, KlearError) or not isinstance(message.error, RuntimeError):
                    raise message.error
                failure = message if failure is None or message.at_s < failure.at_s else failure
            elif isinstance(message, _Returned):
                del talking[rank.inbox]
                value = message.value if rank.index == 0 else value
            else:
                _pass_on(message, telemetry)
        if dead:
            named = ", ".join(map(_how_it_died, dead))
            raise ResourceError(f"learner processes died: {named}") from (None if failure is None else failure.error)
    if failure is not None:
        raise failure.error
    return value


def _next(rank: _Rank) -> _Message | None:
    """What a rank has to say; None if it is dead."""
    try:
        message: _Message = pickle.loads(rank.inbox.recv_bytes())  # noqa: S301 (from our own process)
    except (EOFError, ConnectionResetError):
        return None
    return message


def _pass_on(message: _Logged | _Progressed | logging.LogRecord, telemetry: Telemetry) -> None:
    match message:
        case _Logged():
            telemetry.log(message.metrics, step=message.step)
        case _Progressed():
            telemetry.progress(message.done, message.total, message.note)
        case logging.LogRecord():
            logging.getLogger(message.name).handle(message)
        case _:
            assert_never(message)


def _how_it_died(rank: _Rank) -> str:
    rank.process.join(_LEAVE_S)  # a dying process closes its pipes before its exit code can be known
    code = rank.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"rank {rank.index} ({how})"


class _Speaker:
    """A rank's telemetry, and the queue of its log records: all of it goes to the parent, from any thread."""

    def __init__(self, outbox: Connection) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()

    def put_nowait(self, message: _Message) -> None:
        """Send; plainly pickled, for torch's own way with tensors needs the sender alive when they are received."""
        pickled = pickle.dumps(message)
        with self._lock:
            self._outbox.send_bytes(pickled)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """As `Telemetry.log`."""
        self.put_nowait(_Logged(metrics=dict(metrics), step=step))

    def progress(self, done: int, total: int, note: str = "") -> None:
        """As `Telemetry.progress`."""
        self.put_nowait(_Progressed(done=done, total=total, note=note))


def _be_rank(body: Body[Any], runtime: TrainRuntime, index: int, init_method: str, outbox: Connection, level: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to all processes of the terminal: our parent acts on it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    speaker = _Speaker(outbox)
    is_first = index == 0
    if is_first:  # the others would say the same
        logging.getLogger(_LOGGER).setLevel(level)
        logging.getLogger(_LOGGER).addHandler(QueueHandler(speaker))  # type: ignore[arg-type]
    with ExitStack() as leaving:
        try:
            world = leaving.enter_context(join_world(runtime, rank=index, init_method=init_method))
            value = body(world, speaker if is_first else NullTelemetry())
            speaker.put_nowait(_Returned(value=value if is_first else None))
        except Exception as error:  # noqa: BLE001  # said before we leave, for then the others fail too, of our absence
            speaker.put_nowait(_Raised(error=_portable(error, index), at_s=time.monotonic()))


def _portable(error: Exception, index: int) -> Exception:
    """The error with its trace in words, which is all that can travel; a RuntimeError in its place if itself it cannot."""
    trace = f"On rank {index}:\n{''.join(traceback.format_exception(error))}"
    error.add_note(trace)
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  # whatever an exception's own class does when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
