"""Surround vLLM's processes: the environment they inherit, what they print, and what they report of their cache.

Imports no vllm; `vllm_engine` passes what is needed of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from klear_core.errors import EngineMemoryError, ResourceError
from klear_core.generate.engine import EngineStats

QUIET = "ERROR"
"""Level of vLLM's log in this process unless the user has set one: it warns of each weight."""
_LAST_LINES, _LINE_LENGTH = 40, 500
_LAST_BYTES = 64 << 10
_CAUSE, _NUM_CAUSES = re.compile(r"\b\w*(?:Error|Exception): .+"), 5
_NOISE = re.compile(r" (INFO|DEBUG) \d\d-\d\d |Completed \||^\s*$")
"""Lines of the log that no error is in."""
_TOO_SMALL = r"out of memory|No available memory for the cache blocks|larger than the available KV cache memory"
_TAKEN = r"Free memory on device"
"""vLLM's words at its start if other processes hold some of the share that it may have; they may end."""
_REMEDIES = (
    (
        rf"{_TOO_SMALL}|{_TAKEN}",
        "another process holds memory of this GPU (`klear doctor --gpu` names it), or the engine needs less: lower "
        "engine.max_model_len or raise engine.runtime.tensor_parallel; with a learner on the GPU, lower "
        "engine.runtime.gpu_memory_utilization",
    ),
    (
        r"driver version is insufficient|driver on your system is too old|no CUDA GPUs are available",
        "the NVIDIA driver does not fit this torch: `klear doctor --gpu` says which one it needs",
    ),
    (r"No space left on device|/dev/shm|shm_broadcast", "look at /dev/shm and the disk with `klear doctor --gpu`"),
    (r"Too many open files", "raise `ulimit -n` to 65536 where Ray or klear is started"),
)
"""Remedies by what an engine's last lines say."""


class ProcessLog:
    """Everything that the processes of one engine print, in a file.

    On GPUs engines are Ray actors, whose output reaches no driver, and an exception of vLLM does not say its cause.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine.log"
        self._starter = folder / "python"
        command = f'exec {shlex.quote(sys.executable)} "$@" >> {shlex.quote(str(self.path))} 2>&1'
        self._starter.write_text(f"#!/bin/sh\n{command}\n")
        self._starter.chmod(0o700)

    @contextlib.contextmanager
    def of_children(self) -> Iterator[None]:
        """Send the output of processes that are spawned in the block, and of their children, to the file."""
        # A folder on a disk that is mounted without the right to execute: they print to this process's output then.
        if not os.access(self._starter, os.X_OK):
            yield
            return
        before = spawn.get_executable()
        multiprocessing.set_executable(str(self._starter))
        try:
            yield
        finally:
            multiprocessing.set_executable(os.fsdecode(before))

    def error(self, what: str) -> ResourceError:
        """Return the error of an engine that failed, with its last lines; `what` says in what.

        It is an EngineMemoryError if the GPU has too little memory for the settings, whoever else uses it.
        """
        ending = self.ending()
        # vLLM's advice has these words, too
        is_too_small = re.search(rf"(?:error|exception|failure)\b.*(?:{_TOO_SMALL})", ending, re.IGNORECASE)
        is_permanent = is_too_small is not None and re.search(_TAKEN, ending) is None
        return (EngineMemoryError if is_permanent else ResourceError)(f"{what}{ending}")

    def ending(self) -> str:
        """Return the first errors and the last lines, below what to do about them; empty if nothing was printed."""
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        told = [line[:_LINE_LENGTH] for line in lines if not _NOISE.search(line)]
        # A worker says the cause, and the processes above it then print long traces of their own.
        causes = list(dict.fromkeys(found[0] for line in told[:-_LAST_LINES] if (found := _CAUSE.search(line))))
        told = [*causes[:_NUM_CAUSES], *told[-_LAST_LINES:]]
        if not told:
            return ""
        last = "\n  ".join(told)
        remedies = [remedy for pattern, remedy in _REMEDIES if re.search(pattern, last, re.IGNORECASE)]
        return "".join(f"; {remedy}" for remedy in remedies) + f"; its log ends with\n  {last}"


@contextlib.contextmanager
def environment(num_threads: int, sockets: str, *, is_cpu: bool) -> Iterator[None]:
    """Set the environment that the engine process inherits.

    Measured on CPU: without the OMP settings two threads run ten times slower than one, bound engines share a core, and
    the first request with log-probs waits half a minute for a compiler. `sockets` is the folder for sockets between the
    processes, which vLLM does not delete; their full path must stay below 108 bytes.
    """
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads can deadlock
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": sockets,
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }
    if os.environ.get("VLLM_LOGGING_LEVEL") == QUIET:  # that of this process, which has read it by now
        wanted["VLLM_LOGGING_LEVEL"] = "INFO"  # its processes print into their log
    if is_cpu:
        wanted |= {
            "OMP_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Gauge:
    """Keep the numbers that vLLM reports after each step: its `stat_loggers` call `record`."""

    def __init__(self) -> None:
        self._since = EngineStats()

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Add a step's `SchedulerStats` and `IterationStats`, either of which may be None."""
        before = self._since
        drafted = accepted = 0
        usage, num_waiting = before.cache_usage, before.num_waiting
        if scheduler is not None:
            usage, num_waiting = scheduler.kv_cache_usage, scheduler.num_waiting_reqs
            guessed = scheduler.spec_decoding_stats
            if guessed is not None:
                drafted, accepted = guessed.num_draft_tokens, guessed.num_accepted_tokens
        self._since = EngineStats(
            cache_usage=max(before.cache_usage, usage),
            num_waiting=max(before.num_waiting, num_waiting),
            num_preempted=before.num_preempted + (0 if iteration is None else iteration.num_preempted_reqs),
            num_drafted=before.num_drafted + drafted,
            num_accepted=before.num_accepted + accepted,
        )

    def take(self) -> EngineStats:
        """Return what was reported since the last call."""
        taken, self._since = self._since, EngineStats()
        return taken

    def logger_type(self, own_logger: type[Any]) -> type[Any]:
        """Return the class of loggers for `AsyncLLM`, each of which records here; `own_logger` is vLLM's Prometheus."""
        gauge = self

        # In the place of vLLM's own logger, which would compute some histograms of each request in each step.
        class _IntoGauge(own_logger):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_indexes: Any) -> None:
                """Register nothing."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, **_others: Any) -> None:
                """Record a step."""
                gauge.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Ignore."""

            def log(self) -> None:
                """Ignore."""

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                """Ignore."""

            def record_admission_rejection(self, reason: str) -> None:
                """Ignore."""

        return _IntoGauge


def cache_tokens(llm: Any) -> int:
    """Return the tokens that the KV cache of a running `AsyncLLM` has room for."""
    cache = llm.vllm_config.cache_config
    tokens: int = cache.kv_cache_size_tokens or (cache.num_gpu_blocks or 0) * cache.block_size
    return tokens
