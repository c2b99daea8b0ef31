"""Training a Qwen3-1.7B of random weights on one GPU: how near SFT steps and RL updates come to its peak, what length costs,
what the fused head costs beside its bare matrix products, and with several GPUs what sending new weights to engines costs.

Needs torch, transformers and pydantic, no tokenizer and no file: see tests/gpu/README.md for how to run it on a bare machine.
MFU is `klear_core.train.model` over the peak of NVIDIA's data sheet, or over a measured product for a device that is not in its table.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from klear_core.config.rl import RlConfig
from klear_core.config.train import AttentionKernel, OptimConfig
from klear_core.errors import ConfigError
from klear_core.generate.engine import TransferBackend, dump_offer
from klear_core.generate.weight_transfer import WeightServer, specs_of
from klear_core.hf_config import HfConfig
from klear_core.rl.objective import Denominators, loss_head, make_loss_inputs
from klear_core.rl.step_metrics import TokenStats
from klear_core.sft.loop import sft_heads
from klear_core.train.distributed import World, parallelise
from klear_core.train.kernels import attention, registry
from klear_core.train.kernels.check import Conditions, prove_in_process
from klear_core.train.kernels.check_cases import ModelSizes
from klear_core.train.kernels.fused import fuse
from klear_core.train.logps import HeadOutput, TokenLogps, fused_loss, head_kernels_on, token_logps
from klear_core.train.model import DTYPES, Dtype, FlopCount, Head, Policy, peak_flops
from klear_core.train.packing import MicroBatch, PackedBatch, pack
from klear_core.train.step import Updater
from klear_core.types import SftExample, TokenRow, TrainSample

Measure = dict[str, object]

QWEN3_1_7B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
"""Its config.json on Hugging Face."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, so that a test can run all of it small."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: Dtype = "bfloat16"
    model: dict[str, int | bool] = field(default_factory=lambda: dict(QWEN3_1_7B))
    row_lengths: tuple[int, ...] = (8192, 4096, 2048, 1024, 1024)
    """Rows of the step whose MFU is taken: 16K tokens, in one packed sequence."""
    lengths: tuple[int, ...] = (4096, 8192, 16_384, 32_768)
    """One row each."""
    num_prompt_tokens: int = 256
    """Of each row; they carry no loss."""
    max_logits: tuple[int, ...] = (1 << 27, 1 << 28, 1 << 29)
    """Sizes of the head's chunks to compare."""
    product_size: int = 8192
    """Side of the square product that the device's practical peak is taken from."""
    warmups: int = 3
    repeats: int = 10


