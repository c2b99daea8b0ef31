"""Before the first step RL finds out whether engines get the learner's weights, and compute its log-probs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rl_builders import TINY, rl_config, tiny_base

from klear_core.cluster.engine_actors import RolloutActor
from klear_core.cluster.rank_actors import LearnerActor
from klear_core.config.evaluate import VllmEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import HfModelConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import SamplingParams, TrainableEngine, WeightOffer, WeightSource
from klear_core.generate.weight_transfer import digest_of, known_tensors
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import TOLERANCES, LocalWorkers, RlSetup, check_engine
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.types import Completion

pytest.importorskip("ray")
from klear_core.cluster.rank_actors import LOGGER
from klear_core.cluster.ray_calls import Restarts
from klear_core.cluster.rl_workers import RayLearner


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


class Changed:
    """An engine whose log-probs are changed on their way."""

    def __init__(self, engine: object, change: Callable[[float], float]) -> None:
        self.engine, self.change = engine, change
        self.asked: list[SamplingParams] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.asked.append(params)
        found = await self.engine.generate(prompt_ids, params)
        return [dataclasses.replace(c, logps=tuple(map(self.change, c.logps))) for c in found]


def checked(base: Path, workdir: Path, change: Callable[[float], float], cfg: RlConfig) -> tuple[str, int]:
    """Return the note on an engine with changed log-probs, and how many answers it was asked for."""
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir)

    async def main() -> tuple[str, int]:
        workers = LocalWorkers()
        try:
            learner, engine = await workers.start(setup)
            assert await learner.notes() == ()  # the engine as it is agrees
            changed = Changed(engine, change)
            return await check_engine(learner, changed, setup), len(changed.asked)
        finally:
            await workers.close()

    return asyncio.run(main())


def config(check: str, temperature: float = 0.7) -> RlConfig:
    cfg = rl_config(runtime={"device": "cpu", "engine_check": check})
    sampling = cfg.rollout.sampling.model_copy(update={"temperature": temperature})
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"sampling": sampling})})


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        (lambda logp: logp - 0.5, "0.5 nats per token"),
        (lambda logp: logp + 0.002, "0.002 nats per token"),
        (lambda logp: math.nan, "nan nats per token"),
    ],
)
def test_an_engine_with_other_log_probs_is_noted(
    base: Path, tmp_path: Path, change: Callable[[float], float], stated: str
) -> None:
    note, num_asked = checked(base, tmp_path, change, config("warn"))
    assert stated in note
    assert f"{TOLERANCES['float32']:g} are allowed" in note
    assert num_asked >= 4


def test_an_engine_that_agrees_or_that_is_not_checked_gets_no_note(base: Path, tmp_path: Path) -> None:
    assert checked(base, tmp_path, lambda logp: logp + 1e-4, config("warn"))[0] == ""
    assert checked(base, tmp_path, lambda logp: logp - 9, config("off")) == ("", 0)


def test_training_with_an_engine_that_disagrees_can_be_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"9 nats per token.*engine_check = .refuse.") as refused:
        checked(base, tmp_path, lambda logp: logp - 9, config("refuse"))
    assert refused.value.is_permanent  # the next attempt would load 8B again, and find the same


def test_one_question_fills_the_window_but_for_its_answer(base: Path, tmp_path: Path) -> None:
    """An engine whose positions go wrong late is found before it has sampled a long answer."""
    cfg = config("warn")
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=tmp_path)

    async def main() -> tuple[str, list[int]]:
        workers = LocalWorkers()
        learner, engine = await workers.start(setup)
        row = min(cfg.rollout.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens, 64)
        late = WrongLate(engine, from_position=row - 4)
        try:
            return await check_engine(learner, late, setup), late.prompt_lengths
        finally:
            await workers.close()

    note, prompt_lengths = asyncio.run(main())
    num_new = min(32, cfg.rollout.sampling.max_new_tokens)
    assert max(prompt_lengths) == min(cfg.rollout.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens, 64) - num_new
    assert "nats per token" in note


def test_engines_have_the_positions_that_were_asked_for_a_given_model(base: Path, tmp_path: Path) -> None:
    """`max_position_embeddings` of a model that RL starts from: without it answers would end at the folder's window."""
    wider = HfModelConfig(path=str(model_folder(base)), max_position_embeddings=2 * TINY.max_position_embeddings)
    prepare_base(wider, seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    setup = RlSetup(cfg=config("warn"), model=tmp_path, seed=0, workdir=tmp_path / "rl")
    prompt = [65] * (TINY.max_position_embeddings + 9)

    async def answers(engine: TrainableEngine) -> list[Completion]:
        params = SamplingParams(
            num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=4, seed=0
        )
        return await engine.generate(prompt, params)

    async def main() -> None:
        actor, workers = RolloutActor(), LocalWorkers()
        await actor.start(setup)
        _, engine = await workers.start(setup)
        try:
            assert len(await answers(actor._engine)) == len(await answers(engine)) == 1
        finally:
            await workers.close()
            await actor.close()

    asyncio.run(main())


class WrongLate:
    """An engine whose log-probs are wrong from some position of the row on."""

    def __init__(self, engine: object, *, from_position: int) -> None:
        self.engine, self.from_position = engine, from_position
        self.prompt_lengths: list[int] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.prompt_lengths.append(len(prompt_ids))
        found = await self.engine.generate(prompt_ids, params)
        first = self.from_position - len(prompt_ids)
        return [
            dataclasses.replace(c, logps=tuple(logp - 3.0 * (i >= first) for i, logp in enumerate(c.logps)))
            for c in found
        ]


@pytest.mark.parametrize(
    "fast", [{"kv_cache_dtype": "fp8"}, {"engine_args": {"speculative_config": {"method": "ngram"}}}]
)
def test_rl_refuses_to_train_with_a_fast_path_of_vllm_that_disagrees(base: Path, tmp_path: Path, fast: dict) -> None:
    """The engine is a fake in vLLM's place: ours, with other log-probs. Without the fast path the same is a note."""
    for engine, refuses in ((VllmEngineConfig(**fast), True), (VllmEngineConfig(), False)):
        cfg = config("warn")
        setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=tmp_path)
        asked = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"engine": engine})})

        async def main(setup: RlSetup = setup, asked: RlConfig = asked) -> str:
            workers = LocalWorkers()
            try:
                learner, ours = await workers.start(setup)
                disagrees = Changed(ours, lambda logp: logp - 0.5)
                return await check_engine(learner, disagrees, dataclasses.replace(setup, cfg=asked))
            finally:
                await workers.close()

        if refuses:
            with pytest.raises(
                TrainingError, match=r"0.5 nats per token.*kv_cache_dtype, engine_args or sleep_level may cause it"
            ):
                asyncio.run(main())
        else:
            assert "0.5 nats per token" in asyncio.run(main())


