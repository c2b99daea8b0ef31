"""Settings of inference engines and of sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klear_core.config.base import Settings


class SamplingConfig(Settings):
    """A decoding profile: everything about sampling that a score depends on."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy. Rollouts: 1.0 (scripts; the paper does not say); evaluation: 0.6 (paper)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probabilities add up to this; 1 is off. Paper: 0.95 in evaluation; scripts: 1 in rollouts."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary. The authors' evaluation script used 20, which the paper does not mention."""
    repetition_penalty: float = Field(default=1.0, ge=1, le=2)
    """The authors' evaluation script used 1.05, which the paper does not mention."""
    max_new_tokens: int = Field(default=32_768, ge=1)
    """Tokens of an answer, thinking included; at the limit it is cut off. Paper: 32K in RL and evaluation (section 4.1), 64K with YaRN."""


class TorchEngineRuntime(Settings):
    """Where the torch engine runs, and how much at once."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if torch finds one, and else a CPU for models of up to 200 million parameters; larger ones need the word."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Samples that decode together; their KV cache grows as needed. By default 512 on a GPU, and 128 on CPU, where more would take it
    out of the processor's caches (`klear bench sampler`)."""


class TorchEngineConfig(Settings):
    """Our own sampler for Qwen3 models in plain torch, fast for small ones on CPU and one GPU."""

    kind: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and KV cache. float32 agrees with a float32 learner to the last bits on CPU."""
    runtime: TorchEngineRuntime = TorchEngineRuntime()


class VllmRuntime(Settings):
    """Where and how vLLM runs."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model (authors' scripts: 2)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that vLLM takes, weights and KV cache together; the rest is for what CUDA itself needs."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Answers that decode together; the authors' evaluation script has 128. More need more KV cache."""
    enforce_eager: bool = False
    """Skip CUDA graphs: a faster start and less memory, slower tokens."""
    kv_cache_mb: int | None = Field(default=None, ge=1)
    """Fixed KV cache size; needed on CPU, where the utilisation means host memory."""
    sleep_mode: bool = False
    """Lets the engine give its GPU memory to a learner on the same GPU between rollouts."""


class VllmEngineConfig(Settings):
    """vLLM, in a process of its own."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and KV cache; bfloat16 is what Qwen3 ships in."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Prompt plus response tokens; None takes the model's own."""
    yarn_factor: float | None = Field(default=None, gt=1)
    """Stretches the window at inference (paper: 2.5 for 64K, evaluation only)."""
    yarn_attention_factor: float | None = Field(default=None, gt=0)
    """None takes YaRN's own (1.0916 for a factor of 2.5)."""
    runtime: VllmRuntime = VllmRuntime()


class HttpRuntime(Settings):
    """How an HTTP endpoint is reached."""

    max_concurrency: int = Field(default=64, ge=1)
    """Requests open at a time."""
    timeout_s: float = Field(default=600, gt=0)
    """Of one request."""
    max_retries: int = Field(default=5, ge=0)
    """Further tries of a request that failed for a reason that may pass (408, 429, 5xx, network), with doubling pauses."""


class HttpEngineConfig(Settings):
    """An OpenAI-compatible completions endpoint that returns token ids and log-probs: vLLM with `--logprobs-mode processed_logprobs`."""

    kind: Literal["http"] = "http"
    base_url: str
    """Up to and including `/v1`."""
    model: str
    """As the endpoint calls it, in `/v1/models`."""
    api_key_env: str = ""
    """Name of the environment variable with the key; the key itself is never a setting."""
    runtime: HttpRuntime = HttpRuntime()


EngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig | HttpEngineConfig, Field(discriminator="kind")]
LocalEngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig, Field(discriminator="kind")]
"""Engines whose weights we can set: RL can sample from them, and evaluation knows which model it scores."""