def measure() -> list[Measure]:
    """All measures, for `klear bench gpu`."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark is about GPUs, and torch sees no CUDA device here")
    return list(measures(Plan()))


def measures(plan: Plan) -> Iterator[Measure]:
    """Each as soon as it is known."""
    entry = partial(_entry, plan)
    bare = _bare_rate(plan)
    peak = peak_flops(plan.device) or bare
    yield entry("gpu/product/tflops", bare / 1e12, "TFLOP/s")
    yield entry("gpu/peak/tflops", peak / 1e12, "TFLOP/s, what MFU is a share of")
    yield from _head(plan)
    for name, rows, heads_of, least in (
        ("sft/step", _sft_rows(plan), _sft, 0.45),
        ("rl/update", _rl_rows(plan), _rl, 0.40),
    ):
        checkpointing, run = _fitting(partial(_train, plan, rows, heads_of))
        how = "with" if checkpointing else "without"
        yield entry(
            f"{name}/mfu", run.flop / run.seconds / peak, f"of peak, {how} activation checkpointing", least=least
        )
        yield entry(f"{name}/tokens_per_s", run.tokens / run.seconds, "tokens/s")
        yield entry(f"{name}/memory", run.gigabytes, "GB")
    for length in plan.lengths:
        yield from _of_length(plan, peak, f"length_{length}", length)
    longest = plan.lengths[-1]
    # What `hardware.mfu` of a plan is computed from: each attention kernel that is here, and all activations kept.
    for name in attention.FASTER:
        kernel: AttentionKernel = "FA4" if name.endswith("FA4") else "FA3"
        if plan.device.type == "cuda" and not attention.why_no_faster(name):
            attention.ask_for(kernel)
            sizes = ModelSizes.of(HfConfig.model_validate({"model_type": "qwen3", **plan.model}))
            conditions = Conditions(device=plan.device, dtype=DTYPES[plan.dtype], sizes=sizes)
            proof = next(found for found in prove_in_process(conditions) if found.name == name)
            yield entry(f"{kernel}/error", proof.error, f"of what is allowed; it {proof.verdict}", most=1)
            if proof.verdict == "agrees":
                yield from _of_length(plan, peak, f"length_{longest}/{kernel}", longest)
            registry.leave_out(name, "measured")
    with suppress(torch.OutOfMemoryError):
        yield from _of_length(plan, peak, f"length_{longest}/recompute_none", longest, activation_checkpointing=False)
    yield from _weight_sync(plan)


def _of_length(
    plan: Plan, peak: float, name: str, length: int, *, activation_checkpointing: bool = True
) -> Iterator[Measure]:
    run = _train(plan, [_sft_row(plan, length, 0)], _sft, activation_checkpointing)
    yield _entry(plan, f"{name}/tokens_per_s", run.tokens / run.seconds, "tokens/s")
    yield _entry(plan, f"{name}/mfu", run.flop / run.seconds / peak, "of peak")
    yield _entry(plan, f"{name}/memory", run.gigabytes, "GB")


# ---- weight sync ----


_ENGINE = """
import sys
from klear_core.generate.engine import load_offer
from klear_core.generate.weight_transfer import fetch

print("ready", flush=True)
for line in sys.stdin:
    print(sum(tensor.nbytes for _, tensor in fetch(load_offer(line), rank=1)), flush=True)
"""
"""What an engine does of a transfer: it receives the weights, and has no use for them."""


def _weight_sync(plan: Plan) -> Iterator[Measure]:
    """Seconds in which the model's weights go from this process to all other GPUs at once, and to an engine on its own.

    NCCL refuses two processes on one GPU: with a single one there are only handles of memory to measure.
    """
    is_on_gpu = plan.device.type == "cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if is_on_gpu else ""
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count() if is_on_gpu else 2)]
    weights = _weights(plan)
    yield from _handed_over(plan, weights, devices[1:], "nccl" if is_on_gpu else "gloo")
    yield from _handed_over(plan, weights, devices[:1], "ipc")


def _handed_over(
    plan: Plan, weights: dict[str, Tensor], devices: list[str], backend: TransferBackend
) -> Iterator[Measure]:
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    server = WeightServer("127.0.0.1", timeout_s=300)
    times = []
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(device)) for device in devices]
        for version in range(plan.warmups + plan.repeats if engines else 0):
            _synchronize(plan)
            started = time.perf_counter()
            offer = server.offer(specs_of(weights), version=version, backend=backend, num_ranks=1)
            for index, engine in enumerate(engines):
                engine(dump_offer(replace(offer, engine=index)))
            lost = server.send(offer, weights.items(), range(len(engines)))
            assert not lost, lost
            assert [engine("") for engine in engines] == [str(num_bytes)] * len(engines)
            times.append(time.perf_counter() - started)
    if times:
        seconds, name = median(times[plan.warmups :]), "weight_sync/ipc" if backend == "ipc" else "weight_sync"
        yield _entry(plan, f"{name}/seconds", seconds, f"s to {len(engines)} engines at once over {backend}")
        yield _entry(plan, f"{name}/rate", num_bytes * len(engines) / seconds / 1e9, "GB/s out of one process")


def _weights(plan: Plan) -> dict[str, Tensor]:
    with torch.device("meta"):
        hf = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**plan.model))
    make = partial(torch.randn, device=plan.device, dtype=DTYPES[plan.dtype])
    return {name: make(p.shape) for name, p in hf.named_parameters()}


@contextmanager
def _engine(device: str) -> Iterator[Callable[[str], str]]:
    """Yield a function that sends a line to a process with this GPU, or with no line returns the next of its own."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _ENGINE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, of = process.stdin, process.stdout

        def talk(line: str) -> str:
            if not line:
                return of.readline().strip()
            to.write(line + "\n")
            return ""

        try:
            assert talk("") == "ready"
            yield talk
        finally:
            to.close()  # it ends with its input


