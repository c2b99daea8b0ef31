"""Fast paths are compared with plain operations at the start of a stage, and those that disagree are left out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import broken_kernels as broken
import pytest
import torch
from tiny_models import ONE
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "sft"))
from gloo_ranks import run_ranks
from safetensors.torch import load_file
from sft_traces import config, inputs

from klear_core.artifacts.manifest import StageSummary
from klear_core.config.train import TrainRuntime
from klear_core.hf_config import HfConfig
from klear_core.metrics import NullTelemetry
from klear_core.native import compile_c
from klear_core.sft.loop import train_sft
from klear_core.train.kernels import attention, fused, registry
from klear_core.train.kernels.check import Conditions, Proof, prove, prove_fast_paths, prove_in_process
from klear_core.train.kernels.check_cases import PARTS, ModelSizes, is_used
from klear_core.train.logps import HeadKernels

needs_compiler = pytest.mark.skipif(
    compile_c(attention._SOURCE, {"HEAD_DIM": 16}) is None, reason="no C compiler on this machine: no compiled C"
)
ON_CPU = ["attention/cpu", "norm/cpu", "gate/cpu", "rotate/cpu"]
CONFIG = HfConfig(
    model_type="qwen3",
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)
PHI_4 = CONFIG.model_copy(update={"num_attention_heads": 40, "num_key_value_heads": 10})
SIZES = ModelSizes.of(CONFIG)
CPU = torch.device("cpu")
HERE = Conditions(device=CPU, dtype=torch.float32, sizes=SIZES)
Fault = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def own_paths() -> Iterator[None]:
    """What a test leaves out is in use again after it."""
    with registry.replaced({}):
        yield


def verdicts(proofs: Iterator[Proof]) -> dict[str, str]:
    return {proof.name: proof.verdict for proof in proofs}


@needs_compiler
def test_the_compiled_c_of_this_machine_agrees_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert prove_fast_paths(CONFIG, ONE, "float32") == ()
    assert all(registry.in_use(name) for name in ON_CPU)
    assert not caplog.records
    assert all(proof.error < 0.2 for proof in prove(HERE))


@needs_compiler
@pytest.mark.parametrize("fault", broken.FAULTS)
@pytest.mark.parametrize("name", ON_CPU)
def test_a_broken_kernel_is_left_out_with_a_warning_and_a_note(
    name: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with registry.replaced(broken.with_fault(name, fault)):
        (note,) = prove_fast_paths(CONFIG, ONE, "float32")
        assert registry.in_use(name) is None
        assert all(registry.in_use(other) for other in ON_CPU if other != name)
    assert note.startswith(f"fast path {name} was left out: it ")
    assert note.endswith(f"{PARTS[name.split('/', maxsplit=1)[0]].plain} took its place")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [note]
    assert registry.in_use(name)  # nothing of it is left behind


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize(
    "fault", [broken.wrong_by_a_factor, broken.not_a_number, broken.raises, broken.right_for_short]
)
def test_a_head_with_broken_passes_is_left_out(fault: Fault, is_gradient: bool) -> None:
    head_kernels = broken.SpoiltHeadKernels(fault, is_gradient=is_gradient)
    with registry.replaced({"head/cpu": lambda: head_kernels}):
        assert len([note for note in prove_fast_paths(CONFIG, ONE, "float32") if "head/cpu" in note]) == 1


def test_a_sound_head_stays() -> None:
    with registry.replaced({"head/cpu": HeadKernels}):
        assert not [note for note in prove_fast_paths(CONFIG, ONE, "float32") if "head" in note]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return inputs(tmp_path_factory.mktemp("inputs"))


def train(given: tuple[Path, Path], workdir: Path) -> tuple[StageSummary, dict[str, Tensor]]:
    model, traces = given
    cfg = config(max_steps=3)
    summary = train_sft(cfg, model=model, traces=traces, seed=5, workdir=workdir, telemetry=NullTelemetry())
    return summary, load_file(workdir / "model" / "model.safetensors")


@needs_compiler
def test_a_stage_with_a_broken_kernel_ends_with_the_weights_of_plain_operations(
    given: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in ON_CPU:
        part = name.split("/")[0]
        with registry.replaced({}):
            registry.leave_out(name, "for comparison")
            _, plain = train(given, tmp_path / part / "plain")
        with registry.replaced(broken.with_fault(name, broken.wrong_gradient)):
            summary, found = train(given, tmp_path / part / "broken")
        assert all(torch.equal(found[key], plain[key]) for key in plain), name
        assert [note for note in summary.notes if f"fast path {name} was left out" in note]


def in_float32(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    product = a.float() @ b.float()
    return product if total is None else total.add_(product)


def rounded_between(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    product = (a @ b).float()
    return product if total is None else total.add_(product)


@pytest.mark.parametrize(("run", "verdict"), [(in_float32, "agrees"), (rounded_between, "disagrees")])
def test_products_of_halves_may_not_be_rounded_to_halves(run: registry.Run, verdict: str) -> None:
    with registry.replaced({"products/cpu": run}):
        assert verdicts(prove(replace(HERE, dtype=torch.bfloat16))) == {"products/cpu": verdict}


def test_no_trial_moves_torchs_random_numbers() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    list(prove(HERE))
    assert torch.equal(torch.rand(2), wanted)


def test_a_process_tries_a_path_once() -> None:
    tried: list[str] = []
    norm = registry.provided()["norm/cpu"]

    def counted(*arguments: object) -> object:
        tried.append("norm")
        return norm(*arguments)

    with registry.replaced({"norm/cpu": counted}):
        prove_fast_paths(CONFIG, ONE, "float32")
        after_first = len(tried)
        prove_fast_paths(CONFIG, ONE, "float32")
    assert len(tried) == after_first


@pytest.mark.slow
@needs_compiler
def test_a_kernel_that_ends_its_process_costs_that_path_alone() -> None:
    with registry.replaced(broken.with_fault("norm/cpu", broken.ends_the_process)):
        found = {proof.name: proof for proof in prove_in_process(HERE)}
    assert {name: proof.verdict for name, proof in found.items()} == dict.fromkeys(ON_CPU, "agrees") | {
        "norm/cpu": "crashed"
    }
    assert found["norm/cpu"].reason == "the process that tried it ended with exit code 3"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device, on which another process can start")
def test_where_no_other_process_can_start_paths_are_tried_in_this_one(caplog: pytest.LogCaptureFixture) -> None:
    no_gpu = replace(HERE, device=torch.device("cuda", 0), sizes=replace(SIZES, model_type="llama"))
    assert verdicts(prove_in_process(no_gpu)) == {"head/cuda": "crashed"}
    assert "fast paths are tried in the stage's own process" in caplog.text


@needs_compiler
def test_rotations_without_norms_are_tried_as_a_llama_uses_them() -> None:
    llama = replace(HERE, sizes=replace(SIZES, model_type="llama"))
    assert verdicts(prove(llama)) == dict.fromkeys(ON_CPU, "agrees")
    with registry.replaced(broken.with_fault("rotate/cpu", broken.wrong_by_a_factor)):
        assert verdicts(prove(llama)) == dict.fromkeys(ON_CPU, "agrees") | {"rotate/cpu": "disagrees"}


def test_a_path_is_tried_only_where_it_would_be_used() -> None:
    half, single, gpu = torch.bfloat16, torch.float32, torch.device("cuda")
    assert [n for n in registry.provided() if is_used(n, SIZES, CPU, half)] == ["products/cpu"]
    assert {n for n in registry.provided() if is_used(n, SIZES, CPU, single)} == set(ON_CPU)
    assert not is_used("attention/cpu", replace(SIZES, head_dim=24), CPU, single)
    llama, mistral = (replace(SIZES, model_type=name) for name in ("llama", "mistral"))
    assert {n for n in registry.provided() if is_used(n, llama, CPU, single)} == set(ON_CPU)
    assert not is_used("norm/cuda", llama, gpu, half)
    assert not is_used("norm/cpu", mistral, CPU, single)
    assert Conditions(device=gpu, dtype=half, sizes=SIZES).names() == [
        "products/cuda",
        "attention/cuda/varlen_attn",
        "norm/cuda",
        "gate/cuda",
        "rotate/cuda",
        "head/cuda",
    ]


def test_context_parallelism_leaves_a_rank_its_share_of_the_heads() -> None:
    sizes = ModelSizes.of(CONFIG, context_parallel=4)
    assert (sizes.num_heads, sizes.num_kv_heads) == (1, 1)
    repeated = ModelSizes.of(PHI_4, context_parallel=4)
    assert (repeated.num_heads, repeated.num_kv_heads) == (10, 5)  # each key head twice: 20 over 4 ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_torch_compile_makes_for_a_cpu_agrees_in_bfloat16() -> None:
    """The compiler is that of CUDA; its kernels for CPU stand in for Triton's. The doctor's test has float32."""
    kernels = fused.Kernels("inductor")

    def rotate(qkv_BTHD: Tensor, num_kv_heads: int, *others: object) -> tuple[Tensor, ...]:
        q_BTKD, k_BTGD, v_BTGD = fused.split_heads(qkv_BTHD, num_kv_heads)  # on CPU they come side by side
        return (*kernels.rotate(q_BTKD, k_BTGD, *others), v_BTGD)

    runs = {"norm/cpu": kernels.norm, "rotate/cpu": rotate, "head/cpu": partial(HeadKernels, "inductor")}
    with registry.replaced(runs):
        conditions = replace(HERE, dtype=torch.bfloat16)
        assert verdicts(prove(conditions, list(runs))) == dict.fromkeys(runs, "agrees")
    assert kernels.norm.is_compiled
    assert kernels.rotate.is_compiled


def prove_on_rank(world: object, _telemetry: object) -> tuple[tuple[str, ...], bool]:
    fault = broken.with_fault("norm/cpu", broken.wrong_by_a_factor) if world.rank == 1 else {}
    with registry.replaced(fault):
        notes = prove_fast_paths(CONFIG, world, "float32")
        return notes, registry.in_use("norm/cpu") is None


@needs_compiler
@pytest.mark.slow
def test_a_path_that_fails_on_one_rank_is_left_out_on_all() -> None:
    (note,), is_left_out = run_ranks(prove_on_rank, TrainRuntime(device="cpu", num_workers=2), NullTelemetry())
    assert is_left_out  # on rank 0, where it works
    assert note.startswith("fast path norm/cpu was left out on rank 1: it differs")


def wrong(q_TKD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rows: attention.Rows, scaling: float) -> Tensor:
    return 1.1 * attention.by_segment(q_TKD, k_TGD, v_TGD, rows.cu_seqlens, rows.group_bounds, scaling, rows.window)


@pytest.mark.parametrize("impl", ["FA3", "FA4"])
def test_an_attention_that_is_asked_for_and_disagrees_is_not_used(
    impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake in its place; on a GPU the same proof compares torch's switch with plain operations."""
    for module in attention.FASTER.values():
        folder = tmp_path.joinpath(*module.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"attention/cuda/{impl}"
    with registry.replaced({name: wrong}):
        (proof,) = prove(HERE, [name])
        assert proof.verdict == "disagrees"
        assert registry.in_use(name) is None
    for module in ("flash_attn", "flash_attn.cute"):  # the parent was imported to look for the child
        sys.modules.pop(module, None)


@pytest.mark.parametrize("impl", ["FA3", "FA4"])
def test_an_attention_that_is_asked_for_and_not_installed_is_named_with_its_wheel(impl: str) -> None:
    with registry.replaced({}):
        attention.ask_for(impl)
        assert f"attention/cuda/{impl}" in registry.provided()
        assert re.search(
            rf"no module .* is installed; {impl} comes with", attention.why_no_faster(f"attention/cuda/{impl}")
        )
