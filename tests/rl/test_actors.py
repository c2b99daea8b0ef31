"""Learner and rollout actors on a real Ray, with real SIGKILLs. What a run learns must not depend on any of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from ray_builders import NUM_STEPS, PROBLEMS, Saboteur, actors_of, config, kill, run
from rl_builders import low_byte_judge, same_weights, weights

from klear_core.cluster.placement import GpuPlan, is_direct, plan_gpus, transfer_backend
from klear_core.cluster.rank_actors import split_parts, to_arrays, to_tensors
from klear_core.config.evaluate import TorchEngineConfig
from klear_core.config.rl import RlRuntime
from klear_core.errors import ResourceError, TrainingError
from klear_core.generate.engine import SamplingParams, TrainableEngine, WeightOffer, WeightSource
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import LearnerHandle, LearnerLost, LocalWorkers, RlSetup
from klear_core.rl.loop import run_rl
from klear_core.rl.state import RlState
from klear_core.types import Completion

ray = pytest.importorskip("ray")
from klear_core.cluster.ray_calls import Restarts, StoredWeights  # noqa: E402
from klear_core.cluster.rl_workers import (  # noqa: E402
    RayLearner,
    RayRolloutEngines,
    RayWorkers,
)


@pytest.fixture(scope="module")
def undisturbed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RlState]:
    """The same run in one process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    return workdir, run(config(), base, workdir, workers=LocalWorkers())


def test_weights_travel_as_the_same_bits() -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).to(torch.bfloat16), "c": torch.tensor(7)}
    back = to_tensors(to_arrays(tensors))
    assert all(torch.equal(back[k], tensors[k]) and back[k].dtype == tensors[k].dtype for k in tensors)


def test_weights_are_split_into_parts_of_about_the_same_size() -> None:
    arrays = to_arrays({name: torch.ones(size) for name, size in (("a", 6), ("b", 1), ("c", 1), ("d", 4))})
    assert [list(part) for part in split_parts(arrays, 1)] == [["a", "b", "c", "d"]]
    assert [list(part) for part in split_parts(arrays, 2)] == [["a"], ["b", "c", "d"]]
    assert [list(part) for part in split_parts(arrays, 6)] == [["a"], [], [], ["b", "c"], ["d"], []]
    assert split_parts({}, 3) == [{}, {}, {}]  # of ranks above 0


def test_gpus_are_planned_before_anything_starts() -> None:
    engine = TorchEngineConfig()
    runtime = RlRuntime(num_workers=2)
    assert plan_gpus(runtime, engine, 0) == GpuPlan(learner=0, rollout=0)
    assert plan_gpus(runtime, engine, 8) == GpuPlan(learner=1, rollout=1)
    with pytest.raises(ResourceError, match="need 4 GPUs; Ray has 1"):
        plan_gpus(runtime, engine, 1)
    shared = RlRuntime(learner_gpus=0.5, rollout_gpus=0.25)
    assert plan_gpus(shared, engine, 1).rollout == 0.25


@pytest.mark.parametrize(
    ("weight_sync", "learner", "rollout", "expected"),
    [
        ("auto", 0, 0, False),
        ("auto", 1, 1, True),
        ("auto", 0.5, 0.5, False),  # one GPU for both: NCCL wants one for each
        ("direct", 0, 0, True),
        ("direct", 0.5, 0.5, True),  # CUDA's handles
        ("store", 1, 1, False),
    ],
)
def test_weights_go_directly_where_both_sides_have_gpus_of_their_own(
    weight_sync: str, learner: float, rollout: float, expected: bool
) -> None:
    runtime = RlRuntime.model_validate({"weight_sync": weight_sync})
    assert is_direct(runtime, TorchEngineConfig(), GpuPlan(learner=learner, rollout=rollout)) is expected


def test_direct_weights_between_a_gpu_and_a_cpu_are_refused() -> None:
    for learner, rollout in ((1, 0), (1, 0.5), (0.5, 1)):
        with pytest.raises(ResourceError, match="NCCL needs whole GPUs"):
            is_direct(RlRuntime(weight_sync="direct"), TorchEngineConfig(), GpuPlan(learner=learner, rollout=rollout))


