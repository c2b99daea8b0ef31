import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from decoder_folder import build_model, write_folder
from transformers import Qwen3ForCausalLM
from vllm_marks import HAS_VLLM, needs_vllm

from klear_core.config.evaluate import OWN_ENGINE_ARGS, VllmEngineConfig, VllmRuntime
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.engine import SamplingParams, TensorSpec, TransferBackend
from klear_core.generate.vllm_engine import VllmEngine, engine_arguments, handover_place
from klear_core.generate.weight_transfer import WeightServer
from klear_core.prompts import build_byte_tokenizer
from klear_core.train.distributed import each_weight, full_weights, weight_shapes
from klear_core.train.model import Policy, export_model
from klear_core.types import Completion

MAX_LEN = 512
SHORT = tuple(range(65, 85))
LONG = tuple(65 + (i * i) % 97 for i in range(354))
"""Longer than two blocks of vLLM's CPU prefix cache (128 tokens each): what is stale shows only there."""
TOLERANCE = 5e-5
"""Nats, float32, between vLLM's CPU kernels and transformers' forward; seen: 1e-5 to 2e-5."""
SILENT_AFTER_S = 120.0
"""Seconds after which an engine counts as one that hangs; a healthy one has answered by then on a busy machine, too."""
CPU_RUNTIME = VllmRuntime(enforce_eager=True, kv_cache_mb=64, max_num_seqs=32)
T = TypeVar("T")


def params(**changes: float) -> SamplingParams:
    defaults = {
        "num_samples": 2,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 30,
        "seed": 1,
    }
    return SamplingParams(**(defaults | changes))  # type: ignore[arg-type]


def model_of(seed: int, *, is_tied: bool) -> Qwen3ForCausalLM:
    return build_model(seed=seed, hidden_size=64, head_dim=32, max_len=MAX_LEN, is_tied=is_tied)


@torch.no_grad()
def reference_logps(
    model: Qwen3ForCausalLM, prompt: tuple[int, ...], completion: Completion, temperature: float
) -> torch.Tensor:
    """logp_TV of transformers' forward over the whole sequence, at the new tokens."""
    return torch.log_softmax(
        model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].float() / temperature, -1
    )


def logp_error(model: Qwen3ForCausalLM, prompt: tuple[int, ...], completion: Completion, temperature: float) -> float:
    logp_TV = reference_logps(model, prompt, completion, temperature)
    expected = logp_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (expected - torch.tensor(completion.logps)).abs().max().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine for several tests, because vLLM takes half a minute of CPU to start, and the loop it lives on."""

    engine: VllmEngine
    loop: asyncio.Runner
    is_tied: bool

    def run(self, body: Callable[[VllmEngine], Awaitable[T]]) -> T:
        async def main() -> T:
            return await body(self.engine)

        return self.loop.run(main())


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Started with a model as the stage before RL leaves it, in bfloat16; tied, neither that nor a learner has the head."""
    source = write_folder(tmp_path_factory.mktemp("source"), model_of(0, is_tied=request.param))
    build_byte_tokenizer().save_pretrained(source)  # to be trained a model needs a chat template
    folder = tmp_path_factory.mktemp("trained") / "model"
    export_model(full_weights(Policy(model_of(0, is_tied=request.param)), dtype="bfloat16"), source, folder)
    with asyncio.Runner() as loop:
        cfg = VllmEngineConfig(dtype="float32", runtime=CPU_RUNTIME)
        engine = loop.run(VllmEngine.start(cfg, folder, num_threads=1, seed=2**62, silence_s=SILENT_AFTER_S))
        yield Running(engine=engine, loop=loop, is_tied=request.param)
        loop.run(engine.close())


