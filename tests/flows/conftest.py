from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from klear_command import Ended, Klear

from flows.cli import main


@pytest.fixture
def klear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Klear]:
    """The `klear` command in this process; for what ends before Prefect is needed."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["klear", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return Ended(status=int(end.value.code or 0), out=shown.out, err=shown.err)

    yield run
    signal.signal(signal.SIGTERM, handler)
