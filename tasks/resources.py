"""Choose where a stage samples, judges and learns, and run Ray for it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil
from pydantic import SecretStr

from klear_core.artifacts.remote_paths import remote_paths_of, share_given
from klear_core.cluster.nodes import (
    EnginePlan,
    cannot_join,
    check_engines_have_gpus,
    joins_a_cluster,
    plan_engines,
    plan_scorer,
    ray_nodes,
    require_listener,
    when_there,
)
from klear_core.cluster.placement import gpus_here
from klear_core.config.evaluate import EnginesRuntime, LocalEngineConfig, TorchEngineConfig
from klear_core.config.pipeline import InlineEvalJob
from klear_core.config.rl import RlConfig
from klear_core.config.stage import Job
from klear_core.config.train import SftConfig, TrainRuntime
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError, GpuMemoryError, ResourceError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.generate.factory import start_with_endpoints
from klear_core.generate.model_size import size_of_hf
from klear_core.hf_config import read_hf_config
from klear_core.stopping import signals_kept_from_ray, sigterm_handler_kept
from klear_core.verify import JudgePool

if TYPE_CHECKING:
    from klear_core.train.distributed import RunRanks
    from klear_core.train.inline_eval import ModelScorer

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise every process prints a warning
}
LOCAL_SETTINGS = {  # of a Ray cluster that is started here
    "RAY_AUTH_MODE": "disabled",  # without it Ray warns; our own cluster listens on this machine only
    "RAY_worker_niceness": "0",  # with Ray's default of 15, two other busy processes almost stop RL
    # Ray's record of tasks is for its dashboard, which does not run. A worker cancels a run by signalling all of its
    # processes, and Ray would wait 5 s to send the last of the record to a process that has ended.
    "RAY_task_events_report_interval_ms": "0",
}
_STORE_FLOOR_BYTES = 128 << 20  # rollouts and Ray's own objects; Ray's minimum is 75 MB
# Two versions of the weights (in use and in transfer), in float32 where the file has bfloat16 (times two), and slack.
_COPIES_OF_WEIGHTS = 6
_SHM = Path("/dev/shm")  # noqa: S108  where Ray keeps objects
_SLOW_STORE_BYTES = 10**10
"""Ray's REQUIRE_SHM_SIZE_THRESHOLD: a larger store than this must fit /dev/shm, or Ray does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Ray resources of a stage."""

    num_cpus: int
    object_store_bytes: int
    wait_s: float = 0.0
    """Longest wait for nodes that the cluster lacks."""


def needs_of(cfg: RlConfig, model: Path) -> Needs:
    """Return an RL stage's resources: one CPU per thread that works at a time, and room for copies of the weights.

    `plan_gpus` assigns GPUs.
    """
    from klear_core.train.base_model import model_folder

    weights = sum(f.stat().st_size for f in model_folder(model).glob("*.safetensors"))
    return Needs(
        num_cpus=cfg.num_cpus,
        object_store_bytes=store_bytes(weights, shm_free=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0),
        wait_s=cfg.runtime.wait_for_nodes_s,
    )


def store_bytes(weights: int, *, shm_free: int) -> int:
    """Return the size of Ray's store for so many bytes of weights; what does not fit, Ray moves to the disk."""
    wanted = _STORE_FLOOR_BYTES + _COPIES_OF_WEIGHTS * weights
    # Ray takes this memory from the machine's, of which learner and engines need the rest.
    most: int = psutil.virtual_memory().available // 2
    # Less than is free, because others may take some before Ray looks.
    in_shm = shm_free - shm_free // 20
    return max(_STORE_FLOOR_BYTES, min(wanted, most, max(in_shm, _SLOW_STORE_BYTES)))


@contextmanager
def learner_ranks(runtime: TrainRuntime, model: Path) -> Iterator[RunRanks[Any]]:
    """Yield the function that runs a stage's learner ranks: on Ray, except a single rank on CPU, in this process.

    Raise ResourceError if `device = "auto"` would put a model that is too large for it on a CPU.
    """
    from klear_core.train.distributed import run_here

    if _is_one_on_this_cpu(runtime):
        yield run_here
        return
    needs = Needs(
        num_cpus=runtime.num_workers * runtime.num_threads,
        object_store_bytes=_STORE_FLOOR_BYTES,
        wait_s=runtime.wait_for_nodes_s,
    )
    with ray_session(needs):
        from klear_core.cluster.gang import check_device, run_on_ray
        from klear_core.train.base_model import model_folder

        check_device(runtime, read_hf_config(model_folder(model)).num_params)
        share_model(model)
        yield run_on_ray