@needs_vllm
def test_a_trained_model_starts_as_it_was_exported_and_takes_what_its_learner_offers(running: Running) -> None:
    """The first test of the engine, for it asks for the weights that the engine was started with."""
    policies = {version: Policy(model_of(version, is_tied=running.is_tied)) for version in (0, 9)}
    server = WeightServer("127.0.0.1", timeout_s=600)

    async def update(engine: VllmEngine, policy: Policy) -> None:
        specs = [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in weight_shapes(policy).items()]
        offer = server.offer(specs, version=9, backend="gloo", num_ranks=1, chunk_bytes=1 << 16)
        sending = asyncio.create_task(asyncio.to_thread(server.send, offer, each_weight(policy, dtype="bfloat16"), [0]))
        await engine.load_weights(offer, version=9)
        assert await sending == []

    async def body(engine: VllmEngine) -> None:
        for version, policy in policies.items():
            if version > 0:
                await update(engine, policy)
            assert engine.version == version
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.copy_(weight.to(torch.bfloat16))
            for completion in await engine.generate(LONG, params()):
                assert logp_error(policy.hf, LONG, completion, 0.8) < TOLERANCE

    running.run(body)


@needs_vllm
def test_logps_and_greedy_choices_are_the_new_models_after_every_update(running: Running, tmp_path: Path) -> None:
    server = WeightServer("127.0.0.1", timeout_s=600)

    async def update(engine: VllmEngine, model: Qwen3ForCausalLM, version: int) -> None:
        """From memory, from a folder, and straight from where a learner has them, in several messages."""
        match version % 3:
            case 0:
                await engine.load_weights(write_folder(tmp_path / str(version), model), version=version)
            case 1:
                await engine.load_weights(dict(model.state_dict()), version=version)
            case 2:
                weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
                specs = [TensorSpec(name=name, dtype="float32", shape=tuple(w.shape)) for name, w in weights.items()]
                backend: TransferBackend = "ipc" if version > 2 else "gloo"
                offer = server.offer(specs, version=version, backend=backend, num_ranks=1, chunk_bytes=1 << 16)
                sending = asyncio.create_task(asyncio.to_thread(server.send, offer, weights.items(), [0]))
                await engine.load_weights(offer, version=version)
                assert await sending == []

    async def body(engine: VllmEngine) -> None:
        for version in (1, 2, 3, 4, 5):
            model = model_of(version, is_tied=running.is_tied)
            await update(engine, model, version)
            assert engine.version == version
            for prompt in (SHORT, LONG):  # the same each time, so that an old prefix cache would be found
                for completion in await engine.generate(prompt, params()):
                    assert logp_error(model, prompt, completion, 0.8) < TOLERANCE
                    assert set(completion.policy_versions) == {version}
                (greedy,) = await engine.generate(prompt, params(temperature=0.0, num_samples=1))
                logp_TV = reference_logps(model, prompt, greedy, 1.0)
                gap_T = logp_TV.amax(-1) - logp_TV.gather(1, torch.tensor(greedy.token_ids)[:, None])[:, 0]
                assert gap_T.max() < TOLERANCE
                assert logp_error(model, prompt, greedy, 1.0) < TOLERANCE

    running.run(body)


@needs_vllm
def test_prompts_that_are_too_many_for_one_step_are_all_answered(running: Running) -> None:
    """A seeded answer to a prompt that is computed in parts ends vLLM 0.32's process on a CPU."""

    async def body(engine: VllmEngine) -> list[list[Completion]]:
        prompts = [(65 + start, *LONG) for start in range(8)]  # 2,840 tokens; vLLM computes 2,048 at a time
        return await asyncio.gather(*(engine.generate(prompt, params(max_new_tokens=4)) for prompt in prompts))

    assert [len(answers) for answers in running.run(body)] == [2] * 8


@needs_vllm
def test_running_requests_go_on_with_new_weights_and_say_so(running: Running) -> None:
    old, new = model_of(10, is_tied=running.is_tied), model_of(11, is_tied=running.is_tied)

    async def body(engine: VllmEngine) -> None:
        await engine.load_weights(dict(old.state_dict()), version=10)
        hot = params(temperature=2.0, max_new_tokens=140, num_samples=6)
        long = asyncio.create_task(engine.generate(LONG, hot))
        await engine.generate(SHORT, params(max_new_tokens=3))
        await engine.load_weights(dict(new.state_dict()), version=11)
        mixed = [c for c in await long if set(c.policy_versions) == {10, 11}]
        assert mixed
        for completion in mixed:
            first_new = completion.policy_versions.index(11)
            assert len(completion.policy_versions) == len(completion.token_ids)
            for scorer, span in ((old, slice(0, first_new)), (new, slice(first_new, None))):
                logp_TV = reference_logps(scorer, LONG, completion, 2.0)
                expected = logp_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                assert torch.allclose(expected[span], torch.tensor(completion.logps)[span], atol=TOLERANCE)

    running.run(body)


