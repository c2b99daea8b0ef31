"""Snapshots: a text is compared with its file, and written only when an update was asked for."""

from pathlib import Path

import pytest
from snapshot import Snapshots


def test_a_text_that_was_written_by_an_update_is_accepted_afterwards(tmp_path: Path):
    Snapshots(folder=tmp_path, updates=True)("plan/smoke", "a\nb")
    Snapshots(folder=tmp_path, updates=False)("plan/smoke", "a\nb\n")
    assert (tmp_path / "plan" / "smoke.txt").read_text() == "a\nb\n"


def test_another_text_fails_with_the_remedy_and_leaves_the_file(tmp_path: Path):
    Snapshots(folder=tmp_path, updates=True)("plan", "a\nb\n")
    with pytest.raises(AssertionError, match="--update-snapshots and commit plan"):
        Snapshots(folder=tmp_path, updates=False)("plan", "a\nc\n")
    assert (tmp_path / "plan.txt").read_text() == "a\nb\n"


def test_a_text_without_a_file_fails_and_writes_none(tmp_path: Path):
    with pytest.raises(AssertionError, match="there is no"):
        Snapshots(folder=tmp_path, updates=False)("plan", "a\n")
    assert list(tmp_path.iterdir()) == []


def test_the_fixture_compares_with_the_files_of_the_checkout(snapshot: Snapshots, pytestconfig: pytest.Config):
    assert snapshot.folder == Path(__file__).parent / "snapshots"
    assert snapshot.updates == pytestconfig.getoption("update_snapshots")
