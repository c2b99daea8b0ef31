"""Two pools of engines on one Ray cluster with two GPUs, which are only counted: who has them, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest

from klear_core.config.evaluate import EvaluateRuntime, TorchEngineConfig, TorchEngineRuntime
from klear_core.config.train import TinyModelConfig
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.generate.factory import EngineSpec, Sampler
from klear_core.generate.pool import expect
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base
from tasks.resources import Needs, ray_session

pytest.importorskip("ray")
import ray
from two_nodes import actors_of, two_nodes

pytestmark = pytest.mark.slow

RUNTIME = EvaluateRuntime(num_engines="auto")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSpec]:
    workdir = tmp_path_factory.mktemp("model")
    prepare_base(TinyModelConfig(num_layers=1), seed=0, workdir=workdir, telemetry=NullTelemetry())
    cfg = TorchEngineConfig(runtime=TorchEngineRuntime(max_batch_size=2))
    with two_nodes(gpus_each=1), ray_session(Needs(num_cpus=1, object_store_bytes=80 << 20)):
        yield EngineSpec(cfg=cfg, model_folder=model_folder(workdir), num_threads=1, seed=0, window=1_000_000)


def params(seed: int, *, num_tokens: int) -> SamplingParams:
    return SamplingParams(
        num_samples=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=num_tokens,
        seed=seed,
    )


async def start(spec: EngineSpec) -> Sampler:
    from klear_core.cluster.pools import start_pool

    return await start_pool(spec, runtime=RUNTIME, key="evaluate")


def ask(engine: InferenceEngine, seed: int, *, num_tokens: int = 4) -> asyncio.Task[object]:
    return asyncio.create_task(engine.generate([65, 66, 67], params(seed, num_tokens=num_tokens)))


async def until_free(num_gpus: int) -> None:
    while ray.available_resources().get("GPU", 0) != num_gpus:  # noqa: ASYNC110  # Ray has no event for it
        await asyncio.sleep(0.1)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on an event loop that must not complain, as of errors that nobody retrieved."""
    complaints: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(str(what)))
        await asyncio.wait_for(body(), 120)

    asyncio.run(watched())
    assert not complaints
    assert not psutil.wait_procs(actors_of("EngineActor"), timeout=90)[1]


def test_a_model_gets_the_gpu_that_the_last_answer_of_another_leaves_idle(spec: EngineSpec) -> None:
    async def body() -> None:
        first = await start(spec)
        assert first.num_engines == 2
        await until_free(0)  # both of its engines have theirs
        starting = asyncio.create_task(start(spec))
        expect(first.engine, 2)
        straggler = ask(first.engine, 0, num_tokens=900_000)
        await asyncio.sleep(0)
        assert not starting.done()
        await ask(first.engine, 1)
        second = await starting
        expect(second.engine, 4)
        await asyncio.gather(*(ask(second.engine, seed) for seed in range(4)))
        assert not straggler.done()
        straggler.cancel()
        await asyncio.gather(first.engine.close(), second.engine.close())

    run(body)


def test_close_ends_engines_that_wait_for_gpus(spec: EngineSpec, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        first = await start(spec)
        await until_free(0)
        starting = asyncio.create_task(start(spec))
        await asyncio.sleep(2)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await first.engine.close()
        await until_free(2)  # none of those that were cancelled has taken one

    with caplog.at_level(logging.WARNING):
        run(body)
    assert not caplog.records
