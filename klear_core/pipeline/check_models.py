"""Check before a run that its models and engines are there and fit each other: lengths, heads, devices.

Each function yields one message for each problem that it finds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from klear_core.artifacts.model_files import check_model, folder_of
from klear_core.cluster.nodes import joins_a_cluster
from klear_core.config.engine import TorchEngineConfig, VllmEngineConfig
from klear_core.config.given_jobs import GivenModelJob
from klear_core.config.jobs import BaseJob, RlJob, SftJob
from klear_core.config.rollout import RolloutConfig
from klear_core.config.stage import EngineUse
from klear_core.config.train import HfModelConfig, HubModelConfig, ModelConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.hf_config import HfConfig, read_hf_config
from klear_core.pipeline.ahead import PendingWork
from klear_core.pipeline.complaints import complaints

_LONG_ANSWER = 8192
"""Answers longer than this many tokens need an engine with a paged cache, which the torch engine lacks."""


def model_problems(work: PendingWork) -> Iterator[str]:
    """Find models that are not there or not whole."""
    # Also the model of a base stage that is reused: its artifact only points to the folder.
    for _, job in work.needs(BaseJob):
        if isinstance(job.model, HfModelConfig):
            yield from complaints(f"model.path = {job.model.path!r}", check_model, job.model)
        elif isinstance(job.model, HubModelConfig):
            yield from complaints("model", check_model, job.model)
    for stage, given in work.needs(GivenModelJob):
        yield from complaints(stage.section, check_model, given.model())


def length_problems(work: PendingWork) -> Iterator[str]:
    """Check lengths against the model's window: the configured one, or the folder's if it is wider."""
    window = window_of(work.config.start_model)
    for stage, job in work.pending(SftJob):
        max_tokens = job.sft.max_tokens
        if window is not None and max_tokens > window:
            yield f"{stage.section}.max_tokens = {max_tokens} is more than model.max_position_embeddings = {window}"
    for use in work.engines():
        yield from _too_long_answers(use, use.model or work.config.start_model)
    for stage, rl_job in work.pending(RlJob):
        yield from _too_long_prompts(f"{stage.section}.rollout", rl_job.rl.rollout)


def _too_long_prompts(key: str, rollout: RolloutConfig) -> Iterator[str]:
    """Yield a problem if RL may send a prompt that its engine refuses, which would end the run when it comes."""
    engine = rollout.engine
    if not isinstance(engine, VllmEngineConfig) or engine.max_model_len is None:
        return
    if rollout.max_prompt_tokens >= engine.max_model_len:
        yield (
            f"{key}.max_prompt_tokens = {rollout.max_prompt_tokens} leaves no room for an answer in "
            f"{key}.engine.max_model_len = {engine.max_model_len}"
        )


def _too_long_answers(use: EngineUse, model: ModelConfig) -> Iterator[str]:
    key, engine, sampling = use.key, use.engine, use.sampling
    room = window_of(model)
    if room is None:
        return
    # From the window of the model to that of the engine; the message names the limit that applies in the end.
    of_what = f"{'its ' if use.model else 'model.'}max_position_embeddings = {room}"
    if isinstance(engine, VllmEngineConfig) and engine.yarn_factor is not None:
        if engine.yarn_original_window is not None:
            of_what = f"{key}.engine.yarn_original_window = {engine.yarn_original_window}"
        room = engine.stretched(room)
        of_what = f"{of_what} times {key}.engine.yarn_factor = {engine.yarn_factor:g}"
    if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None:
        if engine.max_model_len > room:
            yield f"{key}.engine.max_model_len = {engine.max_model_len} is more than {of_what}"
        else:
            room, of_what = engine.max_model_len, f"{key}.engine.max_model_len = {engine.max_model_len}"
    if sampling.max_new_tokens > room:
        yield f"{key}.sampling.max_new_tokens = {sampling.max_new_tokens} is more than {of_what}"


def engine_problems(work: PendingWork) -> Iterator[str]:
    """Find engines that are not installed here, or cannot run their model."""
    from klear_core.generate.qwen3.shape import read_shape

    for use in work.engines():
        key, engine, sampling = use.key, use.engine, use.sampling
        model = use.model or work.config.start_model
        if isinstance(engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
            yield f"{key}.engine.kind = 'vllm': vLLM is not installed here; pip install -e '.[gpu]'"
        if isinstance(engine, VllmEngineConfig) and isinstance(model, TinyModelConfig) and model.head_dim < 32:
            yield f"{key}.engine.kind = 'vllm' needs model.head_dim of 32 or more, not {model.head_dim}"
        if isinstance(engine, TorchEngineConfig) and sampling.max_new_tokens > _LONG_ANSWER:
            remedy = f"for answers of more than {_LONG_ANSWER} tokens use kind = 'vllm'"
            yield f"{key}.engine.kind = 'torch' has no paged cache; {remedy}"
        if isinstance(engine, TorchEngineConfig) and not isinstance(model, TinyModelConfig) and _hf_config(model):
            yield from complaints(f"{key}.engine", read_shape, folder_of(model))


def context_problems(work: PendingWork) -> Iterator[str]:
    """Find trainings whose context parallelism does not fit the model's heads."""
    heads = _num_heads(work.config.start_model)
    if heads is None:
        return
    for stage, runtime in work.trainings():
        try:
            runtime.check_attention_heads(heads, "the model")
        except ConfigError as e:
            yield f"{stage}.{e}"


def cuda_problems(work: PendingWork) -> Iterator[str]:
    """Check the devices of this machine; a stage on a Ray cluster at RAY_ADDRESS is refused where it is placed."""
    if joins_a_cluster():
        return
    devices = {f"{section}.runtime": runtime.device for section, runtime in work.trainings()}
    devices |= {
        f"{use.key}.engine.runtime": use.engine.runtime.device
        for use in work.engines()
        if isinstance(use.engine, TorchEngineConfig)
    }
    for key, device in devices.items():
        if device == "cuda":
            from klear_core.train.model import pick_device

            yield from complaints(key, pick_device, device)


def _hf_config(model: ModelConfig) -> HfConfig | None:
    """Return None for a tiny model, and without a readable config.json, which `model_problems` reports."""
    try:
        return None if isinstance(model, TinyModelConfig) else read_hf_config(folder_of(model))
    except ConfigError:
        return None


def window_of(model: ModelConfig) -> int | None:
    """Return the positions of a model, those of its folder or of its settings; None if neither says."""
    hf = _hf_config(model)
    return hf.window(model.max_position_embeddings) if hf else model.max_position_embeddings


def _num_heads(model: ModelConfig) -> int | None:
    if isinstance(model, TinyModelConfig):
        return model.num_heads
    hf = _hf_config(model)
    return hf.num_attention_heads if hf else None
