"""Keep copies of checkpoints in the shared store, to which every rank sends its own files.

A copy is sealed by `seal.json`, which is written last, as on disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import file_lock
from klear_core.artifacts.opened import WorkPlace, work_place
from klear_core.errors import ArtifactError
from klear_core.train.checkpoint_files import SEAL, digests_of, find_damage, sealed_files

_TRANSFERS = 8  # files at a time; a large file is also sent in several parts


class CheckpointCopies:
    """The copies of one folder's checkpoints."""

    def __init__(self, place: WorkPlace) -> None:
        self._bucket = Bucket(place.url)
        self._prefix = place.prefix
        self._locks = place.root / ".locks"

    @classmethod
    def of(cls, folder: Path) -> CheckpointCopies | None:
        """Return the copies of a stage's folder of checkpoints; None if its workspace has no shared store."""
        place = work_place(folder)
        return cls(place) if place else None

    def send(self, name: str, files: Sequence[Path]) -> None:
        """Send files of the checkpoint `name`; it does not count as a copy before `seal`."""
        with ThreadPoolExecutor(_TRANSFERS) as threads:
            # list() takes the results, which raises an upload's error
            list(threads.map(lambda file: self._bucket.upload(file, self._key(name, file.name)), files))

    def send_whole(self, name: str, folder: Path) -> str:
        """Send all files of a folder as the copy `name`, unless it is there, and seal it; return the seal."""
        files = [file for file in sorted(folder.iterdir()) if file.name != SEAL]
        content = json.dumps({"files": digests_of(files)})
        # A seal with these checksums is there if an earlier attempt has sent everything.
        if self.content(name) != content.encode():
            self.send(name, files)
            self.seal(name, content)
        return content

    def seal(self, name: str, content: str) -> None:
        """Make the copy complete, after all its files were sent."""
        self._bucket.write(self._key(name, SEAL), content.encode())

    def content(self, name: str) -> bytes | None:
        """Return a copy's seal; None if the copy is not complete."""
        return self._bucket.read(self._key(name, SEAL))

    def sealed(self) -> list[str]:
        """Return the names of the complete copies, oldest first."""
        keys = self._bucket.keys(f"{self._prefix}/")
        # Keys come sorted, and the names have eight digits.
        return [key.split("/")[-2] for key in keys if key.endswith(f"/{SEAL}")]

    def drop(self, name: str) -> None:
        """Delete a copy, its seal first."""
        # A deletion that is cut short then leaves no copy that looks complete.
        self._bucket.delete(self._key(name, SEAL))
        for key in self._bucket.keys(f"{self._prefix}/{name}/"):
            self._bucket.delete(key)

    def fetch(self, name: str, folder: Path) -> None:
        """Fetch the files of a copy that `folder` lacks, once for all ranks of a disk.

        Raise ArtifactError if the copy is not complete.
        """
        content = self.content(name)
        if content is None:
            raise ArtifactError(f"{self._place(name)}: its {SEAL} is gone")
        try:
            files = sealed_files(content)
        except ValueError as e:
            raise ArtifactError(f"{self._place(name)}: {SEAL} cannot be read ({e})") from e
        # Ranks of one disk fetch at the same time: the first one downloads, the others find it complete.
        with file_lock(self._locks / f"checkpoint-{name}", on_wait=lambda _: None):
            if _seal_in(folder) != content:
                shutil.rmtree(folder, ignore_errors=True)  # files of another attempt
            elif find_damage(folder) is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            # Here the folder is damaged or empty. If no file is missing, one is altered, and all are fetched anew.
            missing = [file for file in files if not (folder / file).is_file()]
            self._download(name, missing or files, folder)
            (folder / SEAL).write_bytes(content)  # last: a folder without its seal counts as incomplete
            damage = find_damage(folder)
            if damage is not None:
                raise ArtifactError(f"{self._place(name)}: {damage}")

    def _download(self, name: str, files: Iterable[str], folder: Path) -> None:
        def download_one(file: str) -> None:
            if not self._bucket.download(self._key(name, file), folder / file):
                raise ArtifactError(f"{self._place(name)}: {file} is missing")

        with ThreadPoolExecutor(_TRANSFERS) as threads:
            list(threads.map(download_one, files))  # list() raises a download's error

    def _key(self, name: str, file: str) -> str:
        return f"{self._prefix}/{name}/{file}"

    def _place(self, name: str) -> str:
        return f"{self._bucket.url}/{self._prefix}/{name}"


def send_folder(folder: Path) -> None:
    """Send a folder of files that no longer change to the shared store, once, for ranks with other disks."""
    copies = CheckpointCopies.of(folder.parent)
    if copies is not None:
        (folder / SEAL).write_text(copies.send_whole(folder.name, folder))


def fetch_folder(folder: Path) -> None:
    """Fetch a folder that another node has sent, unless it is here."""
    copies = CheckpointCopies.of(folder.parent)
    assert copies is not None, "the sender had a shared store"
    copies.fetch(folder.name, folder)


def fetch_shards(folder: Path) -> None:
    """Fetch what ranks with other disks have written of the checkpoints in `folder`; nothing without a shared store."""
    copies = CheckpointCopies.of(folder)
    if copies is not None:
        for checkpoint in folder.glob("step-*"):
            copies.fetch(checkpoint.name, checkpoint)


def _seal_in(folder: Path) -> bytes:
    try:
        return (folder / SEAL).read_bytes()
    except FileNotFoundError:
        return b""
