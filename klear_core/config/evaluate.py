"""Define the settings of engines, of evaluation, of scores during training, and of the machines that a plan assumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, StringConstraints, field_validator, model_validator

from klear_core.config.benchmark_prompts import QUESTION
from klear_core.config.settings import Precision, Settings, VariableName

# ---- engine ----
# Define the settings of inference engines and sampling.


Device = Literal["auto", "cpu", "cuda"]


def _with_a_valid_port(url: str) -> str:
    _ = urlsplit(url).port  # ValueError for one that is no number up to 65535
    return url


Address = Annotated[str, Field(pattern=r"^https?://[^/\s@?#]+(/[^\s?#]*)?$"), AfterValidator(_with_a_valid_port)]


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

    @property
    def changes_of_policy(self) -> str:
        """Return the settings that make another distribution than the policy's at this temperature; empty if none."""
        off = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        return ", ".join(
            f"{name} = {getattr(self, name):g}" for name, value in off.items() if getattr(self, name) != value
        )


MAX_BATCH_SIZE = {"cpu": 128, "cuda": 512}
"""Samples that decode together in the torch engine, by device, unless set."""
LONGEST_TORCH_ANSWER = 8192
"""Tokens above which an answer needs an engine with a paged cache, which the torch engine lacks."""


class TorchEngineRuntime(Settings):
    """Device and batch size of the torch engine."""

    device: Device = "auto"
    """`auto` uses a GPU if torch finds one, else the CPU for models of up to 200 million parameters; larger ones need
    an explicit `cpu`."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Samples that decode together; their KV cache grows as needed. Default: 512 on a GPU and 128 on CPU, where more do
    not fit the processor's caches (`klear bench sampler`)."""


class TorchEngineConfig(Settings):
    """Klear's sampler for Llama, Qwen2 and Qwen3 without scaled positions, fast for small models on CPU and one GPU."""

    kind: Literal["torch"] = "torch"
    dtype: Precision = "float32"
    """Data type of weights and KV cache. On CPU float32 agrees with a float32 learner to the last bits; `auto` chooses
    by the processor."""
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
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens that are computed in one step, of prompts and of answers that go on after new weights. None: vLLM's 2,048;
    its server has 8,192, which computes prompts a tenth to a fifth faster. Not used on CPU."""
    sleep_mode: bool = False
    """Release the engine's GPU memory between rollouts, for a learner on the same GPU."""
    sleep_level: Literal[1, 2] = 1
    """vLLM's level of sleep: with 1 the weights wait in host memory, with 2 they are dropped, since RL sends new ones
    whenever an engine wakes. 2 has not been run on a GPU; RL checks the engine's log-probs after a first sleep."""


OWN_ENGINE_ARGS = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "max_num_seqs",
        "enforce_eager",
        "enable_sleep_mode",
        "seed",
        "logprobs_mode",
        "generation_config",
        "disable_log_stats",
        "distributed_executor_backend",
        "worker_extension_cls",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "hf_overrides",
    }
)
"""Arguments of vLLM that other settings give it."""


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
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache. `auto`: that of the weights; `fp8` holds twice as many tokens, and long answers decode
    up to 1.7 times faster (computed). RL trains with it only if the check at its start passes."""
    engine_args: dict[str, JsonValue] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `speculative_config` or `compilation_config`, by their
    names there. RL trains with them only if the check at its start passes."""
    runtime: VllmRuntime = VllmRuntime()

    as_before: ClassVar[Mapping[str, JsonValue]] = {"kv_cache_dtype": "auto", "engine_args": {}}

    @field_validator("engine_args")
    @classmethod
    def _are_not_ours(cls, engine_args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        ours = sorted(engine_args.keys() & OWN_ENGINE_ARGS)
        if ours:
            raise ValueError(f"{', '.join(ours)}: set by Klear, from other settings of the engine")
        return engine_args

    @property
    def must_be_proved(self) -> bool:
        """Return whether its log-probs may be others than the model's, so that RL has to check them."""
        return self.kv_cache_dtype != "auto" or bool(self.engine_args) or self.runtime.sleep_level == 2

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
    base_url: Address
    """URL up to and including `/v1`; without a user name, password or query, as of chat endpoints."""
    model: str
    """Model name at the endpoint, as `/v1/models` lists it."""
    api_key_env: VariableName = ""
    """Name of the environment variable that holds the API key; the key itself is never a setting."""
    runtime: HttpRuntime = HttpRuntime()


EngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig | HttpEngineConfig, Field(discriminator="kind")]
LocalEngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig, Field(discriminator="kind")]
"""Engines whose weights we set. RL needs this to sample from the policy, evaluation to know which model it scores."""


