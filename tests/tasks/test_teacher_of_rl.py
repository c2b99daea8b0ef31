"""The teacher of RL's own answers runs on the driver's CPU, if it fits one."""

import json
from pathlib import Path

import pytest

from klear_core.config.evaluate import TorchEngineConfig, TorchEngineRuntime
from klear_core.errors import ResourceError
from tasks.resources import on_this_cpu


def model(folder: Path, *, hidden: int) -> Path:
    """The config of a Qwen3 with two layers; nothing reads its weights."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": hidden // 8}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | sizes | heads))
    return folder


def test_it_leaves_the_gpus_to_others(tmp_path: Path) -> None:
    engine = on_this_cpu(TorchEngineConfig(dtype="bfloat16"), model(tmp_path / "m", hidden=64), key="rl_teacher")
    assert engine == TorchEngineConfig(dtype="bfloat16", runtime=TorchEngineRuntime(device="cpu"))


def test_one_too_large_for_a_cpu_is_refused_unless_the_settings_ask_for_it(tmp_path: Path) -> None:
    """Two layers of 13 * 4096 ** 2 weights and more are above 200 million."""
    large = model(tmp_path / "m", hidden=4096)
    with pytest.raises(ResourceError, match=r"rl_teacher\.engine\.runtime\.device = 'auto'"):
        on_this_cpu(TorchEngineConfig(), large, key="rl_teacher")
    asked = TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu"))
    assert on_this_cpu(asked, large, key="rl_teacher") == asked
