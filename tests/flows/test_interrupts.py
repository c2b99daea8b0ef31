from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from klear_command import ROOT

from klear_core.stopping import REQUEUE_STATUS

SCRIPT = """
import signal, sys, time
from flows.process import reliable_interrupts

class Interrupted:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))
        print("not reached")

with reliable_interrupts():
    try:
        thing = Interrupted()
        del thing
        time.sleep(300)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_comes_while_python_clears_something_away_is_heeded(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT, str(int(number))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")


def test_what_else_is_raised_there_is_reported_as_ever() -> None:
    script = SCRIPT.replace("signal.raise_signal(int(sys.argv[1]))", "raise ValueError('odd')").replace(
        "time.sleep(300)", ""
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert "ValueError: odd" in ended.stderr


def test_a_second_signal_while_a_lost_one_is_sent_again_is_heeded_too() -> None:
    profile = """
def profile(frame, event, _):
    if event == "call" and frame.f_code is threading.Timer.__init__.__code__:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGTERM)

sys.setprofile(profile)
with"""
    script = f"import threading\n{SCRIPT}".replace("\nwith", profile)
    command = [sys.executable, "-c", script, str(int(signal.SIGTERM))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")


IN_AN_EVENT_LOOP = """
import asyncio, os, signal
from prefect.utilities.engine import capture_sigterm
from flows.process import make_terminations_interrupts

async def go_on():
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    await asyncio.sleep(1)
    print("went on")

make_terminations_interrupts()
signal.signal(signal.SIGTERM, signal.SIG_IGN)   # capture_sigterm sends the signal again when it is left
try:
    with capture_sigterm():
        asyncio.run(go_on())
except BaseException as e:
    print(type(e).__name__)
"""


def test_a_termination_that_comes_in_a_callback_of_an_event_loop_ends_the_loop() -> None:
    command = [sys.executable, "-c", IN_AN_EVENT_LOOP]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert (ended.stdout, ended.stderr) == ("TerminationSignal\n", "")


CLEARED_IN_A_FLOW = """
import signal, time
from prefect.utilities.engine import capture_sigterm
from flows.process import make_terminations_interrupts, reliable_interrupts

class Terminated:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

make_terminations_interrupts()
try:
    with reliable_interrupts(), capture_sigterm():
        thing = Terminated()
        del thing
        time.sleep(300)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_termination_of_a_flow_that_comes_while_python_clears_something_away_is_heeded() -> None:
    command = [sys.executable, "-c", CLEARED_IN_A_FLOW]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")


REQUEUED = """
import signal
from flows.cli import app, main

@app.command()
def work():
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        print("tidied up")

main()
"""


def test_a_command_that_is_to_be_started_again_says_so_by_its_status() -> None:
    command = [sys.executable, "-c", REQUEUED, "work"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (75, "tidied up\n"), ended.stderr
    assert "Traceback" not in ended.stderr


ENDING = """
import atexit, time
from flows.process import exit_at_once_when_interrupted

def wait():
    print("ending", flush=True)
    time.sleep(600)

atexit.register(wait)
exit_at_once_when_interrupted()
print("the result", end=" ")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_an_exit_handler_ends_the_process_at_once_and_without_a_traceback(number: signal.Signals):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "the result ending\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", "")


TWO_SIGNALS = """
import io, signal, sys
from flows.cli import chain_of, exit_at_once_when_interrupted, main, reliable_interrupts

class Signalling(io.StringIO):
    def write(self, text):
        if sys.getprofile() is None:
            sys.setprofile(profile)
            signal.raise_signal(first)

def profile(frame, event, _):
    if event == "call" and frame.f_code is place.__code__:
        sys.setprofile(None)
        signal.raise_signal(second)

place = eval(sys.argv.pop())
first, second = (int(sys.argv.pop()) for _ in range(2))
sys.stdout = Signalling()
main()
"""


# The end of the block of signals, what is told after it, and the handlers that are set last.
BLOCK, TOLD, LAST = "reliable_interrupts.__wrapped__", "chain_of", "exit_at_once_when_interrupted"


@pytest.mark.parametrize(
    ("first", "second", "place", "status"),
    [
        (signal.SIGTERM, signal.SIGTERM, BLOCK, 130),
        (signal.SIGINT, signal.SIGTERM, BLOCK, 130),
        (signal.SIGUSR1, signal.SIGTERM, BLOCK, REQUEUE_STATUS),
        (signal.SIGTERM, signal.SIGTERM, TOLD, 130),
        (signal.SIGUSR1, signal.SIGTERM, TOLD, REQUEUE_STATUS),
        (signal.SIGTERM, signal.SIGINT, LAST, 130),
    ],
)
def test_a_second_signal_while_the_first_ends_a_command_leaves_no_traceback(
    first: signal.Signals, second: signal.Signals, place: str, status: int
) -> None:
    command = [sys.executable, "-c", TWO_SIGNALS, "--help", str(int(second)), str(int(first)), place]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (status, "")
