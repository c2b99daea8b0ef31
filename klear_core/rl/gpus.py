"""How an RL stage shares out GPUs between its learner and its engines. Imported without Ray and torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import assert_never

from klear_core.config.engine import VllmEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.errors import ResourceError

_DRIVER_TIMEOUT_S = 60.0  # the first question after a boot wakes the driver up


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """GPUs of one learner rank and of one rollout actor."""

    learner: float
    rollout: float


def plan_gpus(cfg: RlConfig, available: float) -> GpuPlan:
    """As set; else one for each learner rank and what each engine needs, or none where there are none. ResourceError if they do not fit."""
    runtime = cfg.runtime
    wants_gpus = available > 0 and runtime.device != "cpu"
    per_engine = num_engine_ranks(cfg)
    learner = runtime.learner_gpus if runtime.learner_gpus is not None else float(wants_gpus)
    rollout = runtime.rollout_gpus if runtime.rollout_gpus is not None else per_engine * float(wants_gpus)
    needed = learner * runtime.num_workers + rollout * runtime.num_rollout_actors
    if needed > available:
        raise ResourceError(
            f"{runtime.num_workers} learner ranks with {learner:g} GPUs and {runtime.num_rollout_actors} rollout actors with {rollout:g} "
            f"need {needed:g} GPUs; Ray has {available:g}. Lower num_workers or num_rollout_actors, or set learner_gpus and rollout_gpus "
            f"to fractions to share"
        )
    return GpuPlan(learner=learner, rollout=rollout)


def is_direct(cfg: RlConfig, gpus: GpuPlan) -> bool:
    """Whether weights go straight from the learner to the engines. ResourceError if that is asked for and cannot work."""
    match cfg.runtime.weight_sync:
        case "store":
            return False
        case "auto":
            return gpus.learner >= 1 and gpus.rollout >= num_engine_ranks(cfg)
        case "direct":
            if 0 < gpus.learner < 1 or 0 < gpus.rollout < num_engine_ranks(cfg) or (gpus.learner > 0) != (gpus.rollout > 0):
                raise ResourceError(
                    f'runtime.weight_sync = "direct" with {gpus.learner:g} GPUs for a learner rank and {gpus.rollout:g} for a rollout '
                    f'actor: NCCL needs whole GPUs for each of them, gloo none for either; "store" works in between'
                )
            return True
        case _:
            assert_never(cfg.runtime.weight_sync)


def num_engine_ranks(cfg: RlConfig) -> int:
    """Processes of one engine that hold weights, and its GPUs where there are any."""
    engine = cfg.rollout.engine
    return engine.runtime.tensor_parallel if isinstance(engine, VllmEngineConfig) else 1


def gpus_here() -> int:
    """GPUs of this machine as Ray counts them: those that the driver shows, at most as many as CUDA_VISIBLE_DEVICES names."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    count = len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")]) if listed.returncode == 0 else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([name for name in visible.split(",") if name.strip() and name.strip() not in ("-1", "NoDevFiles")]))
