"""How requests reach rollout actors that come, go and change: with fakes, and on a real Ray."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ray_builders import Saboteur, actors_of, config, kill, run
from rl_builders import Recorder
from safetensors.torch import load_file
from virtual_clock import run_virtually

from klear_core.cluster.engine_actors import Reply, Request, RolloutActor, kept_logs
from klear_core.cluster.rank_actors import Arrays, Report, Reports, to_arrays
from klear_core.config.rl import RlCheckpointConfig
from klear_core.errors import ConfigError, ResourceError, TrainingError
from klear_core.generate.engine import SamplingParams, WeightOffer
from klear_core.generate.pool import EngineLost
from klear_core.metrics import Heartbeat
from klear_core.rl.interfaces import RlSetup
from klear_core.train.base_model import model_folder
from klear_core.types import Completion

ray = pytest.importorskip("ray")
from ray.exceptions import OutOfMemoryError  # noqa: E402

from klear_core.cluster.engine_actors import DeadActor, RayEngine  # noqa: E402
from klear_core.cluster.ray_calls import Restarts, StoredWeights, within  # noqa: E402
from klear_core.cluster.rl_workers import (  # noqa: E402
    RayLearner,
    RayRolloutEngines,
)

PARAMS = SamplingParams(
    num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0
)
ANSWER = Completion(text="x", token_ids=(1,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))


class Method:
    """Stands for `actor.method` of Ray: keeps the calls of `remote`, and answers them."""

    def __init__(self, name: str, calls: list[str], answer: object = None) -> None:
        self.name, self.calls, self.answer = name, calls, answer

    async def remote(self, *args: object) -> object:
        self.calls.append(self.name)
        answer = self.answer(*args) if callable(self.answer) else self.answer
        return await answer if isinstance(answer, Awaitable) else answer


class FakeActor:
    """Answers every request at once."""

    def __init__(self, calls: list[str]) -> None:
        self.exchange = Method("exchange", calls, self._answers)

    def _answers(self, requests: list[Request], _unwanted: list[int]) -> list[Reply]:
        return [Reply(request_id=r.request_id, completions=(ANSWER,)) for r in requests]


async def engine_over(actor: object) -> RayEngine:
    """An engine whose actor has started."""

    async def create() -> object:
        return actor

    async def load(_actor: object) -> None:
        pass

    engine = RayEngine("rollout actor 0", create, load, limit=8)
    await engine.start()
    return engine


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_actor_is_asked_nothing_while_it_starts_or_takes_weights() -> None:
    """An actor that has not started cannot answer, and one that waits for its weights would answer with others."""
    calls: list[str] = []

    async def drive() -> list[Completion]:
        engine = await engine_over(FakeActor(calls))
        async with engine.lock:
            asked = asyncio.create_task(engine.generate([1], PARAMS))
            await settle()
            assert calls == []
        return await asked

    assert asyncio.run(drive()) == [ANSWER]
    assert set(calls) == {"exchange"}


def test_the_requests_of_an_actor_that_answers_no_message_can_be_asked_elsewhere() -> None:
    """Its process may be frozen, or its node out of reach: nothing else would ever end an evaluation."""

    class FrozenActor:
        exchange = Method("exchange", [], lambda *_: asyncio.Event().wait())

    async def create() -> FrozenActor:
        return FrozenActor()

    async def load(_actor: object) -> None:
        pass

    async def drive() -> list[Completion]:
        engine = RayEngine("engine 0", create, load, limit=8, answer_s=0.01)
        await engine.start()
        return await engine.generate([1], PARAMS)

    with pytest.raises(EngineLost, match=r"^its actor has not answered for 0\.01 s$"):
        asyncio.run(drive())


def test_an_engine_is_at_version_0_until_it_has_the_weights_of_another(base: Path, tmp_path: Path) -> None:
    """Else tokens of the initial model could pass for those of the present one, and the bound on staleness would let them in."""

    async def drive() -> int:
        actor = RolloutActor()
        await actor.start(RlSetup(cfg=config(), model=base, seed=0, workdir=tmp_path))
        await actor.receive_weights(to_arrays({"no such": torch.ones(1)}))
        with pytest.raises(ConfigError):
            await actor.load_received(7)
        version = actor._engine.version
        await actor.close()
        return version

    assert asyncio.run(drive()) == 0


def test_who_does_not_do_what_in_time_is_named() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        TrainingError, match=r"stalled: waited 0\.01 s for rollout actor 3 to take the weights of version 7$"
    ):
        asyncio.run(within(never(), 0.01, "rollout actor 3", "take the weights of version 7"))


@pytest.mark.parametrize("method", ["load_received", "sleep", "wake"])
def test_an_actor_is_told_nothing_while_it_changes(method: str) -> None:
    calls: list[str] = []
    actor = FakeActor(calls)
    setattr(actor, method, Method(method, calls))

    async def drive() -> None:
        engine = await engine_over(actor)
        async with engine.lock:
            told = asyncio.create_task(engine.call({"change": lambda a: getattr(a, method).remote()}, timeout_s=9))
            await settle()
            assert calls == []
        assert await told is None

    asyncio.run(drive())
    assert calls == [method]


@pytest.mark.parametrize("method", ["load_received", "sleep", "wake"])
def test_an_actor_whose_engine_has_died_is_replaced_as_a_dead_actor_is(method: str) -> None:
    """The process of a vLLM engine may die at any moment, and its actor lives."""
    actor = FakeActor([])

    async def refuse() -> None:
        raise ResourceError("the vLLM engine could not load the weights of version 7; its log ends with ...")

    setattr(actor, method, Method(method, [], refuse))

    async def drive() -> DeadActor | None:
        engine = await engine_over(actor)
        return await engine.call({"change": lambda a: getattr(a, method).remote()}, timeout_s=9)

    dead = asyncio.run(drive())
    assert dead is not None
    assert dead.actor is actor
    assert "version 7" in str(dead.error)


class SlowActor:
    """Stands for an actor's handle: starts at once, and takes 0.4 s to receive or load anything."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.start = Method("start", [], [])
        self.receive_weights = self.load_received = self

    def options(self) -> SlowActor:
        return self

    def remote(self, *args: object) -> Awaitable[None] | SlowActor:
        """Create the actor, or answer a call of it."""
        return self._do(*args) if args else self

    async def _do(self, what: object) -> None:
        await asyncio.sleep(0.4)
        self.calls.append(what)