@contextmanager
def memory_advised(training: SftConfig | RlConfig, model: Path) -> Iterator[None]:
    """Add to a GpuMemoryError of the block the settings that would need less."""
    try:
        yield
    except GpuMemoryError as e:
        from klear_core.pipeline.preflight.capacity import advice_on_memory
        from klear_core.train.base_model import model_folder

        advice = advice_on_memory(training, size_of_hf(read_hf_config(model_folder(model))))
        raise GpuMemoryError(f"{e}; {advice}") from e


def share_model(model: Path) -> None:
    """Send a model that was given by its folder to the shared store, if other nodes may need it."""
    if joins_a_cluster():
        share_given(model)


def _is_one_on_this_cpu(runtime: TrainRuntime) -> bool:
    from klear_core.train.model import pick_device

    if runtime.num_workers > 1 or runtime.device == "cuda":
        return False
    # A driver without a GPU may be connected to a cluster that has some.
    return runtime.device == "cpu" or (not joins_a_cluster() and pick_device("auto").type == "cpu")


@contextmanager
def ray_session(needs: Needs) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, which stays up, or start one that ends with the block.

    A cluster started here also ends if this process is killed; its logs are deleted unless the block raises.
    ResourceError if Ray cannot start or has too few CPUs.
    """
    os.environ.update({k: v for k, v in _QUIET.items() if k not in os.environ})
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.update({k: v for k, v in LOCAL_SETTINGS.items() if k not in os.environ})
    import ray

    where = f"the Ray cluster at {address}" if address else "this machine"
    with no_orphans(), ray_messages_logged():
        try:
            with signals_kept_from_ray():
                logs = _init(address, needs)
            when_there(lambda: _check_cpus(ray.cluster_resources(), needs, where=where), wait_s=needs.wait_s)
            _gpus_of_cluster[:] = [int(ray.cluster_resources().get("GPU", 0))]
            yield
        finally:
            if not address:
                _kill_helpers_of_ray()
            with sigterm_handler_kept():
                ray.shutdown()
        if logs is not None:
            shutil.rmtree(logs, ignore_errors=True)  # Ray itself deletes none: some 60 files a session


_gpus_of_cluster: list[int] = []
"""GPUs of the cluster that this process has joined or started last; empty before."""


def gpus_in_reach() -> int:
    """Return the GPUs that stages of this process hold: the cluster's, or this machine's if none was joined."""
    return _gpus_of_cluster[0] if _gpus_of_cluster else gpus_here()


def _init(address: str | None, needs: Needs) -> Path | None:
    """Connect to the cluster, or start one here; return the folder of the logs of the latter."""
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    # Ray's CPUs are only a count for scheduling: a learner and two actors must also fit on a machine with two cores.
    num_cpus = max(needs.num_cpus, os.cpu_count() or 1)
    if address:
        require_listener(address)
    try:
        if address:
            ray.init(address=address, **quiet)
            return None
        started = ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=gpus_here(),  # as the plan counts: to Ray the -1 that hides all GPUs names one
            object_store_memory=needs.object_store_bytes,
            include_dashboard=False,
            **quiet,
        )
        return Path(started.address_info["session_dir"])
    except Exception as e:  # a node that takes Ray's 30 s to start, on a busy machine, is a bare Exception
        if address:
            raise cannot_join(address, e) from e
        raise ResourceError(f"Ray cannot be started on this machine: {e}") from e


def _check_cpus(resources: dict[str, float], needs: Needs, *, where: str) -> None:
    num_cpus = resources.get("CPU", 0)
    if num_cpus < needs.num_cpus:
        raise ResourceError(
            f"{where} has {num_cpus:g} CPUs, the stage needs {needs.num_cpus:g}: use fewer actors or threads "
            f"(num_workers, num_threads, num_rollout_actors and rollout_threads of the stage's runtime, num_engines "
            f"and num_threads of evaluate.runtime), or set RAY_ADDRESS to a bigger cluster"
        )


def _kill_helpers_of_ray() -> None:
    """Kill what a cluster that was started here does not need to end.

    Ray asks each process by SIGTERM, which is blocked in them, and waits for it a second, one after the other.
    """
    import ray

    for process in psutil.Process().children():
        with suppress(psutil.Error):
            is_rays = any(argument.startswith(ray.__path__[0]) for argument in process.cmdline())
            if is_rays and process.name() not in ("gcs_server", "raylet"):
                process.kill()


# ---- engines and judges ----


_STORE_BYTES = 128 << 20  # requests and answers; weights are read from the disk


@contextmanager
def open_engines_and_judges(
    engine: LocalEngineConfig, runtime: EnginesRuntime, model: Path, *, section: str
) -> Iterator[EnginesAndJudges]:
    """Yield what starts the engines of a stage with a model; `section` is that of the stage's settings.

    Ray is started, or joined, only if there are several engines (endpoints not counted), or if RAY_ADDRESS names a
    cluster, whose GPUs are then used; a given model is sent there. Raise ResourceError if there are too few GPUs.
    """
    if not os.environ.get("RAY_ADDRESS"):
        plan = plan_engines(runtime.num_engines, engine, [gpus_here()], key=section)
        if plan.num_engines <= 1:
            start = partial(start_with_endpoints, runtime=runtime, key=section, num_here=plan.num_engines)
            yield EnginesAndJudges(section=section, start_sampler=start)
            return
    # `auto` is as many as the GPUs hold, which is known once Ray runs; it must have CPUs for one engine at least.
    num_engines = 1 if runtime.num_engines == "auto" else runtime.num_engines
    needs = Needs(
        num_cpus=max(1, num_engines * runtime.num_threads),
        object_store_bytes=_STORE_BYTES,
        wait_s=runtime.wait_for_nodes_s,
    )
    with ray_session(needs):
        from klear_core.cluster.pools import build_cluster_judges, start_pool

        share_model(model)
        yield EnginesAndJudges(
            section=section,
            start_sampler=partial(start_pool, runtime=runtime, key=section),
            build_judges=build_cluster_judges,
        )


def on_this_cpu(engine: LocalEngineConfig, model: Path, *, key: str) -> LocalEngineConfig:
    """Return the settings of our engine for this process's CPU: other processes have the GPUs.

    Raise ResourceError if the model is too large for a CPU, and the settings do not ask for one.
    """
    from klear_core.train.base_model import model_folder

    assert isinstance(engine, TorchEngineConfig), engine.kind
    num_params = read_hf_config(model_folder(model)).num_params
    check_engines_have_gpus(EnginePlan(num_engines=1, gpus_per_engine=0), engine, num_params, key=key)
    runtime = engine.runtime.model_copy(update={"device": "cpu"})
    return engine.model_copy(update={"runtime": runtime})


@contextmanager
def open_judges() -> Iterator[Callable[[VerifyConfig], JudgePool]]:
    """Yield what builds the judges of a stage without engines: on all nodes of the cluster that RAY_ADDRESS names."""
    if not os.environ.get("RAY_ADDRESS"):
        yield JudgePool
        return
    with ray_session(Needs(num_cpus=1, object_store_bytes=_STORE_BYTES)):
        from klear_core.cluster.pools import build_cluster_judges

        yield build_cluster_judges


def scorer_beside(
    job: InlineEvalJob, runtime: TrainRuntime, folder: Path, *, is_on_ray: bool, seed: int, workdir: Path
) -> AbstractContextManager[ModelScorer]:
    """Return the scorer of the models of an SFT run: on GPUs of Ray that its ranks leave free, else in processes.

    `folder` is that of the model to train. Raise ResourceError if the engine needs GPUs and none is left.
    """
    from klear_core.evaluate.inline_eval import process_scorer

    if not is_on_ray:  # the only rank trains in this process, on the CPU
        return process_scorer(job, folder, seed=seed)
    assert job.scorer is not None
    num_params = read_hf_config(folder).num_params
    plan = plan_scorer(job.scorer.engine, runtime, ray_nodes(), num_params, key="sft")
    # On the CPU. Its `device = "auto"` must not find the GPUs, which belong to the ranks.
    if plan.gpus_per_engine == 0:
        return process_scorer(job, folder, seed=seed, hides_gpus=True)
    from klear_core.cluster.pools import ray_scorer

    return ray_scorer(job, folder, plan=plan, seed=seed, remote=remote_paths_of(workdir), key="sft")


# ---- what Ray prints ----
# `log_to_driver=False` silences the workers, but a thread of Ray still prints what the raylet reports.


RAYS_THREAD = "ray_listen_error_messages"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REPORTED_BY_US = re.compile(
    r"A worker died or was killed|worker .*(exit|died)|The actor .*died|restart|\[state-dump\]|\(raylet\) \w+\.cc:\d+",
    re.IGNORECASE,
)
"""Messages about lost actors, logged as INFO only: the stage itself reports them, with the consequence for the run. The
last lines of a dead raylet's log, too: the line before them says that it is dead."""


