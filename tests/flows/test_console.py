"""The lines of a run on the terminal and in a log file."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flows.run import RunConsole
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.errors import TeacherError
from tasks.progress import Attempt

COUNTS = {f"benchmark_{i}_avg_at_64": 0.125 for i in range(8)} | {"problems": 2048, "tokens": 2855520.0}
REF = ArtifactRef(
    kind="evaluate", fingerprint="3f2a91aa", uri="file:///x", created_at=datetime(2026, 1, 1, tzinfo=UTC), counts=COUNTS
)
DOWN = TeacherError("the teacher [R1] at http://127.0.0.1:8000 cannot be reached\nand a second line")


def test_a_log_file_has_every_count_of_a_stage_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    console = RunConsole()
    console.stage_done("evaluate_rl", REF, was_reused=False, wall_s=1.0)
    console.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert all(f"benchmark_{i}_avg_at_64 0.125" in line for i in range(8))
    assert "problems 2,048, tokens 2,855,520" in line


@pytest.mark.parametrize(
    ("error", "attempt", "line"),
    [
        (
            DOWN,
            Attempt(number=1, of=3, next_in_s=5.0),
            "  ✗ distill (attempt 1 of 3): the teacher [R1] at http://127.0.0.1:8000 cannot be reached; next attempt in about 5 s",
        ),
        (
            DOWN,
            Attempt(number=3, of=3, next_in_s=None),
            "  ✗ distill (attempt 3 of 3): the teacher [R1] at http://127.0.0.1:8000 cannot be reached",
        ),
        (
            OSError("disk"),
            Attempt(number=1, of=2, next_in_s=5.0),
            "  ✗ distill (attempt 1 of 2): OSError: disk; next attempt in about 5 s",
        ),
        (DOWN, Attempt(number=1, of=1, next_in_s=None), "  ✗ distill"),
        (KeyboardInterrupt(), Attempt(number=1, of=3, next_in_s=None), "  ✗ distill"),
    ],
)
def test_a_failed_try_is_one_line_with_its_reason_and_the_time_of_the_next(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    attempt: Attempt,
    line: str,
):
    monkeypatch.setenv("COLUMNS", "80")
    console = RunConsole()
    console.stage_failed("distill", error, attempt)
    console.close()
    assert capsys.readouterr().out.splitlines() == [line]


def test_a_log_file_has_the_lines_of_a_stage_that_works(capsys: pytest.CaptureFixture[str]):
    console = RunConsole()
    console.stage_started("rl", attempt=1)
    console.stage_pace("rl: 34 of 80, 3.2 a minute, about 14 min left, pass rate 0.62")
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "  … rl",
        "    rl: 34 of 80, 3.2 a minute, about 14 min left, pass rate 0.62",
    ]
