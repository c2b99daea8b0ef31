"""Divide an RL stage's GPUs between its learner and its engines. Imports neither Ray nor torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import assert_never

from klear_core.config.engine import LocalEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.rl import RlRuntime
from klear_core.errors import ResourceError

CPU_PARAMS = 200_000_000
"""Number of parameters above which `device = "auto"` refuses to run on a CPU."""
ROUNDING = 1e-9  # shares such as 0.1 do not add up to 1 exactly
_DRIVER_TIMEOUT_S = 60.0  # the first nvidia-smi after a boot is slow: it loads the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """GPUs of one learner rank and of one rollout actor."""

    learner: float
    rollout: float


def plan_gpus(runtime: RlRuntime, engine: LocalEngineConfig, available: float) -> GpuPlan:
    """Return the GPUs per learner rank and per rollout actor. Raise ResourceError if they exceed `available`.

    Defaults: one for each learner rank and one for each rank of an engine; none if there are none or `device = "cpu"`.
    """
    wants_gpus = available > 0 and runtime.device != "cpu"
    learner = runtime.learner_gpus if runtime.learner_gpus is not None else float(wants_gpus)
    rollout = runtime.rollout_gpus if runtime.rollout_gpus is not None else num_engine_ranks(engine) * float(wants_gpus)
    if learner == 0 and runtime.device == "cuda":
        raise ResourceError("device = 'cuda', and no node has a GPU; add nodes with GPUs, or set device = \"cpu\"")
    needed = learner * runtime.num_workers + rollout * runtime.num_rollout_actors
    if needed > available + ROUNDING:
        raise ResourceError(
            f"{runtime.num_workers} learner ranks with {learner:g} GPUs and "
            f"{runtime.num_rollout_actors} rollout actors with {rollout:g} need {needed:g} GPUs; Ray has "
            f"{available:g}. Lower num_workers or num_rollout_actors, or set learner_gpus and rollout_gpus to "
            f"fractions to share"
        )
    return GpuPlan(learner=learner, rollout=rollout)


def is_too_large_for_cpu(num_params: int) -> bool:
    """Return whether a model of this size runs on a CPU only if `device = "cpu"` is set."""
    return num_params > CPU_PARAMS


def cpu_refusal(key: str, num_params: int) -> str:
    """Return the message that refuses a CPU under `device = "auto"` and says how to ask for one."""
    return (
        f"{key}.device = 'auto', and no GPU for it: the model has {num_params / 1e9:.2f} billion parameters, and above "
        f"{CPU_PARAMS / 1e9:g} billion a CPU takes days for minutes of a GPU; run where torch sees one, or say so: "
        f"--set {key}.device=cpu"
    )


def check_cpu_is_meant(
    runtime: RlRuntime, engine: LocalEngineConfig, gpus: GpuPlan, num_params: int, *, stage: str = "rl"
) -> None:
    """Raise ResourceError if `device = "auto"` would put learner or sampler on a CPU with a model too large for it."""
    if not is_too_large_for_cpu(num_params):
        return
    if runtime.device == "auto" and gpus.learner == 0:
        raise ResourceError(cpu_refusal(f"{stage}.runtime", num_params))
    if isinstance(engine, TorchEngineConfig) and engine.runtime.device == "auto" and gpus.rollout == 0:
        raise ResourceError(cpu_refusal(f"{stage}.rollout.engine.runtime", num_params))


def is_direct(runtime: RlRuntime, engine: LocalEngineConfig, gpus: GpuPlan) -> bool:
    """Return whether weights go directly from learner to engines.

    Raise ResourceError if that is set and cannot work.
    """
    match runtime.weight_sync:
        case "store":
            return False
        case "auto":  # between whole GPUs only: NCCL refuses two processes on one
            return gpus.learner >= 1 and gpus.rollout >= num_engine_ranks(engine)
        case "direct":
            shares_gpus = 0 < gpus.learner < 1 or 0 < gpus.rollout < num_engine_ranks(engine)
            only_one_has_gpus = (gpus.learner > 0) != (gpus.rollout > 0)
            if shares_gpus or only_one_has_gpus:
                raise ResourceError(
                    f'runtime.weight_sync = "direct" with {gpus.learner:g} GPUs for a learner rank and '
                    f"{gpus.rollout:g} for a rollout actor: NCCL needs whole GPUs for both, and gloo no GPU for "
                    f'either; "store" works with shares of a GPU'
                )
            return True
        case _:
            assert_never(runtime.weight_sync)


def num_engine_ranks(engine: LocalEngineConfig) -> int:
    """Return the number of processes of one engine that hold weights, which is also the number of GPUs it needs."""
    return engine.runtime.tensor_parallel if isinstance(engine, VllmEngineConfig) else 1


def gpus_here() -> int:
    """Return this machine's GPUs as Ray counts them: the driver's, at most as many as CUDA_VISIBLE_DEVICES names."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False
    )
    if listed.returncode != 0:
        return 0
    count = len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    names = [name.strip() for name in visible.split(",")]
    hides_all = ("", "-1", "NoDevFiles")
    return min(count, len([name for name in names if name not in hides_all]))