# ---- chat endpoints ----
# Define the settings of models that are served elsewhere: teachers, and models to score.


class ChatEndpoint(Settings):
    """One server of a model: its address, its key and its prices."""

    base_url: Address
    """URL before `/chat/completions`, such as `https://api.deepseek.com/v1`. A user name, password or query is refused:
    a URL is no place for a key."""
    api_key_env: VariableName = ""
    """Name of the environment variable that holds the API key; the key itself is never a setting."""
    api_key_block: str = Field(default="", pattern="^[a-z0-9-]*$")
    """Name of the Prefect block of type Secret that holds the API key, in place of a variable."""
    model: str = ""
    """Name of the model at this endpoint, if it differs from `model`."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the requests, relative to the other endpoints, while more than one has room."""
    input_price: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, in any currency."""
    output_price: float = Field(default=0.0, ge=0)
    """Price of a million tokens of replies, reasoning included, in the same currency."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key_env and self.api_key_block:
            raise ValueError(f"set either api_key_env or api_key_block for {self.base_url}, not both")
        return self


class BudgetConfig(Settings):
    """Limit of what a stage may spend at endpoints, over all its runs. A request starts only if its reply fits in."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Prompt and reply tokens, those of failed attempts included; None is no limit."""
    max_cost: float | None = Field(default=None, gt=0)
    """Cost by the endpoints' prices, in their currency; None is no limit."""
    publish_from: float = Field(default=1.0, ge=0, le=1)
    """Share of the samples that must have been requested for a distillation to finish with what the budget paid for.
    Below it the stage stops, and continues when the budget is raised. By default a budget never makes a smaller data
    set. An evaluation always needs all."""


class ChatRuntime(Settings):
    """Endpoints, concurrency, timeouts, retries and budget of a model behind chat endpoints."""

    endpoints: tuple[ChatEndpoint, ...]
    """Servers of the same model. One that fails is left out for a while, and its requests go to the others."""
    min_concurrency: int = Field(default=8, ge=1)
    """Concurrent requests to an endpoint at the start, and the least that errors can reduce them to."""
    max_concurrency: int = Field(default=1024, ge=1)
    """Most concurrent requests to an endpoint. Below it the limit is found by measurement: vLLM runs 256 to 1,024
    sequences a server by default, and hosted services answer 429 earlier."""
    probe_s: float = Field(default=10.0, gt=0)
    """Seconds for which a concurrency is measured before a higher one is tried. Ours."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds to wait for a connection."""
    first_token_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for the first token, queueing and prefill included; DeepSeek's API queues requests for up to 10
    minutes. A server that cannot stream must send its whole reply within this time."""
    silence_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds between two tokens after which a reply counts as broken off. Keep-alive lines are no tokens. The length
    of a reply has no time limit."""
    max_attempts: int = Field(default=6, ge=1)
    """Attempts at a sample. Refusals by a full server (429, 503, no first token in time) do not count while other
    requests to that endpoint succeed."""
    first_backoff_s: float = Field(default=1.0, gt=0)
    """Upper bound of the random wait before the second attempt; it doubles with every further one."""
    max_backoff_s: float = Field(default=60.0, gt=0)
    """Upper bound of every random wait."""
    max_retry_after_s: float = Field(default=600.0, ge=0)
    """Longest `Retry-After` that is waited for in full; servers may ask for hours."""
    left_out_s: float = Field(default=60.0, gt=0)
    """Seconds for which a failing endpoint gets no requests; doubled each time it fails again, up to 16 times as
    long."""
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.endpoints:
            raise ValueError("endpoints = []: there must be at least one")
        if self.min_concurrency > self.max_concurrency:
            raise ValueError(
                f"min_concurrency = {self.min_concurrency} is above max_concurrency = {self.max_concurrency}"
            )
        has_price = any(endpoint.input_price or endpoint.output_price for endpoint in self.endpoints)
        if self.budget.max_cost is not None and not has_price:
            raise ValueError("budget.max_cost needs the input_price and output_price of the endpoints")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatUse:
    """Chat endpoints that a stage asks."""

    key: str
    """Dotted key of their settings in the config: `distill.teacher`."""
    runtime: ChatRuntime


