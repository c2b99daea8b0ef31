"""Ray's messages to its driver, as records of our log in place of lines between ours on the terminal.

`log_to_driver=False` silences the workers, but Ray has a thread that prints what the raylet reports whatever it is told.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

log = logging.getLogger(__name__)

RAYS_THREAD = "ray_listen_error_messages"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REPORTED_BY_US = re.compile(r"A worker died or was killed|worker .*(exit|died)|The actor .*died|restart", re.IGNORECASE)
"""A lost actor is told by the stage, with what it means for the run; the raylet's own words are for the log."""


@contextmanager
def ray_messages_logged() -> Iterator[None]:
    """While the block runs, take what Ray's thread prints into the log: lost workers as INFO, all else (memory, disk) as WARNING."""
    before = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRay(before))
    try:
        yield
    finally:
        sys.stdout = before


class _WithoutRay:
    """A text stream that passes on what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._is_logging = False

    def write(self, text: str) -> int:
        """Log whole lines of Ray's thread."""
        if threading.current_thread().name != RAYS_THREAD or self._is_logging:
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        self._is_logging = True  # a handler may show the record here, in this very thread
        try:
            for line in filter(None, (_COLOURS.sub("", line).strip() for line in lines)):
                log.log(logging.INFO if _REPORTED_BY_US.search(line) else logging.WARNING, "Ray: %s", line)
        finally:
            self._is_logging = False
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)
