"""Objects of a shared folder are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from klear_core.artifacts.bucket import Bucket


def test_a_reader_of_a_shared_folder_sees_an_object_as_it_was_or_as_it_is(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "shared").as_uri())
    bucket.write("a/seal.json", b"the first content")
    with (tmp_path / "shared" / "a" / "seal.json").open("rb", buffering=0) as reader:
        assert reader.read(4) == b"the "
        bucket.write("a/seal.json", b"another")
        assert reader.read() == b"first content"
    assert bucket.read("a/seal.json") == b"another"


def test_a_write_to_a_shared_folder_that_fails_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "a" / "seal.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        Bucket(tmp_path.as_uri()).write("a/seal.json", b"x")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["seal.json"]
