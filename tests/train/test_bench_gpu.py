"""The GPU benchmark, run whole on a CPU with a tiny model: what it prints there means nothing, that it runs does."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from flows.cli import bench
from klear_core.config.evaluate import TorchEngineConfig, TorchEngineRuntime
from klear_core.errors import ConfigError

BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "train" / "bench_gpu.py"))


def tiny_plan(**changes):
    model = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    settings = {
        "device": torch.device("cpu"),
        "dtype": "float32",
        "model": model,
        "row_lengths": (20, 9, 6),
        "lengths": (8, 24),
        "num_prompt_tokens": 4,
        "max_logits": (96 * 8, 96 * 64),
        "product_size": 32,
        "warmups": 1,
        "repeats": 2,
    }
    return BENCH["Plan"](**settings | changes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_measure_of_the_gpu_benchmark_comes_out_of_a_tiny_model_on_cpu(dtype):
    found = {m["name"]: m for m in BENCH["measures"](tiny_plan(dtype=dtype))}
    runs = {
        f"{run}/{what}"
        for run in ("sft/step", "rl/update", "length_8", "length_24", "length_24/recompute_none")
        for what in ("mfu", "tokens_per_s", "memory")
    }
    assert runs | {"gpu/product/tflops", "gpu/peak/tflops", "head/products", "head/is_compiled"} <= found.keys()
    assert {"weight_sync/seconds", "weight_sync/rate"} <= found.keys()
    for name, measure in found.items():
        assert math.isfinite(measure["value"]), name
        assert measure["value"] > 0 or name.endswith(("memory", "is_compiled")), name
        assert measure["ok"] == (measure["target"] == "-" or eval(f"{measure['value']!r} {measure['target']}")), measure


@pytest.mark.slow
def test_every_measure_of_an_engine_comes_out_of_our_sampler_on_cpu():
    """In vLLM's place; its log-probs are the learner's, so that the gap is their rounding at every position."""
    engine_bench = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "generate" / "bench_gpu_engine.py"))
    model = tiny_plan().model | {"vocab_size": 264, "head_dim": 16, "max_position_embeddings": 128}
    plan = engine_bench["Plan"](
        device=torch.device("cpu"),
        dtype="float32",
        model=model,
        engines={"ours": TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu"))},
        num_answers=4,
        num_cached=40,
        num_new=8,
        positions=(10, 60),
    )
    found = {m["name"]: m["value"] for m in engine_bench["measures"](plan)}
    assert found.keys() == {
        f"ours/{what}" for what in ("start", "prefill", "decoding", "weights_from_disk", "gap_at_10", "gap_at_60")
    }
    assert found["ours/gap_at_10"] < 1e-4
    assert found["ours/gap_at_60"] < 1e-4
    assert all(value > 0 for name, value in found.items() if "gap" not in name)


def test_the_measured_model_is_qwen3_1_7b():
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**BENCH["QWEN3_1_7B"]))
    assert model.num_parameters() == 1_720_574_976  # that of the published safetensors, with the tied head counted once


def test_rows_that_do_not_fit_are_trained_with_activation_checkpointing():
    asked = []

    def run(checkpointing):
        asked.append(checkpointing)
        if not checkpointing:
            raise torch.OutOfMemoryError("no")
        return "ran"

    assert BENCH["_fitting"](run) == (True, "ran")
    assert asked == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_klear_bench_gpu_says_that_there_is_no_gpu():
    with pytest.raises(ConfigError, match="no CUDA device"):
        bench("gpu")
