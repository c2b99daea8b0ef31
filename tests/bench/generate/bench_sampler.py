"""The torch engine against `transformers.generate`: same tiny model, prompts, token budget, precision and thread; CPU tokens a second.

`full_length`: equal prompts and no end tokens, so that both sides do the same work. `rollout`: as RL samples, prompts of mixed
lengths and answers that end by themselves. Both must draw from the same distribution: their mean log-probs are compared.

A given model is measured beside vLLM's CPU build too where that is installed, which Klear's command is not beside it:
`.venv-vllm/bin/python tests/bench/generate/bench_sampler.py models/SmolLM2-135M`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from klear_core.config.evaluate import TorchEngineConfig
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import SamplingParams
from klear_core.train.model import DTYPES, Dtype

BATCH_SIZES, PROMPT_LEN, NEW_TOKENS, GROUP, VOCAB = (64, 256, 512), 24, 80, 8, 264
END_IDS, NEVER_ID, PAD_ID = list(range(200, 209)), VOCAB, 256
"""Nine of 264 nearly equal tokens end an answer after some 29; an id beyond the vocabulary never does."""
TARGET_RATIO, REPEATS = 5.0, 5
TARGET_GIVEN = 3.0
"""Of a model of 100 million parameters, at whose size matrix products are most of the time."""
TARGET_RATE = 24_000.0
"""Tokens per CPU second at 256 rows, one thread; what a hand-written sampler of this model reached before."""


def measure(model: Path | None = None) -> list[dict[str, object]]:
    """Ratios engine over transformers: each side's best of five after a warm-up, in turns, for a machine's speed changes by the second.

    A given `model` is measured at 64 rows in float32 and bfloat16, against the faster dtype of transformers.
    """
    torch.set_num_threads(1)
    if model is not None:
        return _measure_given(model)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ends in (False, True):
            tiny = _model(Path(folder), ends=ends)
            for batch_size in BATCH_SIZES:
                prompts = _prompts(batch_size // GROUP, is_mixed=ends)
                runs = [
                    (_engine_run(Path(folder), prompts), _transformers_run(tiny, prompts)) for _ in range(1 + REPEATS)
                ]
                (ours, our_logp), (theirs, their_logp) = (_best(side[1:]) for side in zip(*runs, strict=True))
                name = f"sampler/{'rollout' if ends else 'full_length'}_{batch_size}"
                rows.append(
                    _row(f"{name}/ratio", ours / theirs, "x", f">= {TARGET_RATIO:g}", ours / theirs >= TARGET_RATIO)
                )
                rows.append(
                    _row(
                        f"{name}/engine_rate",
                        ours,
                        "tokens/cpu-s",
                        f">= {TARGET_RATE:g} at 256",
                        batch_size < 256 or ours >= TARGET_RATE,
                    )
                )
                rows.append(_row(f"{name}/transformers_rate", theirs, "tokens/cpu-s", "", True))
                gap = abs(our_logp - their_logp)
                rows.append(_row(f"{name}/mean_logp_gap", gap, "nats", "<= 0.1", gap <= 0.1))
    return rows


def _measure_given(folder: Path) -> list[dict[str, object]]:
    prompts = _prompts(BATCH_SIZES[0] // GROUP, is_mixed=False)
    theirs = {dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in DTYPES}
    for model in theirs.values():
        model.generation_config.eos_token_id = None  # of full length; ours may end earlier
    vllm = _vllm(folder) if importlib.util.find_spec("vllm") else None
    runs: dict[str, list[tuple[int, float, float]]] = {}
    for _ in range(3):
        for dtype, given in theirs.items():
            runs.setdefault(f"klear_{dtype}", []).append(_engine_run(folder, prompts, dtype))
            runs.setdefault(f"transformers_{dtype}", []).append(_transformers_run(given, prompts))
        if vllm is not None:
            runs.setdefault("vllm_bfloat16", []).append(_vllm_run(vllm, prompts))
    rates = {side: _best(found)[0] for side, found in runs.items()}
    best = max(rates["transformers_float32"], rates["transformers_bfloat16"])
    name, ratio = f"sampler/{folder.name}_{BATCH_SIZES[0]}", rates["klear_bfloat16"] / best
    rows = [_row(f"{name}/{side}", rate, "tokens/cpu-s", "", True, folder) for side, rate in rates.items()]
    rows.append(
        _row(f"{name}/float32_ratio", rates["klear_float32"] / rates["transformers_float32"], "x", "", True, folder)
    )
    rows.append(_row(f"{name}/ratio_of_best", ratio, "x", f">= {TARGET_GIVEN:g}", ratio >= TARGET_GIVEN, folder))
    return rows


def _prompts(num_prompts: int, *, is_mixed: bool) -> list[list[int]]:
    lengths = [PROMPT_LEN // 2 + (5 * i) % PROMPT_LEN if is_mixed else PROMPT_LEN for i in range(num_prompts)]
    return [[65 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate(lengths)]


def _row(name: str, value: float, unit: str, target: str, is_ok: bool, folder: Path | None = None) -> dict[str, object]:
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": "d64 L3 H4 K2 ff192, float32, 1 thread" if folder is None else f"{folder.name}, 1 thread",
    }
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": is_ok, "versions": versions}


def _best(runs: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Best tokens per CPU second, and the mean log-prob of a token."""
    return max(tokens / cpu_s for tokens, cpu_s, _ in runs), runs[0][2]


