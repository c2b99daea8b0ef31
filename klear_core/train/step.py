"""Run one optimizer step over a packed batch, for SFT and RL alike: accumulate gradients, check, clip, update.

`torchao` (8-bit moments) is imported nowhere else.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from klear_core.config.train import NO_TORCHAO, OptimConfig
from klear_core.errors import ConfigError, TrainingError, reporting
from klear_core.metrics import made_progress
from klear_core.train.distributed import World
from klear_core.train.logps import HeadOutput
from klear_core.train.model import Head
from klear_core.train.packing import PackedBatch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of a step. `outputs` are this rank's, one per micro-batch; `loss` is the sum over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    is_applied: bool
    """False if loss or gradient was not finite; the weights are then unchanged."""
    outputs: tuple[HeadOutput, ...]


class Updater:
    """Updates a (possibly sharded) model with AdamW and its learning-rate schedule."""

    def __init__(self, model: nn.Module, cfg: OptimConfig, world: World, *, num_steps: int) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, cfg)
        self.cfg = cfg
        self.world = world
        self.num_steps = num_steps

    def update(self, batch: PackedBatch, heads: Sequence[Head[HeadOutput]], *, step: int) -> UpdateResult:
        """Run forward and backward over all micro-batches, then one update at the rate of `step` (collective call).

        `heads` has one head per micro-batch. Their losses are summed over micro-batches and ranks, so each must divide
        by counts of all rows of the update.
        """
        outputs = []
        for i, (micro, head) in enumerate(zip(batch.micro_batches, heads, strict=True), start=1):
            out: HeadOutput = self.model(micro, head)
            # Gradients accumulate as a sum: the loss is already divided by the global count. FSDP sums over ranks in
            # every backward; to do so only in the last, each rank would have to hold whole gradients.
            out.loss.backward()  # type: ignore[no-untyped-call]
            # Detached, so that the graph of this micro-batch is freed.
            outputs.append(HeadOutput(out.loss.detach(), out.logp_N, out.entropy_N))
            made_progress(f"micro-batch {i} of {len(heads)} of an update")
        # Ranks without rows take part, too: every rank must make the same collective calls.
        loss = self.world.sum(torch.stack([o.loss for o in outputs]).sum())
        norm = grad_norm(self.model)
        # Loss and norm are global, so all ranks take the same decision; otherwise their weights would diverge.
        is_applied = bool(torch.isfinite(loss) & torch.isfinite(norm))
        # By the number of the step, so that a skipped update does not shift the schedule.
        lr = lr_at(step, self.cfg, self.num_steps)
        if is_applied:
            apply_update(self.model, self.optimizer, lr=lr, norm=norm, max_grad_norm=self.cfg.max_grad_norm)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(
            loss=loss.item(), grad_norm=norm.item(), lr=lr, is_applied=is_applied, outputs=tuple(outputs)
        )


_PROBE_SIZE = {"cpu": 384, "cuda": 2048}  # rows and columns; some milliseconds on either
_SLOWER = 1.5  # times the usual rank's time of the probe, from which on a rank counts as slower
_STEPS_UNTIL_TOLD = 3  # in a row: another process may want a core for a moment


class RankPaces:
    """Finds ranks whose processor computes slower than the others': a throttled GPU, a core shared with another job.

    Ranks wait for one another in every layer, so that a slow one costs all of them the same. Therefore each times a
    matrix product of its own, with nobody waiting.
    """

    def __init__(self, world: World, prefix: str, probe: Callable[[torch.device], float] | None = None) -> None:
        self._world = world
        self._prefix = prefix
        self._probe = product_ms if probe is None else probe
        self._hosts = world.gather(socket.gethostname())
        self._steps_slow = [0] * world.size

    def measure(self) -> dict[str, float]:
        """Time the product on every rank and warn of a slow one (collective call).

        Return milliseconds of the usual and of the slowest rank, under the prefix; nothing with a single rank.
        """
        if self._world.size == 1:
            return {}
        own = torch.zeros(self._world.size, device=self._world.device)
        own[self._world.rank] = self._probe(self._world.device)
        times = self._world.sum(own).tolist()
        usual = statistics.median_low(times)
        for rank, ms in enumerate(times):
            self._steps_slow[rank] = self._steps_slow[rank] + 1 if ms > _SLOWER * usual else 0
            if self._steps_slow[rank] == _STEPS_UNTIL_TOLD and self._world.rank == 0:
                log.warning(
                    "rank %d on %s is slow, and all wait for it: a matrix product takes it %.1f times as long as the "
                    "median of %d ranks. Look at the clocks, temperature and other processes of its node",
                    rank, self._hosts[rank], ms / max(1e-9, usual), self._world.size,
                )  # fmt: skip
        return {f"{self._prefix}/rank_ms": usual, f"{self._prefix}/slowest_rank_ms": max(times)}


def product_ms(device: torch.device) -> float:
    """Return the milliseconds that `device` takes for a matrix product of fixed size, the shortest of three."""
    size = _PROBE_SIZE[device.type]
    factor = torch.ones(size, size, device=device)
    times = []
    for _ in range(3):
        started = time_when_done(device)
        factor @ factor
        times.append(1000 * (time_when_done(device) - started))
    return min(times)


def time_when_done(device: torch.device) -> float:
    """Return the time in seconds once `device` has finished all queued work (CUDA runs asynchronously)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


