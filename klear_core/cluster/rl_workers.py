"""Run an RL stage's learner ranks and sampling engines as Ray actors."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from klear_core.artifacts.remote_paths import fetch_results
from klear_core.cluster.engine_actors import RayEngine, RolloutActor, relay_logs, rollout_name
from klear_core.cluster.gang import Gang, RanksLost
from klear_core.cluster.nodes import when_there
from klear_core.cluster.placement import check_cpu_is_meant, is_direct, place_rl, plan_gpus
from klear_core.cluster.pools import build_cluster_judges
from klear_core.cluster.rank_actors import LearnerActor, check_timeout_s, to_arrays
from klear_core.cluster.ray_calls import START_S, Plan, RemoteCall, Restarts, StoredWeights, final_error, within
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ResourceError
from klear_core.generate.engine import EngineStats, SamplingParams, TrainableEngine, WeightOffer, WeightSource
from klear_core.generate.factory import num_slots
from klear_core.generate.pool import EngineLost, EnginePool
from klear_core.hf_config import read_hf_config
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import STEP, Args, LearnerHandle, LearnerLost, RlSetup, T, check_engine
from klear_core.rl.sample_arrays import tokens_of, without_tokens
from klear_core.train.base_model import model_folder
from klear_core.types import Completion, TrainSample
from klear_core.verify import JudgePool

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.rl.learner import Learner
    from klear_core.train.checkpoint import Counters


log = logging.getLogger(__name__)

PART_BYTES = 256 << 20
"""Size of the objects in which weights go through Ray's object store."""
_BYTES = {"float32": 4, "bfloat16": 2}


