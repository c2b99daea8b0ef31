"""Define the exceptions that users see, as one tree, and keep errors of reporting away from them.

KlearError
├── ConfigError(ValueError)        a setting is wrong; retrying cannot help
├── DataError(ValueError)          a source row, benchmark or trace cannot be used
├── ArtifactError                  something stored is missing or altered
├── ResourceError                  disk, memory, GPU or Ray cannot give what was asked
│   ├── DiskFullError              no space left; somebody must free some before another attempt
│   ├── GpuMemoryError             a learner rank's GPU is too small for these settings; the same ones would fail again
│   └── EngineMemoryError          the same of an engine; not if another process holds the memory, which may pass
├── SandboxError                   isolation is weaker than configured; nothing is run
├── JudgeError                     too many answers could not be judged; scores would be noise
├── RewardError                    a reward of the user's own fails too often
├── TeacherError                   the teacher cannot be reached, or its replies cannot be read
└── TrainingError                  training cannot continue (non-finite steps, a stall, a dead worker)
    ├── CollapseError              most answers of the policy have become useless
    └── EngineMismatchError        engine and learner compute other log-probs, and that is refused

An error with `is_permanent` would fail again: it is not retried.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)


class KlearError(Exception):
    """Root of all errors that Klear raises on purpose; its message is written for the user."""

    is_permanent = False


class ConfigError(KlearError, ValueError):
    """The user's settings are wrong; the message names the key, its value and what is allowed."""

    is_permanent = True


class DataError(KlearError, ValueError):
    """Input data is unusable; the message names the file, the row and the field."""

    is_permanent = True


class ArtifactError(KlearError):
    """A stored artifact is missing, incomplete or altered; the message names the file."""


class ResourceError(KlearError):
    """The machine or cluster cannot provide what a stage needs."""


class DiskFullError(ResourceError):
    """A disk is full; the message names the file, the free space and the remedy."""

    is_permanent = True


class GpuMemoryError(ResourceError):
    """A learner rank ran out of GPU memory; the message names the rank and the settings that need less."""

    is_permanent = True


class EngineMemoryError(ResourceError):
    """An engine ran out of GPU memory that nothing else held; the message names the settings that need less."""

    is_permanent = True


class SandboxError(KlearError):
    """The sandbox does not isolate as configured; nothing untrusted was run."""

    is_permanent = True


class JudgeError(KlearError):
    """The verifiers fail too often for their verdicts to mean anything; the message gives the rate and the last
    failure."""


class RewardError(KlearError):
    """A reward function of the user's own fails too often; the message names it and gives the last failure."""

    is_permanent = True


class TeacherError(KlearError):
    """The teacher could not be reached, or its replies could not be read."""


class TrainingError(KlearError):
    """Training stopped: too many non-finite steps, a stall, or a lost worker."""


class CollapseError(TrainingError):
    """Most answers of the policy have become useless; the message names what they lack, the limit and the remedy."""

    is_permanent = True


class EngineMismatchError(TrainingError):
    """Engine and learner compute other log-probs of the initial model; the message has the distance and the remedy."""

    is_permanent = True


# ---- steps that only report ----


@contextmanager
def reporting(failure: str, *, level: int = logging.WARNING) -> Iterator[None]:
    """Log an error of the block, after the words `failure`, instead of raising it.

    For records, summaries, heartbeats and whatever else only reports: it must neither end a run nor replace the error
    that it reports on. Interrupts pass.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except Exception as e:
        # Native code turns Ctrl-C into a SystemError. One that is reported on here is no new interrupt.
        if is_interrupt(e) and not is_interrupt(before):
            raise
        with suppress(Exception):  # the log may go to the disk, terminal or server that has failed
            log.log(level, "%s: %s: %s", failure, type(e).__name__, e)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether the error is a KeyboardInterrupt, or one is in its chain of causes and contexts.

    Native code turns an exception raised inside it into a SystemError.
    """
    return any(isinstance(e, KeyboardInterrupt) for e in chain_of(error))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause or else its context, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def meant(word: str, known: Sequence[str], what: str) -> str:
    """Return the word that may be meant (`did you mean sft?`), else all that is known (`stages: base, sft, rl`)."""
    if not known:
        return f"{what}: none"
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(known)}"