@contextmanager
def ray_messages_logged() -> Iterator[None]:
    """Log what Ray's thread prints while the block runs: lost workers as INFO, the rest (memory, disk) as WARNING."""
    before = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRay(before))
    try:
        yield
    finally:
        sys.stdout = before


class _WithoutRay:
    """A text stream that logs the lines of Ray's thread and passes on what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._is_logging = False

    def write(self, text: str) -> int:
        """Log complete lines of Ray's thread; write the text of other threads."""
        if threading.current_thread().name != RAYS_THREAD or self._is_logging:
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        self._is_logging = True  # a log handler may write the record to this stream, in this thread
        try:
            for line in filter(None, (_COLOURS.sub("", line).strip() for line in lines)):
                log.log(logging.INFO if _REPORTED_BY_US.search(line) else logging.WARNING, "Ray: %s", line)
        finally:
            self._is_logging = False
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the stream."""
        return getattr(self._stream, name)


# ---- processes of a killed run ----


_GRACE_S = 2.0
_watched: set[int] = set()
"""This process's id while it is watched; two watchers would end each other before their work is done."""

_WATCH = """
import os, signal, sys
import psutil

def descendants():
    try:
        return {p.pid: p for p in psutil.Process(parent).children(recursive=True) if p.pid != os.getpid()}
    except psutil.Error:  # the parent is gone
        return {}

parent, grace_s = int(sys.argv[1]), float(sys.argv[2])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
family, is_over = {}, False
while os.getppid() == parent and not is_over:
    # Processes stay in `family` once seen: if their own parent dies, they are no longer listed as descendants.
    family = {pid: p for pid, p in family.items() if p.is_running()} | descendants()
    is_over = signal.sigtimedwait([signal.SIGTERM], 1)
if is_over:
    kept = descendants()
    family = {pid: p for pid, p in family.items() if pid not in kept}
for ask in (psutil.Process.terminate, psutil.Process.kill):
    for process in family.values():
        try:
            ask(process)  # psutil checks that the pid is still the same process
        except psutil.Error:
            pass
    psutil.wait_procs(family.values(), timeout=grace_s)
"""