_OF_ONE_ENDPOINT = ("base_url", "api_key_env", "api_key_block", "input_price", "output_price")


class ChatSettings(Settings):
    """Settings of a model behind chat endpoints: those of a single endpoint may stand directly among them."""

    @model_validator(mode="before")
    @classmethod
    def _one_endpoint(cls, settings: object) -> object:
        """Move `base_url`, the name of the key and prices into `runtime.endpoints`."""
        if not isinstance(settings, dict) or "base_url" not in settings:
            return settings
        runtime = settings.get("runtime", {})
        if not isinstance(runtime, dict) or "endpoints" in runtime:
            raise ValueError("set either base_url or runtime.endpoints, not both")
        short = {key: settings[key] for key in _OF_ONE_ENDPOINT if key in settings}
        rest = {key: value for key, value in settings.items() if key not in short}
        return rest | {"runtime": runtime | {"endpoints": [short]}}


class ServedModelConfig(ChatSettings):
    """A model behind OpenAI-compatible chat endpoints, to score: text goes in and out, its weights are unknown.

    `base_url`, key and prices directly under it are short for one endpoint under `runtime.endpoints`.
    """

    kind: Literal["served"] = "served"
    model: str = Field(min_length=1)
    """Model name at the endpoints."""
    send_seed: bool = True
    """Send a seed with every request, which vLLM and SGLang accept; False for endpoints that refuse the field."""
    runtime: ChatRuntime


EvaluateEngineConfig = Annotated[TorchEngineConfig | VllmEngineConfig | ServedModelConfig, Field(discriminator="kind")]
"""Engines that load the model to score, or a model that is served elsewhere."""


# ---- evaluate ----


class EnginesRuntime(Settings):
    """Number and threads of a stage's engines."""

    num_engines: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Engines that sample. `auto`: as many as the GPUs of this machine, or of the Ray cluster at RAY_ADDRESS, have room
    for, at `tensor_parallel` GPUs each; one on CPU. One engine runs in the process of the stage, several as Ray
    actors."""
    max_restarts: int = Field(default=10, ge=0)
    """Engines that may die and be replaced within an hour; with one more the stage stops."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the sampler."""
    wait_for_nodes_s: float = Field(default=1800, ge=0)
    """Longest wait on a Ray cluster that lacks nodes which the engines need, as in training."""


class EvaluateRuntime(EnginesRuntime):
    """Settings that do not change a score. The `endpoints` that stages with a `PoolRuntime` have beside them can."""

    answers_per_shard: int = Field(default=256, ge=1)
    """Answers per shard, the unit of resume: a killed evaluation loses its unfinished shards."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Answers sampled or judged at a time for each engine; with more than the engine's batch, engine and judge are both
    kept busy."""


class PoolRuntime(EnginesRuntime):
    """Engines of stages that may also sample through endpoints, of servers that Klear did not start."""

    num_engines: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Engines that sample, as in evaluation. 0 starts none: the `endpoints` alone sample."""
    endpoints: tuple[HttpEngineConfig, ...] = ()
    """OpenAI-compatible endpoints that serve the same model and share the work with the engines. A server draws other
    samples from the same seed than an engine does, so an answer depends on which of them gave it."""

    @model_validator(mode="after")
    def _has_a_member(self) -> Self:
        if self.num_engines == 0 and not self.endpoints:
            raise ValueError("num_engines = 0 needs endpoints: nothing else would sample")
        return self


PLAIN_TEMPLATE = "plain"
"""Name of the question as it stands, without a template."""

TemplateName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]


class EvaluateSamplingConfig(SamplingConfig):
    """Sampling parameters for benchmark answers (section 4.1)."""

    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature; 0 is greedy. Section 4.1."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities add up to this; 1 is off. Section 4.1."""


