"""Find the work that a run still has to do: stages to build, and the sources, engines and trainings that they use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.manifest import ArtifactId
from klear_core.artifacts.store import LocalStore
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import EngineUse, Job, Stage
from klear_core.config.train import TrainRuntime
from klear_core.distill.keys import BlockKeys
from klear_core.errors import ConfigError
from klear_core.pipeline.fingerprints import fingerprints_of
from klear_core.pipeline.graph import stages_of, with_inputs
from klear_core.pipeline.workspace import open_store

J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """The stages that would run, and what they would use."""

    config: PipelineConfig
    stages: tuple[Stage, ...]
    """Stages that would run, in order."""
    needed: tuple[Stage, ...]
    """Stages whose input files must exist, in order: those chosen, and all that they depend on. Also those to build
    again and not chosen, because their artifacts are set aside by fingerprint, which depends on their files."""
    benchmarks: Path | None = None
    """The folder of the benchmarks artifact that would be reused."""
    begun_gb: float = 0.0
    """Gigabytes that earlier attempts at these stages have left in their working folders."""
    unmade_inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Chosen stages, each with the inputs (in pipeline order) that neither exist nor are chosen."""
    keys: BlockKeys | None = None
    """Teachers' API keys by Prefect block; None before Prefect runs, when they cannot be read."""

    @classmethod
    def of(cls, config: PipelineConfig, chosen: Collection[str] | None, again: Collection[str]) -> PendingWork:
        """Return the work for the chosen stages (None: all), without those that exist, unless they are to be built
        `again`."""
        stages = stages_of(config)
        wanted = tuple(s for s in stages if chosen is None or s.name in chosen)
        names = {s.name for s in wanted}
        needed = with_inputs(stages, names.union(again))
        try:
            ids = fingerprints_of(needed, config.workspace)
        except (ConfigError, OSError):  # a missing file or unusable workspace; preflight reports it with its key
            return cls(config=config, stages=wanted, needed=needed)
        # By size: this check takes seconds. The run itself compares as `workspace.check_artifacts` says.
        store = open_store(config.workspace, checked_by="size")
        made = _made(store, ids, again)
        pending = tuple(s for s in wanted if s.name not in made)
        begun = [store.workdir(ids[s.name].kind, ids[s.name].fingerprint) for s in pending]
        loading = [s.name for s in needed if isinstance(s.job, BenchmarksJob)]
        benchmarks = _folder_of(store, ids[loading[0]]) if loading and loading[0] in made else None
        return cls(
            config=config,
            stages=pending,
            needed=needed,
            benchmarks=benchmarks,
            begun_gb=sum(_gb_in(folder) for folder in begun),
            unmade_inputs=tuple(_unmade_inputs(wanted, needed, made)),
        )

    @property
    def evaluates(self) -> bool:
        """Whether any model would be evaluated."""
        return any(stage.job.scores_model for stage in self.stages)

    def pending(self, job: type[J]) -> Iterator[tuple[Stage, J]]:
        """Yield the stages that would run and have a job of this class, each with its job."""
        return _with_job(self.stages, job)

    def needs(self, job: type[J]) -> Iterator[tuple[Stage, J]]:
        """Yield the `needed` stages that have a job of this class, each with its job."""
        return _with_job(self.needed, job)

    def engines(self) -> list[EngineUse]:
        """Return the engines that would sample, each once: all models are evaluated by one."""
        # By key, because the stages that evaluate share one section of settings, also with the curve of SFT.
        by_key: dict[str, EngineUse] = {}
        for stage in self.stages:
            engines = [use for use in (stage.job.scorer(), stage.engine()) if use is not None]
            by_key |= {use.key: use for use in engines}
        return list(by_key.values())

    def trainings(self) -> Iterator[tuple[str, TrainRuntime]]:
        """Yield the stages that would train, by the section of their settings."""
        for stage in self.stages:
            training = stage.job.training()
            if training is not None:
                yield stage.section, training.runtime


def _with_job(stages: Sequence[Stage], job: type[J]) -> Iterator[tuple[Stage, J]]:
    for stage in stages:
        if isinstance(stage.job, job):
            yield stage, stage.job


def _made(store: LocalStore, ids: Mapping[str, ArtifactId], again: Collection[str]) -> set[str]:
    """Return the names of stages whose artifacts can be reused."""
    return {
        name
        for name, own in ids.items()
        if name not in again and store.exists(own.kind, own.fingerprint) and not store.damage(own.kind, own.fingerprint)
    }


def _folder_of(store: LocalStore, own: ArtifactId) -> Path | None:
    ref = store.find(own.kind, own.fingerprint)
    return ref.path if ref else None


def _unmade_inputs(
    wanted: Sequence[Stage], needed: Sequence[Stage], made: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    there = {stage.name for stage in wanted} | {*made}
    for stage in wanted:
        inputs = set(stage.inputs.values())
        missing = tuple(n.name for n in needed if n.name in inputs and n.name not in there)
        if missing:
            yield stage.name, missing


def _gb_in(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9
