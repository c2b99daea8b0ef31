"""An engine on one GPU as rollouts use it: its speed with 80 answers of 10,000 tokens, what new weights cost, and how far its
log-probs are from the learner's, by position. With CUDA vLLM, in bfloat16 and with an fp8 cache; random weights of a Qwen3-1.7B.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers

from klear_core.config.evaluate import LocalEngineConfig, VllmEngineConfig, VllmRuntime
from klear_core.errors import ConfigError
from klear_core.generate.engine import SamplingParams, TrainableEngine
from klear_core.generate.factory import build_trainable_engine
from klear_core.hf_config import read_hf_config
from klear_core.train.distributed import World
from klear_core.train.kernels.check import prove_fast_paths
from klear_core.train.logps import TokenLogps, token_logps
from klear_core.train.model import DTYPES, Dtype, Policy, load_model
from klear_core.train.packing import pack
from klear_core.types import Completion, SftExample

sys.path.insert(0, str(Path(__file__).parents[2] / "generate"))
from decoder_folder import END_ID, write_folder

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


def _engines() -> dict[str, LocalEngineConfig]:
    runtime = VllmRuntime(gpu_memory_utilization=0.6)
    return {
        "bf16": VllmEngineConfig(max_model_len=16_384, runtime=runtime),
        "fp8_cache": VllmEngineConfig(max_model_len=16_384, kv_cache_dtype="fp8", runtime=runtime),
        "8192_tokens_a_step": VllmEngineConfig(
            max_model_len=16_384, runtime=runtime.model_copy(update={"max_num_batched_tokens": 8192})
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, so that a test can run all of it small."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: Dtype = "bfloat16"
    model: dict[str, int | bool] = field(default_factory=lambda: dict(QWEN3_1_7B))
    engines: dict[str, LocalEngineConfig] = field(default_factory=_engines)
    num_answers: int = 80
    num_cached: int = 10_000
    """Tokens of each answer that are in the cache when decoding is timed."""
    num_new: int = 256
    positions: tuple[int, ...] = (100, 1000, 4000, 10_000)
    """Lengths of the prompts whose answers are compared with the learner."""


def measure() -> list[Measure]:
    """All measures, for `klear bench gpu_engine`."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark is about GPUs, and torch sees no CUDA device here")
    return list(measures(Plan()))


def measures(plan: Plan) -> Iterator[Measure]:
    """Each as soon as it is known."""
    with tempfile.TemporaryDirectory() as folder:
        model = _write_model(plan, Path(folder))
        for name, cfg in plan.engines.items():
            yield from asyncio.run(_of_engine(plan, name, cfg, model))


async def _of_engine(plan: Plan, name: str, cfg: LocalEngineConfig, model: Path) -> list[Measure]:
    started = time.perf_counter()
    engine = await build_trainable_engine(cfg, model, num_threads=1, seed=0)
    found = [_entry(plan, f"{name}/start", time.perf_counter() - started, "s")]
    try:
        prompts = [_prompt(plan, i, plan.num_cached) for i in range(plan.num_answers)]
        filling_s = await _seconds(engine, prompts, 1)
        # The prompts are in the cache now, so that this is decoding alone.
        decoding_s = await _seconds(engine, prompts, plan.num_new)
        cached = plan.num_answers * plan.num_cached
        found.append(_entry(plan, f"{name}/prefill", cached / filling_s, "tokens/s"))
        unit = f"tokens/s, {plan.num_answers} answers with {plan.num_cached:,} tokens each"
        found.append(_entry(plan, f"{name}/decoding", plan.num_answers * plan.num_new / decoding_s, unit))

        started = time.perf_counter()
        await engine.load_weights(model, version=1)
        found.append(_entry(plan, f"{name}/weights_from_disk", time.perf_counter() - started, "s"))
        answers = [(prompt, await _answer(engine, prompt, plan.num_new)) for prompt in _by_position(plan)]
    finally:
        await engine.close()  # its memory is the learner's then
    learner = _learner(plan, model)
    for prompt, answer in answers:
        gap = (_logps(plan, learner, prompt, answer) - torch.tensor(answer.logps)).abs()
        found.append(_entry(plan, f"{name}/gap_at_{len(prompt)}", float(gap.mean()), "nats a token, mean", most=0.1))
    return found


def _by_position(plan: Plan) -> list[tuple[int, ...]]:
    return [_prompt(plan, 1000 + length, length) for length in plan.positions]


def _prompt(plan: Plan, seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    # Below the special tokens of the tokenizer.
    return tuple(torch.randint(min(256, int(plan.model["vocab_size"])), (length,), generator=generator).tolist())


def _params(num_new: int) -> SamplingParams:
    return SamplingParams(
        num_samples=1, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=num_new, seed=1
    )


async def _seconds(engine: TrainableEngine, prompts: Sequence[tuple[int, ...]], num_new: int) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, _params(num_new)) for prompt in prompts))
    return time.perf_counter() - started


async def _answer(engine: TrainableEngine, prompt: tuple[int, ...], num_new: int) -> Completion:
    return (await engine.generate(prompt, _params(num_new)))[0]


def _write_model(plan: Plan, folder: Path) -> Path:
    """Random weights as transformers draws them, and a tokenizer of bytes, whose end token is hardly ever drawn."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**plan.model, bos_token_id=None, eos_token_id=END_ID, pad_token_id=256)
    with plan.device:
        model = transformers.Qwen3ForCausalLM(config).to(DTYPES[plan.dtype])
    return write_folder(folder, model)


def _learner(plan: Plan, model: Path) -> Policy:
    world = World(rank=0, size=1, device=plan.device)
    prove_fast_paths(read_hf_config(model), world, plan.dtype)  # leaves out what is wrong here
    return load_model(model, device=plan.device, dtype=plan.dtype).eval()


@torch.no_grad()
def _logps(plan: Plan, learner: Policy, prompt: tuple[int, ...], answer: Completion) -> torch.Tensor:
    """Log-probs of the answer by the learner's own kernels and head."""
    mask = (False,) * len(prompt) + (True,) * len(answer.token_ids)
    row = SftExample(problem_id="gap", token_ids=prompt + answer.token_ids, loss_mask=mask)
    (micro,) = pack([row], tokens_per_microbatch=len(row.token_ids), device=plan.device).micro_batches
    found: TokenLogps = learner(micro, partial(token_logps, target_N=micro.target_N))
    return found.logp_N.float().cpu()


def _entry(plan: Plan, name: str, value: float, unit: str, *, most: float | None = None) -> Measure:
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else plan.device.type
    versions = {"device": device, "torch": torch.__version__, "date": str(date.today())}
    target = "-" if most is None else f"<= {most}"
    is_met = most is None or value <= most
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": is_met, "versions": versions}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    for measured in measures(Plan()):
        print(json.dumps(measured), flush=True)
