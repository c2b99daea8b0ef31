"""Let child processes end with their parent, wherever the system can."""

from __future__ import annotations

import ctypes
import signal
import sys

IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if that was killed. Only Linux can."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