@needs_vllm
def test_weights_that_do_not_fit_are_refused_before_anything_changes(running: Running) -> None:
    async def body(engine: VllmEngine) -> None:
        before, version = await engine.generate(SHORT, params()), engine.version
        partial = {k: v for k, v in model_of(5, is_tied=running.is_tied).state_dict().items() if "layers.1" not in k}
        with pytest.raises(ConfigError, match="missing"):
            await engine.load_weights(partial, version=99)
        assert engine.version == version
        assert [c.token_ids for c in await engine.generate(SHORT, params())] == [c.token_ids for c in before]

    running.run(body)


@needs_vllm
def test_requests_of_a_process_that_hangs_fail_as_weights_for_a_dead_one_do_and_nothing_of_it_stays(
    running: Running, tmp_path: Path
) -> None:
    """The last test of the engine, for it ends its processes."""
    processes = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")]
    folder = write_folder(tmp_path / "model", model_of(0, is_tied=running.is_tied))

    async def body(engine: VllmEngine) -> None:
        await engine.generate(SHORT, params())
        for process in processes:
            process.suspend()
        with pytest.raises(ResourceError, match=rf"^the vLLM engine gave no sign of life for {SILENT_AFTER_S:g} s"):
            await engine.generate(SHORT, params())
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=60)
        with pytest.raises(ResourceError, match=r"(?s)could not load the weights of version 1 .*its log ends with\n"):
            await engine.load_weights(folder, version=1)
        await engine.close()

    assert processes
    running.run(body)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What was seen of an engine with YaRN over twice the positions of its model, which is closed now."""

    model: Qwen3ForCausalLM
    stretched: Qwen3ForCausalLM
    """The same weights with transformers' YaRN."""
    prompt: tuple[int, ...]
    completions: list[Completion]
    sockets: list[Path]
    """On which this process listened to the engine's."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    model = build_model(hidden_size=64, head_dim=32, max_len=128)
    folder = write_folder(tmp_path_factory.mktemp("plain"), model)
    cfg = VllmEngineConfig(dtype="float32", yarn_factor=2.5)  # the defaults, which were made for GPUs, work here, too
    stretched = write_folder(tmp_path_factory.mktemp("stretched"), model)
    path = stretched / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | engine_arguments(cfg, folder, seed=0)["hf_overrides"]))
    prompt = LONG[:200]  # beyond the model's own 128

    async def main() -> tuple[list[Completion], list[Path]]:
        before = sockets()
        engine = await VllmEngine.start(cfg, folder, num_threads=1, seed=0)
        completions, added = await engine.generate(prompt, params()), sockets() - before
        await engine.close()
        return completions, sorted(added)

    completions, added = asyncio.run(main())
    reference = Qwen3ForCausalLM.from_pretrained(stretched).float().eval()
    return Ended(model=model, stretched=reference, prompt=prompt, completions=completions, sockets=added)


def sockets() -> set[Path]:
    """The files of this process's sockets."""
    return {Path(c.laddr) for c in psutil.Process().net_connections(kind="unix") if str(c.laddr).startswith("/")}


@needs_vllm
def test_yarn_computes_what_transformers_yarn_computes(ended: Ended) -> None:
    assert max(logp_error(ended.stretched, ended.prompt, c, 0.8) for c in ended.completions) < TOLERANCE
    assert max(logp_error(ended.model, ended.prompt, c, 0.8) for c in ended.completions) > 0.1


