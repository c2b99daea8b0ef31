"""A causal LM under training: any Hugging Face folder, run over packed rows up to the hidden states that predict loss tokens.

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
from klear_core.prompts import load_tokenizer
from klear_core.train.kernels import attention
from klear_core.train.packing import MicroBatch

R = TypeVar("R")
Head = Callable[[Tensor, Tensor], R]
"""(hidden_NH, lm_head_weight_VH) -> what the caller wants, a tensor or a tuple of tensors."""

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """The model, called as `policy(micro, head)`: the head runs inside, where a sharded model has its weights gathered."""

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, micro: MicroBatch, head: Head[R]) -> R:
        """`head` gets the hidden states before each loss token and the LM-head weight."""
        hf: Any = self.hf
        hidden_1TH = hf.base_model(
            input_ids=micro.token_ids_1T,
            position_ids=micro.position_ids_1T,
            use_cache=False,
            micro=micro,
        ).last_hidden_state
        return head(hidden_1TH[0, micro.select_N], hf.get_output_embeddings().weight)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device


def load_model(folder: Path, *, device: torch.device | str, dtype: Dtype = "float32") -> Policy:
    """The model of a Hugging Face folder in training mode; ConfigError if its forward pass is not one that we compute.

    On the device `meta` it has no weights, and the folder's are not read.
    `dtype` is that of the weights. Training keeps float32, whatever it computes in: at a rate of 1e-6 an update is lost in bf16.
    """
    from klear_core.train.kernels.fused import fuse

    check_architecture(folder)
    hf = _read(folder, torch.device(device), DTYPES[dtype])
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{folder}: the LM head has a bias, which the fused head does not add")
    dropouts = {f"{name} of {m.p}" for name, m in hf.named_modules() if isinstance(m, nn.Dropout) and m.p > 0}
    if dropouts:  # old log-probs would not be those of the policy, nor a resumed run that which was killed
        raise ConfigError(f"{folder}: dropout ({min(dropouts)}); set it to 0 in the model's config, Klear trains without")
    fuse(hf)
    return Policy(hf.to(device)).train()


def _read(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    attention.register()
    if device.type == "meta":
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True)


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """`auto` takes CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; allowed here: auto, cpu")
    return torch.device(device)


def export_model(state: dict[str, Tensor], source: Path, target: Path, *, max_position_embeddings: int | None = None) -> None:
    """Write weights under their Hugging Face names, with the config and tokenizer of `source`, as a folder that loads as is.

    `max_position_embeddings` raises the config's window (never lowers it): vLLM refuses prompt + response beyond it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(source)
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if max_position_embeddings is not None:
        config.max_position_embeddings = max(config.max_position_embeddings, max_position_embeddings)
    config.dtype = next(iter(state.values())).dtype
    config.eos_token_id = tokenizer.eos_token_id
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    shell.generation_config = _generation_config(source, tokenizer.eos_token_id)
    beside = target.with_name(target.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shell.save_pretrained(beside, state_dict=state)
    tokenizer.save_pretrained(beside)
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed after this point
    beside.rename(target)


def _generation_config(source: Path, eos_token_id: int) -> Any:
    """The source's, with the end of a turn first among the tokens that stop."""
    from transformers import GenerationConfig

    path = source / "generation_config.json"
    config = GenerationConfig.from_pretrained(source, local_files_only=True) if path.is_file() else GenerationConfig()
    listed = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = [eos_token_id, *(i for i in listed if i not in (None, eos_token_id))]
    return config
