"""The policy's forward pass against transformers, packed against alone, and what is written against what is read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import packed, random_rows, rows_of_groups, tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from klear_core.errors import ConfigError
from klear_core.generate.model_weights import tensor_shapes
from klear_core.hf_config import check_architecture
from klear_core.train.distributed import full_weights, weight_shapes
from klear_core.train.logps import fused_loss, token_logps
from klear_core.train.model import export_model, load_model, pick_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


WAYS = [(random_rows([5, 31, 12, 12, 48, 7]), {}), (rows_of_groups([6, 3, 1]), {"shares_prompts": True})]


def logps_of(policy, rows, tokens=1 << 20, **how):
    """Log-probs of each row's loss tokens, by row."""
    found = {}
    for micro in packed(rows, tokens, **how).micro_batches:
        out = policy(micro, lambda h, w, m=micro: token_logps(h, w, m.target_N))
        found.update(zip(micro.rows, out.logp_N.detach().split(micro.counts), strict=True))
    return [found[i] for i in range(len(rows))]


def gradient_of(folder, rows, tokens, **how):
    policy = load_model(folder, device="cpu")
    batch = packed(rows, tokens, **how)
    for micro in batch.micro_batches:
        policy(
            micro, lambda h, w, m=micro: fused_loss(h, w, m.target_N, lambda lp, _e, _at: -lp / batch.num_loss_tokens)
        ).loss.backward()
    return [p.grad for p in policy.parameters()]


def test_log_probs_equal_those_of_transformers(folder):
    (row,) = random_rows([20])
    ids = torch.tensor([row.token_ids])
    plain = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(ids).logits[0, :-1].log_softmax(-1)
    )
    want = plain.gather(1, ids[0, 1:, None])[2:, 0]
    torch.testing.assert_close(logps_of(load_model(folder, device="cpu"), [row])[0], want, atol=1e-5, rtol=0)


def test_a_folder_in_many_shards_is_the_same_model(folder, tmp_path):
    whole = load_model(folder, device="cpu")
    shutil.copytree(folder, tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    whole.hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    cut = load_model(tmp_path / "many", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))


@pytest.mark.parametrize(("rows", "how"), WAYS)
def test_packed_rows_have_the_log_probs_that_they_have_alone(folder, rows, how):
    policy = load_model(folder, device="cpu")
    together = logps_of(policy, rows, **how)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i], logps_of(policy, [row])[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("rows", "how"), WAYS)
def test_gradient_does_not_depend_on_how_rows_are_cut_up(folder, rows, how):
    alone = gradient_of(folder, rows, 1)
    for tokens in (50, 1 << 20):
        torch.testing.assert_close(gradient_of(folder, rows, tokens, **how), alone, atol=1e-6, rtol=1e-4)


def test_another_rows_tokens_do_not_matter(folder):
    policy = load_model(folder, device="cpu")
    first, second = random_rows([10, 10])
    other = random_rows([10], seed=1)[0]
    a, b = (logps_of(policy, [first, beside])[0] for beside in (second, other))
    assert torch.equal(a, b)


def test_another_answer_to_the_same_prompt_does_not_matter(folder):
    policy = load_model(folder, device="cpu")
    first, second = rows_of_groups([2])
    other = replace(second, token_ids=(*second.token_ids[:-4], 1, 2, 3, 4))
    a, b = (logps_of(policy, [first, beside], shares_prompts=True)[0] for beside in (second, other))
    assert torch.equal(a, b)


