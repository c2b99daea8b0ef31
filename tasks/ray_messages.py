"""Send the messages that Ray prints in its driver to our log instead of the terminal.

`log_to_driver=False` silences the workers, but a thread of Ray still prints what the raylet reports.
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
_REPORTED_BY_US = re.compile(
    r"A worker died or was killed|worker .*(exit|died)|The actor .*died|restart", re.IGNORECASE
)
"""Messages about lost actors, logged as INFO only: the stage itself reports them, with the consequence for the run."""


@contextmanager
def ray_messages_logged() -> Iterator[None]:
    """Log what Ray's thread prints while the block runs: lost workers as INFO, the rest (memory, disk) as WARNING."""
    before = sys.stdout
    sys.stdout = cast("TextIO", _WithoutRay(before))
    try:
        yield
    finally:
        sys.stdout = before


class _WithoutRay:
    """A text stream that logs the lines of Ray's thread and passes on what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._is_logging = False

    def write(self, text: str) -> int:
        """Log complete lines of Ray's thread; write the text of other threads."""
        if threading.current_thread().name != RAYS_THREAD or self._is_logging:
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        self._is_logging = True  # a log handler may write the record to this stream, in this thread
        try:
            for line in filter(None, (_COLOURS.sub("", line).strip() for line in lines)):
                log.log(logging.INFO if _REPORTED_BY_US.search(line) else logging.WARNING, "Ray: %s", line)
        finally:
            self._is_logging = False
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the stream."""
        return getattr(self._stream, name)
