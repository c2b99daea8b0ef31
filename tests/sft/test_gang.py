"""Learner ranks as Ray actors on several raylets: reports come home, deaths are named, and a lost node costs no bits."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from manifests import manifest
from object_server import object_server
from safetensors.torch import load_file
from sft_traces import config, inputs

from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.remote_paths import NODE_ROOT
from klear_core.artifacts.store import LocalStore
from klear_core.cluster.rank_actors import RankActor
from klear_core.config.train import TrainRuntime
from klear_core.errors import DataError, TrainingError
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.sft.loop import train_sft
from klear_core.stopping import Requeued, checkpoint_first, is_asked, requeued_by_signal
from klear_core.train.distributed import Body, World
from klear_core.waits import read_trace, traced

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from raylets import kill_a_rank_node  # noqa: E402

from klear_core.cluster.gang import (  # noqa: E402
    Gang,
    run_on_ray,
)
from klear_core.cluster.nodes import ray_nodes  # noqa: E402

pytestmark = pytest.mark.slow

TWO = TrainRuntime(device="cpu", num_workers=2, max_restarts=0)
SMALL_STORE = 100 << 20
QUICK_DEATH = {  # the default is 15 s
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a store of objects; returns the folder of the driver's and the raylets' own folders."""
    with object_server("gang"):
        yield tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def cluster(disks: Path) -> Iterator[Cluster]:
    """Three raylets with one CPU and a disk each; two of them have two GPUs, as far as Ray knows."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    before = os.environ.get("PYTHONPATH")
    # Workers import this module for the bodies of the ranks.
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [before])])
    own = [{"env_vars": {NODE_ROOT: str(disks / f"node{i}")}} for i in range(3)]
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": SMALL_STORE} | own[0]
    made = Cluster(initialize_head=True, head_node_args=head | {"_system_config": QUICK_DEATH})
    for env in own[1:]:
        made.add_node(num_cpus=1, num_gpus=2, object_store_memory=SMALL_STORE, **env)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ["PYTHONPATH"] = before or ""


class Recorder(NullTelemetry):
    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.heard.append((step, metrics))

    def progress(self, done: int, total: int, note: str = "") -> None:
        self.heard.append((done, total, note))


def speak(world: World, telemetry: Telemetry) -> tuple[int, str, list[float]]:
    telemetry.progress(1, 2, "half")
    telemetry.log({"a/b/c": 0.5}, step=7)
    log = logging.getLogger("klear_core.somewhere")
    log.warning("all say this")
    if world.rank == 1:
        log.warning("only I say this")
    return world.rank, ray.get_runtime_context().get_node_id(), world.sum(torch.tensor([1.0, 2.0])).tolist()


class OddError(Exception):
    """Cannot be copied: its constructor wants more than its message."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def fail_on_rank_one(error: Exception | None, world: World, telemetry: Telemetry) -> None:
    if world.rank == 1:
        raise OddError("odd", code=1) if error is None else error


def die_on_rank_one(world: World, telemetry: Telemetry) -> None:
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()  # as in training: torch tells rank 0 of the loss