class EvaluateConfig(Settings):
    """avg@n on every benchmark with a confidence interval; defaults from Klear-Reasoner section 4.1."""

    engine: EvaluateEngineConfig = TorchEngineConfig()
    """Engine that loads the models to score; or, with `kind = "served"`, one model behind chat endpoints, which is then
    all that the run scores."""
    sampling: EvaluateSamplingConfig = EvaluateSamplingConfig()
    greedy: bool = True
    """Also decode one greedy answer per problem and report its score next to avg@n."""
    templates: dict[TemplateName, str] = Field(default={}, exclude_if=lambda templates: not templates)
    """Other wordings of every question, by name, to see how much the score depends on the wording:
    `boxed = "{question} Put your final answer within \\boxed{}."`. Each is sampled n times a problem, too. The score is
    that of the question as it stands, the paper's protocol; empty: it alone."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence level of all intervals, over problems; 0.95 by convention. The paper gives no intervals."""
    max_unscored_rate: float = Field(default=0.02, ge=0, le=1)
    """The stage stops above this share of judge failures, because the score would then measure the judge."""
    runtime: EvaluateRuntime = EvaluateRuntime()

    @field_validator("templates")
    @classmethod
    def _have_the_question_once(cls, templates: dict[str, str]) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name, text in templates.items():
            if text.count(QUESTION) != 1:
                raise ValueError(f"template {name!r} has {QUESTION} {text.count(QUESTION)} times, not once: {text!r}")
            if name == PLAIN_TEMPLATE or text == QUESTION:
                raise ValueError(f"template {name!r}: the question as it stands is always asked, as {PLAIN_TEMPLATE!r}")
            if text in texts:
                raise ValueError(f"templates {texts[text]!r} and {name!r} are the same text")
            texts[text] = name
        return templates


# ---- inline evaluation ----
# Define the settings of scores during training: a small fixed set of problems, answered every few steps.


class InlineEvalConfig(Settings):
    """Scores of the model while it trains, for the curve in report and tracking; changes no weight."""

    benchmark: str = Field(min_length=1)
    """Name of the run's benchmark to take the problems from. It is kept out of the training data, as all benchmarks
    are."""
    num_problems: int = Field(default=32, ge=2)
    """Problems of the fixed set: the first in an order that the run's seed draws; at most all of the benchmark."""
    num_samples: int = Field(default=4, ge=1)
    """Answers to each problem; with 2 or more the curve has intervals over other samples of these problems."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between two scores. The model before the first step and the one after the last are always scored."""

    def is_due(self, step: int, *, num_steps: int) -> bool:
        """Return whether the model after `step` steps of `num_steps` is scored."""
        return step % self.every_steps == 0 or step == num_steps

    def num_points(self, num_steps: int) -> int:
        """Return the number of models that are scored in `num_steps` steps."""
        # Steps 0, k, 2k, ... and the last, if it is none of these.
        return num_steps // self.every_steps + 1 + (num_steps % self.every_steps > 0)


# ---- hardware ----
# Define the settings of the machines from which `klear plan` estimates memory, time and cost.


class HardwareConfig(Settings):
    """Memory, speed and price of the GPUs, for the estimates of `klear plan`; they never change a result."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one GPU in gigabytes of 1e9 bytes. None: that of the GPUs here; without any, no memory is checked."""
    peak_tflops: float = Field(default=989.0, gt=0)
    """Dense bf16 TFLOP/s of one GPU; H100 and H200 (NVIDIA's data sheet). A100: 312."""
    mfu: float | None = Field(default=None, gt=0, le=1)
    """Share of the peak that training reaches, recomputation not counted; `klear bench gpu` measures it. None: computed
    from attention kernel, recomputation and row length (docs/scale.md)."""
    memory_tb_per_s: float = Field(default=3.35, gt=0)
    """Memory bandwidth of one GPU in TB/s, which bounds the speed of decoding; H100 (NVIDIA's data sheet).
    H200: 4.8."""
    decoding_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Share of that bandwidth that decoding reaches. By published step times of vLLM 0.30 with Qwen3-8B on an H100 it
    is 0.71 for weights and 0.9 for the cache (github.com/tgarg01/silybench-data)."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price of one GPU for an hour, in any currency; None shows GPU-hours alone."""