def test_exported_weights_load_as_they_were(folder, tmp_path):
    policy = load_model(folder, device="cpu")
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    export_model(full_weights(policy), folder, tmp_path / "model", max_position_embeddings=100)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(policy.hf.parameters(), again.parameters(), strict=True))
    assert again.config.max_position_embeddings == 100
    assert again.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_export_stops_at_the_end_of_a_turn_and_at_what_the_source_stopped_at(folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 256, "temperature": 0.6, "do_sample": True})
    )
    export_model(full_weights(load_model(source, device="cpu")), source, tmp_path / "model")
    made = tmp_path / "model"
    assert AutoTokenizer.from_pretrained(made).eos_token == "<|im_end|>"
    generation = json.loads((made / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([258, 256], 0.6)
    assert json.loads((made / "config.json").read_text())["eos_token_id"] == 258


def test_sampling_settings_that_transformers_reads_and_refuses_to_save_are_written_as_they_were(folder, tmp_path):
    """Vicuna and others state a temperature without `do_sample`: the export at the end of a training must not fail."""
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    stated = {"temperature": 0.9, "top_p": 0.6, "pad_token_id": -1}
    (source / "generation_config.json").write_text(json.dumps(stated))
    export_model(full_weights(load_model(source, device="cpu")), source, tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert stated | {"eos_token_id": [258]} == {key: written[key] for key in (*stated, "eos_token_id")}


@pytest.mark.parametrize("renamed", ["model.layers.0.self_attn.q_proj.base_layer.weight", "q_proj.weight"])
def test_weights_without_a_tensor_of_the_model_are_refused_instead_of_drawn_at_random(folder, tmp_path, renamed):
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[renamed] = weights.pop(name)  # as a model that was saved with its LoRA adapters has it
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{source}: 1 of the model's tensors are not in its weights \({name}\)"):
        load_model(source, device="cpu")


def test_a_head_of_its_own_beside_a_config_that_ties_it_is_refused(folder, tmp_path):
    """transformers would train it apart, and engines, which go by the config, would never use it."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, model / "model.safetensors", metadata={"format": "pt"})
    load_model(model, device="cpu")
    save_file(weights | {"lm_head.weight": 2 * embedding}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = true, but .* another lm_head\.weight"):
        load_model(model, device="cpu")


def test_export_never_lowers_the_window_and_replaces_what_a_killed_run_left(folder, tmp_path):
    for _ in range(2):
        export_model(
            full_weights(load_model(folder, device="cpu")), folder, tmp_path / "model", max_position_embeddings=16
        )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["max_position_embeddings"] == 64
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_export_in_bfloat16_says_so_in_the_config(folder, tmp_path):
    export_model(full_weights(load_model(folder, device="cpu"), dtype="bfloat16"), folder, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised \(fp8\)"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(folder, tmp_path, change, complaint):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=complaint):
        load_model(tmp_path, device="cpu")


def test_attention_dropout_is_refused(folder):
    policy = load_model(folder, device="cpu")
    policy.hf.base_model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match=r"dropout 0\.1"):
        logps_of(policy, random_rows([5]))


def test_a_model_that_drops_row_bounds_is_refused(folder):
    policy = load_model(folder, device="cpu")
    inner = policy.hf.base_model.forward
    policy.hf.base_model.forward = lambda micro, **given: inner(**given)
    with pytest.raises(ConfigError, match="does not pass attention arguments"):
        logps_of(policy, random_rows([5, 6]))


def test_asking_for_a_missing_gpu_is_a_config_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda")


def test_dropout_is_refused_for_the_old_log_probs_would_not_be_those_of_the_policy(tmp_path):
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    StableLmForCausalLM(StableLmConfig(**sizes, num_key_value_heads=2, hidden_dropout=0.1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"dropout of 0\.1"):
        load_model(tmp_path, device="cpu")


def test_layers_whose_state_would_flow_from_row_to_row_are_refused(folder, tmp_path):
    """Falcon-H1, Jamba, Bamba and Zamba mix state-space layers with attention, and name them under no `layer_types`."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_d_conv": 4}))
    with pytest.raises(ConfigError, match=r"mamba_d_conv=4; .* carry a state from one packed row to the next"):
        check_architecture(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "num_experts"),
    [
        ("qwen3_moe", 128),
        ("mixtral", 8),
        ("gpt_oss", 128),
        ("deepseek_v3", 256),
        ("ernie4_5_moe", 64),
        ("llama4_text", 16),
        ("llama4", 16),
        ("qwen3_5_moe", 256),
        ("dbrx", 4),
    ],
)
def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path, model_type: str, num_experts: int):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"{model_type} is a mixture of {num_experts} experts"):
        check_architecture(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"text_config": {"num_experts": 64}},
        {"text_config": {"n_routed_experts": 64, "num_experts_per_tok": 8}},
        {"thinker_config": {"text_config": {"num_local_experts": 64}}},
        {"moe_num_experts": [64, 32]},  # ERNIE-4.5-VL
    ],
)
def test_experts_are_found_wherever_a_config_states_them(folder: Path, tmp_path: Path, keys: dict[str, object]):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ConfigError, match="is a mixture of 64 experts"):
        check_architecture(tmp_path)


@pytest.mark.parametrize(
    "rope", [{"rope_parameters": {"rope_type": "dynamic"}}, {"rope_scaling": {"type": "longrope"}}]
)
def test_positions_that_depend_on_the_longest_row_beside_are_refused(folder, tmp_path, rope):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": None} | rope))
    with pytest.raises(ConfigError, match=r"(dynamic|longrope) positions"):
        check_architecture(tmp_path)


def test_a_tied_head_is_not_written_beside_its_embedding_in_any_dtype(folder, tmp_path):
    """Else the folder would name a weight that the learner, for whom it is the embedding once more, never offers."""
    policy = load_model(folder, device="cpu")
    for dtype in ("float32", "bfloat16"):
        export_model(full_weights(policy, dtype=dtype), folder, tmp_path / dtype)
        assert tensor_shapes(tmp_path / dtype) == weight_shapes(policy)
        head = AutoModelForCausalLM.from_pretrained(tmp_path / dtype).get_output_embeddings().weight
        assert torch.equal(head, policy.hf.get_input_embeddings().weight.to(head.dtype))
