"""Load a causal LM from any Hugging Face folder, run it over packed rows, and export it.

Axis letters: T tokens, N loss tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from klear_core.errors import ConfigError
from klear_core.hf_config import check_architecture
from klear_core.progress import made_progress
from klear_core.prompts import load_tokenizer
from klear_core.train.kernels import attention
from klear_core.train.lora import Adapters, add_adapters
from klear_core.train.packing import MicroBatch

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
        return head(hidden_1TH[0, micro.predictor_N], hf.get_output_embeddings().weight)

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
    from klear_core.train.kernels.fused import fuse  # imports a model of transformers, which is slow

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
        folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:  # transformers draws them at random, and only logs it
        raise ConfigError(
            f"{folder}: {len(missing)} of the model's tensors are not in its weights ({', '.join(missing[:3])}); "
            "was it saved with adapters that are not merged, or for another config.json?"
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
    from transformers import AutoConfig, AutoModelForCausalLM

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
    shell.generation_config = _generation_config(source, tokenizer.eos_token_id)
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shell.save_pretrained(temporary, state_dict=state)
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