class RayWorkers:
    """Implement `Workers` on the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self._learner: RayLearner | None = None
        self._engines: RayRolloutEngines | None = None

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start learner ranks and rollout actors. Raise ResourceError without Ray or with too few GPUs."""
        if not ray.is_initialized():
            raise ResourceError("Ray is not running in this process: call ray.init first")
        runtime, engine = setup.cfg.runtime, setup.cfg.rollout.engine
        gpus = await asyncio.to_thread(
            when_there,
            lambda: plan_gpus(runtime, engine, ray.cluster_resources().get("GPU", 0.0)),
            wait_s=runtime.wait_for_nodes_s,
        )
        check_cpu_is_meant(runtime, engine, gpus, read_hf_config(model_folder(setup.model)).num_params)
        restarts = Restarts(runtime.max_restarts)

        self._learner = learner = RayLearner(
            setup,
            restarts,
            gpus.learner,
            is_direct=is_direct(runtime, engine, gpus),
            plan=partial(place_rl, runtime, engine, gpus),
        )
        self._engines = RayRolloutEngines(setup, restarts, gpus.rollout, learner, learner.engine_options)
        await learner.reserve()  # before an engine is started that shares a GPU with a rank
        if 0 < gpus.learner < 1:
            # One after the other: vLLM takes all memory that is taken while it starts for its own, and makes its cache
            # smaller by what the learner allocates, or fails if the learner frees some.
            await self._learner.start()
            await self._engines.start()
        else:
            await asyncio.gather(self._learner.start(), self._engines.start())
        if self._learner.is_direct:
            await self._engines.check_direct()
        self._learner.add_note(await check_engine(self._learner, self._engines, setup))
        return self._learner, self._engines

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build judges on all nodes of the cluster."""
        return build_cluster_judges(cfg)

    def status(self) -> str:
        """Describe the rollout actors and their open requests."""
        return self._engines.status() if self._engines else "no rollout actor"

    async def close(self) -> None:
        """Stop all actors."""
        if self._engines is not None:
            await self._engines.close()
        if self._learner is not None:
            self._learner.close()


class RayLearner(LearnerHandle):
    """Run the learner as one actor per rank. If one dies, all restart: a process group cannot replace a rank."""

    def __init__(
        self,
        setup: RlSetup,
        restarts: Restarts,
        num_gpus: float,
        *,
        is_direct: bool,
        plan: Plan | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Send weights to engines with `send_weights` if `is_direct`, else through the object store.

        `plan` chooses the places of ranks and engines; see `Gang`. Objects of the store have about `part_bytes`.
        """
        super().__init__()
        self.is_direct = is_direct
        """Whether weights go directly to the engines; `check_direct` may change it before the first weights."""
        self._setup = setup
        self._part_bytes = part_bytes
        self._restarts = restarts
        self._lock = asyncio.Lock()
        """Held during a call: restarted engines ask for weights while the loop makes other calls."""
        self._lost: LearnerLost | None = None
        """Raised by every call until `restore`: an engine's call may get it first, and the loop must get it too."""
        self._gang = Gang(LearnerActor, setup.cfg.runtime, gpus_per_rank=num_gpus, telemetry=NullTelemetry(), plan=plan)

    async def reserve(self) -> None:
        """Reserve the GPUs of all ranks, which engines may share."""
        await self._gang.reserve()

    async def engine_options(self, index: int) -> dict[str, Any]:
        """Return where Ray shall start an engine, once GPUs are reserved; see `Reservation.engine_options`."""
        return await self._gang.engine_options(index)

    async def start(self) -> None:
        """Start all ranks with the initial model; start over if one dies meanwhile."""
        timeout_s = max(START_S, self._setup.cfg.runtime.stall_timeout_s)
        while True:
            try:
                await self._gang.start()
                loads = [rank.load.remote(self._setup) for rank in self._gang.ranks]
                await self._gang.wait(loads, "load the model", stall_timeout_s=timeout_s)
            except RanksLost as lost:
                self._restarts.count("the learner", lost, lost.nodes)
                self._gang.kill()
            else:
                return

    async def restore(self) -> Counters | None:
        """Restore the newest checkpoint on all ranks; see `LearnerHandle.restore`."""
        self._lost = None  # the loop knows by now, and the ranks get the checkpoint's weights next
        return await super().restore()

    async def check_direct(self, engines: Mapping[int, Any]) -> None:
        """Send known tensors directly to these actors; if not all receive them, use the object store from now on."""
        try:
            failure = await self._failure_of_direct(engines)
        except Exception as e:  # noqa: BLE001  a broken transfer can raise anything; the note says what
            failure = f"{type(e).__name__}: {e}".partition("\n")[0][:300]
        if failure:
            self.is_direct = False
            note = f"weights do not go directly to the engines ({failure}); Ray's object store took its place"
            log.warning("%s", note)
            self.add_note(note)

    async def _failure_of_direct(self, engines: Mapping[int, Any]) -> str:
        """Return what went wrong when all these actors fetched known tensors at once; empty if nothing did."""
        # Longer than the engines themselves wait, so that their own errors come first.
        timeout_s = 2 * check_timeout_s(self._setup)
        wait = partial(within, timeout_s=timeout_s, who="the learner")
        shares = [(rank, of) for rank, of in zip(self._gang.ranks, self._shares(engines), strict=True) if of]
        offers = await asyncio.gather(
            *(wait(rank.offer_known.remote(), what="offer known tensors") for rank, _ in shares)
        )
        digest = offers[0][1]
        # Both sides must run at the same time: sending and fetching are collective calls.
        sending = [
            asyncio.ensure_future(rank.send_known.remote(offer, share))
            for (rank, share), (offer, _) in zip(shares, offers, strict=True)
        ]
        calls = {
            i: engines[i].digest_offered.remote(replace(offer, engine=i))
            for (_, share), (offer, _) in zip(shares, offers, strict=True)
            for i in share
        }
        found: dict[int, list[str]] = {}
        failures: list[str] = []
        for i, call in calls.items():
            try:
                found[i] = await within(call, timeout_s, rollout_name(i), "fetch known tensors")
            except Exception as e:  # noqa: BLE001  # as above; the other engines' results are still to be awaited
                failures.append(f"{rollout_name(i)}: {type(e).__name__}: {e}".partition("\n")[0][:300])
        lost = [i for sent in sending for i in await wait(sent, what="send known tensors")]
        wrong = [i for i, digests in found.items() if set(digests) != {digest}]
        failures += [f"{rollout_name(i)} received other bits than were sent" for i in wrong]
        failures += [f"{rollout_name(i)} was lost" for i in lost if i in found and i not in wrong]
        return "; ".join(failures)

    async def call(self, what: str, method: Callable[[Learner, *Args], T], *args: *Args) -> T:
        """Call `method` with the learner of each rank, once no other call runs; return rank 0's result."""
        stored = [ray.put(arg) for arg in args]  # stored once for all ranks
        results = await self._call_all(lambda rank: rank.call.remote(method, *stored), what)
        first: T = results[0]
        return first

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step; each rank is sent the counts of all rows and the tokens of its own."""
        counts = await asyncio.to_thread(without_tokens, samples)
        stored = ray.put(counts)  # once for all ranks
        # Every rank would plan the same.
        shares = (await self._call_all(lambda rank: rank.shares.remote(stored), "share out the rows", ranks=1))[0]
        tokens = [ray.put(await asyncio.to_thread(tokens_of, samples, rows)) for rows in shares]
        width = self._setup.cfg.runtime.context_parallel  # these ranks share rows
        async with self._lock:
            self._check_present()
            calls = [rank.step.remote(stored, tokens[i // width]) for i, rank in enumerate(self._gang.ranks)]
            results = await self._await_or_restart(calls, STEP)
        metrics: dict[str, float] = results[0]
        return metrics

    async def weights(self) -> WeightSource:
        """Return weights in the object store or an offer to fetch them; see `LearnerHandle.weights`."""
        async with self._lock:
            if self.is_direct:
                return (await self._offers())[0]
            self._check_present()
            num_parts = self._num_parts()
            results = [rank.weights.options(num_returns=1 + num_parts).remote(num_parts) for rank in self._gang.ranks]
            # Awaiting the flags alone reports a dead rank and leaves the weights in the object store.
            await self._await_or_restart([flag for flag, *_ in results], "gather the weights")
        return StoredWeights(results[0][1:])

    async def send_weights(self, engines: Mapping[int, Any]) -> dict[int, BaseException]:
        """Send the current weights to these actors; return the error of each that did not get them.

        Raise LearnerLost if the learner dies.
        """
        async with self._lock:
            # Leave dead engines out beforehand: the learner would wait for each until its timeout.
            ready = {i: engine.__ray_ready__.remote() for i, engine in engines.items()}
            failed = await self._failures(ready, "answer")
            offers = await self._offers()
            shares = self._shares([i for i in engines if i not in failed])
            # Both sides must run at the same time: sending and fetching are collective calls.
            fetching = {
                i: engines[i].fetch_weights.remote(replace(offer, engine=i))
                for offer, share in zip(offers, shares, strict=True)
                for i in share
            }
            ranks = zip(self._gang.ranks, offers, shares, strict=True)
            sending = [rank.send_weights.remote(offer, share) for rank, offer, share in ranks]
            await self._await_or_restart(sending, "send its weights")
            # The engines' timeout begins only now: while the learner sends, it knows whether there is progress.
            failed |= await self._failures(fetching, "fetch its weights")
        return failed

    async def export(self, target: Path) -> None:
        """Write the model folder; see `LearnerHandle.export`."""
        files = (await self._call_all(lambda rank: rank.export.remote(target), "export the model"))[0]
        await asyncio.to_thread(fetch_results, self._setup.remote, files, target.parent)

    def close(self) -> None:
        """Kill all ranks and release their GPUs."""
        self._gang.close()

    def _num_parts(self) -> int:
        """Return the number of objects to store the weights in: an engine waits for each of them by itself."""
        num_params = read_hf_config(model_folder(self._setup.model)).num_params
        return max(1, math.ceil(num_params * _BYTES[self._setup.cfg.dtype] / self._part_bytes))

    async def _offers(self) -> list[WeightOffer]:
        """Return each rank's offer of the current weights; the caller holds the lock."""
        return await self._call_locked(lambda rank: rank.offer_weights.remote(), "offer its weights")

    def _shares(self, engines: Collection[int]) -> list[list[int]]:
        """Return the engines that each rank sends the weights to; where GPUs are shared, they are placed so.

        One rank alone would send 16 GB for each of them, minutes for the hundreds of a large cluster.
        """
        num_ranks = len(self._gang.ranks)
        return [[i for i in engines if i % num_ranks == rank] for rank in range(num_ranks)]

    async def _call_all(self, call: RemoteCall, what: str, *, ranks: int | None = None) -> list[Any]:
        """Call every rank, or the first `ranks`, once no other call runs, and return their results."""
        async with self._lock:
            return await self._call_locked(call, what, ranks=ranks)

    async def _call_locked(self, call: RemoteCall, what: str, *, ranks: int | None = None) -> list[Any]:
        self._check_present()
        return await self._await_or_restart([call(rank) for rank in self._gang.ranks[:ranks]], what)

    def _check_present(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _await_or_restart(self, calls: Sequence[Awaitable[Any]], what: str) -> list[Any]:
        """Wait for a call of each rank, as long as they make progress; restart all if one has died."""
        try:
            return await self._gang.wait(calls, what, stall_timeout_s=self._gang.stall_s)
        except RanksLost as lost:
            self._restarts.count("the learner", lost, lost.nodes)
            self._gang.kill()
            await self.start()
            # The new ranks have the initial model, so no call may use them before `restore`.
            self._lost = LearnerLost(f"the learner died; it was to {what}")
            raise self._lost from lost

    async def _failures(self, calls: Mapping[int, Awaitable[object]], what: str) -> dict[int, BaseException]:
        """Wait for one call of each engine, by its index, and return the errors of those that failed."""
        wait = partial(within, timeout_s=self._setup.cfg.runtime.stall_timeout_s, what=what)
        waits = [wait(call, who=rollout_name(i)) for i, call in calls.items()]
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        return {i: outcome for i, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, BaseException)}


