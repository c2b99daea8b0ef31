"""Define the settings of inference engines and sampling."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from klear_core.config.settings import Settings

Device = Literal["auto", "cpu", "cuda"]


class SamplingConfig(Settings):
    """All sampling parameters that a score depends on."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy. Rollouts: 1.0 (scripts; undisclosed in the paper); evaluation: 0.6 (paper)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off. Paper: 0.95 in evaluation;
    scripts: 1 in rollouts."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0 is off. The authors' evaluation script has 20, the paper is
    silent."""
    repetition_penalty: float = Field(default=1.0, ge=1, le=2)
    """Penalty on repeated tokens; 1 is off. The authors' evaluation script has 1.05, the paper is silent."""
    max_new_tokens: int = Field(default=32_768, ge=1)
    """Maximum tokens of an answer, reasoning included; longer ones are cut off. Paper: 32K in RL and evaluation
    (section 4.1), 64K with YaRN."""


MAX_BATCH_SIZE = {"cpu": 128, "cuda": 512}
"""Samples that decode together in the torch engine, by device, unless set."""


class TorchEngineRuntime(Settings):
    """Device and batch size of the torch engine."""

    device: Device = "auto"
    """`auto` uses a GPU if torch finds one, else the CPU for models of up to 200 million parameters; larger ones need
    an explicit `cpu`."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Samples that decode together; their KV cache grows as needed. Default: 512 on a GPU and 128 on CPU, where more do
    not fit the processor's caches (`klear bench sampler`)."""


class TorchEngineConfig(Settings):
    """Klear's sampler for Qwen3 models in plain torch, fast for small models on CPU and one GPU."""

    kind: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and KV cache. On CPU float32 agrees with a float32 learner to the last bits."""
    runtime: TorchEngineRuntime = TorchEngineRuntime()


class VllmRuntime(Settings):
    """Parallelism and memory of vLLM."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model (authors' scripts: 2)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that vLLM uses for weights and KV cache; the rest is left for CUDA. Not used on CPU."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum answers that decode together; the authors' evaluation script has 128. More need more KV cache."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs: faster start and less memory, but slower decoding. On CPU there are none."""
    kv_cache_mb: int | None = Field(default=None, ge=1)
    """Fixed KV cache size of each rank in MiB (2^20 bytes). None: what gpu_memory_utilization leaves, or on CPU a
    quarter of the free memory."""
    sleep_mode: bool = False
    """Release the engine's GPU memory between rollouts, for a learner on the same GPU."""


class VllmEngineConfig(Settings):
    """vLLM in a separate process."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and KV cache; Qwen3 is published in bfloat16."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum prompt plus response tokens; None takes the model's limit."""
    yarn_factor: float | None = Field(default=None, gt=1)
    """YaRN scaling of the context window at inference (paper: 2.5 for 64K, evaluation only)."""
    yarn_original_window: int | None = Field(default=None, ge=16)
    """Positions that YaRN stretches, those of pre-training (paper: 32,768); None: all positions of the model's config,
    which RL's scripts raise to 36,864."""
    yarn_attention_factor: float | None = Field(default=None, gt=0)
    """YaRN attention scaling; None takes YaRN's default (1.0916 for a factor of 2.5)."""
    runtime: VllmRuntime = VllmRuntime()

    @model_validator(mode="after")
    def _has_a_factor(self) -> Self:
        if self.yarn_original_window is not None and self.yarn_factor is None:
            raise ValueError(
                f"yarn_original_window = {self.yarn_original_window} needs a yarn_factor that stretches it"
            )
        return self

    def stretched(self, window: int) -> int:
        """Return the positions that the engine has for a model with `window` of them."""
        if self.yarn_factor is None:
            return window
        return round((self.yarn_original_window or window) * self.yarn_factor)


class HttpRuntime(Settings):
    """Concurrency, timeout and retries of an HTTP endpoint."""

    max_concurrency: int = Field(default=1024, ge=1)
    """Most concurrent requests. Below it the number follows the endpoint's throughput, from 8 on: it grows while more
    requests give more tokens per second, and falls when the endpoint refuses them (429, 503, timeouts)."""
    probe_s: float = Field(default=10.0, gt=0)
    """Least seconds, and at least one round of replies, for which a number of requests is measured."""
    timeout_s: float = Field(default=600, gt=0)
    """Seconds after which one request times out."""
    max_retries: int = Field(default=5, ge=0)
    """Retries of a request after a transient failure (408, 429, 5xx, network), with exponential backoff."""


class HttpEngineConfig(Settings):
    """An OpenAI-compatible completions endpoint that returns token ids and log-probs.

    vLLM does so with `--logprobs-mode processed_logprobs`.
    """

    kind: Literal["http"] = "http"
    base_url: str
    """URL up to and including `/v1`."""
    model: str
    """Model name at the endpoint, as `/v1/models` lists it."""
    api_key_env: str = Field(default="", pattern="^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Name of the environment variable that holds the API key; the key itself is never a setting."""
    runtime: HttpRuntime = HttpRuntime()


EngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig | HttpEngineConfig, Field(discriminator="kind")]
LocalEngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig, Field(discriminator="kind")]
"""Engines whose weights we set. RL needs this to sample from the policy, evaluation to know which model it scores."""
