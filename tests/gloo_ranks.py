"""Run a function on learner ranks that are plain processes of this machine, joined by gloo or NCCL, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from klear_core.config.train import TrainRuntime
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.train.distributed import Body, join_world, run_here


def run_ranks(body: Body[Any], runtime: TrainRuntime, telemetry: Telemetry) -> Any:
    """Rank 0's result, and at the end its metrics; a single rank runs in this process. Only for bodies that do not fail."""
    if runtime.num_workers == 1:
        return run_here(body, runtime, telemetry)
    spawn = multiprocessing.get_context("spawn")
    inbox, outbox = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        ranks = [
            spawn.Process(target=_run, args=(body, runtime, r, address, outbox)) for r in range(runtime.num_workers)
        ]
        for rank in ranks:
            rank.start()
        outbox.close()  # so that the pipe ends when all ranks have
        try:
            while not inbox.poll(0.2):
                assert not any(rank.exitcode for rank in ranks), "a rank died; its traceback is above"
            value, logged = pickle.loads(inbox.recv_bytes())
            for rank in ranks:
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()
    for metrics, step in logged:
        telemetry.log(metrics, step=step)
    return value


class _Recorder(NullTelemetry):
    """Keeps what rank 0 logs."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.logged.append((dict(metrics), step))


def _run(body: Body[Any], runtime: TrainRuntime, index: int, address: str, outbox: Connection) -> None:
    if runtime.device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)  # a rank uses the first GPU that it sees
    with join_world(runtime, rank=index, init_method=address) as world:
        telemetry = _Recorder()
        value = body(world, telemetry)
        world.barrier()  # a rank that ends cuts off those that still connect to it, for a group that the body made last
        if index == 0:
            # By plain pickle: torch's way to send tensors needs the sender alive when they arrive.
            outbox.send_bytes(pickle.dumps((value, telemetry.logged)))