class Sleeper:
    """An engine of ours in vLLM's place; `loses` says that its log-probs are wrong once it has slept, as of lost buffers."""

    def __init__(self, engine: TrainableEngine, *, loses: bool) -> None:
        self.engine, self.loses, self.version, self.calls = engine, loses, engine.version, []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        found = await self.engine.generate(prompt_ids, params)
        wrong = 0.5 * (self.loses and "sleep" in self.calls)
        return [dataclasses.replace(c, logps=tuple(logp - wrong for logp in c.logps)) for c in found]

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        self.calls.append("load")
        await self.engine.load_weights(weights, version=version)

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def close(self) -> None:
        await self.engine.close()


@pytest.mark.parametrize(
    ("level", "loses", "calls"),
    [(1, True, ["sleep"]), (2, False, ["sleep", "wake", "load", "sleep"]), (2, True, None)],
)
def test_an_engine_that_drops_its_weights_is_checked_after_a_sleep(
    base: Path, tmp_path: Path, level: int, loses: bool, calls: list[str] | None
) -> None:
    cfg = config("warn")
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=tmp_path)
    vllm = VllmEngineConfig.model_validate({"runtime": {"sleep_mode": True, "sleep_level": level}})
    asked = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"engine": vllm})})

    async def main() -> tuple[str, list[str]]:
        workers = LocalWorkers()
        try:
            learner, ours = await workers.start(setup)
            sleeper = Sleeper(ours, loses=loses)
            return await check_engine(learner, sleeper, dataclasses.replace(setup, cfg=asked)), sleeper.calls
        finally:
            await workers.close()

    if calls is None:
        with pytest.raises(TrainingError, match=r"0.5 nats per token.*sleep_level may cause it"):
            asyncio.run(main())
    else:
        assert asyncio.run(main()) == ("", calls)


@pytest.mark.parametrize(
    "fast", [{"kv_cache_dtype": "fp8"}, {"engine_args": {"block_size": 32}}, {"runtime": {"sleep_level": 2}}]
)
def test_a_fast_path_of_vllm_cannot_be_used_without_the_check(fast: dict) -> None:
    engine = {"kind": "vllm", **fast}
    with pytest.raises(ValueError, match="nothing would tell whether their log-probs are the policy's"):
        RlConfig.model_validate({"rollout": {"engine": engine}, "runtime": {"engine_check": "off"}})
    RlConfig.model_validate({"rollout": {"engine": engine}})
    RlConfig.model_validate({"rollout": {"engine": {"kind": "vllm"}}, "runtime": {"engine_check": "off"}})


