"""Define the exceptions that users see, as one tree.

KlearError
├── ConfigError(ValueError)        a setting is wrong; retrying cannot help
├── DataError(ValueError)          a source row, benchmark or trace cannot be used
├── ArtifactError                  something stored is missing or altered
├── ResourceError                  disk, memory, GPU or Ray cannot give what was asked
├── SandboxError                   isolation is weaker than configured; nothing is run
├── JudgeError                     too many answers could not be judged; scores would be noise
├── RewardError                    a reward of the user's own fails too often
├── TeacherError                   the teacher cannot be reached, or its replies cannot be read
└── TrainingError                  training cannot continue (non-finite steps, a stall, a dead worker)

An error with `is_permanent` would fail again: it is not retried.
"""


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
