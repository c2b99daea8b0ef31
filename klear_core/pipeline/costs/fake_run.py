"""Measure a training's memory by one update of its learner on fake tensors, in a process of its own.

    python -m klear_core.pipeline.costs.fake_run < case.json    prints the result as JSON

It runs our model, sharding, packing, head and update, unchanged except for what `fake_ops` replaces. It counts what
torch allocates, but not its allocator's rounding and fragmentation, buffers of cuBLAS and NCCL, or the CUDA context.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig
from klear_core.errors import TrainingError
from klear_core.generate.model_size import ModelSize
from klear_core.pipeline.costs.memory import learner_load, learner_peak
from klear_core.types import TokenCounts

if TYPE_CHECKING:
    from torch import Tensor

    from klear_core.pipeline.costs.fake_ops import MemoryTracker
    from klear_core.train.distributed import World
    from klear_core.train.packing import MicroBatch, PackedBatch

_MICRO_BATCHES = 2
"""From the second micro-batch on there are gradients to add to, which is when a step needs most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCase:
    """The settings that a learner rank's memory depends on."""

    model: dict[str, Any]
    """The content of a Hugging Face config.json."""
    num_ranks: int
    cp_size: int = 1
    """Ranks that share a row (`runtime.context_parallel`)."""
    num_tokens: int
    """Tokens of a micro-batch, over all ranks that share it."""
    num_prompt_tokens: int = 64
    """Tokens among them that are not trained on."""
    dtype: Literal["bfloat16"] = "bfloat16"
    """Float32 is for CPUs, whose kernels fake tensors cannot run."""
    activation_checkpointing: bool = True
    keep_layers: int = 0
    joins_tokens: bool = False
    """The loss needs all tokens of a row at once (`token_logps`)."""
    has_reference: bool = False
    """A frozen copy for the KL term."""
    adapter_rank: int | None = None
    """Rank of LoRA adapters on all linear layers; the weights under them are frozen, in `dtype`."""
    is_compiled: bool = True
    """False: torch.compile has failed on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which a rank holds most."""

    moment: str
    num_bytes: int
    by_kind: dict[str, int]


def measure(case: LearnerCase) -> list[Peak]:
    """Return the peak of each moment of an update, largest first, from a child process.

    Raise TrainingError with the child's last lines if it fails.
    """
    command = [sys.executable, "-m", "klear_core.pipeline.costs.fake_run"]
    text = json.dumps(dataclasses.asdict(case))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainingError(f"the update on fake tensors failed: {done.stderr[-2000:]}")
    # The last line, because libraries may print others before it.
    return [Peak(**peak) for peak in json.loads(done.stdout.splitlines()[-1])]


def _measure_here(case: LearnerCase) -> list[Peak]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from klear_core.config.train import OptimConfig
    from klear_core.pipeline.costs import fake_ops
    from klear_core.pipeline.costs.fake_ops import MemoryTracker
    from klear_core.train import distributed
    from klear_core.train.kernels import attention
    from klear_core.train.step import Updater

    world = _fake_world(case)
    batch = _batch(case, world.cp_group)
    attention.register()
    fake_ops.install(is_compiled=case.is_compiled)
    shell, reference_shell = _shell(case), _shell(case)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy = distributed.parallelise(
            _allocated(shell),
            world,
            dtype=case.dtype,
            activation_checkpointing=case.activation_checkpointing,
            keep_layers=case.keep_layers,
        )
        # Learning rate and number of steps do not change what is allocated.
        updater = Updater(policy, OptimConfig(lr=1e-5), world, num_steps=10)
        tracker = MemoryTracker()
        # Counts what was made before the tracker, and names it: weights, and the moments that the updater has made.
        _label_states(tracker, policy, updater)
        if case.has_reference:
            reference = distributed.parallelise(
                _allocated(reference_shell).requires_grad_(False),
                world,
                dtype=case.dtype,
                activation_checkpointing=False,
            )
            _label_weights(tracker, reference, "reference model")
        batch = _faked(batch, mode)
        heads = _heads(batch, case, tracker)
        tracker.peaks.clear()  # of the building of the model: only the update counts
        with _instrumented(tracker), tracker:
            updater.update(batch, heads, step=0)
    peaks = [Peak(moment=m, num_bytes=sum(kinds.values()), by_kind=kinds) for m, kinds in tracker.peaks.items()]
    return sorted(peaks, key=lambda peak: -peak.num_bytes)


