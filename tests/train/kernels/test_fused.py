"""The compiled passes of a model under training against transformers' own operations."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from klear_core.native import compile_c
from klear_core.train.kernels import attention, fused
from klear_core.train.model import Policy
from klear_core.train.packing import MicroBatch, pack
from klear_core.types import TrainSample

pytestmark = pytest.mark.skipif(
    compile_c(fused._SOURCE, {"HEAD_DIM": 16}) is None,
    reason="no C compiler on this machine: there are no compiled passes",
)


FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig], dict[str, bool]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}


def model(family: str = "qwen3", *, head_dim: int = 16) -> PreTrainedModel:
    attention.register()
    model_class, config_class, own = FAMILIES[family]
    config = config_class(
        vocab_size=50,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        attn_implementation=attention.NAME,
        **own,
    )
    torch.manual_seed(0)
    hf = model_class(config).train()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.3)
    return hf


def micro_batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(12):  # over 256 tokens, so that the sums of a norm's gradient have several parts
        length = 20 + i
        ids = torch.randint(0, 50, (length,), generator=generator).tolist()
        rows.append(
            TrainSample(
                problem_id=str(i),
                token_ids=tuple(ids),
                loss_mask=(False,) + (True,) * (length - 1),
                sampler_logps=(0.0,) * length,
                advantage=1.0,
                is_positive=False,
                oldest_version=0,
            )
        )
    (micro,) = pack(rows, tokens_per_microbatch=1 << 20).micro_batches
    return micro


def hidden_and_gradients(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The hidden states of all loss tokens, and the gradient of a weighted sum of them by every parameter of the layers."""
    hidden_NH = Policy(hf)(micro_batch(), lambda hidden_NH, _weight: hidden_NH)
    weights = torch.randn(hidden_NH.shape, generator=torch.Generator().manual_seed(1))
    hf.zero_grad()
    (hidden_NH * weights).sum().backward()
    return {"hidden": hidden_NH.detach()} | {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_all_gradients_are_those_of_transformers(family: str, head_dim: int) -> None:
    plain = model(family, head_dim=head_dim)
    compiled = copy.deepcopy(plain)
    fused.fuse(compiled)
    layer = compiled.model.layers[0]
    for part in (compiled.model.norm, layer.input_layernorm, layer.mlp, layer.self_attn):
        assert type(part).__module__ == fused.__name__
    expected, found = hidden_and_gradients(plain), hidden_and_gradients(compiled)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_the_number_of_threads_changes_no_bit_of_the_compiled_passes() -> None:
    x, weight = torch.randn(3, 1000, 40), torch.rand(40)

    def run(num_threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        fused._GatePass.apply(fused._NormPass.apply(*leaves, 1e-6)).sum().backward()
        torch.set_num_threads(before)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(1), run(2), strict=True))


def test_a_copy_of_a_fused_model_computes_with_its_own_weights() -> None:
    first = model()
    fused.fuse(first)
    second = copy.deepcopy(first)
    with torch.no_grad():
        first.model.norm.weight.zero_()
    assert hidden_and_gradients(first)["hidden"].abs().max() == 0
    assert hidden_and_gradients(second)["hidden"].abs().max() > 0


def test_other_number_types_go_through_transformers() -> None:
    plain = model().to(torch.bfloat16)
    compiled = copy.deepcopy(plain)
    fused.fuse(compiled)
    with torch.no_grad():
        hidden = [Policy(hf)(micro_batch(), lambda hidden_NH, _weight: hidden_NH) for hf in (plain, compiled)]
    assert torch.equal(*hidden)


def test_another_model_is_left_as_it_is() -> None:
    other = MistralForCausalLM(
        MistralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    fused.fuse(other)
    assert {type(m).__module__ for m in other.modules()}.isdisjoint({fused.__name__})