@contextmanager
def no_orphans() -> Iterator[None]:
    """Run a watcher in its own session while the block runs.

    If this process dies, the watcher ends its descendants; when the block ends, those whose own parent has died.

    Ray ends most of its processes itself, but without its head two agents run on for over a minute, and Prefect's
    temporary server for ever.
    """
    own = os.getpid()
    if own in _watched:
        yield
        return
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCH, str(own), str(_GRACE_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the watcher must survive Ctrl-C and a kill of the process group
    )
    _watched.add(own)
    try:
        yield
    finally:
        _watched.discard(own)
        watcher.terminate()
        watcher.wait()


# ---- keys ----


def read_keys(jobs: Iterable[Job]) -> dict[str, SecretStr]:
    """Return the keys in the Secret blocks that endpoints of these jobs name; blocks that do not exist are left out.

    Raise ConfigError, without the value, if a block holds something else than text.
    """
    # Prefect reads its settings when it is imported, and commands that set them import this module first.
    from prefect.blocks.system import Secret
    from prefect.exceptions import ObjectNotFound

    found: dict[str, SecretStr] = {}
    for name in sorted(_blocks_of(jobs)):
        try:
            block = Secret.load(name)
        except ValueError as e:
            if isinstance(e.__cause__, ObjectNotFound):
                continue
            # the text and the cause of another error may show what is in the block
            raise ConfigError(f"the Prefect block secret/{name} cannot be read ({type(e).__name__})") from None
        assert isinstance(block, Secret), type(block)
        value = block.value.get_secret_value()
        if not isinstance(value, str):
            raise ConfigError(f"the Prefect block secret/{name} holds {type(value).__name__}, not the text of a key")
        found[name] = SecretStr(value)
    return found


def _blocks_of(jobs: Iterable[Job]) -> set[str]:
    used = [chat for job in jobs if (chat := job.chat_in(""))]
    return {endpoint.api_key_block for chat in used for endpoint in chat.runtime.endpoints} - {""}
