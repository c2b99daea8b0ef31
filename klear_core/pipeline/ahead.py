"""Find the work that a run still has to do: stages to build, and the sources, engines and trainings that they use."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.store import LocalStore
from klear_core.config.data import CurateConfig, Source
from klear_core.config.engine import EngineConfig, SamplingConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import TrainRuntime
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of, with_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """The stages that would run, and what they would use."""

    config: PipelineConfig
    stages: frozenset[str]
    """Names of the stages that would run."""
    files_of: frozenset[str]
    """Names of the stages whose input files must exist: those chosen, and all that they depend on."""
    benchmarks: Path | None = None
    """The folder of the benchmarks artifact that would be reused."""
    begun_gb: float = 0.0
    """Gigabytes that earlier attempts at these stages have left in their working folders."""
    unmade_inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Chosen stages, each with the inputs (in pipeline order) that neither exist nor are chosen."""

    @classmethod
    def of(cls, config: PipelineConfig, chosen: Collection[str] | None, again: Collection[str]) -> PendingWork:
        """Return the work for the chosen stages (None: all), without those that exist, unless they are to be built
        `again`."""
        stages = stages_of(config)
        names = frozenset(s.name for s in stages if chosen is None or s.name in chosen)
        needed = with_inputs(stages, {*names, *again})
        files_of = frozenset(s.name for s in needed)
        try:
            ids = fingerprints_of(needed, config.workspace)
        except (ConfigError, OSError):  # a missing file or unusable workspace; preflight reports it with its key
            return cls(config=config, stages=names, files_of=files_of)
        store = LocalStore(open_store(config.workspace).root, checked_by="size")
        folders = {name: store.folder(own.kind, own.fingerprint) for name, own in ids.items() if name not in again}
        made = {
            name: folder
            for name, folder in folders.items()
            if folder.is_dir() and not store.damage(folder.parent.name, folder.name)
        }
        there = names | made.keys()
        unmade = (
            (s.name, tuple(n.name for n in needed if n.name in s.inputs.values() and n.name not in there))
            for s in needed
        )
        return cls(
            config=config,
            stages=names.difference(made),
            files_of=files_of,
            benchmarks=made.get("benchmarks"),
            begun_gb=sum(
                _gb_in(store.workdir(ids[name].kind, ids[name].fingerprint)) for name in names.difference(made)
            ),
            unmade_inputs=tuple((name, missing) for name, missing in unmade if name in names and missing),
        )

    @property
    def evaluates(self) -> bool:
        """Whether any model would be evaluated."""
        return any(name.startswith("evaluate_") for name in self.stages)

    def rl_stages(self) -> Iterator[tuple[str, RlConfig]]:
        """Yield the RL stages that would run, by name."""
        stages = {"rl": self.config.rl, "rl_code": self.config.rl_code}
        yield from ((name, cfg) for name, cfg in stages.items() if cfg is not None and name in self.stages)

    def curations(self) -> Iterator[tuple[str, CurateConfig]]:
        """Yield all curations, by the name of their stage."""
        stages = {"curate": self.config.curate, "curate_rl": self.config.curate_rl}
        yield from ((name, cfg) for name, cfg in stages.items() if cfg is not None)

    def sources(self) -> Iterator[tuple[str, str, Source]]:
        """Yield all sources: the stage that reads it, its place in the settings, and the source."""
        yield from (("benchmarks", f"benchmark {b.name!r}", b.source) for b in self.config.benchmarks)
        for name, curate in self.curations():
            yield from ((name, f"{name}.sources", source) for source in curate.sources)

    def engines(self) -> Iterator[tuple[str, EngineConfig, SamplingConfig]]:
        """Yield the engines that would sample, by their key."""
        if self.evaluates:
            yield "evaluate", self.config.evaluate.engine, self.config.evaluate.sampling
        yield from ((f"{name}.rollout", rl.rollout.engine, rl.rollout.sampling) for name, rl in self.rl_stages())

    def trainings(self) -> Iterator[tuple[str, TrainRuntime]]:
        """Yield the stages that would train, by name."""
        if "sft" in self.stages:
            yield "sft", self.config.sft.runtime
        yield from ((name, rl.runtime) for name, rl in self.rl_stages())


def _gb_in(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9