def _fake_world(case: LearnerCase) -> World:
    """Return rank 0 of as many ranks as the case has; its collective calls allocate and send nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from klear_core.train import distributed

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=case.num_ranks, store=FakeStore())
    # A mesh reads numbers off its tensors, so it is built before the fake mode.
    mesh = init_device_mesh("cpu", (case.num_ranks,))
    cast(Any, distributed).init_device_mesh = lambda *_: mesh
    cp_group = distributed.join_context(0, case.cp_size)
    return distributed.World(rank=0, size=case.num_ranks, device=torch.device("cpu"), cp_group=cp_group)


@dataclass(frozen=True, slots=True)
class _Row(TokenCounts):
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]


def _batch(case: LearnerCase, cp_group: Any) -> PackedBatch:
    from klear_core.train.packing import pack

    mask = [i >= case.num_prompt_tokens for i in range(case.num_tokens)]
    # Each row fills a micro-batch. Values do not matter: fake tensors have shapes and dtypes only.
    rows = [_Row([0] * case.num_tokens, mask)] * _MICRO_BATCHES
    return pack(rows, tokens_per_microbatch=case.num_tokens, cp_group=cp_group)


def _shell(case: LearnerCase) -> Any:
    """Return the policy on the device `meta`, which holds no memory. It has its LoRA adapters already, because peft
    cannot add any to fake tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from klear_core.config.train import LoraConfig
    from klear_core.train.kernels import attention, fused
    from klear_core.train.model import DTYPES, Adapters, Policy, add_adapters

    given = dict(case.model)  # a copy, because the next lines take an entry out
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    dtype = torch.float32 if case.adapter_rank is None else DTYPES[case.dtype]  # as in `load_policy`
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    fused.fuse(hf)
    if case.adapter_rank is None:
        return Policy(hf)
    adapters = Adapters(cfg=LoraConfig(rank=case.adapter_rank), seed=0)
    add_adapters(hf, adapters)
    return Policy(hf, adapters)


def _allocated(shell: Any) -> Any:
    """Give a shell its weights and buffers, which are fake inside a fake mode; tied ones stay tied."""
    import torch
    from torch import nn

    made: dict[int, Any] = {}
    for module in shell.modules():
        for held in (module._parameters, module._buffers):
            for name, empty in held.items():
                if empty is None:
                    continue
                if id(empty) not in made:  # tied weights are one object, under several modules
                    made[id(empty)] = torch.empty_like(empty, device="cpu")
                    if isinstance(empty, nn.Parameter):
                        made[id(empty)] = nn.Parameter(made[id(empty)], requires_grad=empty.requires_grad)
                held[name] = made[id(empty)]
    return shell.train()


