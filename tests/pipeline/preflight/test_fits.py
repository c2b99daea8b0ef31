"""`klear plan` refuses what does not fit into the GPUs, and names settings that do."""

import json
from pathlib import Path

import pytest
from test_hf_config import write_config

from klear_core.config.load import load_profile
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.capacity import memory_problems

CONFIGS = Path(__file__).parents[3] / "configs"
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 36_864,
    "rms_norm_eps": 1e-6,
}


def _problems(*overrides: str, profile: str = "klear_8b") -> list[str]:
    return list(memory_problems(PendingWork.of(load_profile(CONFIGS / profile, overrides), None, ())))


def _advice_on_sharing(problems: list[str]) -> str:
    (problem,) = [p for p in problems if p.startswith("rl.rollout.engine.runtime")]
    return problem


def test_the_8b_profile_fits_into_80_gb() -> None:
    assert _problems("hardware.gpu_memory_gb=80") == []


def test_too_small_gpus_are_refused_with_settings_that_fit() -> None:
    problems = _problems("hardware.gpu_memory_gb=24")
    assert [p.split(":")[0] for p in problems] == ["sft.runtime", "rl.runtime", "rl_code.runtime"]
    assert "set context_parallel = 4, num_workers = 16 in sft.runtime" in problems[0]
    advised = ("sft.runtime.context_parallel=4", "sft.runtime.num_workers=16")
    assert not any(p.startswith("sft.") for p in _problems("hardware.gpu_memory_gb=24", *advised))


def test_more_gpus_are_advised_only_where_those_there_are_not_enough() -> None:
    """3 ranks of SFT need 98 GB, and 58 with activation checkpointing."""
    three = ("hardware.gpu_memory_gb=80", "sft.max_tokens=8192", "sft.runtime.num_workers=3")
    alone = ("sft.runtime.context_parallel=1", "sft.runtime.tokens_per_microbatch=8192")
    advised, off = (f"sft.runtime.activation_checkpointing={value}" for value in ("true", "false"))
    problem = _problems(*three, *alone, off)[0]
    assert "set activation_checkpointing = true in sft.runtime" in problem
    assert not any(p.startswith("sft.") for p in _problems(*three, *alone, advised))


def test_without_known_gpus_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert _problems() == []


def test_a_learner_and_an_engine_on_one_gpu_must_leave_room_for_each_other() -> None:
    shared = ["rl.runtime.learner_gpus=0.5", "rl.runtime.rollout_gpus=0.5", "rl.runtime.num_workers=8"]
    problems = _problems("hardware.gpu_memory_gb=80", *shared)
    of_engine = [p for p in problems if p.startswith("rl.rollout.engine.runtime")]
    assert "sleep_mode = false" in of_engine[0]
    # 8 ranks keep 12 * 8.19e9 / 8 = 12.3 GB each, 14.5 with the margin: 80 - 14.5 is 81 % of the GPU, less than 90 %.
    assert "set 0.81 at most" in of_engine[1]


ONE_GPU_8B = ("model.path=models/Qwen3-8B", "hardware.gpu_memory_gb=80")


def test_no_share_of_a_gpu_is_named_where_the_learner_leaves_none() -> None:
    told = _advice_on_sharing(_problems(*ONE_GPU_8B, profile="single_gpu"))
    assert "the learner keeps 105.7 of 80 GB" in told
    assert told.endswith("set num_workers = 4 in rl.runtime, or cpu_offload = true in rl.runtime")
    for followed in ("rl.runtime.num_workers=4", "rl.runtime.cpu_offload=true"):
        assert not any(p.startswith("rl.") for p in _problems(*ONE_GPU_8B, followed, profile="single_gpu"))


def test_the_share_that_is_named_holds_the_engine_too() -> None:
    small = ("model.path=models/Qwen3-8B", "hardware.gpu_memory_gb=24", "rl.lora.rank=16", "sft.lora.rank=16")
    told = _advice_on_sharing(_problems(*small, profile="single_gpu"))
    assert told.endswith("cpu_offload = true in rl.runtime with gpu_memory_utilization = 0.9")
    followed = ("rl.runtime.cpu_offload=true", "rl.rollout.engine.runtime.gpu_memory_utilization=0.9")
    assert not any(p.startswith("rl.") for p in _problems(*small, *followed, profile="single_gpu"))


def test_where_nothing_makes_room_for_both_they_get_gpus_of_their_own() -> None:
    told = _advice_on_sharing(_problems("hardware.gpu_memory_gb=3", profile="single_gpu"))
    assert "set learner_gpus and rollout_gpus to whole numbers" in told


def test_an_engine_must_hold_the_longest_sequence_that_it_takes_and_not_only_its_answers(tmp_path: Path) -> None:
    """vLLM refuses to start otherwise. The profile's 36,864 positions of 147,456 bytes are 5.4 GB, 1,024 are 0.15."""
    write_config(tmp_path, json.dumps(QWEN3_8B))
    model = (f"model.path={tmp_path}", "rl.rollout.sampling.max_new_tokens=1024", "hardware.gpu_memory_gb=80")
    engine = "rl.rollout.engine={kind='vllm', runtime={kv_cache_mb=1000}}"
    (problem,) = _problems(*model, engine)
    assert "not one answer of 36864 fits; set kv_cache_mb = " in problem
    assert problem.endswith(
        "or rl.rollout.engine.max_model_len, which is the model's 36864, to that of a prompt and its answer"
    )
    limited = "rl.rollout.engine={kind='vllm', max_model_len=5120, runtime={kv_cache_mb=1000}}"
    assert _problems(*model, limited) == []


def test_an_engine_that_is_given_too_little_memory_is_told_how_much_is_enough() -> None:
    engine = "rl.rollout.engine.runtime"
    (problem,) = _problems("hardware.gpu_memory_gb=80", f"{engine}.gpu_memory_utilization=0.05")
    assert problem.endswith("set gpu_memory_utilization = 0.18")
    assert _problems("hardware.gpu_memory_gb=80", f"{engine}.gpu_memory_utilization=0.18") == []
    (problem,) = _problems("hardware.gpu_memory_gb=80", f"{engine}.kv_cache_mb=10")
    # Half of 36,864 tokens of 147,456 bytes is 2,592 MiB, here rounded up twice: vLLM gets `kv_cache_mb << 20` bytes.
    assert problem.endswith("set kv_cache_mb = 2593")
    assert _problems("hardware.gpu_memory_gb=80", f"{engine}.kv_cache_mb=2593") == []
