import os
from pathlib import Path

import psutil
import pytest

from klear_core.config.verify import SandboxConfig
from klear_core.verify.jail import Jail


def test_a_jail_that_has_to_be_killed_leaves_no_file_of_firejails(sandbox_name: str) -> None:
    if sandbox_name != "firejail" or os.geteuid() != 0:
        pytest.skip("only root may remove what a killed firejail leaves")
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    jail = Jail("firejail", SandboxConfig())
    family = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    files = [Path("/run/firejail/sandbox") / str(p.pid) for p in family if p.name() == "firejail"]
    assert any(f.exists() for f in files)
    for process in family:
        if process.name().startswith("python"):
            process.suspend()  # so that it does not see its pipe close
    jail.kill()
    assert not [f for f in files if f.exists()]
