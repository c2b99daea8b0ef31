"""Divide an RL stage's GPUs between learner and engines, and assign each rank and engine to a node. Imports no Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import assert_never

from klear_core.config.evaluate import LocalEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.rl import RlRuntime
from klear_core.config.train import TrainRuntime
from klear_core.errors import ResourceError
from klear_core.generate.engine import TransferBackend

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
    What runs on a CPU by its `device` gets none, so that this one setting takes a profile with shares to a CPU.
    """
    wants_gpus = available > 0 and runtime.device != "cpu"
    learner = runtime.learner_gpus if runtime.learner_gpus is not None else float(wants_gpus)
    rollout = runtime.rollout_gpus if runtime.rollout_gpus is not None else num_engine_ranks(engine) * float(wants_gpus)
    if runtime.device == "cpu":
        learner = 0.0
    if isinstance(engine, TorchEngineConfig) and engine.runtime.device == "cpu":
        rollout = 0.0
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
            has_part = 0 < gpus.learner < 1 or 0 < gpus.rollout < num_engine_ranks(engine)
            only_one_has_gpus = (gpus.learner > 0) != (gpus.rollout > 0)
            if only_one_has_gpus or (has_part and not _share_gpus(gpus.learner, gpus.rollout)):
                raise ResourceError(
                    f'runtime.weight_sync = "direct" with {gpus.learner:g} GPUs for a learner rank and '
                    f"{gpus.rollout:g} for a rollout actor: NCCL needs whole GPUs for both, CUDA's handles parts of "
                    f'one for both, and gloo no GPU for either; "store" always works'
                )
            return True
        case _:
            assert_never(runtime.weight_sync)


def _share_gpus(learner: float, rollout: float) -> bool:
    return 0 < learner < 1 and 0 < rollout < 1


def transfer_backend(runtime: RlRuntime, device: str) -> TransferBackend:
    """Return how weights go directly from a learner rank on this kind of device to an engine."""
    if device != "cuda":
        return "gloo"
    return "ipc" if _share_gpus(runtime.learner_gpus or 1, runtime.rollout_gpus or 1) else "nccl"


def num_engine_ranks(engine: LocalEngineConfig) -> int:
    """Return the number of processes of one engine that hold weights, which is also the number of GPUs it needs."""
    return engine.runtime.tensor_parallel if isinstance(engine, VllmEngineConfig) else 1


