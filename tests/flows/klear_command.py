"""The `klear` command as a user starts it: a process group of its own, and a mark by which all that it starts can be found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from processes import alive, title

ROOT = Path(__file__).parents[2]
_MARK = "KLEAR_TEST_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


Klear = Callable[..., Ended]
"""The fixture `klear`."""
_IN_TIME_S = 480.0  # of a step of a test on a busy machine; nothing waits that long in a good run
TASK = "modulus = 6, num_operations = [2, 3]"
FEW_PROBLEMS = (
    f'benchmarks=[{{name="heldout", num_samples=1, source={{kind="procedural", split="heldout", {TASK}, num_problems=8}}}}]',
    f'curate.sources=[{{kind="procedural", split="train", {TASK}, num_problems=192}}]',
)
"""Settings that make the smoke profile smaller."""
_OURS = ("KLEAR", "PREFECT", "MLFLOW", "RAY", "OMP")


@dataclass(slots=True)
class Command:
    """A started `klear`, its output so far, and its descendants, also those that it has lost."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    @property
    def output(self) -> str:
        """Standard output and error, in the order in which they came."""
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=_IN_TIME_S)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Watch for a sign of progress, which must come before the command ends."""
        deadline = time.monotonic() + _IN_TIME_S
        while not is_so():
            assert self.process.poll() is None, f"ended before that:\n{self.output}"
            assert time.monotonic() < deadline, f"that did not happen:\n{self.output}"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to the command alone: nobody tidies up after it."""
        self.process.kill()
        self.process.wait()

    def interrupt(self, number: signal.Signals) -> int:
        """What a terminal does at Ctrl-C: the signal goes to the whole foreground group. Returns the exit status."""
        os.killpg(self.process.pid, number)
        return self.wait()

    def left_over(self, *, within_s: float) -> list[str]:
        """Command lines of descendants that are still there after so long."""
        return [title(p)[:200] for p in alive(psutil.wait_procs(self._descendants(), timeout=within_s)[1])]

    def end(self) -> None:
        """Leave nothing behind, whatever the test found."""
        self.kill()
        for process in self._descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _descendants(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.pid != self.process.pid and process.environ().get(_MARK) == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def start(*args: str | Path, log: Path, **environment: str) -> Command:
    """Start `klear ARGS`, its output into a new file `log`."""
    mark = uuid.uuid4().hex
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    command = [sys.executable, "-c", "from flows.cli import main; main()", *map(str, args)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _MARK: mark} | environment
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=kept | environment, start_new_session=True
        )
    return Command(process=process, mark=mark, log=log)