def _engine_run(folder: Path, prompts: list[list[int]], dtype: Dtype = "float32") -> tuple[int, float, float]:
    params = SamplingParams(
        num_samples=GROUP,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=NEW_TOKENS,
        seed=0,
    )

    async def main() -> tuple[int, float, float]:
        engine = TorchEngine(folder, TorchEngineConfig(dtype=dtype), num_threads=1)
        started = time.process_time()
        groups = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        cpu_s = time.process_time() - started
        await engine.close()
        logps = [logp for group in groups for completion in group for logp in completion.logps]
        return len(logps), cpu_s, sum(logps) / len(logps)

    return asyncio.run(main())


def _transformers_run(model: Any, prompts: list[list[int]]) -> tuple[int, float, float]:
    """Its default, dynamic cache, which is its fastest on CPU at these sizes; log-probs too, as RL needs them."""
    torch.manual_seed(0)
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = torch.tensor([[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts]).repeat_interleave(
        GROUP, 0
    )
    started = time.process_time()
    output = model.generate(
        ids_BT,
        attention_mask=(ids_BT != PAD_ID).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    logps_BT = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    cpu_s = time.process_time() - started
    new_BT = output.sequences[:, ids_BT.shape[1] :]
    is_end_BT = torch.isin(new_BT, torch.tensor(END_IDS)) & (model.generation_config.eos_token_id == END_IDS)
    is_real_BT = is_end_BT.cumsum(-1) - is_end_BT.long() == 0
    return int(is_real_BT.sum()), cpu_s, float(logps_BT[is_real_BT].mean())


def _vllm(folder: Path) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    from vllm import LLM

    return LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, enable_prefix_caching=True, kv_cache_memory_bytes=1 << 30
    )


def _vllm_run(llm: Any, prompts: list[list[int]]) -> tuple[int, float, float]:
    from vllm import SamplingParams as VllmParams

    params = VllmParams(n=GROUP, temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    started = time.process_time()
    groups = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    cpu_s = time.process_time() - started
    samples = [sample for group in groups for sample in group.outputs]
    logp = sum(sample.cumulative_logprob for sample in samples)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    return num_tokens, cpu_s, logp / num_tokens


def _model(folder: Path, *, ends: bool) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.1)
        model.lm_head.weight.normal_(std=0.1)
    model.generation_config.eos_token_id = END_IDS if ends else NEVER_ID
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return model


if __name__ == "__main__":
    for row in measure(*map(Path, sys.argv[1:])):
        print(json.dumps(row))
