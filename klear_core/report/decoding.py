"""Describe in words how answers were sampled."""

from __future__ import annotations

from klear_core.config.engine import HttpEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.scores import DecodingProfile


def decoding_text(profile: DecodingProfile) -> str:
    """Describe a profile: `temperature 0.6, top-p 0.95, …, up to 32,768 new tokens; torch engine in float32; …`."""
    s = profile.sampling
    top_p = f"{s.top_p:g}" if s.top_p < 1 else "off"
    top_k = f"{s.top_k}" if s.top_k else "off"
    penalty = f"{s.repetition_penalty:g}" if s.repetition_penalty > 1 else "off"
    parts = [
        f"temperature {s.temperature:g}",
        f"top-p {top_p}",
        f"top-k {top_k}",
        f"repetition penalty {penalty}",
        f"up to {s.max_new_tokens:,} new tokens",
    ]
    return f"{', '.join(parts)}; {_engine_text(profile)}; {profile.seed_policy}"


def _engine_text(profile: DecodingProfile) -> str:
    match profile.engine:
        case TorchEngineConfig() as engine:
            return f"torch engine in {engine.dtype}"
        case VllmEngineConfig() as engine:
            yarn = f", YaRN factor {engine.yarn_factor:g}" if engine.yarn_factor else ", no YaRN"
            if engine.yarn_original_window:
                yarn += f" over {engine.yarn_original_window:,} positions"
            attention = (
                f" with attention factor {engine.yarn_attention_factor:g}" if engine.yarn_attention_factor else ""
            )
            return f"vLLM in {engine.dtype}{yarn}{attention}"
        case HttpEngineConfig() as engine:
            return f"endpoint serving {engine.model}"