@needs_vllm
def test_an_engine_that_is_closed_leaves_no_sockets(ended: Ended) -> None:
    assert ended.sockets
    assert {file.parent.name.partition("-")[0] for file in ended.sockets} == {"klear"}
    assert not [file.parent for file in ended.sockets if file.parent.exists()]


def test_a_window_wider_than_the_model_is_refused_unless_yarn_stretches_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, build_model(max_len=256))
    with pytest.raises(ConfigError, match=r"max_model_len = 640 exceeds the 256"):
        engine_arguments(VllmEngineConfig(max_model_len=640), folder, seed=0)
    stretched = engine_arguments(
        VllmEngineConfig(max_model_len=640, yarn_factor=2.5, yarn_attention_factor=1.05), folder, seed=2**40
    )
    assert stretched["max_model_len"] == 640
    assert stretched["hf_overrides"]["max_position_embeddings"] == 640
    assert stretched["hf_overrides"]["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.5,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.05,
    }
    assert 0 <= stretched["seed"] < 2**32


def test_the_window_asked_for_widens_that_of_the_folder_and_yarn_stretches_the_wider_one(tmp_path: Path) -> None:
    """So base, whose folder is as it came, and the models trained from it, whose folders have the window, are served alike."""
    base = write_folder(tmp_path / "base", build_model(max_len=256))
    trained = write_folder(tmp_path / "trained", build_model(max_len=288))
    plain = VllmEngineConfig(dtype="float32", max_model_len=288)
    assert engine_arguments(plain, base, seed=0, window=288)["hf_overrides"] == {"max_position_embeddings": 288}
    assert "hf_overrides" not in engine_arguments(plain, trained, seed=0)
    assert "hf_overrides" not in engine_arguments(VllmEngineConfig(dtype="float32"), trained, seed=0, window=128)
    yarn = VllmEngineConfig(max_model_len=640, yarn_factor=2.5)
    of_base, of_trained = engine_arguments(yarn, base, seed=0, window=288), engine_arguments(yarn, trained, seed=0)
    assert of_base["hf_overrides"] == of_trained["hf_overrides"]
    assert of_base["hf_overrides"]["rope_parameters"]["original_max_position_embeddings"] == 288


def test_yarn_can_stretch_the_window_of_pretraining_instead(tmp_path: Path) -> None:
    """As the paper's 64K: 2.5 times 256, though training raised the model's config to 288."""
    trained = write_folder(tmp_path, build_model(max_len=288))
    cfg = VllmEngineConfig(yarn_factor=2.5, yarn_original_window=256)
    overrides = engine_arguments(cfg, trained, seed=0)["hf_overrides"]
    assert overrides["max_position_embeddings"] == 640
    assert overrides["rope_parameters"]["original_max_position_embeddings"] == 256
    with pytest.raises(ValueError, match="yarn_original_window = 256 needs a yarn_factor"):
        VllmEngineConfig(yarn_original_window=256)


