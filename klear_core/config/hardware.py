"""Define the settings of the machines from which `klear plan` estimates memory, time and cost."""

from __future__ import annotations

from pydantic import Field

from klear_core.config.settings import Settings


class HardwareConfig(Settings):
    """Memory, speed and price of the GPUs, for the estimates of `klear plan`; they never change a result."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one GPU in gigabytes of 1e9 bytes. None: that of the GPUs here; without any, no memory is checked."""
    peak_tflops: float = Field(default=989.0, gt=0)
    """Dense bf16 TFLOP/s of one GPU; H100 and H200 (NVIDIA's data sheet). A100: 312."""
    mfu: float = Field(default=0.4, gt=0, le=1)
    """Share of the peak that training reaches, recomputation not counted. An assumption: 0.3 to 0.5 is usual for dense
    models."""
    memory_tb_per_s: float = Field(default=3.35, gt=0)
    """Memory bandwidth of one GPU in TB/s, which bounds the speed of decoding; H100 (NVIDIA's data sheet).
    H200: 4.8."""
    decoding_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Share of that bandwidth that decoding reaches. By published step times of vLLM 0.30 with Qwen3-8B on an H100 it
    is 0.71 for weights and 0.9 for the cache (github.com/tgarg01/silybench-data)."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price of one GPU for an hour, in any currency; None shows GPU-hours alone."""
