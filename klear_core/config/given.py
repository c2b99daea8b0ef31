"""Define the settings of results that exist and take the place of the stage that would make them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from klear_core.config.data import FileSource, HubRepo, HubRevision, HubRuntime, HubSource
from klear_core.config.settings import Settings
from klear_core.config.train import HfModelConfig, HubModelConfig, PublishedModel


class GivenFacts(Settings):
    """Facts that the user declares about a given result; they change no result."""

    licence: str = ""
    """Licence, for the manifest; empty: what the card (README.md) beside the files states."""


class GivenModelFacts(GivenFacts):
    """Facts that the user declares about a given model."""

    decontaminated_against: Literal["unknown"] | tuple[str, ...] = "unknown"
    """Names of the benchmarks that its training data was compared with; scores on others carry a warning."""
    chosen_on: tuple[str, ...] = ()
    """Names of the benchmarks by whose scores it was chosen among several models, such as checkpoints, learning rates
    or seeds. Its scores on them, and those of models trained from it, are marked."""


class GivenFolder(GivenModelFacts):
    """A model in a local folder, as transformers writes it."""

    kind: Literal["folder"] = "folder"
    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(min_length=1)
    """Folder with config.json, safetensors weights and tokenizer; relative to the working directory."""
    max_position_embeddings: int | None = Field(default=None, ge=16)
    """New value for the config of models trained from it; None keeps it."""

    def as_model(self) -> PublishedModel:
        """Return the settings of the model alone."""
        return HfModelConfig(path=self.path, max_position_embeddings=self.max_position_embeddings)


class GivenRepo(GivenModelFacts):
    """A model of the Hugging Face Hub, downloaded once into the Hub's cache."""

    kind: Literal["hub"] = "hub"
    repo: HubRepo
    """Model repository, `owner/name`."""
    revision: HubRevision
    """Commit, 40 hex digits; the repository's page lists its commits."""
    max_position_embeddings: int | None = Field(default=None, ge=16)
    """New value for the config of models trained from it; None keeps it."""
    runtime: HubRuntime = HubRuntime()
    """The folder that keeps downloaded files, and the address that they come from."""

    def as_model(self) -> PublishedModel:
        """Return the settings of the model alone."""
        window = self.max_position_embeddings
        return HubModelConfig(
            repo=self.repo, revision=self.revision, max_position_embeddings=window, runtime=self.runtime
        )


def _with_kind(value: object, *, local: str) -> object:
    """Add the `kind` that the keys imply; a bare path means local files."""
    if isinstance(value, str):
        return {"kind": local, "path": value}
    if isinstance(value, Mapping) and "kind" not in value:
        return {"kind": "hub" if "repo" in value else local, **value}
    return value


GivenModel = Annotated[
    Annotated[GivenFolder | GivenRepo, Field(discriminator="kind")],
    BeforeValidator(lambda value: _with_kind(value, local="folder")),
]
"""A model that exists, by folder or by Hub id; a bare path means a folder."""


class GivenFiles(FileSource, GivenFacts):
    """Local files of traces or problems; the row format is detected from the first row."""

    name: str = "given"
    """Name under which the rows are counted, and weighted in `sft.source_weights`."""

    def as_source(self) -> FileSource:
        """Return the settings of the rows alone."""
        return FileSource.model_validate(self.model_dump(exclude=set(GivenFacts.model_fields)))


class GivenDataset(HubSource, GivenFacts):
    """The data files of a dataset repository on the Hugging Face Hub, downloaded once into the Hub's cache."""

    name: str = "given"
    """Name under which the rows are counted, and weighted in `sft.source_weights`."""

    def as_source(self) -> HubSource:
        """Return the settings of the rows alone."""
        return HubSource.model_validate(self.model_dump(exclude=set(GivenFacts.model_fields)))


def _as_several(value: object) -> object:
    """Return a list of sources, named `given_1`, `given_2` and so on if there are several without names."""
    # A tuple if a validated config is validated again.
    several = list(value) if isinstance(value, list | tuple) else [value]
    found: list[object] = []
    for number, one in enumerate(several, 1):
        source = _with_kind(one, local="file")
        is_unnamed = len(several) > 1 and isinstance(source, Mapping) and "name" not in source
        found.append({"name": f"given_{number}", **source} if is_unnamed else source)  # type: ignore[dict-item]
    return found


GivenRows = Annotated[
    tuple[Annotated[GivenFiles | GivenDataset, Field(discriminator="kind")], ...],
    Field(min_length=1),
    BeforeValidator(_as_several),
]
"""Rows that exist, in local files or on the Hub: one source, or a list of them."""


class GivenConfig(Settings):
    """Results that take the place of the stage of that name; stages that nothing else needs are left out."""

    curate: GivenRows | None = None
    """Problems of distillation and, without `curate_rl`, of RL, taken as they are: not selected, but kept apart
    from the benchmarks; of the same question letter for letter only the first stays."""
    curate_rl: GivenRows | None = None
    """The same for the problems of RL alone."""
    distill: GivenRows | None = None
    """Traces to fine-tune on, in a published format; without it, `distill` makes them."""
    sft: GivenModel | None = None
    """The fine-tuned model from which RL starts; without it, `sft` makes one."""
    rl: GivenModel | None = None
    """The model after math RL, from which code RL starts."""
    rl_code: GivenModel | None = None
    """The model after code RL."""
    evaluate: GivenModel | None = None
    """A model to score, beside the others in this section. Nothing is trained."""
    score_despite: tuple[str, ...] = ()
    """Benchmarks to score although the lineage of a given model shows that its training data was not compared with
    them; the report says so. Otherwise such a run is refused. A name that no benchmark has is refused too."""

    def rows(self) -> dict[str, tuple[GivenFiles | GivenDataset, ...]]:
        """Return the given problems and traces by the name of the stage that they replace, in the pipeline's order."""
        named = {"curate": self.curate, "curate_rl": self.curate_rl, "distill": self.distill}
        return {name: rows for name, rows in named.items() if rows is not None}

    def models(self) -> dict[str, GivenFolder | GivenRepo]:
        """Return the given models by the name of the stage that they replace, in the pipeline's order."""
        # A model that is only scored replaces no stage: its stage is `model`, and the evaluation `evaluate_model`.
        named = {"sft": self.sft, "rl": self.rl, "rl_code": self.rl_code, "model": self.evaluate}
        return {name: model for name, model in named.items() if model is not None}
