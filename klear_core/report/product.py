"""Find the last trained model of a run, and a question to try it with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from klear_core.report.examples import model_name, pick_examples
from klear_core.report.facts import Facts

_TRAINED = ("rl_code", "rl", "sft")
"""Stages that train a model, last first."""
_MAX_QUESTION_CHARS = 60
"""Longer questions do not fit on a readable command line."""
_NO_QUESTION = "your question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The last trained model of a run."""

    stage: str
    fingerprint: str
    root: Path
    """Workspace folder as the config names it: if relative, then to where the run was started. `folder` likewise."""
    folder: Path
    """Model folder in Hugging Face format."""
    question: str
    """A short held-out problem, if possible one that the last training stage fixed; else `your question`."""

    @property
    def name(self) -> str:
        """Model name in words: `RL (code)`."""
        return model_name(self.stage)

    def command(self, which: str) -> str:
        """Return the shell command that asks the model the question; `which` names the model in its workspace."""
        where = "" if self.root == Path("runs") else f" --root {shlex.quote(str(self.root))}"
        return f"klear chat {which} {shlex.quote(self.question)}{where}"


def product_of(facts: Facts) -> Product | None:
    """Return the last trained model of a run; None if it trained none."""
    made = {stage.name: stage for stage in facts.stages}
    trained = next((name for name in _TRAINED if name in made), None)
    if trained is None:
        return None
    artifact = made[trained].folder
    root = Path(facts.config.workspace.root).expanduser()
    return Product(
        stage=trained,
        fingerprint=made[trained].manifest.fingerprint,
        root=root,
        folder=root.joinpath(*artifact.parts[-3:], "model"),
        question=_question(facts),
    )


def _question(facts: Facts) -> str:
    """Return the shortest question of the first example group that has one which fits."""
    shown = pick_examples(facts)
    for group in shown.groups if shown else ():
        fitting = [
            e.question for e in group.examples if len(e.question) <= _MAX_QUESTION_CHARS and e.question.isprintable()
        ]
        if fitting:
            return min(fitting, key=len)
    return _NO_QUESTION
