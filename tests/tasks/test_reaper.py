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
