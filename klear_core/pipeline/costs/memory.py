"""Work out what a learner rank holds at its peak, in closed form.

It is the sum of what our learner allocates, moment by moment; `klear_core.train.memory` counts the same allocations by
running the learner on fake tensors, and a test compares the two. Letters: P weights of the model, R ranks, p weights
of a layer, E weights of embedding and head, L layers, T tokens of a rank in a micro-batch, V vocabulary, H hidden,
A width of all query heads, G width of all key heads, I width of the MLP. Activations and gathered weights take `b`
bytes: 2 in bfloat16. With LoRA the frozen weights take `b` bytes, have no gradients, and a single rank uses them as
they are. With `cpu_offload` weights, gradients and moments are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig
from klear_core.generate.model_size import ModelSize

_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}
"""Logits that the head holds at a time (`train.logps.CHUNK_LOGITS_CUDA`, `CHUNK_LOGITS`, whose import loads torch)."""
MARGIN_SHARE, MARGIN_GB = 0.06, 1.5
"""Margin on top of what torch allocates: 6 % of the peak for fragmentation of its allocator, and 1.5 GB for the CUDA
context and the buffers of cuBLAS and NCCL. Ours; not measured on a GPU."""
_MOMENTS_BYTES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of a weight's two moments: in float32, or in 8 bits with one float32 scale per 256 values."""


def with_margin_gb(num_bytes: float) -> float:
    """Return gigabytes with the margin for what torch does not count."""
    return num_bytes / 1e9 * (1 + MARGIN_SHARE) + MARGIN_GB


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLoad:
    """The settings that a learner rank's memory depends on, besides the model."""

    num_ranks: int
    num_tokens: int
    """Tokens of a rank in its largest micro-batch."""
    value_bytes: int
    """Bytes of an activation: 2 in bfloat16, 4 in float32."""
    has_checkpointing: bool
    """Only the inputs of layers are kept; the rest is computed again in the backward pass."""
    keep_layers: int = 0
    """Layers of which more is kept although there is checkpointing."""
    has_reference: bool = False
    """A frozen copy of the model is kept for a KL term."""
    adapter_rank: int | None = None
    """Rank of LoRA adapters on frozen weights. All linear layers are counted as having one."""
    moments_bytes: float = _MOMENTS_BYTES["adamw"]
    """Bytes of both moments of a weight that trains."""
    is_offloaded: bool = False
    """Weights, gradients and moments are in host memory (`runtime.cpu_offload`)."""
    is_on_cpu: bool = False
    """The rank computes on a CPU, where the head takes fewer logits at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPeak:
    """The bytes of a learner rank when it holds most."""

    moment: str
    """`head`, `mlp backward`, `attention backward` or `embedding gradient`."""
    by_kind: dict[str, float]

    @property
    def num_bytes(self) -> float:
        """Return the sum."""
        return sum(self.by_kind.values())


def learner_load(training: SftConfig | RlConfig) -> LearnerLoad:
    """Return the load of a rank.

    Its largest micro-batch is a full one, or the longest row if that is longer, but never more than all rows of an
    update.
    """
    runtime, has_reference = training.runtime, False
    if isinstance(training, RlConfig):
        longest = training.rollout.max_prompt_tokens + training.rollout.sampling.max_new_tokens
        rows_of_step = training.rollout.groups_per_step * training.rollout.samples_per_group
        num_rows = -(-rows_of_step // training.minibatches_per_step)
        has_reference = training.kl_coef > 0 and training.lora is None
    else:
        longest, num_rows = training.max_tokens, training.rows_per_step
    num_tokens = min(max(longest, runtime.tokens_per_microbatch), num_rows * longest)
    value_bytes = 2 if training.dtype == "bfloat16" else 4
    adapter_rank = None if training.lora is None else training.lora.rank
    return LearnerLoad(
        num_ranks=runtime.num_workers,
        num_tokens=-(-num_tokens // runtime.context_parallel),
        value_bytes=value_bytes,
        has_checkpointing=runtime.activation_checkpointing,
        keep_layers=runtime.keep_layers,
        has_reference=has_reference,
        adapter_rank=adapter_rank,
        moments_bytes=_MOMENTS_BYTES[training.optim.kind],
        is_offloaded=runtime.cpu_offload,
        is_on_cpu=runtime.device == "cpu",
    )


def learner_peak(size: ModelSize, load: LearnerLoad) -> LearnerPeak:
    """Return the largest of all moments of an update, from its second micro-batch on, when there are gradients.

    Not counted: rounding and fragmentation of torch's allocator, buffers of cuBLAS and NCCL, and the CUDA context.
    """
    return max(_moments(size, load), key=lambda peak: peak.num_bytes)


def state_bytes(size: ModelSize, load: LearnerLoad) -> float:
    """Return the bytes of a rank's weights, gradients and moments of Adam, wherever they are.

    A weight that trains has 4 of its own, 4 of its gradient and those of its moments; a frozen one `b`.
    """
    frozen = 0 if load.adapter_rank is None else load.value_bytes * size.num_params
    return (frozen + (8 + load.moments_bytes) * _trained(size, load)) / load.num_ranks


def reference_bytes(size: ModelSize, load: LearnerLoad) -> float:
    """Return the bytes of a rank's share of the frozen copy for a KL term, wherever it is."""
    return 4 * size.num_params / load.num_ranks if load.has_reference else 0.0


