import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import alive

DRIVER = """
import subprocess, sys, time
from tasks.resources import no_orphans

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
with no_orphans(), no_orphans():
    for args in ([], ["new session"]):
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=bool(args))
        child.stdout.readline()
    time.sleep(5)  # the watcher looks every second, once it is up
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_descendants_not_even_stubborn_ones_in_sessions_of_their_own():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "up"
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) == 3  # two children and one watcher
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(family) == []


LEAVER = """
import os, subprocess, sys, time
import psutil
from tasks.resources import no_orphans

def is_there(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

with no_orphans():
    kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    leave = "import subprocess, sys; p = subprocess.Popen(['sleep', '99'], stdout=2); print(p.pid); sys.stdin.read()"
    pipe, lost = subprocess.PIPE, subprocess.DEVNULL
    parent = subprocess.Popen([sys.executable, "-uc", leave], stdin=pipe, stdout=pipe, stderr=lost, text=True)
    orphan = int(parent.stdout.readline())
    time.sleep(5)  # the watcher looks every second, once it is up
    parent.stdin.close()
    parent.wait()
    assert is_there(orphan)
print("orphan" if is_there(orphan) else "no orphan", "child" if kept.poll() is None else "no child")
kept.kill()
"""


@pytest.mark.slow
def test_a_process_whose_parent_died_is_ended_with_the_block_and_a_child_goes_on():
    ended = subprocess.run([sys.executable, "-c", LEAVER], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "no orphan child"