def test_loading_weights_may_last_longer_than_the_limit_as_long_as_part_after_part_arrives(
    base: Path, tmp_path: Path
) -> None:
    """1.6 s with a limit of 1 s, for an engine that is there and for one that replaces it."""
    setup = RlSetup(cfg=config(num_rollout_actors=1, stall_timeout_s=1), model=base, seed=0, workdir=tmp_path)
    actor = SlowActor()

    async def drive() -> None:
        engines = RayRolloutEngines(setup, Restarts(allowed=0), 0, None)  # type: ignore[arg-type]
        engines._actor_type = actor
        await engines.engines[0].start()
        assert actor.calls == []
        await engines.load_weights(StoredWeights(["first", "second", "third"]), version=5)  # type: ignore[list-item]
        await engines._load_actor(0, actor)

    run_virtually(drive())
    assert actor.calls == 2 * ["first", "second", "third", 5]


def test_what_an_engine_logs_at_its_start_is_logged_by_the_driver(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a cache much smaller than planned: nobody sees what an actor prints."""
    with kept_logs() as logged:
        logging.getLogger("klear_core.generate.vllm_engine").info("the cache holds %d tokens", 825_000)
        logging.getLogger("klear_core.generate.vllm_engine").warning("planned were 1,700,000")
        logging.getLogger("klear_core").debug("a detail")
        logging.getLogger("vllm").warning("of another program")
    sent: list[Report] = pickle.loads(pickle.dumps(logged))  # as Ray sends them
    setup = RlSetup(cfg=config(num_rollout_actors=1), model=base, seed=0, workdir=tmp_path)
    actor = SlowActor()
    actor.start = Method("start", [], sent)
    caplog.clear()

    async def drive() -> None:
        engines = RayRolloutEngines(setup, Restarts(allowed=0), 0, None)  # type: ignore[arg-type]
        engines._actor_type = actor
        await engines.engines[0].start()

    with caplog.at_level(logging.INFO, logger="klear_core"):
        run_virtually(drive())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "rollout actor 0: the cache holds 825000 tokens"),
        ("WARNING", "rollout actor 0: planned were 1,700,000"),
    ]


class SlowSender:
    """Stands for a learner rank's handle: takes 2 s to send, and reports progress all the time."""

    def __init__(self) -> None:
        self.num_asked = 0
        offer = WeightOffer(
            host="", port=0, key="", engine=0, num_ranks=1, backend="gloo", timeout_s=1, version=3, tensors=(), chunk_bytes=1
        )  # fmt: skip
        self.offer_weights = Method("offer", [], offer)
        self.send_weights = Method("send", [], lambda *_: asyncio.sleep(2, []))
        self.take_reports = self

    def options(self, **_options: str) -> SlowSender:
        return self

    async def remote(self) -> Reports:
        self.num_asked += 1
        return Reports(items=[], progress=Heartbeat(count=self.num_asked, latest="a weight"))


class SlowFetcher:
    """Stands for a rollout actor's handle: it is there, and has its weights after 2 s."""

    __ray_ready__ = Method("ready", [])

    @property
    def fetch_weights(self) -> SlowFetcher:
        return self

    def remote(self, _offer: WeightOffer) -> asyncio.Future[None]:
        return asyncio.ensure_future(asyncio.sleep(2))  # like an actor's, the call runs whether or not it is awaited


def test_weights_may_go_directly_for_longer_than_the_limit_as_long_as_the_learner_makes_progress(
    base: Path, tmp_path: Path
) -> None:
    """2 s with a limit of 1 s."""
    setup = RlSetup(cfg=config(stall_timeout_s=1), model=base, seed=0, workdir=tmp_path)
    learner = RayLearner(setup, Restarts(allowed=0), 0, is_direct=True)
    learner._gang.ranks = [SlowSender()]
    assert run_virtually(learner.send_weights({0: SlowFetcher()})) == {}


class SharingSender(SlowSender):
    """Keeps the engines that it is asked to send to, and offers them its own port."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.engines: list[int] = []
        self.offer_weights.answer = replace(self.offer_weights.answer, port=port)

        def send(offer: WeightOffer, engines: Sequence[int]) -> Awaitable[list[int]]:
            assert offer.port == port
            self.engines += engines
            return asyncio.sleep(2, [])

        self.send_weights = Method("send", [], send)


class ToldFetcher(SlowFetcher):
    """Keeps the offer that it is told to fetch."""

    def remote(self, offer: WeightOffer) -> asyncio.Future[None]:
        self.offer = offer
        return super().remote(offer)


def test_learner_ranks_share_out_the_engines_that_they_send_weights_to(base: Path, tmp_path: Path) -> None:
    setup = RlSetup(cfg=config(), model=base, seed=0, workdir=tmp_path)
    learner = RayLearner(setup, Restarts(allowed=0), 0, is_direct=True)
    learner._gang.ranks = ranks = [SharingSender(port) for port in (100, 200, 300)]
    fetchers = {i: ToldFetcher() for i in (0, 1, 2, 5, 6)}
    assert run_virtually(learner.send_weights(fetchers)) == {}
    assert [rank.engines for rank in ranks] == [[0, 6], [1], [2, 5]]
    assert {i: (f.offer.engine, f.offer.port) for i, f in fetchers.items()} == {
        0: (0, 100), 6: (6, 100), 1: (1, 200), 2: (2, 300), 5: (5, 300)
    }  # fmt: skip
    # With one engine the other ranks have none, and still take part in gathering the weights.
    assert run_virtually(learner.send_weights({7: ToldFetcher()})) == {}
    assert [rank.send_weights.calls for rank in ranks] == [["send"] * 2] * 3


@pytest.mark.slow
def test_weights_reach_the_engines_in_parts(session: None, base: Path, tmp_path: Path) -> None:
    setup = RlSetup(cfg=config(num_rollout_actors=1), model=base, seed=0, workdir=tmp_path)
    learner = RayLearner(setup, Restarts(allowed=0), 0, is_direct=False, part_bytes=10_000)
    engines = RayRolloutEngines(setup, Restarts(allowed=0), 0, learner)

    async def drive() -> Completion:
        await asyncio.gather(learner.start(), engines.start())
        weights = await learner.weights()
        assert isinstance(weights, StoredWeights)
        assert len(weights.parts) > 2
        initial = load_file(model_folder(base) / "model.safetensors")
        assert weights.keys() == initial.keys()
        assert all(torch.equal(weights[name], initial[name]) for name in initial)
        await engines.load_weights(weights, version=1)
        (completion,) = await engines.generate([1], PARAMS)
        return completion

    try:
        assert set(asyncio.run(drive()).policy_versions) == {1}
    finally:
        learner.close()


def sleepy_actor() -> type[RolloutActor]:
    """A class made here travels to Ray's processes, which cannot import this file."""

    class SleepyActor(RolloutActor):
        """Has a torch engine, and fails if anything is asked of it while it is asleep."""

        is_asleep = False

        async def sleep(self) -> None:
            self.is_asleep = True

        async def wake(self) -> None:
            self.is_asleep = False

        async def receive_weights(self, arrays: Arrays) -> None:
            assert not self.is_asleep
            await super().receive_weights(arrays)

        async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
            assert not self.is_asleep
            return await super().exchange(requests, cancelled)

    return SleepyActor


@pytest.mark.slow
def test_engines_that_die_asleep_or_falling_asleep_are_replaced_when_the_others_wake(
    session: None, base: Path, tmp_path: Path
) -> None:
    """And not before: the learner has their memory."""
    first, second = (load_file(model_folder(base) / "model.safetensors") for _ in range(2))
    restarts = Restarts(allowed=2)

    async def drive() -> list[Completion]:
        engines = RayRolloutEngines(RlSetup(cfg=config(), model=base, seed=0, workdir=tmp_path), restarts, 0, None)  # type: ignore[arg-type]
        engines._actor_type = ray.remote(num_cpus=0, max_restarts=0)(sleepy_actor())
        await engines.start()
        try:
            await engines.load_weights(first, version=1)
            kill("SleepyActor", 1)
            await engines.sleep()
            kill("SleepyActor", 1)
            assert restarts.used == 0
            await engines.wake()
            assert restarts.used == 2
            await engines.load_weights(second, version=2)
            return [
                c
                for answers in await asyncio.gather(*(engines.generate([1], PARAMS) for _ in range(4)))
                for c in answers
            ]
        finally:
            await engines.close()

    assert [set(c.policy_versions) for c in asyncio.run(drive())] == [{2}] * 4


def short_of_memory_once() -> type[RolloutActor]:
    """As if Ray had killed the first of them to save its node."""

    class ShortOfMemoryOnce(RolloutActor):
        async def start(self, job: RlSetup) -> list[Report]:
            self.marker = job.workdir / "killed"
            return await super().start(job)

        async def exchange(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[Reply]:
            if not self.marker.exists():
                self.marker.touch()
                raise OutOfMemoryError("the node is low on memory")
            return await super().exchange(requests, cancelled)

    return ShortOfMemoryOnce


@pytest.mark.slow
def test_an_actor_that_ray_kills_for_its_memory_is_replaced_as_any_other(
    session: None, base: Path, tmp_path: Path
) -> None:
    restarts = Restarts(allowed=1)

    async def drive() -> list[Completion]:
        job = RlSetup(cfg=config(num_rollout_actors=1), model=base, seed=0, workdir=tmp_path)
        engines = RayRolloutEngines(job, restarts, 0, None)  # type: ignore[arg-type]
        engines._actor_type = ray.remote(num_cpus=0, max_restarts=0)(short_of_memory_once())
        await engines.start()
        try:
            return await engines.generate([1], PARAMS)
        finally:
            await engines.close()

    assert len(asyncio.run(drive())) == 1
    assert restarts.used == 1


@pytest.mark.slow
@pytest.mark.parametrize("weight_sync", ["store", "direct"])
def test_asynchronous_rl_survives_a_kill_within_its_bound_and_its_books_add_up(
    session: None, base: Path, tmp_path: Path, weight_sync: str
) -> None:
    """Weights arrive while answers are sampled; the kill comes in the second batch."""
    telemetry = Recorder()
    judge = Saboteur(after=32 + 5, do=partial(kill, "RolloutActor", 1))
    cfg = config(weight_sync=weight_sync).model_copy(update={"max_staleness": 1, "num_steps": 3})
    state = run(cfg, base, tmp_path, judge, telemetry=telemetry)
    assert telemetry.steps == [1, 2, 3]
    assert judge.num_seen == 32 * 3
    assert sum(state.reasons.of("group").values()) == 4 * 3
    assert sum(state.reasons.of("rollout").values()) == 32 * 3
    assert {row["rl/staleness/max"] for row in telemetry.rows if row["rl/rollouts/trained"]} <= {0, 1}


class SeesRanks(Recorder):
    """Keeps the learner's processes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[set[int]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        self.ranks.append({p.pid for p in actors_of("LearnerActor")})


@pytest.mark.slow
def test_if_one_learner_rank_dies_all_are_made_anew_and_go_on_from_the_checkpoint(
    session: None, base: Path, tmp_path: Path
) -> None:
    """Killed while the third step is sampled, with the checkpoint of the first in place, and maybe that of the second."""
    telemetry = SeesRanks()
    judge = Saboteur(after=2 * 32 + 5, do=partial(kill, "LearnerActor", 1))
    cfg = config(num_workers=2, checkpoint=RlCheckpointConfig(every_steps=1)).model_copy(update={"num_steps": 3})
    state = run(cfg, base, tmp_path, judge, telemetry=telemetry)
    assert state.step == 3
    assert judge.num_seen > 32 * 3
    assert telemetry.steps[:2] == [1, 2]
    first, last = telemetry.ranks[0], telemetry.ranks[-1]
    assert len(first) == len(last) == 2
    assert not first & last
