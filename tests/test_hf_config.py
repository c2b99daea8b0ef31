"""A model folder that cannot be used is named with what is wrong in it."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.train import HfModelConfig
from klear_core.errors import ConfigError
from klear_core.generate.model_size import known_size, size_of_hf
from klear_core.hf_config import check_architecture, read_hf_config, unusual_keys
from klear_core.pipeline.costs.estimate import estimate
from klear_core.pipeline.preflight.checks import problems_with

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
WRONG = {
    "keys of another kind": (json.dumps(GPT2), r"no hidden_size; .*\(model_type 'gpt2'\)"),
    "a value of another kind": (json.dumps(QWEN3 | {"hidden_size": "wide"}), "hidden_size = 'wide': "),
    "half a file": ('{"model_type": "qwen3", ', "not JSON"),
    "another thing": ("[1, 2]", r"its content = \[1, 2\]"),
    "bytes": ("\udcff", "not JSON"),
}


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    return folder


@pytest.mark.parametrize("wrong", WRONG)
def test_a_config_that_cannot_be_used_is_a_config_error_that_names_file_and_key(tmp_path: Path, wrong: str) -> None:
    text, told = WRONG[wrong]
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'config.json'}: .*{told}"):
        read_hf_config(write_config(tmp_path, text))


@pytest.mark.parametrize("wrong", WRONG)
def test_plan_and_preflight_say_what_is_wrong_with_the_model_and_go_on(tmp_path: Path, wrong: str) -> None:
    folder = write_config(tmp_path / "model", WRONG[wrong][0])
    config = PipelineConfig(
        workspace=WorkspaceConfig(root=str(tmp_path / "ws")),
        benchmarks=(BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout")),),
        model=HfModelConfig(path=str(folder)),
    )
    assert [
        p for p in problems_with(config) if p.startswith(f"model.path = {str(folder)!r}: {folder / 'config.json'}: ")
    ]
    assert {row.memory_gb for row in estimate(config)} == {None}


def test_the_window_of_the_settings_raises_that_of_the_folder_and_never_lowers_it(tmp_path: Path) -> None:
    config = read_hf_config(write_config(tmp_path, json.dumps(QWEN3)))
    assert (config.window(None), config.window(1024), config.window(128)) == (512, 1024, 512)


def test_of_both_names_of_the_rotary_settings_the_one_that_transformers_reads_counts(tmp_path: Path) -> None:
    """The cards of Qwen3 say to add `rope_scaling`, and transformers 5 has written `rope_parameters`."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    both = QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": yarn}
    folder = write_config(tmp_path, json.dumps(both))
    config, theirs = read_hf_config(folder), AutoConfig.from_pretrained(folder).rope_parameters
    assert (config.rope_type, config.theta) == (theirs["rope_type"], theirs["rope_theta"]) == ("yarn", 10_000.0)
    assert list(unusual_keys(config)) == ["rope_scaling"]
    for is_trained in (True, False):
        with pytest.raises(
            ConfigError, match=r"config\.json: rope_scaling .* rope_theta = 1000000.0 is not read and 10000"
        ):
            check_architecture(folder, is_trained=is_trained)
    check_architecture(write_config(tmp_path, json.dumps(both | {"rope_theta": 1e6})))


def test_of_a_mixture_a_token_uses_a_few_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30 billion weights of which 3 are active, as its name says."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    mixture = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    config = {**QWEN3, **sizes, **mixture, "model_type": "qwen3_moe", "vocab_size": 151_936, "head_dim": 128}
    folder = write_config(tmp_path, json.dumps(config | {"tie_word_embeddings": False}))
    size = size_of_hf(read_hf_config(folder))
    assert size == known_size("Qwen/Qwen3-30B-A3B-Thinking-2507")
    assert size.num_params == read_hf_config(folder).num_params == pytest.approx(30.5e9, rel=0.01)
    assert size.embedding_params + 48 * size.active_layer_params == pytest.approx(3.3e9, rel=0.02)
    mixtral = {"num_local_experts": 8, "moe_intermediate_size": None, "intermediate_size": 14_336}
    of_mixtral = read_hf_config(
        write_config(tmp_path / "mixtral", json.dumps(config | mixtral | {"num_experts": None}))
    )
    assert of_mixtral.mlp_size == 8 * 14_336
    assert of_mixtral.idle_mlp_size == 0  # 8 of 8


@pytest.mark.parametrize(
    ("model_type", "active", "all_of_them"),
    [
        ("qwen2_moe", 4 * 1408 + 5632, 60 * 1408 + 5632),  # a shared expert as wide as four
        ("qwen3_next", 10 * 512 + 512, 512 * 512 + 512),
        ("deepseek_v3", 8 * 2048 + 1 * 2048, 256 * 2048 + 1 * 2048),
        ("glm4_moe", 8 * 1408 + 1 * 1408, 128 * 1408 + 1 * 1408),
        ("exaone_moe", 8 * 1024 + 1 * 1024, 64 * 1024 + 1 * 1024),
        ("granitemoehybrid", 2 * 11_008 + 1024, 8 * 11_008 + 1024),
        ("qwen3_5_moe", 8 * 512 + 512, 256 * 512 + 512),
        ("mixtral", 2 * 14_336, 8 * 14_336),
    ],
)
def test_every_token_uses_the_shared_experts(tmp_path: Path, model_type: str, active: int, all_of_them: int) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    assert (config.mlp_size, config.mlp_size - config.idle_mlp_size) == (all_of_them, active)


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_5_moe"])
def test_a_mixture_whose_keys_are_in_another_may_be_scored_and_not_trained(tmp_path: Path, model_type: str) -> None:
    published = AutoConfig.for_model(model_type)
    published.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    assert (config.model_type, config.hidden_size) == (model_type, published.text_config.hidden_size)
    check_architecture(tmp_path, is_trained=False)
    with pytest.raises(ConfigError, match=f"{model_type} is a mixture of"):
        check_architecture(tmp_path)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_that_generates_no_text_is_refused_whether_trained_or_not(tmp_path: Path, is_trained: bool) -> None:
    def check(name: str) -> None:
        write_config(tmp_path, json.dumps(QWEN3 | {"architectures": [name]}))
        check_architecture(tmp_path, is_trained=is_trained)

    check("Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match=r"architectures = \['Qwen3ForSequenceClassification'\]"):
        check("Qwen3ForSequenceClassification")


def test_a_model_that_reads_pictures_too_may_be_sampled_from_and_not_trained(tmp_path: Path) -> None:
    write_config(tmp_path, json.dumps(QWEN3 | {"architectures": ["Llama4ForConditionalGeneration"]}))
    check_architecture(tmp_path, is_trained=False)
    with pytest.raises(ConfigError, match="Klear trains causal language models, …ForCausalLM"):
        check_architecture(tmp_path)
