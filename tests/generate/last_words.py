"""A process that dies, in a file that loads nothing: a process that is spawned imports the file of its function."""

import os
import sys


def fail(words: str) -> None:
    """A process that says something in each way there is, starts another one, and dies."""
    print("(Worker pid=1) INFO 11-24 15:35:35 [core.py:1] of no interest", flush=True)
    print("printed by Python", file=sys.stderr, flush=True)
    os.write(1, b"written by C\n")
    os.system("echo said by a grandchild >&2")
    os.write(2, words.encode())
    os._exit(1)
