"""Define the jobs of given results: they check what exists and record it; they make nothing."""

from __future__ import annotations

from typing import Self

from klear_core.config.given import GivenFolder, GivenModel, GivenRepo
from klear_core.config.jobs import HubUse, Job
from klear_core.config.train import HubModelConfig, PublishedModel


class GivenModelJob(Job):
    """Take a model that exists. Its identity is its content or its commit, not the place where it is kept."""

    kind = "given_model"
    code_version = 1
    makes_model = True

    max_position_embeddings: int | None = None
    """New value for the config of models trained from it."""
    runtime: GivenModel

    @classmethod
    def of(cls, given: GivenFolder | GivenRepo) -> Self:
        """Return the job that takes a given model."""
        return cls(max_position_embeddings=given.max_position_embeddings, runtime=given)

    def model(self) -> PublishedModel:
        """Return the model that is taken."""
        return self.runtime.as_model()

    def files(self) -> tuple[str, ...]:
        """Return the model's folder if it is a local one."""
        return (self.runtime.path,) if isinstance(self.runtime, GivenFolder) else ()

    def repos(self) -> tuple[HubUse, ...]:
        """Return the model's repository if it is from the Hub."""
        model = self.model()
        return (HubUse(repo=model.repo, revision=model.revision),) if isinstance(model, HubModelConfig) else ()

    def given_facts(self) -> GivenFolder | GivenRepo:
        """Return what the user declared about the model."""
        return self.runtime