def _faked(batch: PackedBatch, mode: Any) -> PackedBatch:
    from torch import Tensor

    micro_batches = []
    for micro in batch.micro_batches:
        tensors = {}
        for field in dataclasses.fields(micro):
            value = getattr(micro, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = mode.from_tensor(value)
        micro_batches.append(dataclasses.replace(micro, **tensors))
    return dataclasses.replace(batch, micro_batches=tuple(micro_batches))


def _heads(batch: PackedBatch, case: LearnerCase, tracker: MemoryTracker) -> list[Any]:
    """Return a head for each micro-batch, of a loss by token or one that joins tokens; it names its moments."""
    from klear_core.train.logps import HeadOutput, fused_loss, token_logps

    def by_token(micro: MicroBatch, hidden_NH: Tensor, weight_VH: Tensor) -> HeadOutput:
        return fused_loss(hidden_NH, weight_VH, micro.target_N, lambda logp_C, _entropy_C, _where: -logp_C)

    def joining(micro: MicroBatch, hidden_NH: Tensor, weight_VH: Tensor) -> HeadOutput:
        logp_N, entropy_N = token_logps(hidden_NH, weight_VH, micro.target_N)
        return HeadOutput(-logp_N.sum(), logp_N.detach(), entropy_N.detach())

    head = joining if case.joins_tokens else by_token
    return [_named(partial(head, micro), tracker, number) for number, micro in enumerate(batch.micro_batches, 1)]


def _named(head: Any, tracker: MemoryTracker, number: int) -> Any:
    def called(hidden_NH: Any, weight_VH: Any) -> Any:
        tracker.moment = f"micro-batch {number}, head"
        try:
            with tracker.kind("head"):
                return head(hidden_NH, weight_VH)
        finally:
            tracker.moment = f"micro-batch {number}"

    return called


def _label_weights(tracker: MemoryTracker, policy: Any, kind: str) -> None:
    for weight in policy.parameters():
        tracker.label(weight, kind)


def _label_states(tracker: MemoryTracker, policy: Any, updater: Any) -> None:
    _label_weights(tracker, policy, "weights")
    for state in updater.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            tracker.label(state[name], "optimizer")


@contextmanager
def _instrumented(tracker: MemoryTracker) -> Iterator[None]:
    """Tell the tracker of what it cannot see: FSDP's storages, which are resized, and what they hold."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    fsdp_module: Any = fsdp
    group, storage = fsdp_module.FSDPParamGroup, cast(Any, torch.UntypedStorage)
    resize, reduce, post_backward = storage.resize_, fsdp_module.foreach_reduce, group.post_backward
    unshard, wait = group.unshard, group.wait_for_unshard

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        if tracker.knows(self):
            tracker.count(self)
        return result

    def after_backward(self: Any, *args: Any) -> Any:
        # Named before the call, which reduces them into the shards' gradients and frees them.
        for p in self.fsdp_params:
            if hasattr(p, "_unsharded_param"):
                tracker.label(p._unsharded_param.grad, "whole gradients")
        result = post_backward(self, *args)
        for p in self.fsdp_params:
            tracker.label(p.sharded_param.grad, "gradients")
        return result

    storage.resize_ = resized
    group.unshard = tracker.labelled("whole weights", unshard)
    group.wait_for_unshard = tracker.labelled("whole weights", wait)
    group.post_backward = after_backward
    fsdp_module.foreach_reduce = tracker.labelled("reduce-scatter", reduce)
    try:
        yield
    finally:
        storage.resize_, fsdp_module.foreach_reduce, group.post_backward = resize, reduce, post_backward
        group.unshard, group.wait_for_unshard = unshard, wait


# ---- caller ----
# Measure a training's memory by running its learner on fake tensors, to check the closed form of `memory`.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """A training's peak by both methods, in bytes."""

    measured: Peak
    closed_form: float

    @property
    def difference(self) -> float:
        """Return how far the closed form is from the measurement, as a share of it."""
        return self.closed_form / self.measured.num_bytes - 1


def measure_training(size: ModelSize, training: SftConfig | RlConfig) -> MemoryComparison | None:
    """Return both peaks of a rank. Takes 10 to 60 s.

    None for training in float32 (which is for CPUs), with 8-bit moments, or with offloading to host memory, which fake
    tensors do not tell apart from device memory.
    """
    if training.dtype != "bfloat16" or training.optim.kind != "adamw" or training.runtime.cpu_offload:
        return None

    closed_form = learner_peak(size, learner_load(training)).num_bytes
    return MemoryComparison(measured=measure(learner_case(size, training))[0], closed_form=closed_form)


def learner_case(size: ModelSize, training: SftConfig | RlConfig) -> LearnerCase:
    """Return the case that a training's settings describe."""
    from klear_core.rl.losses import joins_tokens

    load = learner_load(training)
    return LearnerCase(
        model=hf_config_of(size),
        num_ranks=load.num_ranks,
        cp_size=training.runtime.context_parallel,
        # The load counts the tokens of one rank, the case those of the whole context-parallel group.
        num_tokens=load.num_tokens * training.runtime.context_parallel,
        activation_checkpointing=load.has_checkpointing,
        keep_layers=load.keep_layers,
        joins_tokens=isinstance(training, RlConfig) and joins_tokens(training.loss),
        has_reference=load.has_reference,
        adapter_rank=load.adapter_rank,
    )


def hf_config_of(size: ModelSize) -> dict[str, Any]:
    """Return a config.json with these sizes: of a Qwen3 if the model is fused, else of a Llama."""
    return {
        "model_type": "qwen3" if size.is_fused else "llama",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.mlp_size,
        "tie_word_embeddings": size.is_tied,
        "max_position_embeddings": 1 << 17,  # more than any row
    }


if __name__ == "__main__":
    result = _measure_here(LearnerCase(**json.loads(sys.stdin.read())))
    sys.stdout.write(json.dumps([dataclasses.asdict(peak) for peak in result]) + "\n")
