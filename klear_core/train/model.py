"""Load a causal LM from any Hugging Face folder, run it over packed rows, and export it.

Axis letters: T tokens, N loss tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from klear_core.config.train import LoraConfig
from klear_core.errors import ConfigError
from klear_core.hf_config import check_architecture
from klear_core.metrics import made_progress
from klear_core.mkl import choose_functions
from klear_core.prompts import load_tokenizer
from klear_core.train.balance import RowWork
from klear_core.train.kernels import attention
from klear_core.train.kernels.fused import fuse
from klear_core.train.packing import MicroBatch
from klear_core.types import TokenRow

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

choose_functions()

R = TypeVar("R")
Head = Callable[[Tensor, Tensor], R]
"""(hidden_NH, lm_head_weight_VH) -> a tensor or a tuple of tensors, as the caller needs."""

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """The model, called as `policy(micro, head)`. The head runs inside, where FSDP has gathered the weights."""

    def __init__(self, hf: nn.Module, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.adapters = adapters
        self._has_half_products = False

    def forward(self, micro: MicroBatch, head: Head[R]) -> R:
        """Call `head` with the hidden states that predict the loss tokens and with the LM-head weight."""
        hf: Any = self.hf
        # base_model has no LM head, so that no [T, V] logits are computed.
        hidden_1TH = hf.base_model(
            input_ids=micro.token_ids_1T,
            position_ids=micro.position_ids_1T,
            use_cache=False,
            micro=micro,  # transformers hands arguments that it does not know to `attend`, layer by layer
        ).last_hidden_state
        made_progress("layers of a micro-batch")
        # Select first, so that the head computes logits for loss tokens only.
        hidden_NH = hidden_1TH[0, micro.predictor_N]
        # By the dtype of the hidden states the head knows that its products are to be in bfloat16, too.
        return head(hidden_NH.bfloat16() if self._has_half_products else hidden_NH, hf.get_output_embeddings().weight)

    def multiply_in_half(self) -> None:
        """Compute all products of weights in bfloat16 from now on, with float32 weights, activations and sums."""
        from klear_core.train.kernels.half_linear import halve_products

        halve_products(self.hf)
        self._has_half_products = True

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device


def load_model(
    folder: Path, *, device: torch.device | str, dtype: Dtype = "float32", adapters: Adapters | None = None
) -> Policy:
    """Load a Hugging Face folder in training mode. Raise ConfigError if Klear does not compute its forward pass.

    On the device `meta` the model has no weights, and none are read.
    `dtype` is that of the weights. Those that train are kept in float32, whatever dtype layers compute in, because in
    bf16 updates at a learning rate of 1e-6 would be lost. With `adapters` only these train, and `dtype` is that of the
    frozen weights.
    """
    check_architecture(folder)
    hf = _read(folder, torch.device(device), DTYPES[dtype])
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{folder}: the LM head has a bias, which the fused head does not add")
    dropouts = {f"{name} of {m.p}" for name, m in hf.named_modules() if isinstance(m, nn.Dropout) and m.p > 0}
    # With dropout, old log-probs would differ from the policy's, and a resumed run from an uninterrupted one.
    if dropouts:
        raise ConfigError(
            f"{folder}: dropout ({min(dropouts)}); Klear trains without it: set it to 0 in the model's config"
        )
    fuse(hf)
    if adapters is not None:
        add_adapters(hf, adapters)
    # from_pretrained returns a model in eval mode, in which transformers does not checkpoint activations.
    return Policy(hf.to(device), adapters).train()


def _read(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    attention.register()
    if device.type == "meta":
        # Shapes only; the caller fills in the weights.
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    transformers_logging.disable_progress_bar()
    # Without local_files_only, a folder that is gone would be looked up on the Hub as the name of a repository.
    hf, found = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attention.NAME,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # which are refused here, in words
    )
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise ConfigError(
            f"{folder}: {name} is {list(in_file)} in the weights, but {list(in_model)} by config.json; is it the "
            "config of another model?"
        )
    missing = sorted(found["missing_keys"])
    if missing:  # transformers draws them at random, and only logs it
        raise ConfigError(
            f"{folder}: {len(missing)} of the model's tensors are not in its weights ({', '.join(missing[:3])}); "
            "was it saved with adapters that are not merged, or for another config.json?"
        )
    unused = sorted(name for name in found["unexpected_keys"] if name.startswith("model.layers."))
    if unused:  # transformers leaves them out, and only logs it
        raise ConfigError(
            f"{folder}: {len(unused)} tensors of the weights have no place in the model of config.json "
            f"({', '.join(unused[:3])}); is it the config of another model?"
        )
    # Then transformers ties nothing, and engines leave the file's head out.
    if (
        getattr(hf.config, "tie_word_embeddings", False)
        and hf.get_output_embeddings().weight is not hf.get_input_embeddings().weight
    ):
        raise ConfigError(
            f"{folder}: config.json has tie_word_embeddings = true, but the weights have another lm_head.weight, which "
            "engines would not use: set it to false there, or delete that tensor"
        )
    return hf


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device; `auto` is CUDA if torch sees one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; allowed here: auto, cpu")
    return torch.device(device)


def export_model(
    state: dict[str, Tensor], source: Path, target: Path, *, max_position_embeddings: int | None = None
) -> None:
    """Write weights under their Hugging Face names, with config and tokenizer of `source`, as a folder ready to load.

    `max_position_embeddings` raises the config's window (never lowers it): vLLM refuses prompt + response beyond it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = load_tokenizer(source)
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if max_position_embeddings is not None:
        config.max_position_embeddings = max(config.max_position_embeddings, max_position_embeddings)
    # transformers loads a folder in the dtype that its config names; the callers cast all weights to the same.
    config.dtype = next(iter(state.values())).dtype
    # The chat template ends a turn with this token; the config of the source may name another end.
    config.eos_token_id = tokenizer.eos_token_id
    # The shell has no memory, because save_pretrained takes the weights from `state`.
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    shell.generation_config = GenerationConfig()
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shell.save_pretrained(temporary, state_dict=state)
    # By itself: `save_pretrained` refuses settings that transformers reads, such as a temperature without `do_sample`.
    generation_config = _generation_config(source, tokenizer.eos_token_id)
    generation_config.to_json_file(temporary / "generation_config.json", keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(temporary)
    # Left by a run that was killed after its rename; the rename below needs the name to be free.
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _generation_config(source: Path, eos_token_id: int) -> Any:
    """Return the source's generation config with the end of a turn as its first stop token."""
    from transformers import GenerationConfig

    path = source / "generation_config.json"
    config = GenerationConfig.from_pretrained(source, local_files_only=True) if path.is_file() else GenerationConfig()
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = [eos_token_id, *(i for i in listed if i not in (None, eos_token_id))]
    return config


# ---- lora ----
# Wrap a model's linear layers with LoRA adapters, name them and the weights under them, and save them for peft.
#
# LoRA (arXiv 2106.09685) keeps a weight W and trains W + alpha / rank * B A. `peft` is imported nowhere else.
# Axis letters: R rank, I and O inputs and outputs of a linear layer.


ADAPTER_FOLDER = "adapter"
"""Folder of the adapter in an artifact, beside the merged model."""
_NAME = "default"  # under which peft's layers keep their adapter
_BASE = ".base_layer."
_A, _B = f".lora_A.{_NAME}.", f".lora_B.{_NAME}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a model: their settings, and the seed of their initial weights."""

    cfg: LoraConfig
    seed: int

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.cfg.alpha / self.cfg.rank


def add_adapters(hf: nn.Module, adapters: Adapters) -> None:
    """Wrap the target layers in place and freeze all other weights, which keep their dtype; adapters are float32.

    Raise ConfigError if a target names no linear layer of the blocks.
    """
    from peft import inject_adapter_in_model

    cfg = _peft_config(adapters.cfg, _targets_in(hf, adapters.cfg))
    # peft draws from the global generator: restore it afterwards, and draw the weights from our seed.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(cfg, hf, _NAME)
    generator = torch.Generator().manual_seed(adapters.seed)
    for name, weight in hf.named_parameters():
        if is_adapter(name):
            # peft gives adapters the dtype of their layer: in bfloat16 small updates would be lost.
            weight.data = weight.data.float()
        # With B = 0 the first step sees the base model. The range of A is that of torch's linear layers and of peft.
        if _B in name:
            nn.init.zeros_(weight)
        # On `meta` there is no memory to draw into; the caller fills it in later.
        elif _A in name and not weight.is_meta:
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name belongs to an adapter."""
    return _A in name or _B in name


def base_name(name: str) -> str:
    """Return the name of a weight in the model without adapters."""
    return name.replace(_BASE, ".")


def factor_names(name: str) -> tuple[str, str] | None:
    """Return the names of A and B by which the weight `name` is changed; None if it has no adapter."""
    # The bias of a wrapped layer stays as it is.
    if _BASE not in name or not name.endswith(".weight"):
        return None
    return name.replace(_BASE, _A), name.replace(_BASE, _B)


def merge(weight_OI: Tensor, factors: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Return the weight with its adapter added, in float32 whatever the weight's own dtype is."""
    a_RI, b_OR = factors
    # The factors are float32, and torch widens the sum to it.
    return weight_OI + (b_OR @ a_RI) * scale


@contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """Make the model compute as its base model inside the context."""
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "lora_A")]
    scales = [layer.scaling[_NAME] for layer in layers]
    # A scale of 0 leaves the weights alone; peft's own switch would also freeze the adapters.
    for layer in layers:
        layer.scaling[_NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_NAME] = scale


