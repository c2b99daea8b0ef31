"""What every engine promises (klear_core/generate/engine.py), one suite for all of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from completions_endpoint import MODEL, serve
from decoder_folder import build_model, write_folder
from fake_engine import FakeAnswer, FakeEngine
from vllm_marks import VLLM_MARKS

from klear_core.config.evaluate import (
    EvaluateRuntime,
    HttpEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
    VllmRuntime,
)
from klear_core.errors import ResourceError
from klear_core.generate.engine import InferenceEngine, PooledEngine, SamplingParams, TrainableEngine, logps_of
from klear_core.generate.factory import (
    EndpointMember,
    EngineSpec,
    LocalMember,
    RestartLimit,
    build_engine,
    build_trainable_engine,
)
from klear_core.generate.pool import EnginePool
from klear_core.seeding import seed_for
from klear_core.train.logps import token_logps
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.types import Completion, SftExample
from tasks.resources import Needs, ray_session

MAX_LEN = 160
PROMPTS = [[65 + (7 * i + j) % 50 for j in range(length)] for i, length in enumerate((1, 3, 20, 40, 5))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """One kind of engine: how to start it, whether we can set its weights, and whether it samples the folder's model."""

    start: Callable[[Path], contextlib.AbstractAsyncContextManager[InferenceEngine]]
    is_trainable: bool
    has_model: bool = True
    scores_to_end: bool = False
    """Whether it scores an answer that fills the window; others leave room for one more token."""


@contextlib.asynccontextmanager
async def _fake(_folder: Path) -> AsyncIterator[InferenceEngine]:
    def noise(prompt_ids: tuple[int, ...], params: SamplingParams, sample_idx: int) -> FakeAnswer:
        if params.max_new_tokens > MAX_LEN:
            return FakeAnswer(text="endless" * MAX_LEN, after=asyncio.Event())
        draw = 0 if params.temperature == 0 else seed_for(params.seed, "noise", sample_idx, *prompt_ids)
        return FakeAnswer(text=f"{draw:x}"[: 1 + draw % 16], logp=-0.25)

    yield FakeEngine(noise, max_len=MAX_LEN)


@contextlib.asynccontextmanager
async def _torch(folder: Path) -> AsyncIterator[InferenceEngine]:
    engine = await build_trainable_engine(TorchEngineConfig(), folder, num_threads=1, seed=0)
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _vllm(folder: Path) -> AsyncIterator[InferenceEngine]:
    runtime = VllmRuntime(enforce_eager=True, kv_cache_mb=64, max_num_seqs=32)
    engine = await build_trainable_engine(
        VllmEngineConfig(dtype="float32", runtime=runtime), folder, num_threads=1, seed=0
    )
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _http(folder: Path) -> AsyncIterator[InferenceEngine]:
    async with _torch(folder) as behind, serve(behind, max_model_len=MAX_LEN) as base_url:
        engine = await build_engine(HttpEngineConfig(base_url=base_url, model=MODEL), folder, num_threads=1, seed=0)
        yield engine
        await engine.close()


@contextlib.asynccontextmanager
async def _pool(folder: Path) -> AsyncIterator[InferenceEngine]:
    """Two engines in this process."""

    async def build() -> InferenceEngine:
        return await build_engine(TorchEngineConfig(), folder, num_threads=1, seed=0)

    async with _started([LocalMember(f"engine {i}", build, limit=4) for i in range(2)]) as pool:
        yield pool


@contextlib.asynccontextmanager
async def _endpoints(folder: Path) -> AsyncIterator[InferenceEngine]:
    async with _torch(folder) as behind, serve(behind, max_model_len=MAX_LEN) as base_url:
        cfg = HttpEngineConfig(base_url=base_url, model=MODEL)
        async with _started([EndpointMember(cfg), EndpointMember(cfg)]) as pool:
            yield pool


@contextlib.asynccontextmanager
async def _started(members: Sequence[PooledEngine]) -> AsyncIterator[InferenceEngine]:
    pool = EnginePool(members, RestartLimit(0, window_s=1, key="max_restarts").count)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def _ray_pool(folder: Path) -> AsyncIterator[InferenceEngine]:
    """Two engines in actors."""
    pytest.importorskip("ray")
    from klear_core.cluster.pools import start_pool

    spec = EngineSpec(cfg=TorchEngineConfig(), model_folder=folder, num_threads=1, seed=0)
    with ray_session(Needs(num_cpus=2, object_store_bytes=80 << 20)):
        sampler = await start_pool(spec, runtime=EvaluateRuntime(num_engines=2), key="evaluate")
        try:
            yield sampler.engine
        finally:
            await sampler.engine.close()


