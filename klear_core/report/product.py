"""What a run leaves to use: its last trained model, and a question to try it with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from klear_core.report.examples import model_name, pick_examples
from klear_core.report.facts import Facts

_TRAINED = ("rl_code", "rl", "sft")
"""Stages whose model is worth asking, the last first."""
_MAX_QUESTION_CHARS = 60
"""Longer questions do not fit on a command line that a person reads."""
_NO_QUESTION = "your question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The model that a run ends with."""

    stage: str
    fingerprint: str
    root: Path
    """The workspace, as seen from where the run was started; so is `folder`."""
    folder: Path
    """In Hugging Face's format."""
    question: str
    """A short held-out problem, one that the last step of training fixed if there is one; else `your question`."""

    @property
    def name(self) -> str:
        """The model's name in words: `RL (code)`."""
        return model_name(self.stage)

    def command(self, which: str) -> str:
        """The command that asks it, given how it is called in its workspace."""
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
    """The shortest of the first group of the report's examples that has one which fits."""
    shown = pick_examples(facts)
    for group in shown.groups if shown else ():
        fitting = [e.question for e in group.examples if len(e.question) <= _MAX_QUESTION_CHARS and e.question.isprintable()]
        if fitting:
            return min(fitting, key=len)
    return _NO_QUESTION
