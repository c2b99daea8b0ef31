"""Describe a run that is to be started on a cluster: its name, its nodes, and what its target cannot do."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar, assert_never

from klear_core.cluster.placement import Node
from klear_core.config.load import profile_toml
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings
from klear_core.config.submit import RetryReason, SubmitConfig, in_seconds
from klear_core.errors import ConfigError
from klear_core.pipeline.costs.estimate import estimate, gpus_held
from klear_core.pipeline.graph import stages_of

S = TypeVar("S", bound=Settings)

Target = Literal["slurm", "ray", "kube", "prefect"]
"""Cluster managers that runs are submitted to."""

PROFILE = "profile/run.toml"
"""File of a submission with all settings of the run."""

_MAX_NAME = 36
"""Characters of a name; KubeRay's limit for a RayCronJob."""
_IMAGE = r"[\w][\w.:/@-]*"
_OBJECT_NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
_UNUSED: Mapping[Target, Mapping[str, str]] = {
    "slurm": {"image": "Slurm starts no container: let slurm.setup start one"},
    "ray": {
        "image": "the nodes of the cluster run already",
        "queue": "Ray has no queues",
        "priority": "Ray has no priorities",
    },
    "kube": {},
    "prefect": {"max_retries": "klear sweep starts a run again until its third crash in a row"},
}
"""Settings that a target cannot carry out, with the reason."""
_RETRIED: Mapping[Target, tuple[RetryReason, ...]] = {
    "slurm": ("no-capacity", "error", "interruption"),
    "ray": ("no-capacity", "error"),
    "kube": ("no-capacity", "error", "interruption"),
    "prefect": ("no-capacity", "interruption"),
}
"""Events after which a target starts a run again; with Prefect, `klear sweep` does."""
_TIMED: Mapping[Target, tuple[RetryReason, ...]] = {
    "slurm": ("no-capacity", "error", "interruption"),
    "ray": ("no-capacity", "error"),
    "kube": ("no-capacity",),
    "prefect": ("no-capacity",),
}
"""Of these, those after which it does so for `retry_for` and no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run that is to be started on a cluster."""

    name: str
    folder: Path
    """Its files; on Slurm all nodes see it under the same path. Elsewhere it is a folder of this machine."""
    config: PipelineConfig
    options: tuple[str, ...] = ()
    """Options of `klear run`, such as `--until rl`."""

    @property
    def submit(self) -> SubmitConfig:
        """Settings of the submission."""
        return self.config.workspace.submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Files and commands that start a submission."""

    files: Mapping[str, str]
    """Texts by path in the submission's folder."""
    commands: tuple[tuple[str, ...], ...]
    """Commands that submit it, one after the other."""
    watch: tuple[str, ...]
    """Commands for the user: watch it, end it."""


def name_of(config: PipelineConfig, at: datetime) -> str:
    """Return a name for a submission that is a label of DNS: `klear-8b-1128-053012`."""
    name = config.name.replace("_", "-").strip("-")
    if not name[0].isalpha():
        name = f"klear-{name}"
    moment = f"-{at:%m%d-%H%M%S}"
    return name[: _MAX_NAME - len(moment)].rstrip("-") + moment


def nodes_of(submit: SubmitConfig) -> tuple[Node, ...]:
    """Return the nodes that a submission asks for."""
    cpus = math.inf if submit.cpus_per_node is None else submit.cpus_per_node
    return tuple(Node(name=f"node {i}", num_cpus=cpus, num_gpus=submit.gpus_per_node) for i in range(submit.nodes))


def for_cluster(config: PipelineConfig, target: Target, at: datetime) -> PipelineConfig:
    """Return the config of a run that is submitted at this time.

    It has the end that `deadline` asks for, and the wait for missing nodes that `retry = ["no-capacity"]` asks for.
    """
    submit = config.workspace.submit
    is_scheduled = target == "kube" and submit.kube.schedule  # its runs start later, each with a deadline of its own
    if submit.deadline and not is_scheduled:
        config = ending_at(config, at + timedelta(seconds=in_seconds(submit.deadline)))
    if "no-capacity" not in submit.retry:
        return config
    return _waiting(config, float(in_seconds(submit.retry_for)))


def _waiting(settings: S, wait_s: float) -> S:
    """Return the settings with this wait for missing nodes in all that have one."""
    inner = {name: value for name, value in settings if isinstance(value, Settings)}
    changed: dict[str, object] = {name: new for name, old in inner.items() if (new := _waiting(old, wait_s)) is not old}
    if "wait_for_nodes_s" in type(settings).model_fields:
        changed["wait_for_nodes_s"] = wait_s
    return settings.model_copy(update=changed) if changed else settings


def ending_at(config: PipelineConfig, moment: datetime | None) -> PipelineConfig:
    """Return the config of a run that ends itself at this moment; None: that does not."""
    submit = config.workspace.submit.model_copy(update={"ends_at": moment})
    return config.model_copy(update={"workspace": config.workspace.model_copy(update={"submit": submit})})


def profile_files(submission: Submission) -> dict[str, str]:
    """Return the profile of the run: all settings, so that a later change of files or defaults does not reach it."""
    return {PROFILE: profile_toml(submission.config, with_workspace=True)}


def require_possible(target: Target, config: PipelineConfig) -> None:
    """Raise ConfigError with all settings of the submission that the target cannot carry out."""
    problems = list(_impossible(target, config))
    if problems:
        raise ConfigError("\n       ".join([f"klear submit --to {target} cannot do this:", *problems]))


