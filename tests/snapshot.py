"""Texts that tests compare with files, and write anew when pytest is given --update-snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """A folder with one file for each compared text."""

    folder: Path
    updates: bool

    def __call__(self, name: str, text: str) -> None:
        """Assert that `text` is what `name`.txt holds, up to line breaks at its end; an update writes it there instead."""
        path = self.folder / f"{name}.txt"
        shown = text.rstrip("\n") + "\n"
        if self.updates:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(shown)
            return
        remedy = f"if the text is right, run this test with --update-snapshots and commit {path.name}"
        assert path.is_file(), f"there is no {path}; {remedy}"
        assert shown == path.read_text(), remedy
