"""A gang tells ranks that are slow from ranks that are stuck, by what they report; the ranks are fakes, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from virtual_clock import run_virtually

from klear_core.cluster.rank_actors import RankActor, Reports
from klear_core.config.train import TrainRuntime
from klear_core.errors import GpuMemoryError, TrainingError
from klear_core.metrics import Heartbeat, NullTelemetry

pytest.importorskip("ray")
from klear_core.cluster.gang import Gang


class FakeRank:
    """Stands for an actor's handle that is asked `take_reports.options(...).remote()`, and for its stacks."""

    def __init__(self, progress: Callable[[int], Heartbeat]) -> None:
        self.num_asked = 0
        self.progress = progress
        self.take_reports = self
        self.stacks = Stacks()

    def options(self, **_options: str) -> FakeRank:
        return self

    async def remote(self) -> Reports:
        self.num_asked += 1
        return Reports(items=[], progress=self.progress(self.num_asked))


class Stacks:
    """Answers as an actor does, from a thread of this process that hangs."""

    def options(self, **_options: str) -> Stacks:
        return self

    async def remote(self) -> str:
        return RankActor().stacks()


def gang_of(*ranks: FakeRank) -> Gang:
    runtime = TrainRuntime(device="cpu", num_workers=len(ranks))
    gang = Gang(RankActor, runtime, gpus_per_rank=0, telemetry=NullTelemetry())
    gang.ranks = list(ranks)
    return gang


def advances(num_asked: int) -> Heartbeat:
    return Heartbeat(count=num_asked, latest=f"micro-batch {num_asked}")


def stops(num_asked: int) -> Heartbeat:
    return Heartbeat(count=min(num_asked, 1), latest="micro-batch 1")


def test_a_call_may_last_longer_than_the_limit_as_long_as_a_rank_makes_progress() -> None:
    """2 s with a limit of 1 s; the other rank waits for the first."""

    async def drive() -> list[str]:
        gang = gang_of(FakeRank(advances), FakeRank(stops))
        return await gang.wait([asyncio.sleep(2, "done")], "do a step", stall_timeout_s=1)

    assert run_virtually(drive()) == ["done"]


def test_ranks_without_progress_are_named_with_what_they_did_last() -> None:
    async def drive() -> None:
        gang = gang_of(FakeRank(lambda _n: Heartbeat(count=7, latest="micro-batch 7")), FakeRank(stops))
        await gang.wait([asyncio.sleep(3600)], "do a step", stall_timeout_s=0.6)

    told = (
        r"^stalled: no progress for 0\.6 s while the learner was to do a step; last done: "
        r"learner rank 1: micro-batch 1; learner rank 0: micro-batch 7; the log has the stack of every rank$"
    )
    with pytest.raises(TrainingError, match=told):
        run_virtually(drive())


def hang_in_a_collective_call(is_over: threading.Event) -> None:
    is_over.wait(60)


def test_the_log_has_every_ranks_stack_when_they_stall(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()
    hanging = threading.Thread(target=hang_in_a_collective_call, args=(is_over,), daemon=True)
    hanging.start()

    async def drive() -> None:
        await gang_of(FakeRank(stops), FakeRank(stops)).wait([asyncio.sleep(3600)], "train", stall_timeout_s=0.6)

    with pytest.raises(TrainingError, match="stalled"):
        run_virtually(drive())
    is_over.set()
    told = [record.getMessage() for record in caplog.records if "had stalled" in record.getMessage()]
    assert [line.partition(",")[0] for line in told] == ["learner rank 0", "learner rank 1"]
    assert all("in hang_in_a_collective_call" in stacks for stacks in told)


@pytest.mark.parametrize(("gpus", "configured", "limit"), [(1, 1800, 600), (1, 60, 60), (0, 1800, 1800)])
def test_ranks_on_gpus_may_be_silent_for_ten_minutes_at_most(gpus: int, configured: float, limit: float) -> None:
    runtime = TrainRuntime(device="cuda" if gpus else "cpu", stall_timeout_s=configured)
    gang = Gang(RankActor, runtime, gpus_per_rank=gpus, telemetry=NullTelemetry())
    assert gang.stall_s == limit


async def fail(error: Exception, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise error


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 79 GiB")


@pytest.mark.parametrize(
    "error",
    [
        OUT_OF_MEMORY,
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        torch.distributed.DistBackendError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "driver", "nccl", "cublas"],
)
def test_a_rank_without_gpu_memory_ends_the_stage_with_its_settings_and_is_not_waited_for(error: Exception) -> None:
    """The other rank waits in a collective call; torch raises a RuntimeError for lost peers too."""

    async def drive() -> None:
        gang = gang_of(FakeRank(stops), FakeRank(stops))
        await gang.wait([asyncio.sleep(3600), fail(error)], "train", stall_timeout_s=600)

    with pytest.raises(
        GpuMemoryError, match=r"learner rank 1 ran out of GPU memory .*tokens_per_microbatch = 16384"
    ) as e:
        run_virtually(drive())
    assert e.value.is_permanent  # so that the stage is not repeated as it was


def test_a_rank_that_says_later_that_it_has_no_memory_is_the_cause_of_a_peers_error() -> None:
    class Slow(FakeRank):
        """Is there, and takes 2 s to say so."""

        async def remote(self) -> Reports:
            await asyncio.sleep(2)
            return await super().remote()

    async def drive() -> None:
        calls = [fail(RuntimeError("Connection closed by peer"), 0.1), fail(OUT_OF_MEMORY, 1.5)]
        await gang_of(Slow(stops), Slow(stops)).wait(calls, "train", stall_timeout_s=600)

    with pytest.raises(GpuMemoryError, match="learner rank 1 ran out of GPU memory"):
        run_virtually(drive())


def test_a_rank_whose_host_has_no_memory_is_told_as_it_is() -> None:
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        run_virtually(gang_of(FakeRank(stops)).wait([fail(error)], "train", stall_timeout_s=600))