def _impossible(target: Target, config: PipelineConfig) -> Iterator[str]:
    submit, key = config.workspace.submit, "workspace.submit"
    for name, reason in _UNUSED[target].items():
        if name in submit.model_fields_set and getattr(submit, name):
            yield f"{key}.{name} = {getattr(submit, name)!r}: {reason}"
    if "retry" in submit.model_fields_set:
        never = [reason for reason in submit.retry if reason not in _RETRIED[target]]
        if never:
            can = ", ".join(_RETRIED[target])
            yield f"{key}.retry = {', '.join(never)}: {target} starts a run again after {can} only"
    if "retry_for" in submit.model_fields_set and set(_TIMED[target]).isdisjoint(submit.retry):
        timed = ", ".join(_TIMED[target])
        yield f"{key}.retry_for = {submit.retry_for!r}: {target} has this limit for retry = {timed} only"
    if submit.idle_kill is not None and not submit.gpus_per_node:
        yield f"{key}.idle_kill: looks at GPUs, and {key}.gpus_per_node is 0"
    match target:
        case "slurm":
            pass
        case "ray":
            yield from _lost_results(config)
        case "kube":
            yield from _kube_problems(config)
        case "prefect":
            yield from _prefect_problems(submit)
            yield from () if submit.prefect.pool == "process" else _lost_results(config)
        case _:
            assert_never(target)


def _lost_results(config: PipelineConfig) -> Iterator[str]:
    """Yield a problem if the results would be in a folder that ends with the job."""
    root = config.workspace.root
    if not config.workspace.store and not Path(root).is_absolute():
        yield f"workspace.root = {root!r}: the job's folder ends with it; set an absolute path, or workspace.store"


def _image_problem(submit: SubmitConfig) -> Iterator[str]:
    if submit.image and not re.fullmatch(_IMAGE, submit.image):
        yield f"workspace.submit.image = {submit.image!r}: no name of an image"


def _kube_problems(config: PipelineConfig) -> Iterator[str]:
    submit, root = config.workspace.submit, config.workspace.root
    yield from _image_problem(submit)
    for name in ("image", "cpus_per_node", "memory_gb_per_node"):
        if not getattr(submit, name):
            yield f"workspace.submit.{name}: a pod needs it"
    target = submit.kube
    names = {"queue": submit.queue, "priority": submit.priority, "kube.namespace": target.namespace}
    names |= {"kube.volume": target.volume, "kube.secret": target.secret}
    for name, value in names.items():
        if value and not re.fullmatch(_OBJECT_NAME, value):
            yield f"workspace.submit.{name} = {value!r}: no name of an object of Kubernetes (a-z, 0-9, - and .)"
    if target.volume and (not Path(root).is_absolute() or ":" in root):
        yield f"workspace.root = {root!r}: the volume is mounted there; set an absolute path without a colon"
    if not target.volume and not config.workspace.store:
        yield "workspace.submit.kube.volume: the results would end with the pod; set it, or workspace.store"
    if submit.idle_kill is not None and submit.nodes > 1:
        yield "workspace.submit.idle_kill: looks at the GPUs of the driver's pod, which has none with nodes > 1"
    if submit.kube.schedule and submit.queue:
        yield "workspace.submit.queue: a RayCronJob of KubeRay 1.7 gives its RayJobs no labels, so Kueue misses them"


def _prefect_problems(submit: SubmitConfig) -> Iterator[str]:
    pool = submit.prefect.pool
    if not submit.queue:
        yield "workspace.submit.queue: the name of the work pool"
    if pool != "process" and not submit.image:
        yield f"workspace.submit.image: a pool of type {pool} needs it"
    if "{" not in submit.image:  # Prefect's placeholders are refused as such
        yield from _image_problem(submit)
    if pool == "process" and submit.image:
        yield f"workspace.submit.image = {submit.image!r}: a pool of processes starts no container"
    if pool == "kubernetes":
        for name in ("volume", "secret"):
            if value := getattr(submit.kube, name):
                yield f"workspace.submit.kube.{name} = {value!r}: with Prefect, the pool's job template has it"
    if submit.nodes > 1:
        yield f"workspace.submit.nodes = {submit.nodes}: a worker starts a run on one machine; use slurm, ray or kube"
    if pool != "process" and submit.gpus_per_node:
        yield f"workspace.submit.gpus_per_node: Prefect's {pool} worker asks for no GPU; use its process pool, or kube"


def fit_lines(config: PipelineConfig, chosen: Collection[str]) -> Iterator[str]:
    """Yield what the submission asks for, how much of it each stage holds, and the GPU-hours and price of all."""
    submit, hardware = config.workspace.submit, config.hardware
    total = submit.nodes * submit.gpus_per_node
    machines = "1 node" if submit.nodes == 1 else f"{submit.nodes} nodes"
    held = {stage.name: gpus_held(stage) for stage in stages_of(config) if stage.name in chosen}
    shares = [f"{name} {total if num is None else num:g}" for name, num in held.items() if num != 0]
    if not total:
        yield f"submits: {machines} without GPUs"
        return
    yield f"submits: {machines} of {submit.gpus_per_node} GPUs; of {total}, stages hold {', '.join(shares) or 'none'}"
    if hardware.gpu_memory_gb is None:
        yield "submits: hardware.gpu_memory_gb is not set, so nothing was checked against the memory of these GPUs"
    hours = sum(row.gpu_hours or 0.0 for row in estimate(config, chosen))
    if hours:
        price = hardware.price_per_gpu_hour
        cost = "" if price is None else f", costing {hours * price:,.0f}"
        yield f"submits: at most {hours:,.0f} GPU-hours{cost}; {hours / total:,.1f} hours if no GPU waits"
