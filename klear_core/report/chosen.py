"""Mark scores that a model was chosen by. The best of several scores is biased upwards, the more so the more there are.

In Klear only `klear ablate` chooses by scores; it leaves a record in the workspace. For models from elsewhere the user
declares it (`given.*.chosen_on`). Models that are trained from a chosen model are marked as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from klear_core.config.given import GivenModelFacts
from klear_core.config.given_jobs import GivenModelJob
from klear_core.config.settings import Settings
from klear_core.errors import ArtifactError
from klear_core.report.ancestry import ancestors, pointed_artifact
from klear_core.report.contamination import stages_behind
from klear_core.report.facts import Facts, ModelFacts

_FOLDER = "choices"
"""Folder of the records, in the workspace."""
_DECLARED = "declared as chosen by this score; a score that a model is chosen by is too high"


class Choice(Settings):
    """Models that a comparison of several by their scores puts first."""

    by: str
    """The command that compared them: `klear ablate losses_hot`."""
    among: int = Field(ge=2)
    """Models that were compared."""
    benchmarks: tuple[str, ...]
    """Benchmarks whose scores decided."""
    models: tuple[str, ...]
    """Artifacts of the models, `kind/fingerprint`."""

    @property
    def sentence(self) -> str:
        """The choice in words."""
        first = f"first among {self.among} models that were compared by this score ({self.by})"
        return f"{first}; a score that a model is chosen by is too high"


def write_choice(root: Path, name: str, choice: Choice) -> None:
    """Write the record to a workspace; a later one of the same name replaces it."""
    file = root / _FOLDER / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(choice.model_dump_json(indent=2) + "\n")
    temporary.replace(file)


def chosen_on(model: Path) -> dict[str, str]:
    """Return why a model's scores are marked, by benchmark, from its artifact and those that it is made from."""
    choices = list(_choices(model.absolute().parents[2] / _FOLDER))
    reasons: dict[str, str] = {}
    for ancestor in ancestors(model):
        manifest = ancestor.manifest
        for choice in choices:
            if f"{manifest.kind}/{manifest.fingerprint}" in choice.models:
                reasons |= dict.fromkeys(choice.benchmarks, choice.sentence)
        if manifest.kind == GivenModelJob.kind:
            declared: Any = manifest.config.get("runtime", {})
            reasons |= dict.fromkeys(declared.get("chosen_on", ()), _DECLARED)
        pointed = pointed_artifact(ancestor.folder)
        if pointed is not None:
            reasons |= chosen_on(pointed)
    return reasons


def chosen_in_run(facts: Facts, model: ModelFacts) -> dict[str, str]:
    """Return why the scores of a run's model are marked, by benchmark; what the run's settings declare counts too."""
    reasons: dict[str, str] = {}
    for stage in stages_behind(facts, model.maker.name):
        if stage.stage.name == model.maker.name:
            reasons |= chosen_on(stage.folder)
        declared = stage.stage.job.given_facts()
        if isinstance(declared, GivenModelFacts):
            reasons |= dict.fromkeys(declared.chosen_on, _DECLARED)
    return reasons


def _choices(folder: Path) -> Iterator[Choice]:
    for file in sorted(folder.glob("*.json")):
        try:
            yield Choice.model_validate_json(file.read_bytes())
        except ValidationError as e:
            raise ArtifactError(f"{file}: not a record of a choice: {e}") from e
