"""Find the task that makes an artifact."""

from __future__ import annotations

from importlib import import_module

from prefect import Task

from tasks.task import StageTask


def task_of(kind: str) -> StageTask:
    """Return the task of a kind of stage: the function `<kind>` of the module `tasks.<kind>`."""
    found = getattr(import_module(f"tasks.{kind}"), kind)
    assert isinstance(found, Task), f"tasks.{kind}.{kind} is not a task"
    return found
