"""Run a function on learner ranks that are plain processes of this machine, joined by gloo or NCCL, without Ray."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from klear_core.config.train import TrainRuntime
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.train.distributed import Body, join_world, run_here

_KEPT = 2
"""Ranks that wait for the next test: the start of one takes seconds, for it imports torch and transformers."""


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    connection: Connection


_ranks: list[_Rank] = []


def run_ranks(body: Body[Any], runtime: TrainRuntime, telemetry: Telemetry) -> Any:
    """Rank 0's result, and at the end its metrics; a single rank runs in this process. Only for bodies that do not fail."""
    if runtime.num_workers == 1:
        return run_here(body, runtime, telemetry)
    while len(_ranks) < runtime.num_workers:
        _ranks.append(_start())
    replies: list[Any] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            address = f"file://{folder}/rendezvous"
            for index, rank in enumerate(_ranks[: runtime.num_workers]):
                rank.connection.send_bytes(pickle.dumps((body, runtime, index, address, dict(os.environ))))
            for rank in _ranks[: runtime.num_workers]:
                while not rank.connection.poll(0.2):
                    assert all(each.process.is_alive() for each in _ranks), "a rank died; its traceback is above"
                replies.append(pickle.loads(rank.connection.recv_bytes()))
    except BaseException:
        end_ranks()
        raise
    end_ranks(kept=_KEPT if runtime.device == "cpu" else 0)  # on a GPU they would hold its memory
    value, logged = replies[0]
    for metrics, step in logged:
        telemetry.log(metrics, step=step)
    return value


def end_ranks(*, kept: int = 0) -> None:
    """End all ranks that wait but the first ones, as after a body that leaves its process in another state."""
    for rank in _ranks[kept:]:
        rank.process.kill()
        rank.process.join()
    del _ranks[kept:]


atexit.register(end_ranks)


def _start() -> _Rank:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # so that the pipe ends when the process has
    return _Rank(process, ours)


class _Recorder(NullTelemetry):
    """Keeps what rank 0 logs."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.logged.append((dict(metrics), step))


def _serve(connection: Connection) -> None:
    """Run one body after the other, each in a process group of its own, until the tests end."""
    while True:
        try:
            body, runtime, index, address, environment = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        if runtime.device != "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(index)  # a rank uses the first GPU that it sees
        with join_world(runtime, rank=index, init_method=address) as world:
            telemetry = _Recorder()
            value = body(world, telemetry)
            world.barrier()  # a rank that ends cuts off those that still connect to it, for a group that the body made last
        # By plain pickle: torch's way to send tensors needs the sender alive when they arrive.
        connection.send_bytes(pickle.dumps((value, telemetry.logged) if index == 0 else None))