def _entry(
    plan: Plan, name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None
) -> Measure:
    target = "-" if least is None and most is None else f">= {least}" if most is None else f"<= {most}"
    is_met = (least is None or value >= least) and (most is None or value <= most)
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type
    versions = {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(date.today()),
    }
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": is_met, "versions": versions}


def _seconds(plan: Plan, run: Callable[[], object]) -> float:
    """The median call, device work included."""
    times = []
    for _ in range(plan.warmups + plan.repeats):
        _synchronize(plan)
        started = time.perf_counter()
        run()
        _synchronize(plan)
        times.append(time.perf_counter() - started)
    return median(times[plan.warmups :])


def _synchronize(plan: Plan) -> None:
    if plan.device.type == "cuda":
        torch.cuda.synchronize()


def _bare_rate(plan: Plan) -> float:
    """FLOP/s of one large product of random numbers, for zeros run faster than data ever will."""
    n = plan.product_size
    a, b = (torch.randn(n, n, device=plan.device, dtype=DTYPES[plan.dtype]) for _ in range(2))
    return 2 * n**3 / _seconds(plan, lambda: a @ b)


def _head(plan: Plan) -> Iterator[Measure]:
    """Forward and backward of the head against the three products it cannot do without, in the same chunks."""
    num_tokens, hidden, vocab = sum(plan.row_lengths), int(plan.model["hidden_size"]), int(plan.model["vocab_size"])
    make = partial(torch.randn, device=plan.device, dtype=DTYPES[plan.dtype])
    h_NH, w_VH = make(num_tokens, hidden).requires_grad_(), (make(vocab, hidden) / hidden**0.5).requires_grad_()
    target_N = torch.randint(vocab, (num_tokens,), device=plan.device)
    losses = {"plain": lambda lp_C, _e_C, _at: -lp_C, "entropy_loss": lambda lp_C, e_C, _at: -lp_C - 0.01 * e_C}

    def fused(name: str, size: int) -> None:
        need_entropy = name != "plain"
        fused_loss(h_NH, w_VH, target_N, losses[name], need_entropy=need_entropy, max_logits=size).loss.backward()  # type: ignore[no-untyped-call]
        h_NH.grad = w_VH.grad = None

    bare_s = min(
        _seconds(plan, partial(_bare_products, h_NH.detach(), w_VH.detach(), max(1, size // vocab)))
        for size in plan.max_logits
    )
    yield _entry(plan, "head/products", 1e3 * bare_s, "ms, the best chunk size of those below")
    for size in plan.max_logits:
        for name in losses:
            seconds = _seconds(plan, partial(fused, name, size))
            yield _entry(plan, f"head/{name}/{size >> 20}M_logits", seconds / bare_s, "of the bare products", most=1.5)
    yield _entry(plan, "head/is_compiled", float(head_kernels_on(plan.device.type).is_compiled), "1: yes")


def _bare_products(h_NH: Tensor, w_VH: Tensor, tokens_per_chunk: int) -> None:
    """Logits, and from as large a gradient those of hidden states and weight, all in the inputs' own precision."""
    for h_CH in h_NH.split(tokens_per_chunk):
        z_CV = h_CH @ w_VH.T
        z_CV @ w_VH
        z_CV.T @ h_CH


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    seconds: float
    flop: float
    tokens: int
    gigabytes: float
    """The most that was allocated; 0 off CUDA."""


HeadsOf = Callable[[Plan, Policy, Sequence[TokenRow], PackedBatch], list[Head[HeadOutput]]]


def _train(plan: Plan, rows: Sequence[TokenRow], heads_of: HeadsOf, activation_checkpointing: bool) -> _Run:
    """Steps over the same rows: forward, backward, clipping and AdamW."""
    world = World(rank=0, size=1, device=plan.device)
    policy = _policy(plan, world, activation_checkpointing)
    flop = FlopCount.of(policy).step(rows)
    updater = Updater(policy, OptimConfig(lr=1e-6), world, num_steps=1 << 20)
    batch = pack(rows, tokens_per_microbatch=sum(len(r.token_ids) for r in rows), device=plan.device)
    heads = heads_of(plan, policy, rows, batch)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = _seconds(plan, lambda: updater.update(batch, heads, step=0))
    finally:
        if dist.is_initialized():  # by `parallelise`
            dist.destroy_process_group()
    gigabytes = torch.cuda.max_memory_allocated() / 1e9 if plan.device.type == "cuda" else 0.0
    return _Run(seconds=seconds, flop=flop, tokens=sum(len(r.token_ids) for r in rows), gigabytes=gigabytes)


def _fitting(run: Callable[[bool], _Run]) -> tuple[bool, _Run]:
    """With activation checkpointing only where memory ends without it; MFU does not count what is computed twice."""
    try:
        return False, run(False)
    except torch.OutOfMemoryError:
        pass  # what it held is free once the exception is gone
    gc.collect()
    torch.cuda.empty_cache()
    return True, run(True)


def _policy(plan: Plan, world: World, activation_checkpointing: bool) -> Policy:
    """Random weights, as transformers draws them, where they will be used."""
    attention.register()
    config = transformers.Qwen3Config(**plan.model, attn_implementation=attention.NAME)
    with plan.device:
        hf = transformers.Qwen3ForCausalLM(config)
    fuse(hf)
    return parallelise(Policy(hf).train(), world, dtype=plan.dtype, activation_checkpointing=activation_checkpointing)


def _tokens(plan: Plan, length: int, seed: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(int(plan.model["vocab_size"]), (length,), generator=generator).tolist())
    return ids, tuple(i >= plan.num_prompt_tokens for i in range(length))


def _sft_row(plan: Plan, length: int, seed: int) -> SftExample:
    ids, mask = _tokens(plan, length, seed)
    return SftExample(problem_id=str(seed), token_ids=ids, loss_mask=mask)


def _sft_rows(plan: Plan) -> list[SftExample]:
    return [_sft_row(plan, length, i) for i, length in enumerate(plan.row_lengths)]


def _rl_rows(plan: Plan) -> list[TrainSample]:
    """Answers of one group, right and wrong in turn."""
    rows = []
    for i, length in enumerate(plan.row_lengths):
        ids, mask = _tokens(plan, length, i)
        is_positive = i % 2 == 0
        row = TrainSample(
            problem_id=str(i),
            token_ids=ids,
            loss_mask=mask,
            sampler_logps=(0.0,) * length,
            advantage=1.0 if is_positive else -1.0,
            is_positive=is_positive,
            oldest_version=0,
        )
        rows.append(row)
    return rows


def _sft(_plan: Plan, _policy: Policy, rows: Sequence[TokenRow], batch: PackedBatch) -> list[Head[HeadOutput]]:
    return sft_heads(batch.micro_batches, rows, "token")


def _rl(plan: Plan, policy: Policy, rows: Sequence[TokenRow], batch: PackedBatch) -> list[Head[HeadOutput]]:
    """GPPO against the policy's own log-probs, with entropy and statistics as the learner takes them."""
    cfg, samples = RlConfig(), [r for r in rows if isinstance(r, TrainSample)]
    counts, stats = Denominators.of(samples), TokenStats(plan.device)

    @torch.no_grad()
    def head(micro: MicroBatch) -> Head[HeadOutput]:
        old: TokenLogps = policy(micro, partial(token_logps, target_N=micro.target_N))
        return loss_head(make_loss_inputs(micro, samples, old, None, counts, cfg), cfg, stats)

    return [head(micro) for micro in batch.micro_batches]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    for measured in measures(Plan()):
        print(json.dumps(measured), flush=True)