def test_reports_come_home_an_error_is_raised_as_itself_and_a_dead_rank_is_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In this order, because all but the last can come from the same two ranks, each on a node of its own."""
    heard = Recorder()

    async def drive() -> None:
        gang = Gang(RankActor, TWO, gpus_per_rank=0, telemetry=heard)
        await gang.start()
        with caplog.at_level(logging.INFO), traced(tmp_path / "trace.json"):
            spoken = await gang.wait([r.run.remote(speak) for r in gang.ranks], "speak", stall_timeout_s=60)
        rank, node, total = spoken[0]
        assert (rank, total) == (0, [2.0, 4.0])
        assert node in {n.node_id for n in ray_nodes()}
        for error, kind, message in (
            (DataError("row 3 is bad"), DataError, "row 3 is bad"),
            (RuntimeError("no memory"), RuntimeError, "no memory"),
            (None, RuntimeError, "OddError: odd"),
        ):
            body = partial(fail_on_rank_one, error)
            with pytest.raises(kind) as raised:
                await gang.wait([r.run.remote(body) for r in gang.ranks], "fail", stall_timeout_s=60)
            assert str(raised.value) == message
            assert raised.value.__notes__[0].startswith("On rank 1:\nTraceback")
        body = die_on_rank_one
        with pytest.raises(TrainingError, match=r"^learner rank 1 \(node [\d.]+, pid \d+\) died: Worker unexpectedly"):
            await gang.wait([r.run.remote(body) for r in gang.ranks], "die", stall_timeout_s=60)
        gang.close()

    asyncio.run(drive())
    assert heard.heard == [(1, 2, "half"), (7, {"a/b/c": 0.5})]
    spans = read_trace(tmp_path / "trace.json")
    assert sorted(span.track.partition(" (")[0] for span in spans) == ["learner", "learner rank 0", "learner rank 1"]
    assert {span.name for span in spans} == {"speak"}
    said = [r.getMessage() for r in caplog.records if r.name == "klear_core.somewhere"]
    assert said.count("all say this") == 1
    assert [s.partition(": ")[2] for s in said if s.startswith("learner rank 1")] in (
        ["only I say this"],
        ["all say this", "only I say this"],  # if rank 1 was heard first
    )


def ask_at_the_start(body: Body[Any], runtime: TrainRuntime, telemetry: Telemetry) -> Any:
    signal.raise_signal(signal.SIGUSR1)
    return run_on_ray(body, runtime, telemetry)


def test_a_gang_that_is_to_move_saves_a_step_before_it_ends(cluster: Cluster, tmp_path: Path) -> None:
    model, traces = inputs(tmp_path / "in")
    cfg = config(every_steps=1000, num_workers=2, num_epochs=100)
    with requeued_by_signal(), pytest.raises(Requeued):
        train_sft(cfg, model=model, traces=traces, seed=5, workdir=tmp_path / "moved", run_ranks=ask_at_the_start)
    (checkpoint,) = (tmp_path / "moved" / "scratch" / "checkpoints").iterdir()
    assert 1 <= int(checkpoint.name.removeprefix("step-")) < 450  # of so many


def die_when_asked(world: World, telemetry: Telemetry) -> None:
    """Die as a rank does that got the signal, too."""
    while not world.any(is_asked()):
        time.sleep(0.01)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def test_ranks_that_die_after_the_signal_are_not_started_again(cluster: Cluster) -> None:
    runtime = TWO.model_copy(update={"max_restarts": 5})
    with requeued_by_signal(), pytest.raises(Requeued), checkpoint_first():
        ask_at_the_start(die_when_asked, runtime, NullTelemetry())


class SeesGpus(RankActor):
    """A rank without torch, which says what Ray has assigned to it."""

    def join(self, runtime: TrainRuntime, rank: int, init_method: str, level: int) -> None:
        """Join nothing."""

    def assigned(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_context_parallel_ranks_are_on_one_node_with_a_gpu_for_each(cluster: Cluster, share: float) -> None:
    """With half a GPU for a rank Ray itself would put two of them on the same one."""

    async def drive() -> list[tuple[str, str]]:
        runtime = TrainRuntime(device="cpu", num_workers=4, context_parallel=2)
        gang = Gang(SeesGpus, runtime, gpus_per_rank=share, telemetry=NullTelemetry())
        await gang.start()
        found = await gang.wait([r.assigned.remote() for r in gang.ranks], "say", stall_timeout_s=60)
        gang.close()
        return found

    (a, first), (b, second), (c, third), (d, fourth) = asyncio.run(drive())
    assert (a, c) == (b, d)
    assert a != c
    assert {first, second} == {third, fourth} == {"0", "1"}


class KillsNode(Recorder):
    """Kills a raylet with all its processes when a step has been logged."""

    def __init__(self, cluster: Cluster, at_step: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.at_step = at_step

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        if step == self.at_step and len(self.cluster.worker_nodes) == 2:
            kill_a_rank_node(self.cluster, num_ranks=2)


def make(store: LocalStore, kind: str, made: Path) -> Path:
    with store.create(kind, "f1") as slot:
        shutil.copytree(made, slot.workdir, dirs_exist_ok=True)
        return slot.publish(manifest(kind=kind)).path


def test_a_node_lost_in_mid_run_costs_no_bit(cluster: Cluster, disks: Path, tmp_path: Path) -> None:
    """Two ranks on two of three raylets, one of which is killed, equal two plain processes. The last test: it takes a node.

    Raylets and driver share nothing but the store of objects.
    """
    store = ObjectStore(disks / "driver", "s3://gang/klear")
    model, traces = (make(store, made.name, made) for made in inputs(tmp_path / "in"))
    cfg = config(every_steps=1, num_workers=2, num_epochs=1)
    killer = KillsNode(cluster, at_step=2)
    train = partial(train_sft, cfg, model=model, traces=traces, seed=5)
    (tmp_path / "plain").mkdir()
    with store.create("sft", "f1") as slot:
        train(workdir=slot.workdir, telemetry=killer, run_ranks=run_on_ray)
        ours = load_file(slot.publish(manifest()).path / "model" / "model.safetensors")
    train(workdir=tmp_path / "plain", telemetry=NullTelemetry(), run_ranks=run_ranks)
    plain = load_file(tmp_path / "plain" / "model" / "model.safetensors")
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[k], plain[k]) for k in plain)
    assert len(ray_nodes()) == 2
