"""Run vLLM as an engine: an `AsyncLLM` whose core is a separate process. The only import of vllm; needs 0.32 or later.

Log-probs are `processed_logprobs`: those of the distribution each token was drawn from, temperature included, as in the
torch engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from klear_core.config.evaluate import HardwareConfig, VllmEngineConfig
from klear_core.errors import ConfigError, KlearError, ResourceError
from klear_core.generate.engine import (
    SILENCE_S,
    EngineStats,
    OnTokens,
    OpenRequests,
    SamplingParams,
    WeightOffer,
    WeightSource,
    check_logps_at_1,
    check_room,
    dump_offer,
    scored,
)
from klear_core.generate.model_size import engine_fit, size_of_hf
from klear_core.generate.model_weights import Shapes, check_shapes, tensor_shapes, wanted_shapes
from klear_core.generate.vllm_process import QUIET, Gauge, ProcessLog, cache_tokens, environment
from klear_core.generate.vllm_worker import WorkerExtension
from klear_core.hf_config import FolderTokenizer, HfConfig, read_hf_config
from klear_core.seeding import seed_for
from klear_core.stopping import signal_mask
from klear_core.types import Completion, FinishReason

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

HANDOVER_PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108
"""Folders for new weights on their way to the engine process: memory, or disk where that is too small (containers)."""
_LOGGING = {"VLLM_LOGGING_LEVEL": QUIET, "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
"""Unless the user has set these: commands print answers and scores to standard output."""
_CACHE_OF_PLAN = 0.8
"""Share of the planned KV cache below which the engine warns: other processes hold memory of its GPU."""
_HEADER_BYTES = 1 << 20
"""Upper bound on the bytes of the safetensors header."""


class VllmEngine:
    """A `TrainableEngine`, and a `SleepingEngine` with `sleep_mode`. Must stay on the event loop it was started on."""

    @classmethod
    async def start(
        cls,
        cfg: VllmEngineConfig,
        model_folder: Path,
        *,
        num_threads: int,
        seed: int,
        version: int = 0,
        window: int | None = None,
        silence_s: float = SILENCE_S,
    ) -> VllmEngine:
        """Load the model in a new process.

        Raise ResourceError without vllm or if the process does not start, ConfigError if vLLM refuses the settings.

        `num_threads` is per tensor-parallel rank and counts on CPU only; `window` raises the positions of the folder's
        config; requests of a process that hangs fail after `silence_s`.
        """
        for name, value in _LOGGING.items():  # read when vllm is imported
            os.environ.setdefault(name, value)
        try:
            from vllm.outputs import WeightVersionSpan  # noqa: F401 (tells 0.32 from versions that cannot label tokens)
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.metrics.loggers import PrometheusStatLogger
        except ImportError as error:
            raise ResourceError(
                'engine.kind = "vllm" needs vllm 0.32 or later: '
                f"install klear[gpu], or klear[cpu-engine] without a GPU ({error})"
            ) from error
        tokenizer = FolderTokenizer(model_folder)
        args = _checked_arguments(cfg, engine_arguments(cfg, model_folder, seed=seed, window=window))
        gauge = Gauge()
        with contextlib.ExitStack() as held:
            scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="klear-", ignore_cleanup_errors=True))
            output = ProcessLog(Path(scratch))
            with environment(num_threads, scratch, is_cpu=current_platform.is_cpu()), output.of_children():

                def start() -> AsyncLLM:
                    # Blocked in Ray's processes; vLLM ends its own by it.
                    with signal_mask(signal.SIG_UNBLOCK, signal.SIGTERM):
                        return AsyncLLM.from_engine_args(args, stat_loggers=[gauge.logger_type(PrometheusStatLogger)])

                try:
                    llm = await asyncio.to_thread(start)
                except ValueError as error:  # from this process: its own checks of settings and model
                    raise ConfigError(f"vLLM refuses {model_folder} with these settings: {error}") from error
                except RuntimeError as error:  # without the cause, which only the processes' log has
                    raise output.error(f"vLLM did not start with {model_folder} ({error})") from error
            # from here on the engine owns the folder; after an error above it is deleted
            shapes = wanted_shapes(model_folder)
            engine = cls(
                llm,
                tokenizer,
                shapes,
                held=held.pop_all(),
                silence_s=silence_s,
                output=output,
                gauge=gauge,
                sleep_level=cfg.runtime.sleep_level,
            )
        if not current_platform.is_cpu():
            memory_gb = current_platform.get_device_total_memory() / 1e9
            compare_cache(cfg, model_folder, tokens=engine.cache_tokens, memory_gb=memory_gb, longest=engine._max_len)
        await llm.update_weight_version(str(version))
        engine.version = version
        return engine

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: FolderTokenizer,
        shapes: Shapes,
        *,
        held: contextlib.ExitStack,
        silence_s: float,
        output: ProcessLog,
        gauge: Gauge,
        sleep_level: int,
    ) -> None:
        """Wrap a running `AsyncLLM`. `held` is closed with the engine."""
        self.version = 0
        self.cache_tokens = cache_tokens(llm)
        """Tokens that its KV cache has room for."""
        self._held, self._output, self._gauge, self._sleep_level = held, output, gauge, sleep_level
        self._llm, self._tokenizer, self._shapes = llm, tokenizer, shapes
        self._max_len: int = llm.model_config.max_model_len
        # vLLM reports a process that died, and not one that hangs, as in a collective call of GPUs
        self._open = OpenRequests("vLLM engine", ping=self._ping, silence_s=silence_s)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.num_samples` completions, in sample order, each with its own seed.

        Raise ResourceError if the engine process dies or hangs.
        """
        return await self.stream(prompt_ids, params, None)

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Completion]:
        """Return what `generate` does, and call `on_tokens` with each output of vLLM before the last."""
        check_room(len(prompt_ids), params, self._max_len)
        check_logps_at_1(params, "vLLM engine")
        try:
            if params.scored_ids:
                return [await self._open.run(self._logps_of_given(list(prompt_ids), params))]
            return await self._open.run(self._samples(list(prompt_ids), params, on_tokens))
        except ResourceError as error:
            raise self._output.error(str(error)) from error

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Overwrite the weights in place, without a restart. ConfigError, with nothing changed, if one does not fit.

        Raise ResourceError if the engine process dies or fails. Names and shapes are compared. Running requests are
        frozen meanwhile and continue with the new weights, on a recomputed KV cache. Without this reset vLLM would
        answer known prompts from the old weights' cache, silently and off by nats.
        """
        # vLLM keeps old tensors for missing ones, with only a warning
        check_shapes(tensor_shapes(weights), self._shapes)
        # mode="keep" freezes running requests instead of ending them. No `finally` resumes: after an error old and new
        # weights may be mixed, and the engine must not serve
        if isinstance(weights, WeightOffer):
            await self._replace_weights("fetch_weights", version, offer=dump_offer(weights))
        else:
            async with self._folder_of(weights) as folder:
                await self._replace_weights("reload_weights", version, weights_path=str(folder))

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        """Fetch offered tensors without loading them; return a digest of what each process received."""
        found: list[str] = await self._llm.collective_rpc("digest_offered", kwargs={"offer": dump_offer(offer)})
        return found

    async def stats(self) -> EngineStats | None:
        """Return the load since the last call; see `MeasuredEngine`."""
        return self._gauge.take()

    async def sleep(self) -> None:
        """Release the GPU memory: weights move to host memory or are dropped, and the KV cache is dropped."""
        with self._failures("sleep"):
            await self._llm.sleep(level=self._sleep_level)

    async def wake(self) -> None:
        """Take the memory back, if it was released; the weights are those from before `sleep`, or to be loaded."""
        with self._failures("wake up"):
            if await self._llm.is_sleeping():
                await self._llm.wake_up()

    async def close(self) -> None:
        """End the engine process; open requests fail."""
        self._open.close()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it reports the end of the process as a crash
        self._held.close()  # first, in case shutdown is cut short; open sockets stay connected
        await asyncio.to_thread(self._llm.shutdown)

    async def _replace_weights(self, method: str, version: int, **arguments: str) -> None:
        """Have each process of the engine call this method of `WorkerExtension` or vLLM, while requests are frozen."""
        with self._failures(f"load the weights of version {version}"):
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            await self._llm.collective_rpc(method, kwargs=arguments)
            await self._llm.collective_rpc("refresh_tied_head")
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise ResourceError(
                    f"vLLM kept its prefix cache while loading version {version}: answers would mix two policies"
                )
            # labels all further tokens; before requests resume, so that none has the old label
            await self._llm.update_weight_version(str(version))
            self.version = version
            await self._llm.resume_generation()

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Raise what goes wrong in the block as ResourceError with the engine's last lines: it must not serve then."""
        try:
            yield
        except KlearError:
            raise
        except Exception as error:
            raise self._output.error(f"the vLLM engine could not {what} ({error!r})") from error

    async def _ping(self) -> None:
        """Return once the engine process answers, or is known to be dead: then vLLM fails the requests itself."""
        from vllm.v1.engine.exceptions import EngineDeadError

        with contextlib.suppress(EngineDeadError):
            await self._llm.is_sleeping()  # any question that the process answers between two steps

    async def _samples(
        self, prompt_ids: list[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Completion]:
        samples = [self._sample(prompt_ids, params, i, on_tokens) for i in range(params.num_samples)]
        tasks = [asyncio.create_task(sample) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, nobody reads the others
                task.cancel()

    async def _sample(
        self, prompt_ids: list[int], params: SamplingParams, sample_idx: int, on_tokens: OnTokens | None
    ) -> Completion:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        vllm_params = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            repetition_penalty=params.repetition_penalty,
            max_tokens=min(params.max_new_tokens, self._max_len - len(prompt_ids)),
            seed=seed_for(params.seed, "generate/sample", sample_idx),
            stop_token_ids=list(self._tokenizer.stop_ids),
            logprobs=0,  # only that of the sampled token
            flat_logprobs=True,  # lists of numbers; a dict for each token makes Python pause for seconds
            detokenize=False,  # `FolderTokenizer` does, with special tokens
            output_kind=RequestOutputKind.CUMULATIVE if on_tokens else RequestOutputKind.FINAL_ONLY,
        )
        try:
            prompt = {"prompt_token_ids": prompt_ids}
            async for output in self._llm.generate(prompt, vllm_params, uuid.uuid4().hex):
                # FINAL_ONLY: the first output is the whole answer
                if on_tokens is None or output.finished:
                    return self._completion(output.outputs[0])
                on_tokens(sample_idx, tuple(output.outputs[0].token_ids))
        except (EngineDeadError, EngineGenerateError) as error:
            raise ResourceError(f"the vLLM engine process failed: {error!r}") from error
        raise ResourceError("vLLM ended a request without an answer")

    async def _logps_of_given(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """Return the given tokens with log-probs: they are part of vLLM's prompt, which has them at temperature 1."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        token_ids, version = [*prompt_ids, *params.scored_ids], self.version
        vllm_params = VllmParams(
            max_tokens=1,  # vLLM samples at least one
            prompt_logprobs=params.num_top,  # beside those of the tokens that are there
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            prompt = {"prompt_token_ids": token_ids}
            async for output in self._llm.generate(prompt, vllm_params, uuid.uuid4().hex):
                flat = output.prompt_logprobs
                firsts = flat.start_indices[len(prompt_ids) :]
                found = [flat.token_ids[i] for i in firsts]
                assert found == list(params.scored_ids), "vLLM's log-probs are of other tokens"
                # After each token that is there come the likeliest ones, whether or not it is one of them.
                tops = [i for first in firsts for i in range(first + 1, first + 1 + params.num_top)]
                return scored(
                    params,
                    [flat.logprobs[i] for i in firsts],
                    version=version,
                    top_ids=[flat.token_ids[i] for i in tops],
                    top_logps=[flat.logprobs[i] for i in tops],
                )
        except (EngineDeadError, EngineGenerateError) as error:
            raise ResourceError(f"the vLLM engine process failed: {error!r}") from error
        raise ResourceError("vLLM ended a request without an answer")

    def _completion(self, output: Any) -> Completion:
        token_ids = tuple(output.token_ids)
        assert output.finish_reason in ("stop", "length", "abort"), output.finish_reason
        finish_reason = cast(FinishReason, output.finish_reason)
        flat = output.logprobs
        firsts = flat.start_indices  # of each token's own entries, of which that of the sampled one is the first
        assert [flat.token_ids[i] for i in firsts] == list(token_ids), "vLLM's log-probs are of other tokens"
        logps = [flat.logprobs[i] for i in firsts]
        versions: list[int] = []
        for span in output.weight_versions or []:  # which weights sampled which tokens
            versions += [int(span.version)] * (span.end - span.start)
        return Completion(
            text=self._tokenizer.decode(token_ids, finish_reason),
            token_ids=token_ids,
            logps=tuple(logps),
            finish_reason=finish_reason,
            policy_versions=tuple(versions),
        )

    @contextlib.asynccontextmanager
    async def _folder_of(self, weights: Path | Mapping[str, Tensor]) -> AsyncIterator[Path]:
        """Yield a folder that the engine process can read; vLLM's RPC does not carry tensors."""
        if isinstance(weights, Path):
            yield weights
            return
        # without a tied head, which repeats the embedding
        kept = {name: tensor for name, tensor in dict(weights).items() if name in self._shapes}
        place = handover_place(sum(tensor.nbytes for tensor in kept.values()), HANDOVER_PLACES)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            await asyncio.to_thread(_save, kept, Path(folder))
            yield Path(folder)


def compare_cache(cfg: VllmEngineConfig, model_folder: Path, *, tokens: int, memory_gb: float, longest: int) -> None:
    """Log the size of an engine's KV cache, with a warning if it is much below the plan's."""
    planned = engine_fit(
        size_of_hf(read_hf_config(model_folder)), cfg, HardwareConfig(gpu_memory_gb=memory_gb), longest=longest
    ).cache_tokens
    found = f"the engine's KV cache holds {tokens:,} tokens, {tokens / longest:.1f} answers of {longest:,}"
    if tokens >= _CACHE_OF_PLAN * planned:
        log.info("%s; planned were %s", found, f"{planned:,}")
        return
    log.warning(
        "%s; planned were %s: something else holds memory of its GPU, or takes it while vLLM measures what is free "
        "(`klear doctor --gpu` names processes); engine.runtime.kv_cache_mb fixes the cache",
        found, f"{planned:,}",
    )  # fmt: skip


def handover_place(num_bytes: int, places: Sequence[Path]) -> Path:
    """Return the first folder with room for this many bytes. Raise ResourceError if there is none."""
    free = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    for place, num_free in free.items():
        if num_free > num_bytes + _HEADER_BYTES:
            return place
    found = ", ".join(f"{place} has {num_free / 1e9:.1f}" for place, num_free in free.items())
    raise ResourceError(f"new weights need {num_bytes / 1e9:.1f} GB on their way to the vLLM process: {found} GB free")


def _save(weights: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors"
    )


# ---- vllm arguments ----
# Translate an engine's settings into the arguments of vLLM.


_TOKENS_PER_STEP = 2048
"""Prompt tokens that are computed together on a CPU: vLLM's default."""
_CPU_CACHE_SHARE = 0.25
"""KV cache, of the free host memory. vLLM's own default, 0.9 of all memory, fails if other programs run."""


def _checked_arguments(cfg: VllmEngineConfig, arguments: dict[str, Any]) -> AsyncEngineArgs:
    """Return the arguments as vLLM takes them on this machine; ConfigError for those that it does not know."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # there all ranks take their caches from one memory
        arguments = for_cpu(arguments, free_bytes=psutil.virtual_memory().available // cfg.runtime.tensor_parallel)
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM does not take these settings of the engine: {error}") from error


def engine_arguments(
    cfg: VllmEngineConfig, model_folder: Path, *, seed: int, window: int | None = None
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs`.

    `window` raises the positions of the folder's config; YaRN multiplies the result, or `yarn_original_window`.
    """
    model = read_hf_config(model_folder)
    num_positions = model.window(window)
    stretched = cfg.stretched(num_positions)
    if cfg.max_model_len is not None and cfg.max_model_len > stretched:
        raise ConfigError(
            f"max_model_len = {cfg.max_model_len} exceeds the {stretched} positions of {model_folder}; "
            "yarn_factor stretches them"
        )
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "dtype": cfg.dtype,
        "max_model_len": cfg.max_model_len or stretched,
        "tensor_parallel_size": cfg.runtime.tensor_parallel,
        "gpu_memory_utilization": cfg.runtime.gpu_memory_utilization,
        "max_num_seqs": cfg.runtime.max_num_seqs,
        "enforce_eager": cfg.runtime.enforce_eager,
        "enable_sleep_mode": cfg.runtime.sleep_mode,
        "seed": seed % 2**32,  # numpy's limit
        "logprobs_mode": "processed_logprobs",  # temperature included, as the learner's
        "generation_config": "vllm",  # ignore the folder's sampling defaults
        "disable_log_stats": True,  # of vLLM's own loggers; `Gauge` gets the numbers all the same
        # Explicitly, so that an actor in one of Ray's placement groups does not ask Ray for processes of its own.
        "distributed_executor_backend": "mp" if cfg.runtime.tensor_parallel > 1 else "uni",
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    }
    if cfg.runtime.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = cfg.runtime.kv_cache_mb << 20
    if cfg.runtime.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = cfg.runtime.max_num_batched_tokens
    overrides: dict[str, Any] = {}
    # The learner computes logits in float32 from bfloat16 states; rounded ones are 0.01 to 0.03 nats off per token.
    if cfg.dtype == "bfloat16":
        overrides["head_dtype"] = "float32"
    # also without YaRN, if `window` raises them
    if stretched != model.max_position_embeddings:
        overrides["max_position_embeddings"] = stretched
    if cfg.yarn_factor is not None:
        overrides["rope_parameters"] = _yarn(cfg, model, window=cfg.yarn_original_window or num_positions)
    if overrides:
        arguments["hf_overrides"] = overrides
    return arguments | {"kv_cache_dtype": cfg.kv_cache_dtype} | cfg.engine_args


def for_cpu(arguments: Mapping[str, Any], *, free_bytes: int) -> dict[str, Any]:
    """Return the arguments with what vLLM's CPU build needs; `free_bytes` is the free memory for each rank.

    Nothing is compiled: `VllmEngine` turns off torch's compiler, without which vLLM's own does not work. No prompt is
    computed in parts: a seeded answer to one that is ends the engine process (0.32 sets the offset of its generator,
    and those on CPU have none), and there are seeds in all our requests.
    """
    longest: int = arguments["max_model_len"]
    # the cache size comes first, so that a configured one replaces it
    return {"kv_cache_memory_bytes": int(_CPU_CACHE_SHARE * free_bytes)} | {
        **arguments,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, _TOKENS_PER_STEP),  # the longest prompt is computed whole
    }


def _yarn(cfg: VllmEngineConfig, model: HfConfig, *, window: int) -> dict[str, Any]:
    """Return YaRN settings (arXiv 2309.00071) over a window; vLLM's `max_position_embeddings` is the stretched one."""
    if model.rope_type != "default":
        raise ConfigError(f"yarn_factor = {cfg.yarn_factor}: the model already has rope_parameters {model.rope}")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": model.theta,
        "factor": cfg.yarn_factor,
        "original_max_position_embeddings": window,
    }
    if cfg.yarn_attention_factor is not None:
        yarn["attention_factor"] = cfg.yarn_attention_factor
    return yarn
