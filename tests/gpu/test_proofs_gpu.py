"""The fast paths on a GPU agree with plain operations; one that breaks the GPU's context is left out, and the others stay."""

from dataclasses import replace

import pytest
import torch

from klear_core.train.kernels import attention, registry
from klear_core.train.kernels.check import Conditions, prove_in_process
from klear_core.train.kernels.check_cases import ModelSizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = ModelSizes(
    hidden=1024, intermediate=3072, num_heads=16, num_kv_heads=8, head_dim=128, vocab=151_936, model_type="qwen3"
)
HERE = Conditions(device=torch.device("cuda", 0), dtype=torch.bfloat16, sizes=SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_path_that_is_there_agrees(dtype):
    proofs = list(prove_in_process(replace(HERE, dtype=dtype)))
    assert {"norm/cuda", "gate/cuda", "rotate/cuda", "head/cuda"} <= {p.name for p in proofs}
    for proof in proofs:
        assert proof.verdict == "agrees" or (proof.verdict == "missing" and proof.name in attention.FASTER), proof


def asserts_on_the_device(x, _weight, _eps):
    """An index out of range: the process can use the GPU no more."""
    return x[:, torch.full((1,), 10**6, device=x.device)]


def test_a_kernel_that_breaks_its_process_costs_that_path_alone():
    with registry.replaced({"norm/cuda": asserts_on_the_device}):
        found = {p.name: p.verdict for p in prove_in_process(HERE)}
    assert found["norm/cuda"] == "crashed"
    assert found["gate/cuda"] == found["rotate/cuda"] == found["head/cuda"] == "agrees"
    assert torch.ones(1, device="cuda").item() == 1
