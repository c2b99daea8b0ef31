"""Define the job of the stage that decides on the champion."""

from __future__ import annotations

from typing import Self

from klear_core.config.pipeline import PipelineConfig
from klear_core.config.promote import Champion, PromoteConfig
from klear_core.config.settings import Settings
from klear_core.config.stage import Job


class PromoteRuntime(Settings):
    """Config of the run, with what is known about the training data of given models."""

    config: PipelineConfig = PipelineConfig()


class PromoteJob(Job):
    """Decide whether the last model becomes champion."""

    kind = "promote"
    code_version = 1
    asks_registry = True

    promote: PromoteConfig
    champion: Champion | None = None
    """The champion to compare with; filled in when the stage runs. None compares with the first model of the run."""
    withdrawn: str = ""
    """Why the model was rolled back earlier; filled in when the stage runs. Empty if it was not."""
    chosen_on: dict[str, str] = {}
    """Why the model counts as chosen by its score, by benchmark; filled in when the stage runs."""
    runtime: PromoteRuntime = PromoteRuntime()

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Return the job with the rule of a pipeline config. The section must be set."""
        assert config.promote is not None
        return cls(promote=config.promote, runtime=PromoteRuntime(config=config))
