"""What is left of a jail that had to be killed."""

import os
from pathlib import Path

import psutil
import pytest
from verify_builders import ADD_STDIN, code_config, fenced, problem

from klear_core.config.verify import SandboxConfig
from klear_core.verify import JudgePool
from klear_core.verify.sandbox.jail import Jail


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


def test_jails_whose_workers_were_killed_are_gone_when_the_pool_is_closed(sandbox_name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may kill a firejail, which is setuid; others wait for it to end")
    with JudgePool(code_config()) as pool:
        assert pool.judge(problem(ADD_STDIN), fenced("a, b = map(int, input().split())\nprint(a + b)")).score == 1.0
        server = psutil.Process(pool._calls._client._link.process.pid)
        workers = server.children()
        jailed = [p for worker in workers for p in worker.children(recursive=True)]
        for process in jailed:
            if process.name().startswith("python"):
                process.suspend()  # so that it does not see its pipe close
        for worker in workers:
            worker.kill()
    assert [p for p in jailed if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert not [p.pid for p in jailed if (Path("/run/firejail/sandbox") / str(p.pid)).exists()]