def gpus_here() -> int:
    """Return this machine's GPUs: the driver's, at most as many as CUDA_VISIBLE_DEVICES names."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0  # a driver that hangs, as `klear doctor --gpu` says
    if listed.returncode != 0:
        return 0
    count = len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")])
    visible = _visible()
    return count if visible is None else min(count, len(visible))


def _visible() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names; None if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    # CUDA sees none of those after the first that is no GPU.
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))


@cache
def gpu_memory_here() -> float | None:
    """Return the memory of the smallest GPU that CUDA sees here in gigabytes, as its driver tells; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = _visible()
    is_by_index = visible is not None and all(name.isdecimal() for name in visible)
    if visible and not is_by_index:
        command += ["-i", ",".join(visible)]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)
        memories = [float(line) for line in listed.stdout.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # no GPU, or none that tells
    if visible is not None and is_by_index:
        # Unless it is told to count as nvidia-smi does, CUDA counts the fastest first, which we take for the largest.
        if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            memories.sort(reverse=True)
        memories = [memories[int(index)] for index in visible if int(index) < len(memories)]
    # nvidia-smi counts in MiB, all settings in gigabytes of 1e9 bytes.
    return min(memories) * (1 << 20) / 1e9 if memories else None


# ---- places ----
# Assign every learner rank and engine of a stage to a node and its GPUs, before anything starts.
#
# Plain arithmetic on the nodes' sizes: imports neither Ray nor torch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine and the resources that Ray may assign on it."""

    name: str
    """Address, for messages."""
    node_id: str = ""
    """Ray's id; empty where Ray does not run yet."""
    num_cpus: float = 0.0
    num_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Node and GPUs of one learner rank or engine."""

    node: Node
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs within the node; empty on the CPU. Ray chooses which devices these are."""
    share: float = 1.0
    """Part of each of these GPUs, below 1 if they are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of a stage's learner ranks and engines; engines without a GPU have none, and run on any node."""

    ranks: tuple[Place, ...]
    engines: tuple[Place, ...] = ()


@dataclass(slots=True)
class Room:
    """The free resources of a node while ranks and engines are placed."""

    node: Node
    free_cpus: float
    free_gpus: list[float] = field(default_factory=list)
    """The part of each GPU that is still free."""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> list[Room]:
        """Return all of these nodes, empty."""
        return [cls(node=node, free_cpus=node.num_cpus, free_gpus=[1.0] * node.num_gpus) for node in nodes]

    def unused(self) -> list[int]:
        """Return the numbers of the GPUs that are entirely free."""
        return [i for i, free in enumerate(self.free_gpus) if free == 1]  # exactly: nothing was ever subtracted

    def take(self, gpus: Sequence[int], share: float = 1.0) -> Place:
        """Take a share of each of these GPUs."""
        for i in gpus:
            self.free_gpus[i] -= share
        return Place(node=self.node, gpus=tuple(gpus), share=share)


def place_rl(runtime: RlRuntime, engine: LocalEngineConfig, gpus: GpuPlan, nodes: Sequence[Node]) -> Placement:
    """Place learner ranks and engines of RL; see `place_ranks` and `place_engines`."""
    # Orders to try, one after the other: of the nodes, and whether engines are placed before ranks.
    orders: list[tuple[Sequence[Node], bool]] = [(nodes, False)]
    if gpus.learner >= 1 and gpus.rollout >= 1:
        # Engines that need more of a node than the ranks of a context may fit if they are placed first; on nodes of
        # different sizes, both may fit if the small ones are filled first.
        small_first = sorted(nodes, key=lambda node: node.num_gpus)
        orders += [(nodes, True), (small_first, False), (small_first, True)]
    refusals = []
    for ordered, is_engines_first in orders:
        try:
            return _place_both(runtime, engine, gpus, ordered, is_engines_first=is_engines_first)
        except ResourceError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _place_both(
    runtime: RlRuntime,
    engine: LocalEngineConfig,
    gpus: GpuPlan,
    nodes: Sequence[Node],
    *,
    is_engines_first: bool = False,
) -> Placement:
    rooms = Room.of(nodes)
    if is_engines_first:
        engines = place_engines(rooms, engine, runtime.num_rollout_actors, gpus.rollout)
        ranks = place_ranks(rooms, runtime, gpus.learner)
    else:
        ranks = place_ranks(rooms, runtime, gpus.learner)
        engines = place_engines(rooms, engine, runtime.num_rollout_actors, gpus.rollout)
    return Placement(ranks=tuple(ranks), engines=tuple(engines))


def place_engines(rooms: Sequence[Room], engine: LocalEngineConfig, count: int, gpus: float) -> list[Place]:
    """Place engines, and take their room: the GPUs of one on one node, shares on the GPU with the most left.

    So engines that share GPUs with learner ranks are distributed evenly over them. Raise ResourceError, with the
    setting to change, if there is no room.
    """
    if gpus == 0:
        return []
    num_ranks = num_engine_ranks(engine)
    if gpus < num_ranks and num_ranks > 1:
        raise ResourceError(
            f"rollout_gpus = {gpus:g} for an engine with tensor_parallel = {num_ranks}: an engine on several GPUs "
            f"takes them whole; set rollout_gpus = {num_ranks}, or tensor_parallel = 1 to share a GPU"
        )
    if gpus > 1 and gpus != int(gpus):
        raise ResourceError(f"rollout_gpus = {gpus:g}: above 1 only whole GPUs can be assigned")
    if gpus < 1:
        return [_place_share(rooms, gpus, index) for index in range(count)]
    return [_place_whole(rooms, int(gpus), index, count) for index in range(count)]


def _place_share(rooms: Sequence[Room], share: float, index: int) -> Place:
    """Place an engine on a part of a GPU: of those in use, the one with the most left; else on one that is unused."""
    best: tuple[float, Room, int] | None = None
    for room in rooms:
        for gpu, free in enumerate(room.free_gpus):
            preference = free if free < 1 else 0.0  # an unused GPU comes last
            # The first of equals: shares that were subtracted in another order differ by rounding.
            if free >= share - ROUNDING and (best is None or preference > best[0] + ROUNDING):
                best = preference, room, gpu
    if best is None:
        left = max((free for room in rooms for free in room.free_gpus), default=0.0)
        raise ResourceError(
            f"rollout_gpus = {share:g}: engine {index} needs that much of one GPU, and no GPU has more than {left:g} "
            f"left ({_sizes(rooms)}); lower rollout_gpus or learner_gpus, so that their sum is 1, or num_rollout_actors"
        )
    _, room, gpu = best
    return room.take([gpu], share)


def _place_whole(rooms: Sequence[Room], gpus: int, index: int, count: int) -> Place:
    for room in rooms:
        unused = room.unused()[:gpus]
        if len(unused) == gpus:
            return room.take(unused)
    largest = max((len(room.free_gpus) for room in rooms), default=0)
    left = ", ".join(f"{room.node.name} {len(room.unused())} of {len(room.free_gpus)}" for room in rooms)
    if gpus > largest:
        raise ResourceError(
            f"tensor_parallel = {gpus}: the GPUs of an engine must be on one node, and the largest has "
            f"{_gpus(largest)}; set tensor_parallel = {_largest_power(largest)}"
        )
    remedy = "lower num_workers"
    if index:
        remedy = f"set num_rollout_actors = {index}"
        if gpus > 1:
            remedy = (
                f"{gpus} does not divide what the nodes have: {remedy}, or tensor_parallel to a number that divides it"
            )
    raise ResourceError(
        f"engine {index} of {count} needs {_gpus(gpus)} of one node, and there are left: {left}; {remedy}"
    )


def check_tensor_parallel(engine: LocalEngineConfig, num_heads: int) -> None:
    """Raise ResourceError if an engine's GPUs cannot share the attention heads of its model evenly."""
    num_ranks = num_engine_ranks(engine)
    if num_heads % num_ranks:
        allowed = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ResourceError(
            f"tensor_parallel = {num_ranks} does not divide the {num_heads} attention heads of the model; "
            f"allowed: {allowed}"
        )


def place_ranks(rooms: Sequence[Room], runtime: TrainRuntime, gpus_per_rank: float) -> list[Place]:
    """Place the learner ranks, and take their room: context-parallel ranks on one node, nodes filled in order.

    Every rank has GPUs of its own among the ranks, even if it has only a share of one: NCCL refuses two ranks on one
    GPU. Raise ResourceError, with the setting to change, if there is no room.
    """
    if gpus_per_rank == 0:
        return _place_on_cpus(rooms, runtime)
    if gpus_per_rank > 1 and gpus_per_rank != int(gpus_per_rank):
        raise ResourceError(f"learner_gpus = {gpus_per_rank:g}: above 1 only whole GPUs can be assigned")
    # GPUs of a rank, and the part of each that it takes: engines may get the rest.
    each = max(1, int(gpus_per_rank))
    share = min(1.0, gpus_per_rank)
    _check_context_fits(rooms, runtime, each)
    places: list[Place] = []
    for _ in range(runtime.num_workers // runtime.context_parallel):
        places += _place_context(rooms, runtime, each, share)
    return places


def _place_context(rooms: Sequence[Room], runtime: TrainRuntime, each: int, share: float) -> list[Place]:
    needed = runtime.context_parallel * each
    for room in rooms:
        unused = room.unused()[:needed]
        if len(unused) == needed:
            # The context's ranks one after the other, each with its own GPUs.
            return [room.take(unused[i : i + each], share) for i in range(0, needed, each)]
    total = sum(len(room.free_gpus) for room in rooms)
    most = _most_ranks(rooms, runtime, each)
    remedy = f"; set num_workers = {most}" if most else ""
    context = runtime.context_parallel
    together = f", those of every {context} ranks (context_parallel) on one node" if context > 1 else ""
    raise ResourceError(
        f"runtime.num_workers = {runtime.num_workers}: every learner rank needs {_gpus(each)} that no other rank uses, "
        f"{_gpus(runtime.num_workers * each)} in all{together}, and there are {total} ({_sizes(rooms)}){remedy}"
    )


def _check_context_fits(rooms: Sequence[Room], runtime: TrainRuntime, each: int) -> None:
    context = runtime.context_parallel
    largest = max((len(room.free_gpus) for room in rooms), default=0)
    if context == 1 or context * each <= largest:
        return
    # A divisor of the context divides whatever the context divides: ranks and attention heads.
    fitting = [c for c in range(1, context) if context % c == 0 and c * each <= largest]
    remedy = f"; set context_parallel = {max(fitting)}" if fitting else ""
    raise ResourceError(
        f"runtime.context_parallel = {context}: ranks that share rows exchange them in every layer and must be on one "
        f"node, and the largest has {_gpus(largest)} ({_sizes(rooms)}){remedy}"
    )


def _most_ranks(rooms: Sequence[Room], runtime: TrainRuntime, each: int) -> int:
    """Return the largest number of ranks for which the nodes have room."""
    per_context = runtime.context_parallel * each
    contexts = sum(len(room.free_gpus) // per_context for room in rooms)
    return contexts * runtime.context_parallel


def _place_on_cpus(rooms: Sequence[Room], runtime: TrainRuntime) -> list[Place]:
    needed = runtime.context_parallel * runtime.num_threads  # the ranks of a context are on one node
    places: list[Place] = []
    while len(places) < runtime.num_workers:
        fitting = [room for room in rooms if room.free_cpus >= needed]
        if not fitting:
            free = ", ".join(f"{room.node.name} {room.node.num_cpus:g}" for room in rooms)
            raise ResourceError(
                f"runtime.num_workers = {runtime.num_workers} with num_threads = {runtime.num_threads}: no node has "
                f"{needed} free CPUs for learner rank {len(places)} (CPUs: {free}); lower one of them"
            )
        fitting[0].free_cpus -= needed
        places += [Place(node=fitting[0].node)] * runtime.context_parallel
    return places


def _largest_power(most: int) -> int:
    """Return the largest power of two that is at most `most`, 1 at least."""
    return 1 << max(0, most.bit_length() - 1)


def _sizes(rooms: Sequence[Room]) -> str:
    return ", ".join(f"{room.node.name} {len(room.free_gpus)}" for room in rooms) or "no node"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