def test_a_shared_gpu_passes_handles_and_gpus_of_their_own_use_nccl() -> None:
    shared = RlRuntime(learner_gpus=0.5, rollout_gpus=0.5)
    assert [transfer_backend(runtime, "cuda") for runtime in (shared, RlRuntime())] == ["ipc", "nccl"]
    assert transfer_backend(shared, "cpu") == "gloo"


def test_without_ray_the_stage_says_so(base: Path, tmp_path: Path) -> None:
    if ray.is_initialized():
        pytest.skip("another test has started Ray")
    with pytest.raises(ResourceError, match="Ray is not running"):
        run(config(), base, tmp_path)


async def once_all_are_busy(workers: RayWorkers, do: Callable[[], None]) -> None:
    """Do it in the moment in which every rollout actor has been asked for something."""
    while "(0 requests)" in workers.status():  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0.001)
    do()


both_ways = pytest.mark.parametrize("weight_sync", ["store", "direct"])


@pytest.mark.slow
@both_ways
def test_actors_learn_exactly_what_one_process_learns(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState], weight_sync: str
) -> None:
    state = run(config(weight_sync=weight_sync), base, tmp_path)
    assert state.counters() == undisturbed[1].counters()
    assert state.notes == ()  # the direct way carries the known tensors, and engines give the learner's log-probs
    assert same_weights(tmp_path, undisturbed[0])
    assert not psutil.wait_procs(actors_of("RolloutActor") + actors_of("LearnerActor"), timeout=90)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("context_parallel", "weight_sync"), [(1, "store"), (2, "direct")])
def test_two_learner_ranks_learn_what_one_learns_up_to_rounding(
    session: None, base: Path, tmp_path: Path, context_parallel: int, weight_sync: str
) -> None:
    """One step, for later ones sample from weights that differ in their last bits."""
    ranks = config(num_workers=2, context_parallel=context_parallel, weight_sync=weight_sync)
    one, two = config().model_copy(update={"num_steps": 1}), ranks.model_copy(update={"num_steps": 1})
    run(one, base, tmp_path / "one", workers=LocalWorkers())
    run(two, base, tmp_path / "two")
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-6, rtol=0)


@pytest.mark.slow
@both_ways
def test_a_killed_rollout_actor_is_replaced_and_no_answer_is_lost_or_doubled(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState], weight_sync: str
) -> None:
    """Killed in the second step, with new weights in place: the same answers come from the one that replaces it."""
    workers, strikes = RayWorkers(), []
    strike = partial(once_all_are_busy, workers, partial(kill, "RolloutActor", 1))
    judge = Saboteur(after=32, do=lambda: strikes.append(asyncio.ensure_future(strike())))
    state = run(config(weight_sync=weight_sync), base, tmp_path, judge, workers)
    assert [s.done() for s in strikes] == [True]
    assert judge.num_seen == 32 * NUM_STEPS
    assert state.counters() == undisturbed[1].counters()
    assert same_weights(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_all_rollout_actors_may_die_at_once_and_a_learner_between_its_steps_goes_on_from_its_checkpoint(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState]
) -> None:
    """The learner while the fourth step is sampled: the third, behind the checkpoint of the second, is done again."""
    learner = Saboteur(after=3 * 32 + 5, do=partial(kill, "LearnerActor", 1))
    judge = Saboteur(after=40, do=partial(kill, "RolloutActor", 2), judge=learner)
    state = run(config(), base, tmp_path, judge)
    assert judge.num_seen > 32 * NUM_STEPS
    assert state.counters() == undisturbed[1].counters()
    assert same_weights(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_with_direct_weights_learner_and_engines_may_die_together(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState]
) -> None:
    """The new engines find a learner without its state; what they sample until the loop hears of it counts for nothing."""

    def kill_all() -> None:
        kill("LearnerActor", 1)
        kill("RolloutActor", 2)

    state = run(config(weight_sync="direct"), base, tmp_path, Saboteur(after=3 * 32 + 5, do=kill_all))
    assert state.counters() == undisturbed[1].counters()
    assert same_weights(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_with_direct_weights_an_engine_that_died_idle_is_replaced_when_there_are_weights_for_it(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState]
) -> None:
    run(config(weight_sync="direct"), base, tmp_path, Saboteur(after=2 * 32, do=partial(kill, "RolloutActor", 1)))
    assert same_weights(tmp_path, undisturbed[0])


