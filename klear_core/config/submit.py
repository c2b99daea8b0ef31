"""Define how `klear submit` starts a run on a cluster; nothing here changes a result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from klear_core.config.settings import Settings

Duration = Annotated[str, Field(pattern=r"^[1-9](\d{0,8}s|\d{0,6}m|\d{0,4}h|\d{0,3}d)$")]
"""Time as a number and a unit: `90s`, `30m`, `6h`, `2d`; its seconds fit 32 bits."""
SbatchOption = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
"""Long name of an option of sbatch, without its dashes."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def in_seconds(duration: Duration) -> int:
    """Return the seconds of `6h`."""
    return int(duration[:-1]) * _UNITS_S[duration[-1]]


class IdleKill(Settings):
    """A limit below which a run that holds GPUs is ended."""

    below: float = Field(gt=0, lt=1)
    """Share of time in which the GPUs of the driver's machine compute."""
    window: Duration
    """Time over which the share is taken."""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: object) -> object:
        """Read `10%/1h`."""
        if not isinstance(value, str):
            return value
        share, percent, duration = value.partition("%/")
        if not percent or not share.isdigit():
            raise ValueError(f"{value!r}: expected a share and a time, such as 10%/1h")
        return {"below": int(share) / 100, "window": duration}


class SlurmTarget(Settings):
    """Settings of `klear submit --to slurm`."""

    time_limit: Duration | None = None
    """Longest time of one allocation; five minutes before its end the run saves a checkpoint and is queued again.
    None: the partition's."""
    setup: str = ""
    """Shell commands on every node before anything starts; empty: put the folder of this Python into PATH."""
    sbatch: dict[SbatchOption, str] = {}
    """Further options of sbatch, such as `account`; one without a value, such as `hold`, is an empty text."""


class KubeTarget(Settings):
    """Settings of `klear submit --to kube`: a RayJob of KubeRay."""

    namespace: str = "default"
    """Namespace of its objects."""
    volume: str = ""
    """Name of the PersistentVolumeClaim that is mounted at `workspace.root`; empty: only `workspace.store` is kept."""
    secret: str = ""
    """Name of the Secret whose entries become environment variables, such as the keys of a store or a teacher."""
    schedule: str = Field(default="", pattern=r"^(@[a-z]+( \S+)?|\S+( +\S+){4})?$")
    """Times of a retraining, as cron writes them: a RayCronJob in place of a RayJob."""
    time_zone: str = Field(default="Etc/UTC", min_length=1)
    """Time zone of `schedule`."""
    user_namespaces: bool = False
    """Let pods make the namespaces of the sandbox, which model-written code needs: Kubernetes 1.33 or newer, an image
    that does not run as root."""
    keep_head: Duration = "1h"
    """Time for which the head, with its logs, outlives the run; workers, and their GPUs, are free at once."""


class PrefectTarget(Settings):
    """Settings of `klear submit --to prefect`."""

    pool: Literal["process", "docker", "kubernetes"] = "process"
    """Type of the work pool, whose name is `queue`."""


RetryReason = Literal["no-capacity", "error", "interruption"]
"""`no-capacity`: nodes are missing; `error`: the run failed; `interruption`: time limit, preemption, lost node."""


class SubmitConfig(Settings):
    """Resources that `klear submit` asks a cluster for, and what becomes of the run there."""

    nodes: int = Field(default=1, ge=1)
    """Number of machines."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of each machine."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """None: all of a node (Slurm alone)."""
    memory_gb_per_node: int | None = Field(default=None, ge=1)
    """None: all of a node (Slurm alone)."""
    image: str = ""
    """Container image with Klear, for `kube` and Prefect's pools of containers."""
    queue: str = ""
    """Slurm's partition, Kueue's LocalQueue, Prefect's work pool."""
    priority: str = ""
    """Slurm's QOS, Kueue's WorkloadPriorityClass, Prefect's work queue."""
    deadline: Duration | None = None
    """Time after submission at which the run is ended, waiting included; it is not started again. Slurm: with a
    checkpoint, up to five minutes earlier."""
    ends_at: AwareDatetime | None = None
    """Moment at which the run ends itself; `klear submit` sets it from `deadline`."""
    retry: tuple[RetryReason, ...] = ("interruption",)
    """Events after which the run is started again; it goes on from its last checkpoint."""
    retry_for: Duration = "7d"
    """Time after the first start in which it is started again (Slurm, Ray), and for which it waits for missing
    nodes."""
    max_retries: int = Field(default=3, ge=0)
    """Number of restarts after errors; on Kubernetes, after interruptions too."""
    idle_kill: IdleKill | None = None
    """End a run whose GPUs compute less than that, such as `10%/1h`."""
    slurm: SlurmTarget = SlurmTarget()
    kube: KubeTarget = KubeTarget()
    prefect: PrefectTarget = PrefectTarget()
