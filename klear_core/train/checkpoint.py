"""Save and restore checkpoints (model, optimizer, random state, caller's counters) that are either complete or absent.

A checkpoint is a folder `step-00000100`: written under another name, sealed with checksums of all files, then renamed.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from klear_core.config.train import CheckpointConfig
from klear_core.errors import ArtifactError, ResourceError
from klear_core.metrics import made_progress
from klear_core.train.checkpoint_files import SEAL, CheckpointCopies, digests_of, files_of_rank, find_damage
from klear_core.train.distributed import COLLECTIVE_TIMEOUT, World

log = logging.getLogger(__name__)
# This warning is expected, because a single rank saves without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")

T = TypeVar("T")
Counters = Mapping[str, int | float]
"""Other numbers that a training loop needs to resume (policy version, skipped steps, data position)."""


class Checkpoints:
    """Save and load the checkpoints of one stage in one folder. Every rank must make the same calls in order.

    A step is an update of SFT, or an RL step with all its updates.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig, world: World) -> None:
        self.folder = folder
        self.cfg = cfg
        self.world = world
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The writer thread needs a separate process group: collective calls of two threads would mix on a shared one.
        is_group_needed = cfg.asynchronous and world.size > 1
        # The others wait in it for the rank that writes or sends its files the longest.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if is_group_needed else None
        self._copies = CheckpointCopies.of(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def is_due(self, step: int) -> bool:
        """Return whether the state after `step` finished steps is to be saved."""
        return step % self.cfg.every_steps == 0

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, counters: Counters) -> None:
        """Save the state after `step` steps; with `asynchronous`, a thread writes a copy while training goes on."""
        self.wait()  # one save at a time: all of them use the same temporary folder
        state = state_of(model, optimizer, self.world)
        seal = {"step": step, "counters": dict(counters)}
        if not self.cfg.asynchronous:
            self._write(step, state, seal)
            return
        # The copy is complete before this call returns: the next update overwrites weights and moments in place.
        # A daemon, so that a failing run can end: what the thread leaves behind has no final name and is not loaded.
        self._writer = threading.Thread(target=self._write_guarded, args=(step, cpu_copy(state), seal), daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Wait until the last asynchronous save is complete; raise the error that it failed with."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error that an asynchronous save has failed with, once; do not wait for one that still writes."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def load_latest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, dict[str, int | float]] | None:
        """Restore the newest complete checkpoint and return its step and counters; None if there is none.

        A damaged checkpoint is skipped with a warning: resuming from the one before it loses less than starting over.
        With a shared store the newest complete copy counts, and is fetched to every rank's disk.
        """
        name = self._newest_here() if self._copies is None else self._newest_copy(self._copies)
        if name is None:
            return None
        folder = self.folder / name
        # Read on every rank: the checkpoint is on a disk that all share, or was fetched to each.
        seal = json.loads((folder / SEAL).read_text())
        state = state_of(model, optimizer, self.world)  # names and shapes to load into; its values are overwritten
        random_key = f"random.{self.world.rank}"
        if random_key not in FileSystemReader(folder).read_metadata().state_dict_metadata:
            del state[random_key]  # saved by fewer ranks: this one keeps its random state
        try:
            load_shards(state, checkpoint_id=folder, no_dist=self.world.size == 1, planner=LoadPlanner())
        except CheckpointException as e:
            raise ArtifactError(f"checkpoint {folder} does not fit this model and optimizer: {_causes(e)}") from e
        model_state, optimizer_state = state["model"], state["optimizer"]
        # The names and shapes were checked by the loading above; `strict` would ask for the frozen weights too.
        options = StateDictOptions(strict=False)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
        )
        if random_key in state:
            torch.set_rng_state(state[random_key])
        return seal["step"], seal["counters"]

    def _write_guarded(self, step: int, state: dict[str, Any], seal: dict[str, Any]) -> None:
        try:
            self._write(step, state, seal)
        except BaseException as e:  # noqa: BLE001  # carried to the training thread, which raises it in wait()
            self._failure = e

    def _write(self, step: int, state: dict[str, Any], seal: dict[str, Any]) -> None:
        # Collective call. The barriers keep this order on all ranks: clean up, write shards, seal and rename, return.
        temporary, final = self.folder / "unfinished", self.folder / f"step-{step:08d}"
        if self._is_writer_of_disk:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)  # damaged: a run resumes from a complete one
        self._barrier()
        try:
            save_shards(
                state,
                checkpoint_id=temporary,
                no_dist=self.world.size == 1,
                process_group=self._group,
                planner=SavePlanner(),
            )
        except CheckpointException as e:  # a BaseException, which `except Exception` would miss
            raise ResourceError(f"checkpoint {final} could not be written: {_causes(e)}") from e
        self._barrier()
        if self._copies is not None:
            self._send(self._copies, seal, temporary, final)
        else:
            self._on_each_rank(partial(self._seal_here, seal, temporary, final), final)
        if self._is_writer_of_disk:
            for old in self._outdated(self._names(), final.name):  # only now that the new one is complete
                shutil.rmtree(self.folder / old, ignore_errors=True)
        self._barrier()

    def _seal_here(self, seal: dict[str, Any], temporary: Path, final: Path) -> None:
        """Seal what all ranks have written to the disk that they share."""
        if self.world.rank == 0:
            seal["files"] = digests_of(sorted(temporary.iterdir()))
            # The name comes last, so that a killed save is never loaded. No fsync: what a power failure cuts short has
            # another checksum, and the checkpoint before it is loaded.
            (temporary / SEAL).write_text(json.dumps(seal, allow_nan=False))
            temporary.rename(final)

    def _send(self, copies: CheckpointCopies, seal: dict[str, Any], temporary: Path, final: Path) -> None:
        """Send this rank's files to the store, and seal the copy and what is on each disk (collective call)."""

        def send_own() -> dict[str, str]:
            own = files_of_rank(temporary, self.world.rank)
            digests = digests_of(own)
            copies.send(final.name, own)
            return digests

        seal["files"] = {name: d for each in self._on_each_rank(send_own, final) for name, d in each.items()}
        self._on_each_rank(partial(self._seal_copy, copies, json.dumps(seal, allow_nan=False), temporary, final), final)

    def _seal_copy(self, copies: CheckpointCopies, content: str, temporary: Path, final: Path) -> None:
        """Seal the copy in the store (rank 0), and the checkpoint on this rank's disk."""
        # After the gathering in `_send`: the store has the files of all ranks.
        if self.world.rank == 0:
            copies.seal(final.name, content)
            for old in self._outdated(copies.sealed(), final.name):
                copies.drop(old)
        # Any of the ranks that share a disk may do the renaming, because all files are there after the gathering.
        # Written beside first: a rank that renames the folder must not find another's seal half written.
        beside = self.folder / f"{SEAL}.{self.world.rank}"
        beside.write_text(content)
        try:
            beside.replace(temporary / SEAL)
            temporary.rename(final)
        except FileNotFoundError:  # another rank of this disk has renamed the folder in between
            beside.unlink(missing_ok=True)
            if not final.is_dir():
                raise

    @property
    def _is_writer_of_disk(self) -> bool:
        """Return whether this rank cleans up its disk: rank 0, or with a shared store all, whose disks may differ."""
        return self.world.rank == 0 or self._copies is not None

    def _on_each_rank(self, part: Callable[[], T], final: Path) -> list[T]:
        """Do each rank's part of a save and return the results of all (collective call).

        If a part fails, all ranks raise: the others would wait for the one that failed.
        """
        if self.world.size == 1:
            return [part()]
        value, failure = None, None
        try:
            value = part()
        except Exception as e:  # noqa: BLE001  # raised below, once the other ranks know
            failure = e
        # The failure goes as text: an exception may hold what cannot be pickled.
        reports: list[Any] = [None] * self.world.size
        dist.all_gather_object(reports, (value, None if failure is None else repr(failure)), group=self._group)
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(reports) if error is not None]
        if failed:
            raise ResourceError(f"checkpoint {final} could not be written: {'; '.join(failed)}")
        return [value for value, _ in reports]

    def _barrier(self) -> None:
        if self.world.size > 1:
            dist.barrier(group=self._group)

    def _outdated(self, names: Sequence[str], newest: str) -> list[str]:
        """Return those of the names to delete once `newest` is complete: all but the last `keep` of those up to it.

        Later ones are damaged, or this run would have gone on from them.
        """
        kept = [name for name in names if name <= newest][-self.cfg.keep :]
        return [name for name in names if name not in kept]

    def _names(self) -> list[str]:
        # Names have eight digits, so their order is that of the steps.
        return sorted(p.name for p in self.folder.glob("step-*") if p.is_dir())

    def _newest_here(self) -> str | None:
        """Return the newest complete checkpoint on the disk of all ranks (collective call)."""
        # Rank 0 alone verifies checksums and chooses, so that all ranks load the same step.
        name: str | None = self.world.broadcast(self._newest_complete() if self.world.rank == 0 else None)
        return name

    def _newest_copy(self, copies: CheckpointCopies) -> str | None:
        """Return the newest checkpoint of the shared store that all ranks could fetch (collective call).

        With a single rank, one that only this disk has counts too: the run was killed before it was sent.
        """
        here = self._newest_complete() if self.world.size == 1 else None
        names: list[str] = self.world.broadcast(copies.sealed() if self.world.rank == 0 else None)
        for name in reversed(names):
            if here is not None and here >= name:
                return here
            try:
                copies.fetch(name, self.folder / name)
                trouble = ""
            except ArtifactError as e:
                trouble = str(e)
            # All ranks or none: they must load the same step, even if only one of them could not fetch it.
            troubles = [found for found in self.world.gather(trouble) if found]
            if not troubles:
                return name
            log.warning("checkpoint %s is skipped: %s", name, troubles[0])
        return here

    def _newest_complete(self) -> str | None:
        for name in reversed(self._names()):
            damage = find_damage(self.folder / name)
            if damage is None:
                return name
            log.warning("checkpoint %s is skipped: %s", self.folder / name, damage)
        return None