def resident_bytes(size: ModelSize, load: LearnerLoad) -> float:
    """Return what is left of `state_bytes` on the device between updates, when there are no gradients."""
    if load.is_offloaded:
        return 0.0
    return state_bytes(size, load) - 4 * _trained(size, load) / load.num_ranks


def _trained(size: ModelSize, load: LearnerLoad) -> int:
    """Return the number of weights that train."""
    return size.num_params if load.adapter_rank is None else size.adapter_params(load.adapter_rank)


def _moments(size: ModelSize, load: LearnerLoad) -> Iterator[LearnerPeak]:
    always = {} if load.is_offloaded else {"weights, gradients, optimizer": state_bytes(size, load)}
    if load.has_reference and not load.is_offloaded:
        always["reference model"] = reference_bytes(size, load)
    b, t, is_lora = load.value_bytes, load.num_tokens, load.adapter_rank is not None
    kept = b * t * (size.num_layers * _kept_values(size, load) + load.keep_layers * _kept_more(size, load))
    yield LearnerPeak(
        moment="head",
        by_kind=always
        | {
            "gathered weights": _gathered(size, load, num_layers=1),
            "activations": kept + _last_values(size, load) * b * t,
            "head": _head_bytes(size, load),
        },
    )
    # In the backward pass two layers are gathered, and the gradient of a third is summed over ranks in float32. Without
    # checkpointing most is held in the topmost layer, before there is such a gradient.
    passing = _layer_sum(size, load) if load.has_checkpointing else 0
    backward = {
        "gathered weights": _gathered(size, load, num_layers=2),
        "gradients being summed": passing + (0 if is_lora else b * size.vocab_size * size.hidden_size),
    }
    for moment, values, matrix in _layer_backward(size, load):
        # In the topmost layer, whose own values are counted beside those of the others.
        others = (size.num_layers - 1) * _kept_values(size, load)
        others += max(0, load.keep_layers - 1) * _kept_more(size, load)
        activations = b * t * (others + values) + b * matrix
        yield LearnerPeak(moment=moment, by_kind=always | backward | {"activations": activations})
    if not is_lora:
        yield LearnerPeak(moment="embedding gradient", by_kind=always | _embedding_gradient(size, load))


