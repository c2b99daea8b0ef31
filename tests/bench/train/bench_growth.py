"""How cost grows with the model: sampling and learning of Llamas with random weights from 0.17 to 500 million parameters.

Each size and dtype runs in a process of its own, whose peak memory is reported. `products` is the share of the CPU time that the
matrix products of the weights alone would take at the machine's rate of a large product in that dtype: what is near 1 is limited by
products, what is far below by memory and overheads. `KLEAR_GROWTH=135M` leaves out the larger sizes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from klear_core.config.evaluate import TorchEngineConfig
from klear_core.config.train import OptimConfig
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import SamplingParams
from klear_core.sft.loop import sft_heads
from klear_core.train.distributed import World, parallelise
from klear_core.train.model import DTYPES, Dtype, FlopCount, load_model
from klear_core.train.packing import pack
from klear_core.train.step import Updater
from klear_core.types import SftExample

# hidden, layers, query heads, key heads, MLP, vocabulary; SmolLM2's own shapes at 135M and 360M, Qwen2.5's at 0.5B.
SIZES = {
    "0.17M": (64, 3, 4, 2, 192, 264),
    "14M": (256, 8, 4, 2, 768, 32_000),
    "135M": (576, 30, 9, 3, 1536, 49_152),
    "360M": (960, 32, 15, 5, 2560, 49_152),
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
}
ROWS, PROMPT_LEN, NEW_TOKENS = 64, 32, 32
TRAIN_ROWS, TRAIN_LEN = 8, 256
WORK = ("sampling", "learning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens per CPU second of one thread, the share of products in that time, and the peak memory of the process in GB."""

    rate: float
    products: float
    peak: float


def measure() -> list[dict[str, object]]:
    """Sampling and learning apart, in both dtypes."""
    entries: list[tuple[str, float, str]] = []
    last = list(SIZES).index(os.environ.get("KLEAR_GROWTH", list(SIZES)[-1]))
    with tempfile.TemporaryDirectory() as place:
        for size in list(SIZES)[: last + 1]:
            folder = Path(place) / size
            _write(folder, size)
            for dtype in DTYPES:
                for work in WORK:
                    command = [sys.executable, __file__, work, str(folder), dtype]
                    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                    cost = Cost(**json.loads(output.splitlines()[-1]))
                    name = f"growth/{size}/{work}/{dtype}"
                    print(f"{name}: {cost}", flush=True)  # as it comes, because large sizes take minutes
                    entries.append((f"{name}/rate", cost.rate, "tokens/cpu-s"))
                    entries.append((f"{name}/products", cost.products, "share of the time"))
                    entries.append((f"{name}/peak_memory", cost.peak, "GB"))
    versions = {"torch": torch.__version__}
    return [{"name": n, "value": v, "unit": u, "target": "-", "ok": True, "versions": versions} for n, v, u in entries]


def _write(folder: Path, size: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, mlp, vocab = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def _plain_rate(dtype: Dtype) -> float:
    """FLOP per CPU second of a product of 1024 by 1024 matrices, the best of several."""
    a = torch.randn(1024, 1024).to(DTYPES[dtype])
    seconds = []
    for _ in range(20):
        started = time.process_time()
        a @ a
        seconds.append(time.process_time() - started)
    return 2 * 1024**3 / min(seconds)


def _cost(tokens: int, seconds: float, flop: float, dtype: Dtype) -> Cost:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return Cost(rate=tokens / seconds, products=flop / _plain_rate(dtype) / seconds, peak=peak)


def _sampling(folder: Path, dtype: Dtype) -> Cost:
    torch.set_num_threads(1)
    params = SamplingParams(
        num_samples=ROWS // 8,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=NEW_TOKENS,
        seed=0,
    )

    async def main() -> tuple[int, float]:
        engine = TorchEngine(folder, TorchEngineConfig(dtype=dtype), num_threads=1)
        await engine.generate((1, 2, 3), params)  # warms up
        started = time.process_time()
        prompts = [tuple(range(10 + i, 10 + i + PROMPT_LEN)) for i in range(8)]
        groups = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        seconds = time.process_time() - started
        await engine.close()
        return sum(len(c.token_ids) for group in groups for c in group), seconds

    tokens, seconds = asyncio.run(main())
    flops = FlopCount.of(load_model(folder, device="meta"))
    return _cost(tokens, seconds, 2 * tokens * (flops.layer_params + flops.head_params), dtype)


def _learning(folder: Path, dtype: Dtype) -> Cost:
    torch.set_num_threads(1)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    policy = parallelise(load_model(folder, device="cpu"), world, dtype=dtype, activation_checkpointing=False)
    flops = FlopCount.of(policy)
    updater = Updater(policy, OptimConfig(lr=1e-5), world, num_steps=10)
    ids = torch.randint(0, 260, (TRAIN_ROWS, TRAIN_LEN), generator=torch.Generator().manual_seed(0)).tolist()
    mask = (False,) * PROMPT_LEN + (True,) * (TRAIN_LEN - PROMPT_LEN)
    rows = [SftExample(problem_id=str(i), token_ids=tuple(row), loss_mask=mask) for i, row in enumerate(ids)]
    seconds = []
    for step in range(3):
        started = time.process_time()
        batch = pack(rows, tokens_per_microbatch=16_384)
        updater.update(batch, sft_heads(batch.micro_batches, rows, "token"), step=step)
        seconds.append(time.process_time() - started)
    tokens = TRAIN_ROWS * TRAIN_LEN
    return _cost(tokens, min(seconds[1:]), flops.step(rows), dtype)


if __name__ == "__main__":
    work, folder, dtype = sys.argv[1:]
    print(json.dumps(asdict({"sampling": _sampling, "learning": _learning}[work](Path(folder), dtype))))  # type: ignore[arg-type]