def _causes(failure: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {error!r}" for rank, (error, _trace) in failure.failures.items())


# ---- checkpoint state ----
# Collect what a checkpoint holds, copy it, and report each tensor that is written or read.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Return the weights that are trained, the optimizer's state, and this rank's random state."""
    # By parameter names and in shards (DTensor), so that another number of ranks can load it.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Frozen weights are those of the initial model: with LoRA a checkpoint holds only the adapters. A tied weight is in
    # the state under both its names, which torch's own option to leave out frozen weights overlooks.
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: value for name, value in model_state.items() if name not in frozen}
    # A key for each rank: of a tensor that several ranks name alike, DCP writes one rank's. Only the CPU's state:
    # on CUDA only the dropout of LoRA draws numbers, and each SFT step seeds it.
    return {"model": trained, "optimizer": optimizer_state, f"random.{world.rank}": torch.get_rng_state()}


def cpu_copy(state: Any) -> Any:
    """Return a copy of the state on the CPU; training overwrites the original in place."""
    if is_traceable_wrapper_subclass(state) and not isinstance(state, DTensor):
        # torchao's 8-bit moments, whose own `to` shares their memory if they are on the CPU already.
        source: Any = cast(Any, state).detach()
        names, context = source.__tensor_flatten__()
        parts = {name: cpu_copy(getattr(source, name)) for name in names}
        return type(source).__tensor_unflatten__(parts, context, source.shape, source.stride())
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)  # without `copy`, a tensor on the CPU would be returned itself
    if isinstance(state, dict):
        return {k: cpu_copy(v) for k, v in state.items()}
    if isinstance(state, list):
        return [cpu_copy(v) for v in state]
    return state


class SavePlanner(DefaultSavePlanner):
    """Reports every tensor that is written."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the data of one item, as the writer asks for it."""
        made_progress(f"writing of {write_item.index.fqn} to a checkpoint")
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    """Reports every tensor that is read."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor that one item is read into."""
        made_progress(f"reading of {read_item.dest_index.fqn} from a checkpoint")
        tensor: Tensor = super().resolve_tensor(read_item)
        return tensor
