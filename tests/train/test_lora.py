"""Adapters alone train; merged they are the model that engines, exports and peft see."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from peft import PeftModel
from pydantic import ValidationError
from tiny_models import ONE, nll_heads, packed, random_rows, tiny_folder
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from klear_core.config.rl import RlConfig
from klear_core.config.train import CheckpointConfig, LoraConfig, OptimConfig, TrainRuntime
from klear_core.errors import ConfigError
from klear_core.generate.model_weights import tensor_shapes
from klear_core.metrics import NullTelemetry
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import adapter_weights, full_weights, load_policy, weight_shapes
from klear_core.train.logps import token_logps
from klear_core.train.model import Adapters, FlopCount, export_model, load_model, save_adapter, without_adapters
from klear_core.train.packing import pack
from klear_core.train.step import Updater

BATCHES = [packed(random_rows([9, 20], seed=s)) for s in range(4)]
ALL = LoraConfig(rank=4, alpha=8)
SETTINGS = [ALL, LoraConfig(rank=2, alpha=8, targets=("q_proj", "up_proj"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


def load(folder, cfg=ALL, *, seed=1):
    return load_model(folder, device="cpu", adapters=Adapters(cfg=cfg, seed=seed))


def train(policy, first=0, last=3, updater=None):
    updater = updater or Updater(policy, OptimConfig(lr=1e-2, weight_decay=0.1), ONE, num_steps=4)
    for s in range(first, last):
        updater.update(BATCHES[s], nll_heads(BATCHES[s], 1 / 23), step=s)
    return updater


def logps(policy, batch=BATCHES[0]):
    (micro,) = batch.micro_batches
    with torch.no_grad():
        return policy(micro, partial(token_logps, target_N=micro.target_N)).logp_N


def raw(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def test_new_adapters_change_nothing_and_depend_on_their_seed_alone(folder):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    policy = load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(logps(policy), logps(load_model(folder, device="cpu")), atol=1e-6, rtol=0)
    torch.manual_seed(4)
    assert all(torch.equal(a, b) for a, b in zip(raw(policy).values(), raw(load(folder)).values(), strict=True))
    other = raw(load(folder, seed=2))
    assert any(not torch.equal(a, other[name]) for name, a in raw(policy).items())


@pytest.mark.parametrize("cfg", SETTINGS)
def test_only_adapters_train(folder, cfg):
    policy = load(folder, cfg)
    before = raw(policy)
    updater = train(policy)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    sizes = [p.numel() for group in updater.optimizer.param_groups for p in group["params"]]
    assert sum(sizes) == sum(p.numel() for name, p in before.items() if ".lora_" in name)


def test_targets_are_the_layers_that_are_named(folder):
    names = {
        name.rpartition(".lora_A")[0].rpartition(".")[2] for name in raw(load(folder, SETTINGS[1])) if "lora_A" in name
    }
    assert names == {"q_proj", "up_proj"}
    every = {name.rpartition(".lora_A")[0].rpartition(".")[2] for name in raw(load(folder)) if "lora_A" in name}
    assert every == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "self_attn", "q_norm"])
def test_a_target_that_is_no_linear_layer_of_the_blocks_is_refused(folder, target):
    with pytest.raises(ConfigError, match=rf"'{target}'; they have \['down_proj', 'gate_proj'"):
        load(folder, LoraConfig(targets=("q_proj", target)))


@pytest.mark.parametrize("cfg", SETTINGS)
def test_merged_weights_are_w_plus_scaled_b_a_under_the_base_models_names(folder, cfg):
    policy, plain = load(folder, cfg), load_model(folder, device="cpu")
    train(policy)
    merged, base, parts = full_weights(policy), full_weights(plain), raw(policy)
    assert list(merged) == list(base)
    assert weight_shapes(policy) == weight_shapes(plain) == {name: tuple(w.shape) for name, w in merged.items()}
    for name, weight in merged.items():
        stem = "hf." + name.removesuffix(".weight")
        want = base[name]
        if f"{stem}.lora_A.default.weight" in parts:
            product = parts[f"{stem}.lora_B.default.weight"] @ parts[f"{stem}.lora_A.default.weight"]
            assert product.abs().max() > 1e-4
            want = want + cfg.alpha / cfg.rank * product
        torch.testing.assert_close(weight, want, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("cfg", SETTINGS)
def test_the_merged_export_and_peft_on_the_base_compute_what_was_trained(folder, tmp_path, cfg):
    policy = load(folder, cfg)
    train(policy)
    export_model(full_weights(policy), folder, tmp_path / "model")
    save_adapter(adapter_weights(policy), policy.adapters, tmp_path / "adapter")
    assert tensor_shapes(tmp_path / "model") == weight_shapes(policy)
    torch.testing.assert_close(logps(load_model(tmp_path / "model", device="cpu")), logps(policy), atol=1e-5, rtol=0)
    assert (logps(policy) - logps(load_model(folder, device="cpu"))).abs().max() > 1e-2

    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(adapted(ids).logits, merged, atol=1e-5, rtol=0)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (cfg.rank, cfg.alpha)
    assert settings["target_modules"] == sorted(settings["target_modules"])


def test_the_same_adapter_is_written_to_the_same_bytes(folder, tmp_path):
    policy = load(folder)
    for name in ("a", "b", "a"):
        save_adapter(adapter_weights(policy), policy.adapters, tmp_path / name)
    files = [sorted((tmp_path / name).iterdir()) for name in ("a", "b")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert [f.name for f in files[0]] == ["adapter_config.json", "adapter_model.safetensors"]


def test_without_adapters_the_policy_is_the_base_model(folder):
    policy = load(folder)
    train(policy)
    trained = logps(policy)
    with without_adapters(policy.hf):
        torch.testing.assert_close(logps(policy), logps(load_model(folder, device="cpu")), atol=1e-6, rtol=0)
    assert torch.equal(logps(policy), trained)


def test_a_checkpoint_holds_adapters_only_and_resumes_bit_for_bit(folder, tmp_path):
    whole, checkpoints = load(folder), Checkpoints(tmp_path / "kept", CheckpointConfig(), ONE)
    updater = train(whole, 0, 2)
    checkpoints.save(2, whole, updater.optimizer, {})
    train(whole, 2, 4, updater)
    kept = FileSystemReader(tmp_path / "kept" / "step-00000002").read_metadata().state_dict_metadata
    adapters = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert {key.removeprefix("model.") for key in kept if key.startswith("model.")} == adapters
    moments = {key for key in kept if key.endswith(".exp_avg")}
    assert moments == {f"optimizer.state.{name}.exp_avg" for name in adapters}

    resumed = load(folder)
    updater = Updater(resumed, OptimConfig(lr=1e-2, weight_decay=0.1), ONE, num_steps=4)
    assert Checkpoints(tmp_path / "kept", CheckpointConfig(), ONE).load_latest(resumed, updater.optimizer) == (2, {})
    train(resumed, 2, 4, updater)
    assert all(torch.equal(p, raw(resumed)[name]) for name, p in raw(whole).items())


@pytest.fixture
def one_rank():
    """One rank in bf16 makes a process group of its own."""
    yield ONE
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_half(folder, cfg=ALL):
    return load_policy(
        folder, ONE, dtype="bfloat16", activation_checkpointing=False, adapters=Adapters(cfg=cfg, seed=1)
    )


def test_in_bfloat16_a_frozen_weight_takes_two_bytes_and_no_copy_is_made(folder, one_rank):
    policy, plain = load_half(folder), load_model(folder, device="cpu")
    held = {name: p.untyped_storage() for name, p in policy.named_parameters() if not p.requires_grad}
    updater = train(policy)
    frozen = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert {p.dtype for p in frozen.values()} == {torch.bfloat16}
    assert {name: p.untyped_storage().data_ptr() for name, p in frozen.items()} == {
        n: s.data_ptr() for n, s in held.items()
    }
    assert sum(s.nbytes() for s in held.values()) == 2 * sum(p.numel() for p in plain.parameters())
    assert {p.dtype for p in trained} == {torch.float32}
    assert {m.dtype for s in updater.optimizer.state.values() for m in s.values()} == {torch.float32}
    assert len(updater.optimizer.state) == len(trained) == 2 * 14  # A and B of seven layers in two blocks


def test_in_bfloat16_the_weights_are_merged_before_they_are_rounded(folder, one_rank):
    policy, base = load_half(folder), full_weights(load_model(folder, device="cpu"), dtype="bfloat16")
    train(policy)
    parts = adapter_weights(policy)
    for name, weight in full_weights(policy, dtype="bfloat16").items():
        stem, want = name.removesuffix(".weight"), base[name].float()
        if f"{stem}.lora_A.default.weight" in parts:
            want = want + 2 * parts[f"{stem}.lora_B.default.weight"] @ parts[f"{stem}.lora_A.default.weight"]
        assert torch.equal(weight, want.bfloat16())


def test_in_bfloat16_a_resumed_run_ends_with_the_same_adapters(folder, tmp_path, one_rank):
    whole, kept = load_half(folder), Checkpoints(tmp_path, CheckpointConfig(), ONE)
    updater = train(whole, 0, 2)
    kept.save(2, whole, updater.optimizer, {})
    train(whole, 2, 4, updater)
    resumed = load_half(folder)
    updater = Updater(resumed, OptimConfig(lr=1e-2, weight_decay=0.1), ONE, num_steps=4)
    assert kept.load_latest(resumed, updater.optimizer) == (2, {})
    train(resumed, 2, 4, updater)
    assert all(torch.equal(p, adapter_weights(resumed)[name]) for name, p in adapter_weights(whole).items())


def test_frozen_weights_cost_no_gradient_product(folder):
    policy = load(folder)
    plain, frozen = FlopCount.of(load_model(folder, device="cpu")), FlopCount.of(policy)
    num_adapter = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    rows = random_rows([9, 20])  # 29 tokens, 23 of them learnt
    want = plain.step(rows) + 6 * 29 * num_adapter - 2 * (29 * plain.layer_params + 23 * plain.head_params)
    assert frozen.step(rows) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"dropout": 0.1}}, "RL allows only 0"),
        ({"lora": {}, "keep_optimizer": True}, "keep_optimizer"),
        ({"lora": {}, "continue_optimizer": True}, "continue_optimizer"),
        ({"lora": {"targets": []}}, "nothing would train"),
    ],
)
def test_settings_that_cannot_hold_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        RlConfig.model_validate(changes)


DTYPES = {"float32": 1e-5, "bfloat16": 5e-2}
"""Tolerances of the weights."""


def train_on_ranks(folder, world, telemetry):
    """Merged weights and adapters after three updates, by dtype."""
    trained = {}
    for dtype in DTYPES:
        policy = load_policy(
            folder,
            world,
            dtype=dtype,
            activation_checkpointing=dtype == "bfloat16",
            adapters=Adapters(cfg=ALL, seed=1),
        )
        updater = Updater(policy, OptimConfig(lr=1e-2, weight_decay=0.1), world, num_steps=3)
        for s in range(3):
            rows = random_rows([9, 20, 14], seed=s)
            batch = pack(rows, tokens_per_microbatch=24, rank=world.rank, num_ranks=world.size)
            updater.update(batch, nll_heads(batch, 1 / batch.num_loss_tokens), step=s)
        trained[dtype] = full_weights(policy), adapter_weights(policy)
    return trained


@pytest.mark.slow
def test_two_ranks_train_and_merge_as_one(folder):
    one, two = (
        run_ranks(partial(train_on_ranks, folder), TrainRuntime(device="cpu", num_workers=n), NullTelemetry())
        for n in (1, 2)
    )
    for dtype, atol in DTYPES.items():
        for alone, shared in zip(one[dtype], two[dtype], strict=True):
            assert alone.keys() == shared.keys()
            torch.testing.assert_close(alone, shared, atol=atol, rtol=0)
