"""Find the last trained model of a run, and a question to try it with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from klear_core.config.stage import Stage
from klear_core.report.examples import pick_examples
from klear_core.report.facts import Facts

_MAX_QUESTION_CHARS = 60
"""Longer questions do not fit on a readable command line."""
_NO_QUESTION = "your question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The last trained model of a run."""

    stage: Stage
    """The stage that made it."""
    fingerprint: str
    root: Path
    """Workspace folder as the config names it; a relative path, also of `folder`, starts where the run was started."""
    folder: Path
    """Model folder in Hugging Face format."""
    question: str
    """A short held-out problem, if possible one that the last training stage fixed; else `your question`."""

    def command(self, which: str) -> str:
        """Return the shell command that asks the model the question; `which` names the model in its workspace."""
        where = "" if self.root == Path("runs") else f" --root {shlex.quote(str(self.root))}"
        return f"klear chat {which} {shlex.quote(self.question)}{where}"


def product_of(facts: Facts) -> Product | None:
    """Return the last trained model of a run; None if it trained none."""
    # Given and random models are no product of this run.
    trained = [stage for stage in facts.stages if stage.stage.job.training() is not None]
    if not trained:
        return None
    last = trained[-1]
    root = Path(facts.config.workspace.root).expanduser()
    return Product(
        stage=last.stage,
        fingerprint=last.manifest.fingerprint,
        root=root,
        folder=root.joinpath(*last.folder.parts[-3:], "model"),
        question=_question(facts),
    )


def _question(facts: Facts) -> str:
    """Return the shortest question of the first example group that has one which fits."""
    shown = pick_examples(facts)
    for group in shown.groups if shown else ():
        questions = [example.question for example in group.examples]
        fitting = [q for q in questions if len(q) <= _MAX_QUESTION_CHARS and q.isprintable()]
        if fitting:
            return min(fitting, key=len)
    return _NO_QUESTION
