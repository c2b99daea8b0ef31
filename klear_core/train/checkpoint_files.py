"""Name, seal and verify the files of a checkpoint, and keep copies of them in the shared store."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import file_lock, hash_all
from klear_core.artifacts.shared import SealedFiles, WorkPlace, work_place
from klear_core.errors import ArtifactError
from klear_core.metrics import made_progress

SEAL = "seal.json"


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank has written of a checkpoint; rank 0 has also written what describes all."""
    # DCP's names: `__RANK_NUMBER.distcp`, and `.metadata`, which says where in them each tensor is.
    own = [file for file in sorted(folder.iterdir()) if file.name.startswith(f"__{rank}_")]
    return [*own, folder / ".metadata"] if rank == 0 else own


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "blake2b").hexdigest()[:32]  # 128 bits: against accidents, not attacks
    made_progress(f"checksum of {file.name}")
    return digest


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the checksum of each file by its name."""
    return dict(zip([file.name for file in files], hash_all(files, _digest), strict=True))


def sealed_files(content: bytes) -> dict[str, str]:
    """Return the checksums that a seal names by file. Raise ValueError if the content is not a complete seal."""
    seal = json.loads(content)
    if not isinstance(seal, dict) or not isinstance(seal.get("files"), dict):
        raise ValueError("it names no files")
    files: dict[str, str] = seal["files"]
    return files


def find_damage(folder: Path) -> str | None:
    """Return in words what is wrong with a checkpoint; None if it is complete."""
    try:
        files = sealed_files((folder / SEAL).read_bytes())
    except (OSError, ValueError) as e:
        return f"{SEAL} cannot be read ({e})"
    # Names first, because checksums read all files to their end.
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    found = digests_of([folder / name for name in files])
    damaged = [name for name, digest in files.items() if found[name] != digest]
    return f"{damaged[0]} is damaged" if damaged else None


# ---- checkpoint copies ----
# Keep copies of checkpoints in the shared store, to which every rank sends its own files.
#
# A copy is sealed by `seal.json`, which is written last, as on disk.


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
        self._copy(name).send(files)

    def send_whole(self, name: str, folder: Path) -> str:
        """Send all files of a folder as the copy `name`, unless it is there, and seal it; return the seal."""
        files = [file for file in sorted(folder.iterdir()) if file.name != SEAL]
        content = json.dumps({"files": digests_of(files)})
        # A seal with these checksums is there if an earlier attempt has sent everything.
        if self._copy(name).seal() != content.encode():
            self.send(name, files)
            self.seal(name, content)
        return content

    def seal(self, name: str, content: str) -> None:
        """Make the copy complete, after all its files were sent."""
        self._copy(name).write_seal(content.encode())

    def sealed(self) -> list[str]:
        """Return the names of the complete copies, oldest first."""
        keys = self._bucket.keys(f"{self._prefix}/")
        # Keys come sorted, and the names have eight digits.
        return [key.split("/")[-2] for key in keys if key.endswith(f"/{SEAL}")]

    def drop(self, name: str) -> None:
        """Delete a copy."""
        self._copy(name).delete()

    def fetch(self, name: str, folder: Path) -> None:
        """Fetch the files of a copy that `folder` lacks, once for all ranks of a disk.

        Raise ArtifactError if the copy is not complete.
        """
        copy = self._copy(name)
        content = copy.seal()
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
            copy.fetch((file, folder / file) for file in missing or files)
            (folder / SEAL).write_bytes(content)  # last: a folder without its seal counts as incomplete
            damage = find_damage(folder)
            if damage is not None:
                raise ArtifactError(f"{self._place(name)}: {damage}")

    def _copy(self, name: str) -> SealedFiles:
        return SealedFiles(self._bucket, f"{self._prefix}/{name}", seal=SEAL)

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