def test_a_bfloat16_model_computes_its_logits_in_float32_as_the_learner_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, build_model())
    assert engine_arguments(VllmEngineConfig(), folder, seed=0)["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize(("tensor_parallel", "backend"), [(1, "uni"), (2, "mp")])
def test_an_engine_never_asks_ray_for_its_processes(tmp_path: Path, tensor_parallel: int, backend: str) -> None:
    cfg = VllmEngineConfig(runtime=VllmRuntime(tensor_parallel=tensor_parallel))
    arguments = engine_arguments(cfg, write_folder(tmp_path, build_model()), seed=0)
    assert arguments["distributed_executor_backend"] == backend


def test_the_cache_and_the_tokens_of_a_step_are_vllms_own_unless_they_are_set(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, build_model())
    names = {"kv_cache_memory_bytes", "max_num_batched_tokens"}
    assert not names & set(engine_arguments(VllmEngineConfig(), folder, seed=0))
    cfg = VllmEngineConfig(runtime=VllmRuntime(kv_cache_mb=3, max_num_batched_tokens=8192))
    arguments = engine_arguments(cfg, folder, seed=0)
    assert [arguments[name] for name in sorted(names)] == [3 * 2**20, 8192]


def test_arguments_of_vllm_are_passed_on_and_those_that_are_ours_refused(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    cfg = VllmEngineConfig(kv_cache_dtype="fp8", engine_args={"speculative_config": ngram})
    arguments = engine_arguments(cfg, write_folder(tmp_path, build_model()), seed=0)
    assert (arguments["kv_cache_dtype"], arguments["speculative_config"]) == ("fp8", ngram)
    assert arguments.keys() - {"speculative_config", "model"} <= OWN_ENGINE_ARGS
    with pytest.raises(ValueError, match="hf_overrides, seed: set by Klear"):
        VllmEngineConfig(engine_args={"seed": 1, "hf_overrides": {}, "block_size": 32})


@needs_vllm
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_that_does_not_start_names_the_model_and_says_what_its_process_said_last(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, model_of(0, is_tied=True))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    cfg = VllmEngineConfig(dtype="float32", runtime=CPU_RUNTIME)
    with pytest.raises(
        ResourceError, match=rf"(?s)vLLM did not start with {folder} .*its log ends with\n.*[Ss]afetensor"
    ):
        asyncio.run(VllmEngine.start(cfg, folder, num_threads=1, seed=0))


@needs_vllm
def test_an_argument_that_vllm_does_not_know_is_a_wrong_setting(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, model_of(0, is_tied=True))
    cfg = VllmEngineConfig(dtype="float32", engine_args={"kv_cache_dtpye": "fp8"}, runtime=CPU_RUNTIME)
    with pytest.raises(ConfigError, match=r"does not take these settings of the engine.*kv_cache_dtpye"):
        asyncio.run(VllmEngine.start(cfg, folder, num_threads=1, seed=0))


@needs_vllm
def test_an_engine_in_bfloat16_reports_its_load_and_agrees_within_its_rounding(tmp_path: Path) -> None:
    """Prompts of several lengths, requests in flight during an update, and logits in float32, as on a GPU."""
    model = model_of(0, is_tied=False)
    folder = write_folder(tmp_path, model)
    cfg = VllmEngineConfig(dtype="bfloat16", runtime=CPU_RUNTIME)

    async def main() -> list[tuple[tuple[int, ...], Completion]]:
        engine = await VllmEngine.start(cfg, folder, num_threads=1, seed=0)
        prompts = [(65 + i, *LONG[: 20 + 5 * i]) for i in range(16)]
        assert engine.cache_tokens is not None
        assert engine.cache_tokens >= MAX_LEN
        flying = [asyncio.create_task(engine.generate(p, params(max_new_tokens=60))) for p in prompts]
        await asyncio.sleep(0.2)
        await engine.load_weights(dict(model.state_dict()), version=7)  # the same ones: only the label changes
        answers = await asyncio.gather(*flying)
        load = await engine.stats()
        assert load is not None
        assert 0 < load.cache_usage <= 1
        assert load.num_preempted >= 0
        assert (await engine.stats()).cache_usage == 0  # since the last call
        await engine.close()
        return [(p, completion) for p, group in zip(prompts, answers, strict=True) for completion in group]

    found = asyncio.run(main())
    assert {version for _, completion in found for version in completion.policy_versions} == {0, 7}
    reference = model.to(torch.bfloat16)
    assert max(logp_error(reference, prompt, completion, 0.8) for prompt, completion in found) < 0.25


def test_weights_are_handed_over_where_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    free = shutil.disk_usage(tmp_path).free
    places = (tmp_path / "no memory here", tmp_path / "disk")
    assert handover_place(1000, places) == tmp_path / "disk"
    with pytest.raises(
        ResourceError,
        match=rf"need {2 * free / 1e9:.1f} GB on their way to the vLLM process: .*disk has \d+\.\d GB free",
    ):
        handover_place(2 * free, places)


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_without_vllm_the_error_says_what_to_install(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, build_model())
    with pytest.raises(ResourceError, match=r"klear\[gpu\]"):
        asyncio.run(VllmEngine.start(VllmEngineConfig(), folder, num_threads=1, seed=0))
    assert "vllm" not in sys.modules