def _last_values(size: ModelSize, load: LearnerLoad) -> float:
    """Return the values per token that are held between the last layer and the logits.

    These are the last layer's output, the final norm's output and the states of the loss tokens; uncompiled, also the
    norm's input in float32. A frozen norm keeps one tensor less. With adapters, the first layer's input and output of
    the previous micro-batch are also still there: nothing below that layer needs a gradient, so torch frees them later.
    """
    values = 3 * size.hidden_size
    if not size.is_fused:
        values += (4 // load.value_bytes) * size.hidden_size - _norm_less(size, load)
    if load.adapter_rank is not None and load.has_checkpointing:
        values += 2 * size.hidden_size
    return values


def _head_bytes(size: ModelSize, load: LearnerLoad) -> float:
    """Return the bytes that the head holds: logits of a chunk in float32, and the gradients of logits and states."""
    b, t, h = load.value_bytes, load.num_tokens, size.hidden_size
    logits = _LOGITS["cpu" if load.is_on_cpu else "cuda"]
    chunk = (4 + b) * _chunk_tokens(t, size.vocab_size, logits) * size.vocab_size
    if load.adapter_rank is not None:
        return chunk + b * t * h
    # 4 bytes per weight for the head's gradient. After the last chunk it is cast, while its float32 sum is still there.
    embedding = size.vocab_size * h
    return 4 * embedding + max(chunk, b * (embedding + t * h)) + b * t * h


def _kept_values(size: ModelSize, load: LearnerLoad) -> float:
    """Return the values per token and layer that the forward pass keeps for the backward pass."""
    return size.hidden_size if load.has_checkpointing else _layer_values(size, load)


def _kept_more(size: ModelSize, load: LearnerLoad) -> float:
    """Return the values per token that a layer of `keep_layers` keeps beside its input."""
    return _layer_values(size, load) - size.hidden_size


def _layer_values(size: ModelSize, load: LearnerLoad) -> float:
    """Return the values per token that one layer keeps without checkpointing.

    Fused layers keep the inputs and outputs of both norms (4H), queries and keys before and after their rotation,
    values and output of attention (3A + 3G), and gate, up and their product (3I). Uncompiled, each norm keeps its input
    in float32, the normalised input and its output (8H); a rotation keeps nothing, and the activation keeps its result
    (2A + 2G + 4I). Attention adds one float32 number per head. Each of seven adapters keeps the tensor between A and B.
    """
    h, a, g, i = size.hidden_size, size.query_size, size.kv_size, size.mlp_size
    beside = 2 * size.num_heads + 7 * (load.adapter_rank or 0)
    if size.is_fused:
        return 4 * h + 3 * a + 3 * g + 3 * i + beside
    return 8 * h + 2 * a + 2 * g + 4 * i + beside - 2 * _norm_less(size, load)


def _norm_less(size: ModelSize, load: LearnerLoad) -> int:
    """Return the values per token that an uncompiled norm need not keep if its weight is frozen."""
    return 0 if load.adapter_rank is None else size.hidden_size


def _layer_backward(size: ModelSize, load: LearnerLoad) -> Iterator[tuple[str, float, float]]:
    """Yield moments of one layer's backward pass: name, values per token, weights whose gradient is being formed."""
    h, a, g, i = size.hidden_size, size.query_size, size.kv_size, size.mlp_size
    # A frozen matrix has no gradient. Scaling the gradient before an adapter's B makes a copy of it.
    layer, matrix = _layer_values(size, load) + (0 if load.adapter_rank is None else h), h * i
    if load.adapter_rank is not None:
        matrix = 0
    if size.is_fused:
        # The product of gate and up and the sum before the second norm are already freed. There are the gradients of
        # gate, of up, of their product and of the layer's output.
        yield "mlp backward", layer - h - i + h + 3 * i, matrix
    else:
        yield "mlp backward", layer + h + 2 * i, matrix
    # FlashAttention-2: a float32 gradient of the queries, those of keys and values for every query head, and all
    # three gradients in `b` bytes, beside the gradient of its output and that of the layer.
    after_mlp = layer - 3 * i - h if size.is_fused else layer - 4 * i - 4 * h
    yield "attention backward", after_mlp + 6 * a + 2 * g + h, 0


def _gathered(size: ModelSize, load: LearnerLoad, *, num_layers: int) -> float:
    """Return the bytes of the weights that FSDP holds in full: embedding and head, and `num_layers` layers."""
    b = load.value_bytes
    adapters = size.adapter_params(load.adapter_rank or 0)
    if load.num_ranks == 1 and not load.is_offloaded:
        if load.adapter_rank is not None:
            return b * adapters  # frozen weights are used as they are
        if b == 4:
            return 0.0  # the weights themselves are used, and counted elsewhere
        # One rank keeps all layers gathered from forward to backward. Before its first peak, the backward pass has
        # released one of them.
        return b * (size.num_params - (num_layers - 1) * size.layer_params)
    # A rank's share of the next layer comes from the host in the dtype in which it is kept there, and is then cast and
    # gathered.
    kept_bytes = 4 if load.adapter_rank is None else b
    coming = kept_bytes * size.layer_params / load.num_ranks if load.is_offloaded else 0.0
    return coming + b * (size.embedding_params + num_layers * (size.layer_params + adapters / size.num_layers))


def _layer_sum(size: ModelSize, load: LearnerLoad) -> float:
    """Return the bytes of a layer's gradient in float32, as it enters the sum over ranks."""
    if load.num_ranks == 1 and load.value_bytes == 4:
        return 0.0
    return 4.0 * (size.layer_params if load.adapter_rank is None else _trained(size, load) / size.num_layers)


def _embedding_gradient(size: ModelSize, load: LearnerLoad) -> dict[str, float]:
    """Return the bytes at the end of the backward pass, when embedding and head get their gradients."""
    b, embedding = load.value_bytes, size.vocab_size * size.hidden_size
    # The gradients and their float32 copy enter the sum over ranks. Its result, a rank's shard, is there twice while it
    # is added to the gradient of earlier micro-batches, unless that is in host memory.
    num_shards = 1 if load.is_offloaded else 2
    summed = max((4 + b) * size.embedding_params, 4 * size.embedding_params * (1 + num_shards / load.num_ranks))
    # A tied matrix first has two gradients, from the head and from the lookup, and then their sum, beside the weights.
    joined = 4 * b * embedding + _layer_sum(size, load) if size.is_tied else 0
    return {"gradients being summed": max(summed, joined)}


def _chunk_tokens(num_tokens: int, vocab_size: int, max_logits: int) -> int:
    """Return the tokens whose logits are held at a time, as `train.logps.chunk_size` does."""
    most = max(1, max_logits // vocab_size)
    num_chunks = max(1, -(-num_tokens // most))
    return -(-num_tokens // num_chunks)
