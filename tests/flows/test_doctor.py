"""`klear doctor` reports what is wrong with a machine, and does not stop at it."""

import sys

import pytest

from flows.doctor import ask_program


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("print('fine')", ""),
        ("import os; os.kill(os.getpid(), 4)", "killed by signal 4"),  # a torch for another processor
        ("import time; time.sleep(600)", "no answer within 5 s"),  # nvidia-smi with a broken driver
        ("print('no devices'); raise SystemExit(9)", "no devices"),
        ("raise SystemExit(9)", "exit status 9"),
        ("raise OSError('libcudart.so: not found')", "OSError: libcudart.so: not found"),
    ],
)
def test_a_program_that_crashes_or_hangs_is_described_in_words(code, failure):
    assert ask_program([sys.executable, "-c", code], timeout_s=5).failure == failure


def test_a_store_is_checked_before_the_fast_paths_which_take_longer(klear):
    told = klear("doctor", "--gpu", "--store", "not-a-url")
    assert (told.status, "store" in told.out) == (1, True)