def save_adapter(weights: Mapping[str, Tensor], adapters: Adapters, target: Path) -> None:
    """Write adapter weights as a folder that `PeftModel.from_pretrained(base_model, folder)` loads."""
    from safetensors.torch import save_file

    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    renamed = {}
    for name, weight in weights.items():
        # peft's names in files: with the wrapper's prefix, and without the adapter's name.
        renamed["base_model.model." + name.replace(f".{_NAME}.", ".")] = weight.contiguous()
    save_file(renamed, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = {name.partition(_A)[0].rpartition(".")[2] for name in weights if _A in name}
    settings = _peft_config(adapters.cfg, sorted(targets)).to_dict() | {"inference_mode": True}
    # Sorted, because sets have another order in each process, and the same run must write the same file.
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    (temporary / "adapter_config.json").write_text(text + "\n")
    # Left by a run that was killed after its rename; the rename below needs the name to be free.
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _targets_in(hf: Any, cfg: LoraConfig) -> list[str]:
    """Return the last parts of the names of the layers to wrap."""
    # The LM head and the embedding lie outside the blocks: the fused head reads the plain weight.
    blocks = hf.base_model.layers.named_modules()
    linear = sorted({name.rpartition(".")[2] for name, module in blocks if isinstance(module, nn.Linear)})
    if cfg.targets == "all-linear":
        return linear
    unknown = sorted(set(cfg.targets) - set(linear))
    if unknown:
        raise ConfigError(f"lora.targets: this model's blocks have no linear layer {unknown[0]!r}; they have {linear}")
    return sorted(set(cfg.targets))


def _peft_config(cfg: LoraConfig, targets: list[str]) -> PeftConfig:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )


