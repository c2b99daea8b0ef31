"""Find artifacts that point to a model elsewhere than the config does, so that they are made again."""

from __future__ import annotations

import logging
from collections.abc import Collection

from klear_core.artifacts.model_files import folder_of
from klear_core.config.given_jobs import GivenModelJob
from klear_core.config.jobs import BaseJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import Stage
from klear_core.config.train import PublishedModel, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.fingerprints import fingerprints_of
from klear_core.pipeline.graph import stages_of, with_inputs
from klear_core.pipeline.workspace import open_store
from klear_core.train.base import pointed_folder

log = logging.getLogger(__name__)


def set_moved_aside(config: PipelineConfig, chosen: Collection[str] | None = None) -> None:
    """Set aside the artifacts of models that are now given by another folder; a run takes them again.

    What was made from such a model stays valid: a fingerprint depends on the model's content and not on its place. The
    old folder may be gone, or hold another model by now.
    """
    stages = stages_of(config)
    names = [stage.name for stage in stages if chosen is None or stage.name in chosen]
    published = {stage.name: model for stage in with_inputs(stages, names) if (model := _published(stage)) is not None}
    if not published:
        return
    try:
        ids = fingerprints_of(with_inputs(stages, published), config.workspace)
    except ConfigError:
        return  # preflight says what is missing
    store = open_store(config.workspace)
    for name, model in published.items():
        own, folder = ids[name], folder_of(model).resolve()
        artifact = store.folder(own.kind, own.fingerprint)
        if artifact.is_dir() and pointed_folder(artifact) != folder:
            log.warning("%s: the same model is now taken from %s", name, folder)
            store.set_aside(own.kind, own.fingerprint, why="moved")


def _published(stage: Stage) -> PublishedModel | None:
    match stage.job:
        case GivenModelJob() as job:
            return job.model()
        case BaseJob(model=model) if not isinstance(model, TinyModelConfig):
            return model
        case _:
            return None