class _DeadLearner:
    """Stands for a learner that sent its weights once and then died without its state."""

    def __init__(self) -> None:
        self.has_sent = False

    async def send_weights(self, engines: Mapping[int, object]) -> dict[int, BaseException]:
        if self.has_sent:
            raise LearnerLost("it died")
        self.has_sent = True
        return {}


@pytest.mark.slow
def test_an_engine_that_finds_no_learner_calls_its_initial_weights_version_0(
    session: None, base: Path, tmp_path: Path
) -> None:
    """So that the bound on staleness can tell what it samples from what the current policy samples."""
    offer = WeightOffer(
        host="",
        port=0,
        key="",
        engine=0,
        num_ranks=1,
        backend="gloo",
        timeout_s=1,
        version=3,
        tensors=(),
        chunk_bytes=1,
    )
    params = SamplingParams(
        num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0
    )

    async def drive() -> list[Completion]:
        job = RlSetup(cfg=config(num_rollout_actors=1), model=base, seed=0, workdir=tmp_path)
        engines = RayRolloutEngines(job, Restarts(allowed=1), 0, _DeadLearner())
        await engines.start()
        try:
            await engines.load_weights(offer, version=3)
            kill("RolloutActor", 1)
            return await engines.generate([1], params)
        finally:
            await engines.close()

    (completion,) = asyncio.run(drive())
    assert set(completion.policy_versions) == {0}


class _KillsTheLearner:
    """Stands for a rollout actor's handle: it comes for its weights, and the learner dies."""

    __ray_ready__ = fetch_weights = property(lambda self: self)

    def __init__(self) -> None:
        self.num_calls = 0

    def remote(self, *_: object) -> asyncio.Future[None]:
        self.num_calls += 1
        if self.num_calls == 2:
            kill("LearnerActor", 1)
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reply.set_result(None)
        return reply


@pytest.mark.slow
def test_a_learner_that_dies_while_it_sends_weights_is_lost_to_all_until_it_is_restored(
    session: None, base: Path, tmp_path: Path
) -> None:
    async def drive() -> None:
        workers = RayWorkers()
        learner, _ = await workers.start(
            RlSetup(cfg=config(weight_sync="direct"), model=base, seed=0, workdir=tmp_path)
        )
        try:
            assert isinstance(learner, RayLearner)
            with pytest.raises(LearnerLost, match="send its weights"):
                await learner.send_weights({0: _KillsTheLearner()})
            with pytest.raises(LearnerLost, match="send its weights"):
                await learner.step([])
            assert await learner.restore() is None
            assert isinstance(await learner.weights(), WeightOffer)
        finally:
            await workers.close()

    asyncio.run(drive())