# ---- flops ----
# Count the arithmetic of a training step, and look up the hardware's peak, for their ratio (MFU).


BF16_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bf16 FLOP/s from NVIDIA's data sheets, by words of the device name; the first entry that fits counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Sizes of a dense decoder's matrix products.

    As is usual for MFU, norms, softmax and recomputed activations are not counted.
    """

    layer_params: int
    """Number of weights in all matrices of the layers; every token passes through each."""
    head_params: int
    """Vocabulary * hidden size; only loss tokens pass through the head."""
    attention_width: int
    """Layers * query heads * head size."""
    frozen_layer_params: int = 0
    """Number of `layer_params` that do not train (LoRA); their gradient is not computed."""
    frozen_head_params: int = 0
    """The same of `head_params`."""

    @classmethod
    def of(cls, policy: Policy) -> FlopCount:
        """Count a policy's matrices; sharded ones count in full."""
        hf: Any = policy.hf
        head = hf.get_output_embeddings().weight  # [V, H]; of FSDP's shards the shape is that of the whole
        # A lookup is no product, and the head is counted by itself (tied, it is the embedding's tensor). By identity,
        # because == on tensors compares element-wise.
        embeddings = {id(head)} | {id(m.weight) for m in hf.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in hf.parameters() if p.ndim == 2 and id(p) not in embeddings]
        frozen_layer_params = sum(p.numel() for p in matrices if not p.requires_grad)
        config = hf.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_hidden_layers * config.num_attention_heads * head_dim
        # numel() of a sharded weight (DTensor) is its global size.
        layer_params = sum(p.numel() for p in matrices)
        return cls(
            layer_params=layer_params,
            head_params=head.numel(),
            attention_width=width,
            frozen_layer_params=frozen_layer_params,
            frozen_head_params=0 if head.requires_grad else head.numel(),
        )

    def step(self, rows: Sequence[TokenRow]) -> float:
        """Return the FLOPs of forward and backward over `rows`.

        That is 6 per weight and token (4 if it is frozen), and 2 * 6 per attention channel and pair of tokens that see
        each other.
        """
        num_tokens = sum(r.num_tokens for r in rows)
        # Attention is causal, so a token attends to half of its row on average.
        num_pairs = sum(r.num_tokens**2 / 2 for r in rows)
        num_loss_tokens = sum(r.num_loss_tokens for r in rows)
        # 6: multiply and add, once forward and twice backward. Attention has two products, scores and weighted values.
        all_trained = 6.0 * (
            self.layer_params * num_tokens + self.head_params * num_loss_tokens + 2 * self.attention_width * num_pairs
        )
        # 2 of the 6 are the product that forms a weight's own gradient.
        return all_trained - 2.0 * (self.frozen_layer_params * num_tokens + self.frozen_head_params * num_loss_tokens)

    def row_work(self, *, recomputes: bool) -> RowWork:
        """Return the work of a row by its length, to balance ranks; with `recomputes` layers run forward twice.

        Unlike in `step`, recomputation counts, because it takes time. All tokens pass through the head here: the
        share that carries loss differs little between rows.
        """
        per_layer_weight = 8 if recomputes else 6  # the second forward pass takes 2; the head is not recomputed
        all_trained = per_layer_weight * self.layer_params + 6 * self.head_params
        # A frozen weight has no gradient of its own.
        product_flops = all_trained - 2 * (self.frozen_layer_params + self.frozen_head_params)
        return RowWork.of(product_flops=product_flops, attention_width=self.attention_width, recomputes=recomputes)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bf16 FLOP/s of a device; None if it is not in `BF16_PEAKS`."""
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(device_name: str) -> float | None:
    """Return the peak bf16 FLOP/s of the GPU with this name, such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    # Whole words, because "L4" is a part of "L40" and "B200" of "GB200", which are other chips.
    words = set(device_name.replace("-", " ").split())
    return next((peak for key, peak in BF16_PEAKS.items() if words.issuperset(key.split())), None)