ENGINES = [
    pytest.param(Engines(start=_fake, is_trainable=True, has_model=False), id="fake"),
    pytest.param(Engines(start=_torch, is_trainable=True, scores_to_end=True), id="torch"),
    pytest.param(Engines(start=_http, is_trainable=False), id="http"),
    pytest.param(Engines(start=_pool, is_trainable=False, scores_to_end=True), id="pool"),
    pytest.param(Engines(start=_endpoints, is_trainable=False), id="endpoints"),
    pytest.param(
        Engines(start=_ray_pool, is_trainable=False, scores_to_end=True), id="ray-pool", marks=pytest.mark.slow
    ),
    pytest.param(Engines(start=_vllm, is_trainable=True), id="vllm", marks=VLLM_MARKS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), build_model(max_len=MAX_LEN, head_dim=32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine for all tests, because vLLM takes its time to start, and the loop it lives on."""

    engine: InferenceEngine
    loop: asyncio.Runner
    is_trainable: bool
    has_model: bool
    scores_to_end: bool

    def run(self, body: Callable[[InferenceEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            await body(self.engine)

        self.loop.run(main())


@pytest.fixture(scope="module", params=ENGINES)
def running(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    engines: Engines = request.param
    with asyncio.Runner() as loop:
        context = engines.start(folder)
        engine = loop.run(enter(context))
        yield Running(
            engine=engine,
            loop=loop,
            is_trainable=engines.is_trainable,
            has_model=engines.has_model,
            scores_to_end=engines.scores_to_end,
        )
        loop.run(leave(context))


async def enter(context: contextlib.AbstractAsyncContextManager[InferenceEngine]) -> InferenceEngine:
    return await context.__aenter__()


async def leave(context: contextlib.AbstractAsyncContextManager[InferenceEngine]) -> None:
    await context.__aexit__(None, None, None)


def params(**changes: float) -> SamplingParams:
    defaults = {
        "num_samples": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 12,
        "seed": 7,
    }
    return SamplingParams(**(defaults | changes))  # type: ignore[arg-type]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


def test_a_request_gives_that_many_samples_each_with_one_logp_and_version_per_token(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        completions = await engine.generate(PROMPTS[2], params(num_samples=5))
        assert len(completions) == 5
        for completion in completions:
            assert 1 <= len(completion.token_ids) <= 12
            assert len(completion.token_ids) == len(completion.logps) == len(completion.policy_versions)
            assert all(logp <= 0 for logp in completion.logps)
            assert completion.finish_reason == "stop" or len(completion.token_ids) == 12
            assert "<|im_end|>" not in completion.text

    running.run(body)


def test_samples_depend_on_the_seed_and_the_index_and_come_in_order(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        three = await engine.generate(PROMPTS[1], params())
        again = await engine.generate(PROMPTS[1], params())
        five = await engine.generate(PROMPTS[1], params(num_samples=5))
        other = await engine.generate(PROMPTS[1], params(seed=8))
        assert tokens(three) == tokens(again) == tokens(five[:3])
        assert tokens(three) != tokens(other)
        assert len(set(tokens(five))) > 1

    running.run(body)


def test_a_request_does_not_depend_on_its_company(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        together = await asyncio.gather(*(engine.generate(prompt, params(seed=i)) for i, prompt in enumerate(PROMPTS)))
        for i, prompt in enumerate(PROMPTS):
            alone = await engine.generate(prompt, params(seed=i))
            assert tokens(alone) == tokens(together[i])
            for a, b in zip(alone, together[i], strict=True):
                assert a.logps == pytest.approx(b.logps, abs=1e-4)

    running.run(body)


def test_greedy_samples_are_all_the_same(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        first, second = await engine.generate(PROMPTS[3], params(temperature=0.0, num_samples=2))
        (other_seed,) = await engine.generate(PROMPTS[3], params(temperature=0.0, num_samples=1, seed=9))
        assert first.token_ids == second.token_ids == other_seed.token_ids

    running.run(body)


def test_an_answer_that_meets_its_budget_ends_for_length(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        completions = await engine.generate(PROMPTS[0], params(max_new_tokens=1, num_samples=8))
        assert all(len(c.token_ids) == 1 for c in completions)
        assert "length" in {c.finish_reason for c in completions}

    running.run(body)


def test_a_prompt_that_leaves_no_room_is_refused(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        for prompt in ([], [65] * MAX_LEN, [65] * (MAX_LEN + 1)):
            with pytest.raises(ValueError, match="leave room"):
                await engine.generate(prompt, params())
        last = await engine.generate([65] * (MAX_LEN - 1), params())
        assert {len(c.token_ids) for c in last} == {1}

    running.run(body)


def test_a_scored_answer_has_the_log_probs_that_it_was_sampled_with(running: Running) -> None:
    async def body(engine: InferenceEngine) -> None:
        for prompt in PROMPTS:
            for completion in await engine.generate(prompt, params()):
                found = await logps_of(engine, prompt, completion.token_ids)
                assert found.logps == pytest.approx(completion.logps, abs=1e-4)

    running.run(body)


def test_scores_are_the_learners_log_probs_of_any_tokens(running: Running, folder: Path) -> None:
    if not running.has_model:
        pytest.skip("it has no model")
    answers = [[66 + (3 * i + 5 * j) % 40 for j in range(7 + 9 * i)] for i in range(len(PROMPTS))]
    model = load_model(folder, device="cpu")
    rows = [
        SftExample(
            problem_id="p", token_ids=(*prompt, *answer), loss_mask=(False,) * len(prompt) + (True,) * len(answer)
        )
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]

    async def body(engine: InferenceEngine) -> None:
        requests = [logps_of(engine, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
        for row, found in zip(rows, await asyncio.gather(*requests), strict=True):
            (micro,) = pack([row], tokens_per_microbatch=1 << 20).micro_batches
            learners = model(micro, partial(token_logps, target_N=micro.target_N)).logp_N.tolist()
            assert found.logps == pytest.approx(learners, abs=1e-4)

    running.run(body)


def test_the_likeliest_tokens_are_the_models(running: Running, folder: Path) -> None:
    if not running.has_model:
        pytest.skip("it has no model")
    prompt, answer = PROMPTS[0], [66, 90, 77, 77]
    mask = (False,) * len(prompt) + (True,) * len(answer)
    row = SftExample(problem_id="p", token_ids=(*prompt, *answer), loss_mask=mask)
    (micro,) = pack([row], tokens_per_microbatch=1 << 20).micro_batches
    logits_NV = load_model(folder, device="cpu")(micro, lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.T)
    wanted = torch.log_softmax(logits_NV, -1).topk(3, dim=1)

    async def body(engine: InferenceEngine) -> None:
        found = await logps_of(engine, prompt, answer, num_top=3)
        assert found.top_ids == tuple(wanted.indices.flatten().tolist())
        assert found.top_logps == pytest.approx(wanted.values.flatten().tolist(), abs=1e-4)

    running.run(body)


def test_tokens_to_score_must_fit_the_window(running: Running) -> None:
    longest = MAX_LEN - 100 if running.scores_to_end else MAX_LEN - 101

    async def body(engine: InferenceEngine) -> None:
        found = await logps_of(engine, [65] * 100, [65] * longest)
        assert len(found.logps) == longest
        for prompt, answer in (([], [65]), ([65] * 100, [65] * (longest + 1))):
            with pytest.raises(ValueError, match="leave room"):
                await logps_of(engine, prompt, answer)

    running.run(body)


def test_versions_follow_the_weights(running: Running, folder: Path) -> None:
    async def body(engine: InferenceEngine) -> None:
        before = await engine.generate(PROMPTS[2], params())
        assert {v for c in before for v in c.policy_versions} == {0}
        if not running.is_trainable:
            return
        trainable: TrainableEngine = engine  # type: ignore[assignment]
        assert trainable.version == 0
        await trainable.load_weights(folder, version=4)
        after = await engine.generate(PROMPTS[2], params())
        assert trainable.version == 4
        assert {v for c in after for v in c.policy_versions} == {4}
        assert tokens(before) == tokens(after)  # the weights are the same

    running.run(body)


def test_close_fails_requests_that_wait_and_those_that_come_later(running: Running) -> None:
    """The last test here, for it closes the engine of all."""

    async def body(engine: InferenceEngine) -> None:
        many = [
            asyncio.create_task(engine.generate(PROMPTS[4], params(max_new_tokens=1000, num_samples=64, seed=i)))
            for i in range(8)
        ]
        await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*many, return_exceptions=True)
        assert any(isinstance(result, ResourceError) for result in results)
        assert all(isinstance(result, ResourceError | list) for result in results)
        with pytest.raises(ResourceError, match=r"closed|stopped"):
            await engine.generate(PROMPTS[0], params())

    running.run(body)