class Handle:
    """Stands for Ray's handle of an actor: each method runs in a thread of this process, as in a process of its own."""

    def __init__(self, actor: object) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Handle.Method:
        return Handle.Method(getattr(self.actor, name))

    class Method:
        def __init__(self, method: Callable[..., object]) -> None:
            self.method = method

        def options(self, **_where: object) -> Handle.Method:
            return self

        def remote(self, *args: object) -> Awaitable[object]:
            is_async = asyncio.iscoroutinefunction(self.method)
            call = (lambda *a: asyncio.run(self.method(*a))) if is_async else self.method
            future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

            def finish(result: object, error: BaseException | None) -> None:
                future.set_exception(error) if error else future.set_result(result)

            def run(loop: asyncio.AbstractEventLoop) -> None:
                try:
                    result, error = call(*args), None
                except BaseException as e:  # noqa: BLE001
                    result, error = None, e
                loop.call_soon_threadsafe(finish, result, error)

            threading.Thread(target=run, args=(asyncio.get_running_loop(),), daemon=True).start()
            return future


class Flipping(LearnerActor):
    """A learner whose way to the engines flips one bit of one tensor."""

    def send_known(self, offer: WeightOffer, engines: Sequence[int]) -> list[int]:
        known = known_tensors()
        known["small"].view(torch.int16)[500] ^= 1
        return self._check_server.send(offer, known.items(), engines)


class Deaf(RolloutActor):
    """An engine that cannot fetch."""

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        raise RuntimeError("no route to the learner")


@pytest.fixture
def learners(base: Path, tmp_path: Path) -> Iterator[Callable[[type[LearnerActor]], RayLearner]]:
    # The learner waits half as long for an engine.
    setup = RlSetup(
        cfg=rl_config(runtime={"device": "cpu", "stall_timeout_s": 8}), model=base, seed=0, workdir=tmp_path
    )

    logger = logging.getLogger(LOGGER)
    level, handlers = logger.level, list(logger.handlers)

    def make(kind: type[LearnerActor]) -> RayLearner:
        actor = kind()
        actor.join(setup.cfg.runtime, 0, "tcp://127.0.0.1:1", logging.WARNING)  # a single rank joins nobody
        actor.load(setup)
        learner = RayLearner(setup, Restarts(0), 0, is_direct=True)
        learner._gang.ranks = [Handle(actor)]
        return learner

    yield make
    logger.setLevel(level)
    logger.handlers = handlers  # a rank keeps records for its driver


def engine(kind: type[RolloutActor] = RolloutActor) -> Handle:
    actor = kind()
    actor._engine = None  # in this process, if any
    return Handle(actor)


async def outcome(learner: RayLearner, *engines: Handle) -> tuple[bool, tuple[str, ...]]:
    await learner.check_direct(dict(enumerate(engines)))
    return learner.is_direct, await learner.notes()


def test_the_direct_way_is_kept_if_all_engines_receive_the_bits_that_were_sent(learners) -> None:
    assert asyncio.run(outcome(learners(LearnerActor), engine(), engine())) == (True, ())


@pytest.mark.parametrize(
    ("learner", "second", "why"),
    [
        (Flipping, RolloutActor, "rollout actor 0 received other bits than were sent; rollout actor 1 received"),
        (LearnerActor, Deaf, "rollout actor 1: RuntimeError: no route to the learner"),
    ],
)
def test_a_direct_way_that_is_wrong_or_fails_is_given_up_with_a_note(
    learners, learner: type[LearnerActor], second: type[RolloutActor], why: str
) -> None:
    is_direct, (note,) = asyncio.run(outcome(learners(learner), engine(), engine(second)))
    assert not is_direct
    assert why in note
    assert note.endswith("Ray's object store took its place")


def test_a_digest_tells_apart_names_dtypes_shapes_order_and_bits() -> None:
    known = known_tensors()
    others = [
        dict(reversed(known.items())),
        known | {"small": known["small"].flip(0)},
        known | {"small": known["small"].view(torch.float16)},
        known | {"large": known["large"].T.contiguous().reshape(1 << 10, -1)},
        {("tiny" if name == "small" else name): tensor for name, tensor in known.items()},
    ]
    digests = {digest_of(tensors.items()) for tensors in [known, *others]}
    assert len(digests) == 6
    assert digest_of(known_tensors().items()) == digest_of(known.items())
