"""Define the interface between the phases of a curation and the executors that run them: numbered tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Progress = Callable[[int], None]
"""Takes the number of tasks that are done."""


class Tasks(Protocol):
    """Numbered tasks that can run in any order, in other processes, and again after a kill."""

    def is_done(self, task: int) -> bool:
        """Return whether the result of a task is there."""
        ...

    def __call__(self, task: int) -> None:
        """Do a task, unless it is done; its result appears whole or not at all."""
        ...