@pytest.mark.slow
def test_a_learner_killed_in_the_middle_of_a_step_goes_on_from_its_checkpoint(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState]
) -> None:
    killed: list[int] = []

    def watch() -> None:
        while not killed:
            for process in actors_of("LearnerActor.call"):  # the next call is the step
                process.kill()
                killed.append(process.pid)
            time.sleep(0.001)

    judge = Saboteur(after=2 * 32 + 1, do=threading.Thread(target=watch, daemon=True).start)
    state = run(config(), base, tmp_path, judge)
    assert killed
    assert state.counters() == undisturbed[1].counters()
    assert same_weights(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_one_loss_too_many_is_an_error_that_names_the_actor(session: None, base: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"rollout actor \d was lost .*; runtime\.max_restarts = 0 allows no more"):
        run(config(max_restarts=0), base, tmp_path, Saboteur(after=5, do=partial(kill, "RolloutActor", 1)))


class _FrozenWithFirstUpdate:
    """Engines whose actors stop as soon as they have the weights of version 1: nothing that they are asked then is answered."""

    def __init__(self, engines: TrainableEngine) -> None:
        self._engines = engines

    def __getattr__(self, name: str) -> object:
        return getattr(self._engines, name)

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        await self._engines.load_weights(weights, version=version)
        if version == 1:
            for process in actors_of("RolloutActor"):
                process.send_signal(signal.SIGSTOP)


class _FreezingWorkers(RayWorkers):
    async def start(self, job: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        learner, engines = await super().start(job)
        return learner, _FrozenWithFirstUpdate(engines)


@pytest.mark.slow
def test_a_frozen_actor_is_a_stall_that_names_it(session: None, base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError,
        match=r"rollouts stalled: in 20 s .* answers from rollout actor 0 \(\d+ requests\), rollout actor 1",
    ):
        run(config(stall_timeout_s=20), base, tmp_path, workers=_FreezingWorkers())
    frozen = actors_of("RolloutActor")
    for process in frozen:
        process.send_signal(signal.SIGCONT)
    assert not psutil.wait_procs(frozen, timeout=90)[1]  # they had been told to end, and do once they can


@pytest.mark.slow
def test_a_broken_engine_in_a_living_actor_is_replaced_and_a_wrong_request_is_the_callers(
    session: None, base: Path, tmp_path: Path
) -> None:
    """As when the process of vLLM dies below its actor."""

    async def drive() -> None:
        workers = RayWorkers()
        cfg = config(max_restarts=1, num_rollout_actors=1)
        _, engines = await workers.start(RlSetup(cfg=cfg, model=base, seed=0, workdir=tmp_path))
        params = SamplingParams(
            num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0
        )
        try:
            with pytest.raises(ValueError, match="vocabulary"):
                await engines.generate([10**6], params)
            before = await engines.generate([1], params)
            assert isinstance(engines, RayRolloutEngines)
            await engines.engines[0].actor.close.remote()
            assert await engines.generate([1], params) == before
            await engines.engines[0].actor.close.remote()
            with pytest.raises(TrainingError, match="max_restarts = 1 allows no more"):
                await engines.generate([1], params)
        finally:
            await workers.close()

    asyncio.run(drive())


@pytest.mark.slow
def test_errors_inside_an_actor_arrive_as_themselves(session: None, base: Path, tmp_path: Path) -> None:
    (base / "model" / "config.json").rename(tmp_path / "config.json")
    try:
        with pytest.raises(Exception, match=r"config\.json") as caught:
            run(config(), base, tmp_path / "work")
        assert "RayTaskError" not in type(caught.value).__name__
    finally:
        (tmp_path / "config.json").rename(base / "model" / "config.json")


@pytest.mark.slow
def test_a_stage_whose_driver_is_killed_leaves_no_actor_and_goes_on_to_the_same_weights(
    session: None, base: Path, tmp_path: Path, undisturbed: tuple[Path, RlState]
) -> None:
    """The driver, with a Ray of its own, dies after the checkpoint of the second step."""
    found_here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, __file__, str(base), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=found_here
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "step 3 is done\n"
    actors = actors_of("RolloutActor") + actors_of("LearnerActor")
    assert len(actors) == 3
    driver.kill()
    driver.wait()
    assert not psutil.wait_procs(actors, timeout=90)[1]
    state = run(config(), base, tmp_path)
    assert state.counters() == undisturbed[1].counters()
    assert same_weights(tmp_path, undisturbed[0])


@pytest.mark.slow
def test_stored_weights_are_read_only_when_looked_at(session: None) -> None:
    parts = [ray.put(to_arrays({"w": torch.ones(2)})), ray.put(to_arrays({"v": torch.ones(1)}))]
    stored = StoredWeights(parts)
    assert list(stored) == ["w", "v"]
    stored["w"].add_(1)  # a copy: the store is shared
    assert stored["w"].tolist() == [1, 1]


class _SaysWhenToKill(NullTelemetry):
    def log(self, _metrics: object, *, step: int) -> None:  # type: ignore[override]
        if step == 3:
            print("step 3 is done", flush=True)
            time.sleep(60)


if __name__ == "__main__":
    ray.init(
        address="local",  # not the cluster of another test
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    job = RlSetup(cfg=config(), model=Path(sys.argv[1]), seed=0, workdir=Path(sys.argv[2]))
    asyncio.run(run_rl(job, PROBLEMS, low_byte_judge, _SaysWhenToKill(), RayWorkers()))