PROFILES = "profile"
"""Folder of the recorded steps, in the working folder of a training."""


@contextmanager
def profiled(steps: tuple[int, int] | None, step: int, folder: Path, *, rank: int) -> Iterator[None]:
    """Record the block with torch.profiler, as a Chrome trace, if `step` is within `steps`; both ends are included."""
    if steps is None or not steps[0] <= step <= steps[1]:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        yield
    with reporting(f"the profile of step {step} is not kept"):
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / f"step-{step:08d}-rank-{rank}.json"))


def check_profiled(steps: tuple[int, int] | None, num_steps: int) -> None:
    """Warn if a training of so many steps reaches none of those that it is to record."""
    if steps is not None and steps[0] > num_steps:
        log.warning("profile_steps = %s: this training has %d steps, so none is recorded", list(steps), num_steps)


def save_bad_batch(
    folder: Path, rows: Sequence[DataclassInstance], *, step: int, num_skipped: int, max_skipped: int, rank: int = 0
) -> None:
    """Save the rows of a skipped update for inspection. Raise TrainingError if more than `max_skipped` were skipped.

    `step` counts from 1, as in the metrics. `num_skipped` includes this one. It is part of the file name, because an RL
    step has several updates. So is a rank above 0, whose rows may be others.
    """
    of_rank = f"-rank-{rank}" if rank else ""
    path = folder / f"step-{step:08d}-{num_skipped}{of_rank}.json"
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"  # ranks of a context write the same file at once
    log.warning("step %d: an update skipped, loss or gradient not finite; its rows are in %s", step, path)
    with reporting("these rows are not kept"):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps([_spell_nonfinite(asdict(row)) for row in rows], allow_nan=False))
        temporary.replace(path)
    if num_skipped > max_skipped:
        raise TrainingError(
            f"{num_skipped} updates with a loss or gradient that is not finite, {max_skipped} are allowed; see {folder}"
        )


def _spell_nonfinite(value: Any) -> Any:
    """Replace numbers that are not finite by "nan", "inf" and "-inf".

    JSON cannot express them otherwise; `float` reads these names.
    """
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _spell_nonfinite(item) for key, item in value.items()}
        case list() | tuple():
            return [_spell_nonfinite(item) for item in value]
        case _:
            return value


def lr_at(step: int, cfg: OptimConfig, num_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0: an update of SFT, or an RL step with all its updates.

    It warms up linearly to `lr`, then follows a cosine that reaches `min_lr_ratio` of it at the last step.
    """
    if step < cfg.warmup_steps:
        # step + 1, so that the first step has a rate above 0.
        return cfg.lr * (step + 1) / cfg.warmup_steps
    floor = cfg.lr * cfg.min_lr_ratio
    left = max(1, num_steps - 1 - cfg.warmup_steps)  # the last step is number num_steps - 1
    share = min(1.0, (step - cfg.warmup_steps) / left)
    return floor + (cfg.lr - floor) * 0.5 * (1 + math.cos(math.pi * share))


def make_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only: not on norms and biases (one axis), nor on embeddings.

    Raise ConfigError if `cfg.kind` needs torchao and it is not installed.
    """
    # By identity, because == on tensors compares element-wise. A tied LM head is the embedding's tensor and is not
    # decayed either.
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.ndim >= 2 and id(p) not in embeddings:
            decayed.append(p)
        else:
            plain.append(p)
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if cfg.kind == "adamw_8bit":
        return _adamw_8bit(groups, cfg)
    # fused: one pass over weight, gradient and moments, where the plain form makes eight.
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=True)
    # Create the moments now instead of in the first step: too little memory fails early, and any checkpoint has them.
    for p in decayed + plain:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),  # a tensor beside the weight, as the fused kernel reads it
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def _adamw_8bit(groups: list[dict[str, Any]], cfg: OptimConfig) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as e:
        raise ConfigError(f"optim.kind = 'adamw_8bit': {NO_TORCHAO}") from e
    optimizer: Any = AdamW8bit(groups, lr=cfg.lr, betas=cfg.betas)
    # torchao makes the moments in its first step; `make_optimizer` says why they are made here.
    for group in groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": optimizer._new_buffer(p, True),  # signed: a mean of gradients; squares need no sign
                "exp_avg_sq": optimizer._new_buffer(p, False),
            }
    made: torch.optim.Optimizer = optimizer
    return made


def grad_norm(model: nn.Module) -> Tensor:
    """Return the global 2-norm of all gradients over all ranks (collective call)."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    # Sharded gradients give a sharded norm (DTensor): full_tensor() combines it over the ranks.
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return full


def apply_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float, norm: Tensor, max_grad_norm: float
) -> None:
    """Clip gradients of norm `norm` to `max_grad_norm`, update the weights, and clear the gradients."""
    # Scales by min(1, max_grad_norm / norm): all ranks have the same norm, and so scale alike.
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, norm)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # torchao's compiled step would be compiled again for another number
        else:
            group["lr"] = lr
    _step(optimizer)
    optimizer.zero_grad(set_to_none=True)


def _step(optimizer: torch.optim.Optimizer) -> None:
    first = optimizer.param_groups[0]["params"][0]
    if isinstance(optimizer, torch.optim.AdamW) or first.device.type != "cpu":
        optimizer.step()
        return
    # torchao compiles its step once per shape, which takes a CPU longer than the updates of a small model.
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
