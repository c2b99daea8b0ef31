"""Train on answers that exist: those of folders of scored rows, in an order that the seed draws (the stage `opd`).

A run that is killed anywhere and started again ends with the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from klear_core.artifacts.manifest import FileRecord, LedgerStep, StageSummary
from klear_core.artifacts.records import read_shard
from klear_core.artifacts.remote_paths import RemotePaths, fetch_results, remote_paths_of, send_results
from klear_core.artifacts.shared import send_work
from klear_core.config.rl import RlConfig
from klear_core.errors import ArtifactError
from klear_core.metrics import SILENT, Telemetry, skipped_note
from klear_core.rl.learner import Learner
from klear_core.seeding import seed_for
from klear_core.train.distributed import RunRanks, World, run_here
from klear_core.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Inputs of every rank."""

    cfg: RlConfig
    rows_per_step: int
    model: Path
    rows: Sequence[Path]
    seed: int
    workdir: Path
    remote: RemotePaths | None = None

    def on_this_node(self) -> _Job:
        """Return the inputs with this node's own paths."""
        if self.remote is None:
            return self
        local = self.remote.local_path
        rows = [local(path) for path in self.rows]
        return replace(self, model=local(self.model), rows=rows, workdir=local(self.workdir))


def train_offline(
    cfg: RlConfig,
    *,
    rows_per_step: int,
    model: Path,
    rows: Sequence[Path],
    workdir: Path,
    seed: int = 0,
    telemetry: Telemetry = SILENT,
    run_ranks: RunRanks[tuple[StageSummary, tuple[FileRecord, ...]]] = run_here,
) -> StageSummary:
    """Train `model` on the rows in the folders `scored` of the artifacts `rows`; write `workdir/model`."""
    remote = None if run_ranks is run_here else remote_paths_of(workdir)
    job = _Job(cfg=cfg, rows_per_step=rows_per_step, model=model, rows=rows, seed=seed, workdir=workdir, remote=remote)
    summary, results = run_ranks(partial(_run_rank, job), cfg.runtime, telemetry)
    fetch_results(remote, results, workdir)
    return summary


def _run_rank(job: _Job, world: World, telemetry: Telemetry) -> tuple[StageSummary, tuple[FileRecord, ...]]:
    job = job.on_this_node()
    learner = Learner(job.cfg, job.model, seed=job.seed, workdir=job.workdir, world=world)
    store = RowStore([path / "scored" for path in job.rows], rows_per_step=job.rows_per_step, seed=job.seed)
    counters = dict(learner.restore() or {"updates": 0, "skipped": 0, "trained_tokens": 0})
    checkpoint, num_steps = job.cfg.runtime.checkpoint, job.cfg.num_steps
    for step in range(learner.version, num_steps):
        metrics = learner.step(store.step(step))
        counters["updates"] += int(metrics["rl/optim/updates"])
        counters["skipped"] += int(metrics["rl/optim/skipped"])
        counters["trained_tokens"] += int(metrics.get("rl/batch/tokens", 0))
        done = step + 1
        # The learner names its metrics after RL.
        telemetry.log({name.replace("rl/", "opd/", 1): value for name, value in metrics.items()}, step=done)
        gap = metrics.get("rl/distill/kl")
        telemetry.progress(done, num_steps, "" if gap is None else f"KL to the teacher {gap:.3f}")
        if done % checkpoint.every_steps == 0 or done == num_steps:
            send_work(job.workdir)
            learner.save(counters)
    if not (job.workdir / "model").exists():  # else the run was killed after its export
        learner.export(job.workdir / "model")
    names = learner.results() if world.rank == 0 else []
    results = send_results(job.remote, job.workdir, names) if world.rank == 0 else ()
    skipped = int(counters["skipped"])
    summary = StageSummary(
        counts={"steps": num_steps, **counters},
        ledger=(store.ledger(num_steps),),
        seeds={"opd": job.seed},
        notes=(*learner.notes, *((skipped_note(skipped),) if skipped else ())),
    )
    return summary, results


class RowStore:
    """Scored rows on disk; a step's rows follow from its number and the seed alone."""

    def __init__(self, folders: Sequence[Path], *, rows_per_step: int, seed: int) -> None:
        import pyarrow.parquet as pq

        shards = [shard for folder in folders for shard in sorted(folder.glob("*.parquet"))]
        # The place of each row: its shard and its number in it.
        self._places = [(shard, i) for shard in shards for i in range(pq.read_metadata(shard).num_rows)]
        if not self._places:
            raise ArtifactError(f"{', '.join(map(str, folders))}: no scored answers here")
        self._rows_per_step, self._seed = rows_per_step, seed
        # The epoch whose order was computed last, with the order; -1 is none.
        self._order: tuple[int, list[int]] = (-1, [])

    def step(self, step: int) -> list[TrainSample]:
        """Return the rows of a step, counted from 0. Every epoch has an order of its own."""
        first = step * self._rows_per_step
        by_shard: dict[Path, list[tuple[int, int]]] = {}
        for n in range(first, first + self._rows_per_step):
            shard, i = self._places[self._row_at(n)]
            by_shard.setdefault(shard, []).append((n, i))
        # Each file is opened once.
        found: dict[int, TrainSample] = {}
        for shard, wanted in by_shard.items():
            samples = read_shard(shard, TrainSample, rows=[i for _, i in wanted])
            found |= {n: sample for (n, _), sample in zip(wanted, samples, strict=True)}
        return [found[n] for n in sorted(found)]

    def ledger(self, num_steps: int) -> LedgerStep:
        """Return how many of the rows so many steps train on."""
        num_rows = len(self._places)
        unused = max(0, num_rows - num_steps * self._rows_per_step)
        dropped = {"not_reached": unused} if unused else {}
        return LedgerStep.of("train", "answer", num_in=num_rows, dropped=dropped)

    def _row_at(self, n: int) -> int:
        epoch, place = divmod(n, len(self._places))
        if self._order[0] != epoch:
            order = list(range(len(self._places)))
            random.Random(seed_for(self._seed, "opd/order", epoch)).shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return self._order[1][place]