class RayRolloutEngines:
    """A pool of rollout actors as one `TrainableEngine`, whose weights follow the learner's."""

    def __init__(
        self,
        setup: RlSetup,
        restarts: Restarts,
        num_gpus: float,
        learner: RayLearner,
        actor_options: Callable[[int], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        """`actor_options` returns the options of an actor by its index: where it is to run; None: anywhere."""
        self.version = 0
        self.cache_tokens = None
        self._actor_options = actor_options
        self._setup = setup
        self._learner = learner
        # Reserve no CPUs, and do not let Ray restart the actor, because a new engine must first get the current
        # weights.
        self._actor_type = ray.remote(num_cpus=0, num_gpus=num_gpus, max_restarts=0)(RolloutActor)
        self._weights: Sequence[ray.ObjectRef] = ()
        """Parts of the current weights in the object store; none before the first, and none if they go directly."""
        self._fetches_weights = False
        """Whether a new actor fetches its weights directly from the learner."""
        limit = num_slots(setup.cfg.rollout.engine, is_on_gpu=num_gpus > 0)
        self.engines = [
            RayEngine(rollout_name(i), partial(self._create_actor, i), partial(self._load_actor, i), limit=limit)
            for i in range(setup.cfg.runtime.num_rollout_actors)
        ]
        self._pool = EnginePool(self.engines, restarts.count)

    async def start(self) -> None:
        """Start all actors with the initial model."""
        await self._pool.start()

    async def check_direct(self) -> None:
        """Check the direct transfer of weights to all actors; see `RayLearner.check_direct`."""
        await self._learner.check_direct({i: engine.actor for i, engine in enumerate(self.engines)})

    async def _create_actor(self, index: int) -> Any:
        options = await self._actor_options(index) if self._actor_options else {}
        return self._actor_type.options(**options).remote()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample with the least busy actor; see `EnginePool.generate`."""
        return await self._pool.generate(prompt_ids, params)

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Load weights into all actors, directly or through the object store; see `TrainableEngine.load_weights`."""
        self.version = version  # first, for actors that are replaced while the others load
        if isinstance(weights, WeightOffer):
            await self._send_weights_to_all()
            return
        if isinstance(weights, StoredWeights):
            self._weights = weights.parts
        else:
            self._weights = (ray.put(to_arrays(_tensors(weights))),)
        await self._call_all(self._loading())

    async def sleep(self) -> None:
        """Free the GPU memory of all actors; see `SleepingEngine.sleep`. A dead actor is replaced later, in `wake`."""
        timeout_s = self._setup.cfg.runtime.stall_timeout_s
        sleeping: dict[str, RemoteCall] = {"sleep (free its GPU memory)": lambda actor: actor.sleep.remote()}
        calls = [engine.call(sleeping, timeout_s=timeout_s) for engine in self.engines]
        for engine, dead in zip(self.engines, await asyncio.gather(*calls), strict=True):
            if dead is not None:
                log.warning("%s died before it slept (%s)", engine.name, type(dead.error).__name__)

    async def wake(self) -> None:
        """Wake all actors; see `SleepingEngine.wake`.

        Actors that died meanwhile are replaced only now: the learner has freed the memory that a new engine needs.
        """
        await self._call_all({"wake up (allocate its GPU memory)": lambda actor: actor.wake.remote()})

    async def close(self) -> None:
        """Stop all actors; waiting requests fail."""
        await self._pool.close()

    async def stats(self) -> EngineStats | None:
        """Return the load of all actors; see `MeasuredEngine`."""
        return await self._pool.stats()

    def status(self) -> str:
        """Return the number of open requests of each actor, in words."""
        return self._pool.status()

    def _loading(self) -> dict[str, RemoteCall]:
        """Return the calls that load the stored weights into an actor, by what each does; none if there are none.

        Every part has a call, and so a timeout, of its own: many nodes may fetch large weights from one.
        """
        if not self._weights:
            return {}
        of_version, version = f"the weights of version {self.version}", self.version
        calls: dict[str, RemoteCall] = {}
        for number, part in enumerate(self._weights, start=1):
            calls[f"receive part {number} of {len(self._weights)} of {of_version}"] = partial(_receive, part)
        calls[f"load {of_version}"] = lambda actor: actor.load_received.remote(version)
        return calls

    async def _call_all(self, calls: Mapping[str, RemoteCall]) -> None:
        """Make these calls of all actors concurrently, and replace those that died."""
        timeout_s = self._setup.cfg.runtime.stall_timeout_s

        async def call_or_replace(engine: RayEngine) -> None:
            dead = await engine.call(calls, timeout_s=timeout_s)
            if dead is not None:
                await self._replace(engine, dead.actor, dead.error)

        await asyncio.gather(*(call_or_replace(engine) for engine in self.engines))

    async def _send_weights_to_all(self) -> None:
        """Send weights directly from the learner to all actors, and replace those that did not get everything."""
        self._fetches_weights = True
        # Lock all engines, because no request may reach an actor that has old and new weights mixed.
        async with AsyncExitStack() as held:
            for engine in self.engines:
                await held.enter_async_context(engine.lock)
            actors = {i: engine.actor for i, engine in enumerate(self.engines)}
            try:
                failed = await self._learner.send_weights(actors)
            except LearnerLost as lost:
                failed = dict.fromkeys(actors, lost)  # any of them may have received a part
        await asyncio.gather(*(self._replace(self.engines[i], actors[i], error) for i, error in failed.items()))
        # After the engines were replaced: the loop restores the learner, and then sends its weights to all of them.
        for error in failed.values():
            if isinstance(error, LearnerLost):
                raise error

    async def _replace(self, engine: RayEngine, dead: Any, error: BaseException) -> None:
        """Start another actor with the current weights, unless another task noticed first and did so."""
        error = await final_error(dead, error)
        if engine.actor is dead:
            # The learner's restart was already counted.
            await self._pool.replace(engine, error, is_counted=not isinstance(error, LearnerLost))

    async def _load_actor(self, index: int, actor: Any) -> None:
        name, stall_timeout_s = rollout_name(index), self._setup.cfg.runtime.stall_timeout_s
        start_s = max(START_S, stall_timeout_s)
        relay_logs(await within(actor.start.remote(self._setup), start_s, name, "start its engine"), name)
        for what, call in self._loading().items():
            await within(call(actor), stall_timeout_s, name, what)
        if not self._fetches_weights:
            return
        try:
            failed = await self._learner.send_weights({index: actor})
        except LearnerLost as lost:
            # The RL loop also receives this error, restores the learner, and then sends its weights to all actors.
            log.warning("rollout actor %d has the initial weights for now: %s", index, lost)
        else:
            if failed:
                raise EngineLost("it did not get its weights") from failed[index]


def _receive(part: ray.ObjectRef, actor: Any) -> Any:
    return actor.receive_weights.remote(part)


def _tensors(weights: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(weights, Path):
        from safetensors.torch import load_file

        return {name: w for file in sorted(weights.glob("*.safetensors")) for name, w in load_file(file).items()}
    return weights
