"""Turn the errors of checks before a run into messages, and find the sources that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from klear_core.artifacts.files import matching_files
from klear_core.config.data import FileSource, Source
from klear_core.config.stage import SourceUse, Stage
from klear_core.errors import KlearError
from klear_core.pipeline.graph import stage_of_problems

T = TypeVar("T")


def complaints(where: str, check: Callable[[T], object], subject: T) -> Iterator[str]:
    """Yield the message of the error that a check of the subject raises, if it raises one."""
    try:
        check(subject)
    except KlearError as e:
        yield f"{where}: {e}"


def or_nothing(read: Callable[[Source], frozenset[T]], source: Source) -> frozenset[T]:
    """Return what is read from a source; nothing from a bad one, which `source_problems` reports."""
    try:
        return read(source)
    except KlearError:
        return frozenset()


def sources_of(stages: Sequence[Stage]) -> Iterator[SourceUse]:
    """Yield the sources that stages read."""
    for stage in stages:
        yield from stage.sources()


def sources_of_problems(stages: Sequence[Stage], stage: Stage) -> list[Source]:
    """Return the sources of the problems that a stage takes; `stages` has the stage and all that it depends on."""
    return [use.source for use in stage_of_problems(stages, stage).sources()]


def is_there(source: Source) -> bool:
    """Return whether a source can be read; `file_problems` reports a missing file, so no other check should."""
    if not isinstance(source, FileSource):
        return True
    return is_path_there(source.path)


def is_path_there(path: str) -> bool:
    """Return whether a file or folder exists, or a pattern matches a file."""
    return Path(path).exists() or bool(matching_files(path))
