"""First calls of MKL's functions by several threads at the same moment."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from klear_core.mkl import FUNCTIONS, choose_functions

NUM_PROCESSES, NUM_THREADS = 1000, 4


def same_for_all(name: str) -> bool:
    """Whether threads that call a function at the same moment all get what a later call gives."""
    x = torch.linspace(0.05, 0.95, 64)
    together = threading.Barrier(NUM_THREADS)
    found = []

    def call() -> None:
        together.wait()
        found.append(getattr(torch, name)(x))

    threads = [threading.Thread(target=call) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found) == NUM_THREADS and all(torch.equal(y, getattr(torch, name)(x)) for y in found)


def num_wrong() -> int:
    """How many of the forked processes, in each of which the threads' is the first call, get different results."""
    torch.set_num_threads(1)  # a pool of threads would not be in the forks
    wrong = 0
    for i in range(NUM_PROCESSES):
        child = os.fork()
        if child == 0:
            choose_functions()
            os._exit(0 if same_for_all(FUNCTIONS[i % len(FUNCTIONS)]) else 1)
        wrong += os.waitpid(child, 0)[1] != 0
    return wrong


@pytest.mark.slow
def test_all_threads_of_a_first_call_get_the_same_once_the_functions_were_chosen() -> None:
    """Without `choose_functions` two or three of a thousand processes are wrong, now and then none."""
    # In a process of its own, because in this one the functions were called.
    code = "import test_mkl; print(test_mkl.num_wrong())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stdout == "0\n"
